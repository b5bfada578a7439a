"""An OpenAI-compatible HTTP server for Gemma 3 with pan and scan, on one engine or on replicas over Ray Serve."""
