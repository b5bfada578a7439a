"""Compile a sample of the Triton kernels for two GPUs; check their memory, and how those that start early begin."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.kernel_targets import fits, needs
from tests.early_launch import check_waits

for capability in ((8, 6), (9, 0)):
    names = set()
    for kernel, compiled in needs(capability, sample=True):
        assert fits(kernel), kernel
        assert kernel.registers > 0
        if capability == (9, 0) and "early" in compiled.src.fn.arg_names:
            check_waits(compiled.asm["ptx"])
        names.add(kernel.kernel)
    sys.stdout.write(f"{capability[0]}{capability[1]} {' '.join(sorted(names))}\n")
