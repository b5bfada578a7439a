"""The robustness job: thousands of damaged files, hostile command lines, kills and full disks, each with its outcome.

    python -m benchmarks.robustness [files] [commands] [kills] [enospc] [checkpoints] [--scale 1.0] [--seed 0]

It needs Linux. Results go into a record, part by part; ``docs/robustness.md`` is derived from it. A case is made again
by its seed and number (``files --only 1234``); the inputs of failed cases stay in a local folder (``--keep``).
"""
