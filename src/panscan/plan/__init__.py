"""Predicted memory and speed of layouts, without the hardware."""
