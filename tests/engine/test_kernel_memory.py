"""The kernels compiled for GPUs that are not here: what they take of shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests import triton_here  # noqa: F401 - skips this module where there is no Triton

SHARED = {86: 101_376, 90: 232_448}
"""Bytes that one program may use, by compute capability (CUDA C++ Programming Guide, "Technical Specifications")."""


def test_every_gpu_has_the_shared_memory_that_the_kernels_take() -> None:
    """In a process of its own: in this one Triton interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    script = Path(__file__).parent / "compiled_kernels.py"
    told = subprocess.run(
        [sys.executable, script, json.dumps(SHARED)], env=environment, capture_output=True, text=True
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-2000:]
    taken = json.loads(told.stdout)
    assert len(taken) == 2 * 2 * 2 * len(SHARED)
    for name, shared in taken.items():
        assert 0 < shared <= SHARED[int(name.split()[0])], name
