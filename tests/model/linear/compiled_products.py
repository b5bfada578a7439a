"""Compile the kernels of quantised products for GPUs that need not be present; print the shared memory of each.

    python compiled_products.py '{"86": 101376}'

The argument maps compute capabilities to the bytes of shared memory that a program may use there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.early_launch import check_waits

from panscan.engine import kernels as attention
from panscan.model import layer_kernels
from panscan.model.linear import kernels

ROWS = (1, 128, 512, 2048)
POINTERS = {
    **dict.fromkeys(("gate_up", "hidden", "k_cache", "normed", "out", "part", "product", "qkv", "query"), "*bf16"),
    **dict.fromkeys(("total", "v_cache", "cos", "sin", "q_weight", "k_weight"), "*bf16"),
    **dict.fromkeys(("part_weight", "next_weight", "values", "weight", "bias"), "*bf16"),
    **dict.fromkeys(("column_scale", "row_scale", "largest", "scales", "sums", "w_scale", "x_scale", "x_sum"), "*fp32"),
    "slots": "*i64",
    "zero": "*u8",
}
FLOATS = ("epsilon", "most")
MULTIPLES = ("inputs", "outputs", "scale_row", "w_block", "width")
"""Integers that are multiples of 16 in every published model, so that Triton uses wide, pipelined loads."""


def compiled(
    kernel: Any, capability: int, types: Mapping[str, str], constants: Mapping[str, Any], **options: int
) -> int:
    """Return the bytes of shared memory that a kernel needs."""
    names = kernel.arg_names
    constants = {**constants, **({"early": capability == 90} if "early" in names else {})}
    kinds = dict.fromkeys(names, "i32") | POINTERS | dict.fromkeys(FLOATS, "fp32")
    kinds |= {**types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        fn=kernel,
        signature={name: kinds[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if aligned(name, kinds[name])},
    )
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    if constants.get("early"):
        check_waits(found.asm["ptx"])
    return int(found.metadata.shared)


def aligned(name: str, kind: str) -> bool:
    """Return whether an argument is a pointer or integer that Triton knows as a multiple of 16."""
    return kind.startswith("*") or (kind == "i32" and name in MULTIPLES)


def products(capability: int, most: int) -> Iterator[tuple[str, int]]:
    """Yield name and shared memory of each kernel of products."""
    int8 = {"x": "*i8", "w": "*i8"}
    for rows in ROWS:
        tiles = kernels.int8_tiles(rows, most, tma=False)
        constants = {"block_m": tiles.rows, "block_n": tiles.columns, "block_k": tiles.inputs, "group": 8, "tma": False}
        yield (
            f"int8 {rows}",
            compiled(
                kernels._product_int8, capability, int8, constants, num_warps=tiles.warps, num_stages=tiles.stages
            ),
        )
    words = {"high": "*i32", "low": "*i32", "w": "*i32", "scale": "*bf16"}
    dense = {"x": "*bf16", "w": "*u8", "scale": "*bf16"}
    for rows, group, zero in ((16, 32, True), (64, 128, False)):
        constants = {"group": group, "has_zero": zero}
        vector = {"block_n": 16, "side": 4, "interpreted": False, **constants}
        yield f"int4 vector {group}", compiled(kernels._vector_int4, capability, words, vector, num_warps=1)
        tile = {"block_m": rows, "block_n": 64, "slice_k": group, "precision": "tf32", **constants}
        yield (
            f"int4 {rows}",
            compiled(
                kernels._product_int4, capability, dense, tile, num_warps=4, num_stages=kernels.int4_stages(rows, most)
            ),
        )
        whole = {"block_n": 16, "slice_k": group, **constants}
        yield f"int4 dense {group}", compiled(kernels._dequantize_int4, capability, dense, whole, num_warps=4)


def layers(capability: int) -> Iterator[tuple[str, int]]:
    """Yield name and shared memory of each kernel between products, with quantised rows."""
    for rows, most in (("*fp8e4nv", 448.0), ("*i8", 127.0)):
        if rows == "*fp8e4nv" and capability < 89:
            continue
        norm = {"most": most, "width": 5376, "padded": 8192, "adds": True, "scaled": True}
        types = {"normed": rows, "scale": "*fp32"}
        yield f"norm {rows}", compiled(layer_kernels._add_rms_norms, capability, types, norm, num_warps=16)
        chunk = {"most": most, "width": 21504, "columns": 1024, "padded": 32, "whole": most == 127.0}
        yield f"chunk {rows}", compiled(kernels._quantize_chunk, capability, {"quantized": rows}, chunk, num_warps=4)
        row = {"most": most, "width": 5376, "padded": 8192, "whole": most == 127.0}
        yield f"rows {rows}", compiled(kernels._quantize, capability, {"quantized": rows}, row, num_warps=16)
    rotate = {"heads": 32, "kv_heads": 16, "size": 128, "group": 16, "scaled": True}
    for cached in ("*bf16", "*i8", *(["*fp8e4nv"] if capability >= 89 else [])):
        types = {**dict.fromkeys(("k_cache", "v_cache"), cached), **dict.fromkeys(("k_scale", "v_scale"), "*fp32")}
        constants = rotate if cached == "*i8" else rotate | {"k_scale": None, "v_scale": None}
        yield f"rotate {cached}", compiled(layer_kernels._rotate_and_store, capability, types, constants, num_warps=4)
    layer_norm = {"width": 1152, "padded": 2048, "adds": True}
    yield "layer norm", compiled(layer_kernels._add_layer_norm, capability, {}, layer_norm, num_warps=4)
    merge = {"splits": 4, "splits_padded": 4, "head_size": 128}
    types = dict.fromkeys(("parts", "part_sums"), "*fp32") | {"output": "*bf16"}
    yield "merge", compiled(attention._merge, capability, types, merge, num_warps=1)
    gelu = {"width": 21504, "columns": 1024, "scaled": True, "measures": True}
    yield "gelu", compiled(layer_kernels._gelu_product, capability, {}, gelu, num_warps=4)
    fixed = {"padded": 64, "group": 128}
    types = {"x": "*bf16", "high": "*i8", "low": "*i8"}
    yield "fixed point", compiled(kernels._fixed_point, capability, types, fixed, num_warps=16)


def main() -> None:
    found = {}
    for capability, most in json.loads(sys.argv[1]).items():
        for name, shared in (*products(int(capability), most), *layers(int(capability))):
            found[f"{capability} {name}"] = shared
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
