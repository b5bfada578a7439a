"""Deliberately broken engines, and which part of the verdict catches each: ``python -m tests.mutations``."""
