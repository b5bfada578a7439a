"""Files become views, views become pixels; and pictures of them."""
