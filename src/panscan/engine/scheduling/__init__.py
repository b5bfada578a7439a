"""Who computes what, and where its keys and values go: integers and tables, no tensors."""
