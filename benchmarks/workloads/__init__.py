"""Workloads as commands: ``python -m benchmarks.workloads.w1 --help``."""
