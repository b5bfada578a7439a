"""Files of checkpoints from strangers, read within limits: JSON, safetensors headers, fields, chat templates."""
