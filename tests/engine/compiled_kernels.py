"""Compile the attention kernels for the published models' heads, and print the shared memory that each needs.

    python compiled_kernels.py '{"86": 101376}'

The argument maps compute capabilities to the bytes of shared memory that a program may use there.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.early_launch import check_waits

from panscan.engine import kernels
from panscan.engine.kernels import Sizes, decode_sizes, prefill_sizes

TYPES = {2: "*bf16", 4: "*fp32"}
COMMON = {"page_size": 2, "heads": 8, "kv_heads": 4, "splits": 4}
POINTERS = {
    "k_scale": "*fp32",
    "v_scale": "*fp32",
    "parts": "*fp32",
    "part_sums": "*fp32",
    "tiles": "*i32",
    "ends": "*i32",
    "tables": "*i32",
    "lengths": "*i32",
    "groups": "*i32",
    "members": "*i32",
}


def shared(kernel: Any, sizes: Sizes, head_size: int, itemsize: int, capability: int, int8: bool) -> int:
    """Return the bytes of shared memory that a kernel needs; ``int8``: with keys and values in int8."""
    constants = {**COMMON, "head_size": head_size, "rows": sizes.rows, "keys": sizes.keys}
    if "together" in kernel.arg_names:
        constants["together"] = sizes.heads
    constants |= {"precision": "ieee" if itemsize == 4 else "tf32", "early": capability == 90}
    constants |= {} if int8 else {"k_scale": None, "v_scale": None}
    kinds = dict.fromkeys(kernel.arg_names, "i32") | POINTERS | {"scale": "fp32", "q": TYPES[itemsize]}
    kinds |= dict.fromkeys(("k_cache", "v_cache"), "*i8" if int8 else TYPES[itemsize])
    kinds |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature={name: kinds[name] for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={
            (at,): [["tt.divisibility", 16]] for at, name in enumerate(kernel.arg_names) if kinds[name].startswith("*")
        },
    )
    options = {"num_warps": sizes.warps, "num_stages": sizes.stages}
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=options)
    if constants["early"]:
        check_waits(compiled.asm["ptx"])
    return int(compiled.metadata.shared)


def main() -> None:
    found = {}
    kinds = ((128, 2, True), (256, 2, False), (256, 2, True), (256, 4, False))
    for (capability, most), (head_size, itemsize, int8) in product(json.loads(sys.argv[1]).items(), kinds):
        each = {
            "prefill": (kernels._prefill, prefill_sizes(head_size, itemsize, most)),
            "prefill of few rows": (kernels._prefill, prefill_sizes(head_size, itemsize, most, few=True)),
            "decode": (kernels._decode, decode_sizes(head_size, itemsize, 2)),
            "shared decode": (kernels._decode, decode_sizes(head_size, itemsize, 2, shared=True)),
        }
        for name, (kernel, sizes) in each.items():
            taken = shared(kernel, sizes, head_size, itemsize, int(capability), int8)
            found[f"{capability} {name} {head_size} {itemsize} {int8}"] = taken
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
