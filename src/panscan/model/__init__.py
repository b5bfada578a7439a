"""The only room that imports transformers: load, prompt, attention, quantisation, the bundled mini model."""
