"""Quantised checkpoints: written from dense ones, calibrated on documents, audited."""
