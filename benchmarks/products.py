"""Products with quantised weights on one GPU, by method and number of rows.

    python -m benchmarks.products --output products.json

The four matrices of a decoder layer at their true shapes, with random weights; microseconds of each, replayed from a
CUDA graph over copies that together exceed the L2 cache. Includes the methods that were not chosen
(:mod:`panscan.model.linear.multiply`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.workloads.device import Power
from panscan.model.linear import kernels
from panscan.model.linear.multiply import multiply_fp8, multiply_int4, multiply_int8, quantize_rows
from panscan.model.linear.quantized import QuantizedLinear, WeightFormat, quantized_linear
from panscan.model.linear.rows import QuantizedRows
from panscan.model.shapes import SHAPES, TextShape
from panscan.records.environment import environment

ROWS = (1, 16, 64, 128, 1102, 2204)
GROUP = 128
_COPIES_BYTES = 300 << 20
_REPLAYS = 5
_DEVICE = torch.device("cuda")

Call = Callable[[], torch.Tensor]


def matrices(text: TextShape) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of each fused matrix of a decoder layer."""
    width = text.head_size
    return {
        "qkv": (text.hidden, (text.heads + 2 * text.kv_heads) * width),
        "out": (text.heads * width, text.hidden),
        "gate_up": (text.hidden, 2 * text.intermediate),
        "down": (text.intermediate, text.hidden),
    }


def drawn(inputs: int, outputs: int, kind: str) -> list[QuantizedLinear]:
    """Return copies of one matrix with different random weights."""
    copies = []
    for _ in range(max(2, _COPIES_BYTES // (inputs * outputs))):
        linear = quantized_linear(inputs, outputs, WeightFormat(kind, GROUP), device=_DEVICE)
        linear.quantize(0.02 * torch.randn(outputs, inputs, device=_DEVICE))
        copies.append(linear)
    return copies


def methods(kind: str, copies: Sequence[QuantizedLinear], rows: torch.Tensor) -> Iterator[tuple[str, list[Call]]]:
    """Yield name and calls of each method of a kind for these rows."""
    if kind == "int4":
        yield "chosen", [partial(multiply_int4, rows, linear.weight, linear.scale, None, GROUP) for linear in copies]
        if len(rows) <= 16:
            yield "PyTorch's int4", [_tinygemm(linear, rows) for linear in copies]
        return
    quantized = quantize_rows(rows, copies[0].weight.dtype)
    if kind == "int8":
        yield (
            "chosen",
            [partial(multiply_int8, quantized, linear.weight, linear.scale, rows.dtype) for linear in copies],
        )
        if len(rows) > 16:
            yield "cuBLAS", [partial(_int_mm, quantized.values, quantized.scale, linear) for linear in copies]
        return
    yield "chosen", [_fp8(quantized, linear, rows.dtype) for linear in copies]
    yield (
        "cuBLAS, scales per row",
        [
            partial(
                torch._scaled_mm,
                quantized.values,
                linear.weight.T,
                quantized.scale,
                linear.scale[None],
                out_dtype=rows.dtype,
                use_fast_accum=True,
            )
            for linear in copies
        ],
    )


def microseconds(calls: Sequence[Call]) -> float:
    """Return the mean time of one call, replayed from a CUDA graph of all of them."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types for it
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * float(start.elapsed_time(end)) / _REPLAYS / len(calls)


def measure(shape: str) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Return microseconds by kind, method, rows and matrix."""
    times: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for name, (inputs, outputs) in matrices(SHAPES[shape].text).items():
        for kind in ("bf16", "fp8", "int8", "int4"):
            dense = [0.02 * torch.randn(outputs, inputs, device=_DEVICE, dtype=torch.bfloat16) for _ in range(2)]
            copies = [] if kind == "bf16" else drawn(inputs, outputs, kind)
            for count in ROWS:
                rows = torch.randn(count, inputs, device=_DEVICE, dtype=torch.bfloat16)
                offered = (
                    [("cuBLAS", [partial(torch.mm, rows, weight.T) for weight in dense])]
                    if kind == "bf16"
                    else methods(kind, copies, rows)
                )
                for method, calls in offered:
                    spent = times.setdefault(kind, {}).setdefault(method, {}).setdefault(str(count), {})
                    spent[name] = microseconds(calls)
                    print(f"{kind} {method}, {count} rows, {name}: {spent[name]:.1f} us", flush=True)
    return times


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--model-shape", default="27b", choices=[name for name in SHAPES if name not in ("mini", "tiny")]
    )
    options = parser.parse_args(argv)
    with Power(_DEVICE) as power:
        times = measure(options.model_shape)
    record = {
        "command": ["python", "-m", "benchmarks.products", *(sys.argv[1:] if argv is None else argv)],
        "microseconds": times,
        "power": power.summary(),
        "environment": environment(),
    }
    options.output.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def _fp8(rows: QuantizedRows, linear: QuantizedLinear, dtype: torch.dtype) -> Call:
    return lambda: multiply_fp8(rows, linear.weight, linear.scale, dtype).values


def _int_mm(rows: torch.Tensor, scale: torch.Tensor, linear: QuantizedLinear) -> torch.Tensor:
    return kernels.scale_sums(torch._int_mm(rows, linear.weight.T), scale, linear.scale, torch.bfloat16)


def _tinygemm(linear: QuantizedLinear, rows: torch.Tensor) -> Call:
    """Return PyTorch's own product with 4-bit weights, on random ones."""
    raw = torch.randint(0, 255, (linear.out_features, linear.in_features // 2), device=_DEVICE, dtype=torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(raw, 8)
    scales = torch.randn(linear.in_features // GROUP, linear.out_features, 2, device=_DEVICE, dtype=torch.bfloat16)
    return partial(torch.ops.aten._weight_int4pack_mm, rows, packed, GROUP, scales)


if __name__ == "__main__":
    main()
