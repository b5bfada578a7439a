"""One interface over the ways to run a request: generate, pipeline, generate_batch, engine, vllm."""
