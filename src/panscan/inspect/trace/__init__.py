"""Summaries of Chrome and Kineto traces, streamed."""
