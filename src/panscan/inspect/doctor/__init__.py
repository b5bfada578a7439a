"""Checks of what makes Gemma 3 slow or wrong on this machine."""
