"""From metrics to decisions: significance, comparison, recommendation, floors. No tensors."""
