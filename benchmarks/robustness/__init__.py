"""The robustness job: thousands of damaged files, hostile command lines, kills and full disks, each with its outcome.

    python -m benchmarks.robustness [PART]... [--scale 1.0] [--seed 0]

Parts: files, bombs, checkpoints, endpoints, commands, kills and enospc. It needs Linux. Results go into a record, part
by part; ``docs/robustness.md`` is derived from it. A seed and a number reproduce a case (``files --only 1234``); the
inputs of failed cases stay in a local folder (``--keep``).
"""
