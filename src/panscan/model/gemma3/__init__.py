"""Gemma 3: its decoder, vision tower and configurations."""
