"""Scripts behind the published figures. ``README.md`` says which script wrote which record."""
