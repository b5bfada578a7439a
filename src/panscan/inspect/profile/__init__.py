"""Profiles of one warm request or a steady batch, with named phases."""
