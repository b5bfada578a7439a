"""A sweep over settings: grid, plan, run, replicas, reference and verdict."""
