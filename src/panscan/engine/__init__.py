"""What makes it fast: requests, scheduler, cache blocks, vision batches, decode steps. Knows no Transformers."""
