"""Verdicts for any endpoint: what it should have answered, and which change of the computation explains its answers."""
