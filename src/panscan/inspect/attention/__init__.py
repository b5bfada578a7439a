"""Pictures of which positions attend to which."""
