"""The shared memory of the kernels, compiled for GPUs that need not be present."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests import triton_here  # noqa: F401 - skips this module where there is no Triton

from panscan.core.gpu_features import SHARED_BYTES

SHARED = {10 * major + minor: SHARED_BYTES[major, minor] for major, minor in ((8, 6), (9, 0))}


def test_the_kernels_fit_into_the_shared_memory_of_every_gpu() -> None:
    """In a separate process, because Triton's interpreter is active in this one."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    script = Path(__file__).parent / "compiled_kernels.py"
    command = [sys.executable, script, json.dumps(SHARED)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-2000:]
    needed = json.loads(finished.stdout)
    assert len(needed) == 4 * 4 * len(SHARED)
    for name, shared in needed.items():
        assert 0 < shared <= SHARED[int(name.split()[0])], name
