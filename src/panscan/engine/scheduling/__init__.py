"""Scheduling: the tokens of each pass and the KV cache blocks of each request. Uses integers and arrays, no tensors."""
