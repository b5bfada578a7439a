"""Formats of quantised checkpoints: how each is recognised and read, and the loader of models from them."""
