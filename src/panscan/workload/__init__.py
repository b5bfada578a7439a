"""What a command works on: documents, datasets, tables, prompts and drawn pages become requests."""
