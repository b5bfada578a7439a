"""A sweep over settings: grid, plan, run, replicas, truth and verdict."""
