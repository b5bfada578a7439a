"""8-bit and 4-bit weights: how they are stored, read from published checkpoints, and multiplied."""
