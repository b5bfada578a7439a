"""What was measured: the schema and store of records, and the metrics derived from them. No tensors."""
