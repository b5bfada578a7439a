"""Compile the Triton kernels for GPUs that need not be present, and compare what they need with the GPUs' limits.

    python -m benchmarks.kernel_targets [--capability 80 86 89 90 100] [--sample] [--output RECORD]

The launchers run on tensors without data, and each launch compiles its kernel for the GPU instead of starting it. The
configurations are those that the code chooses there: tiles, stages, splits, early launches. Covered are the attention
kernels (dense, float8 and int8 caches, decode rows and prompts, heads of 256 and 128, the vision tower's heads of 72 on
Hopper), tensor parallel sizes 1 and 2 (which change strides only), the kernels between the products, and products of
int8 and int4 weights, in bf16 and float32. The record has the shared memory, registers and spilled bytes per thread of
every kernel. The exit status is 1 if a kernel needs more shared memory than a program may use.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.runtime.jit import JITFunction

from panscan.core import jit
from panscan.core.gpu_features import SHARED_BYTES, Capability, supports
from panscan.engine import kernels as attention
from panscan.engine.attention import KernelInputs
from panscan.engine.sampling_kernels import TritonVocabulary
from panscan.engine.triton_attention import TritonPlan
from panscan.engine.weights import Cutoff
from panscan.model import layer_kernels
from panscan.model.gemma3 import vision_attention
from panscan.model.layers import LayerCache
from panscan.model.linear import kernels as linear
from panscan.model.linear.rows import UnscaledProduct
from panscan.model.shapes import SHAPES, SIGLIP, TextShape
from panscan.records.environment import environment

RECORD = Path(__file__).parent / "records" / "kernel-targets.json"
TARGETS: tuple[Capability, ...] = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0))
MULTIPROCESSORS = 108  # an A100's; the number decides into how many parts keys are split
_PAGE, _CHUNK, _SLOTS, _GROUP = 2, 2048, 4096, 128
_SAMPLED = (("27b", 1, torch.bfloat16, "int8"), ("4b", 1, torch.bfloat16, "auto"))
_empty = partial(torch.empty, device="meta")
_int32 = partial(_empty, dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """What one kernel needs on one GPU.

    Args:
        capability: compute capability, such as 80.
        kernel: name of the function.
        use: first configuration that launches it.
        shared: bytes of shared memory of a program.
        registers: registers of a thread.
        spilled: bytes of local memory of a thread: values that did not fit into registers.
    """

    capability: int
    kernel: str
    use: str
    shared: int
    registers: int
    spilled: int


class _Driver:
    """The part of Triton's driver that compilation asks, for a GPU that is not here."""

    def __init__(self, capability: Capability) -> None:
        self._capability = 10 * capability[0] + capability[1]

    def get_current_device(self) -> int:
        return self._capability  # Triton keeps what it compiled by device

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


def compile_for(
    capability: Capability, launches: Iterator[tuple[str, Callable[[], object]]]
) -> dict[str, tuple[str, Any]]:
    """Return the compiled kernels of some launches by their hash, each with the name of its first launch."""
    compiled: dict[str, tuple[str, Any]] = {}
    original = JITFunction.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        kernel = original(self, *args, **options | {"warmup": True})
        compiled.setdefault(kernel.hash, (use, kernel))
        return kernel

    def has(feature: str, _: torch.device) -> bool:
        return supports(feature, capability)

    triton.runtime.driver.set_active(_Driver(capability))
    jit.early_launch.cache_clear()
    with (
        patch.object(JITFunction, "run", run),
        patch.object(jit, "gpu_has", has),
        patch.object(attention, "_multiprocessors", lambda _: MULTIPROCESSORS),
        patch.object(attention, "shared_bytes", lambda _: SHARED_BYTES[capability]),
        patch.object(vision_attention, "_multiprocessors", lambda _: MULTIPROCESSORS),
    ):
        for use, launch in launches:  # noqa: B007 - run() reads it
            launch()
    return compiled


def launches(capability: Capability, *, sample: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield every launch on a GPU, or a sample: its name and a function that does it."""
    caches = ["auto", "int8", *(["fp8"] if supports("fp8_cache", capability) else [])]
    models = ("27b", 1), ("27b", 2), ("4b", 1), ("270m", 1)
    choices = [
        *((*model, torch.bfloat16, cache) for model, cache in product(models, caches)),
        *((name, 1, torch.float32, cache) for name, cache in product(("27b", "4b"), ("auto", "int8"))),
    ]
    for name, ranks, dtype, cache in _SAMPLED if sample else choices:
        use = f"{name}, TP {ranks}, {str(dtype).removeprefix('torch.')}, {cache} cache"
        decoder = _decoder(SHAPES[name].text, ranks, dtype, cache)
        omitted = "decode 128" if sample else None  # in other parts than "decode 1", in the same tiles
        yield from ((f"{use}: {what}", launch) for what, launch in decoder if what != omitted)
    for dtype in (torch.bfloat16,) if sample else (torch.bfloat16, torch.float32):
        use = str(dtype).removeprefix("torch.")
        yield from ((f"{use}: {what}", launch) for what, launch in _products(capability, dtype))
        yield from ((f"{use}: {what}", launch) for what, launch in _tower(capability, dtype))
        yield "sampling", _sampling
    if supports("warpgroup_products", capability):
        views = _empty(4, 16, 4096, 72, dtype=torch.bfloat16)
        yield "vision attention", lambda: vision_attention._launch(views, views, views, views.transpose(1, 2), 0.1)


def _decoder(
    text: TextShape, ranks: int, dtype: torch.dtype, cache_dtype: str
) -> Iterator[tuple[str, Callable[[], object]]]:
    heads, kv_heads, size = text.heads // ranks, text.kv_heads // ranks, text.head_size
    kind = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(cache_dtype, dtype)
    keys, values = _empty(2, _SLOTS, kv_heads, size, dtype=kind)
    cache = LayerCache(keys, values, _empty(2, kv_heads, _SLOTS) if cache_dtype == "int8" else None)

    def decode(rows: int, shared: bool) -> None:
        query, none = _empty(rows, heads, size, dtype=dtype), _int32(0, 4)
        tables = _int32(rows, _SLOTS // _PAGE)
        inputs = KernelInputs(none, _int32(rows), _int32(rows, 3), _int32(rows), none, none, tables, none)
        attention.decode(query, cache, query, TritonPlan(inputs, _PAGE, 0, shared), 0.1)

    def prefill(rows: int) -> None:
        query = _empty(rows, heads, size, dtype=dtype)
        tile_rows = attention.prefill_sizes(size, dtype.itemsize, attention.shared_bytes(query.device)).rows
        tiles, tables, none = _int32(-(-rows // tile_rows), 4), _int32(8, _SLOTS // _PAGE), _int32(0, 4)
        inputs = KernelInputs(none, none, none, none, _int32(rows), tiles, none, tables)
        attention.prefill(query, cache, query, TritonPlan(inputs, _PAGE, 0), 0.1)

    def rotate(scaled: bool) -> None:
        qkv, weight = _empty(64, (heads + 2 * kv_heads) * size, dtype=dtype), _empty(size, dtype=dtype)
        sums = UnscaledProduct(qkv, _empty(64, 1), _empty(qkv.shape[1])) if scaled else qkv
        turn, slots = _empty(64, size, dtype=dtype), _empty(64, dtype=torch.int64)
        layer_kernels.rotate_and_store(sums, weight, weight, 1e-6, turn, turn, slots, cache, heads)

    for rows, shared in ((1, False), (128, False), (128, True)):
        yield f"decode {rows}{', shared prefix' if shared else ''}", partial(decode, rows, shared)
    for rows in (64, _CHUNK):
        yield f"prefill {rows}", partial(prefill, rows)
    for scaled in (False, True):
        yield f"rotate{', scaled' if scaled else ''}", partial(rotate, scaled)
    if cache_dtype == "auto":
        yield from _between(text, ranks, dtype)


def _between(text: TextShape, ranks: int, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the launches between the products, for dense and int8 inputs of the next product."""
    hidden, weight = _empty(64, text.hidden, dtype=dtype), _empty(text.hidden, dtype=dtype)
    gate_up = _empty(64, 2 * text.intermediate // ranks, dtype=dtype)
    sums, scales = _empty(64, text.hidden, dtype=dtype), (_empty(64, 1), _empty(text.hidden))
    for kind in (None, torch.int8):
        what = "dense" if kind is None else "int8"
        part = UnscaledProduct(sums, *scales) if kind else sums
        yield f"norms, {what}", partial(layer_kernels.add_rms_norms, hidden, part, weight, weight, 1e-6, kind)
        yield f"norm, {what}", partial(layer_kernels.rms_norm, hidden, weight, 1e-6, kind)
        yield f"gelu, {what}", partial(layer_kernels.gelu_product, gate_up, dtype, kind)


def _sampling() -> None:
    scores = _empty(64, 262_208)
    weights = TritonVocabulary(scores)
    room = _empty(64, 1, dtype=torch.int64)
    weights.search(room)
    weights.ties(weights.top)
    weights.by_block(Cutoff(weights.top, room))


def _tower(capability: Capability, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the launches of a layer of the vision tower, with dense and with 8-bit matrices."""
    rows, hidden, inner = SIGLIP.patches, SIGLIP.hidden, SIGLIP.intermediate
    states, activated = _empty(rows, hidden, dtype=dtype), _empty(rows, inner, dtype=dtype)
    norm = nn.LayerNorm(hidden, device="meta", dtype=dtype)
    yield "layer norm", partial(layer_kernels.add_layer_norm, states, states, norm)
    kinds = {"int8": torch.int8} | ({"fp8": torch.float8_e4m3fn} if supports("fp8_tower", capability) else {})
    for name, kind in kinds.items():
        yield f"layer norm, {name}", partial(layer_kernels.add_layer_norm, states, states, norm, kind)
        yield f"gelu of the tower, {name}", partial(layer_kernels.gelu_rows, activated, kind)
        yield f"attention of the tower, {name}", partial(linear.quantize, states, kind)
    shared, tma = SHARED_BYTES[capability], supports("tensor_memory_accelerator", capability)
    weight, bias = _empty(inner, hidden, dtype=torch.int8), _empty(inner, dtype=dtype)
    yield (
        "int8 of the tower",
        partial(
            linear.product_int8,
            _empty(rows, hidden, dtype=torch.int8),
            _empty(rows, 1),
            weight,
            _empty(inner),
            dtype,
            linear.int8_tiles(rows, shared, tma=tma),
            bias,
        ),
    )
    sums = _empty(rows, inner, dtype=torch.int32)
    yield "scale sums, bias", partial(linear.scale_sums, sums, _empty(rows, 1), _empty(inner), dtype, bias)


def _products(capability: Capability, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield products of the 27B shape's MLP with int8 and int4 weights, and what prepares their inputs."""
    inputs, outputs = SHAPES["27b"].text.hidden, SHAPES["27b"].text.intermediate
    shared, tma = SHARED_BYTES[capability], supports("tensor_memory_accelerator", capability)
    weight, scale = _empty(outputs, inputs, dtype=torch.int8), _empty(outputs)
    for rows in (1, 32, 64, 128, 512, _CHUNK):
        values = _empty(rows, inputs, dtype=torch.int8)
        tiles = linear.int8_tiles(rows, shared, tma=tma)
        yield f"int8 {rows}", partial(linear.product_int8, values, _empty(rows, 1), weight, scale, dtype, tiles)
    dense = _empty(64, inputs, dtype=dtype)
    yield "quantise rows", partial(linear.quantize, dense, torch.int8)
    yield "scale sums", partial(linear.scale_sums, _empty(64, outputs, dtype=torch.int32), _empty(64, 1), scale, dtype)
    packed = _empty(-(-inputs // 256), outputs, 128, dtype=torch.uint8)
    for group, zeros in ((32, True), (_GROUP, False)):
        scales = _empty(inputs // group, outputs, dtype=dtype)
        zero = _empty(inputs // group, outputs, dtype=torch.uint8) if zeros else None
        weights = packed, scales, zero
        if dtype != torch.float32:
            yield f"int4 1, groups of {group}", partial(_vector, _empty(1, inputs, dtype=dtype), *weights, group)
        for rows in (16, 64, 128):
            values = _empty(rows, inputs, dtype=dtype)
            yield f"int4 {rows}, groups of {group}", partial(linear.product_int4, values, *weights, group, shared)
        yield f"int4 dense, groups of {group}", partial(linear.dequantize_int4, *weights, group, inputs, dtype)


def _vector(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group: int
) -> None:
    linear.vector_int4(linear.fixed_point(rows, group), weight, scale, zero, rows.dtype)


def needs(capability: Capability, *, sample: bool = False) -> Iterator[tuple[CompiledKernel, Any]]:
    """Yield what each kernel needs on a GPU, and the kernel as Triton compiled it."""
    for use, kernel in compile_for(capability, launches(capability, sample=sample)).values():
        registers, spilled = _resources(kernel.asm["cubin"])
        shared = int(kernel.metadata.shared)
        number = 10 * capability[0] + capability[1]
        yield CompiledKernel(number, kernel.metadata.name, use, shared, registers, spilled), kernel


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of the stack of a thread, which Triton's kernels have for spilled values only."""
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        lines = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    words = dict(word.split(":", 1) for line in lines.splitlines() if "REG:" in line for word in line.split())
    return int(words["REG"]), int(words["STACK"])


def fits(kernel: CompiledKernel) -> bool:
    """Return whether a program may use as much shared memory on that GPU."""
    return kernel.shared <= SHARED_BYTES[divmod(kernel.capability, 10)]


def main() -> int:
    """Compile for the targets, print what is too large or spills, and write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel_targets", description=__doc__)
    numbers = [10 * major + minor for major, minor in TARGETS]
    parser.add_argument("--capability", type=int, nargs="+", choices=numbers, default=numbers)
    parser.add_argument("--sample", action="store_true", help="a few configurations of each kernel")
    parser.add_argument("--output", type=Path, help="the record")
    options = parser.parse_args()
    kernels = []
    for number in options.capability:
        of_target = [kernel for kernel, _ in needs(divmod(number, 10), sample=options.sample)]
        kernels += of_target
        largest = max(of_target, key=lambda kernel: kernel.shared)
        sys.stdout.write(
            f"sm{number}: {len(of_target)} kernels; at most {largest.shared:,} of"
            f" {SHARED_BYTES[divmod(number, 10)]:,} bytes of shared memory ({largest.kernel}, {largest.use});"
            f" {sum(kernel.spilled > 0 for kernel in of_target)} spill registers\n"
        )
        sys.stdout.flush()
    for kernel in kernels:
        if not fits(kernel) or kernel.spilled:
            what = f"{kernel.spilled} bytes spilled per thread" if fits(kernel) else "does not fit"
            sys.stdout.write(
                f"  sm{kernel.capability} {kernel.kernel} ({kernel.use}): {kernel.shared:,} bytes; {what}\n"
            )
    if options.output:
        record = {"environment": environment(), "kernels": list(map(asdict, kernels))}
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(not all(map(fits, kernels)))


if __name__ == "__main__":
    sys.exit(main())
