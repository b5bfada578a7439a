"""What the kernels need, compiled for GPUs that need not be present. All of them: ``benchmarks/kernel_targets.py``."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests import triton_here  # noqa: F401 - skips this module where there is no Triton

from panscan.core.gpu_features import SHARED_BYTES

RECORD = Path(__file__).parents[2] / "benchmarks" / "records" / "kernel-targets.json"


def test_the_kernels_fit_into_the_shared_memory_of_every_gpu() -> None:
    """In a separate process, because Triton's interpreter is active in this one."""
    script = Path(__file__).parent / "compiled_kernels.py"
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    finished = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-2000:]
    ampere, hopper = (set(line.split()[1:]) for line in finished.stdout.splitlines())
    attention = {"_decode", "_prefill", "_merge", "_rotate_and_store"}
    assert ampere >= {*attention, "_add_rms_norms", "_gelu_product", "_product_int8", "_product_int4", "_vector_int4"}
    assert hopper - ampere == {"_attend"}  # of the vision tower


def test_everything_in_the_record_fits() -> None:
    kernels = json.loads(RECORD.read_text("utf-8"))["kernels"]
    assert {kernel["capability"] for kernel in kernels} == {80, 86, 89, 90, 100}
    assert all(kernel["shared"] <= SHARED_BYTES[divmod(kernel["capability"], 10)] for kernel in kernels)
    uses = {kernel["use"].split(":")[0] for kernel in kernels if kernel["capability"] == 89}
    assert {f"27b, TP 2, bfloat16, {cache} cache" for cache in ("auto", "fp8", "int8")} <= uses
