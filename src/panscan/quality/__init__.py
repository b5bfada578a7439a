"""Datasets of questions with accepted answers, and the scores of answers. No tensors."""
