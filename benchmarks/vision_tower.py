"""The vision tower by attention kernel or by weights, interleaved on one GPU.

    python -m benchmarks.vision_tower --output RECORD.json
    python -m benchmarks.vision_tower --weights bf16,int8,fp8 --output RECORD.json

SigLIP at Gemma 3's true shape with random weights, as the engine encodes views: milliseconds per view by attention
kernel, 1, 4 and 32 views at once; or milliseconds per batch by weights (``--quantize-vision``), 4, 16 and 64 views at
once, the error of the features against float32, and microseconds of the parts of a layer with four views.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.products import microseconds
from benchmarks.workloads.device import Power
from panscan.core.gpu_features import supports
from panscan.model import layer_kernels
from panscan.model.bundled.random_weights import random_model
from panscan.model.gemma3.vision_layers import VisionLayers, quantize_vision_tower
from panscan.model.linear import kernels
from panscan.model.linear.multiply import ANY_ROWS, multiply_fp8, multiply_fp8_scaled, multiply_int8, quantize_rows
from panscan.model.shapes import SHAPES, SIGLIP
from panscan.records.environment import environment

KERNEL_VIEWS, WEIGHTS_VIEWS = (1, 4, 32), (4, 16, 64)
KERNEL_ROUNDS, WEIGHTS_ROUNDS = 7, 3  # after one that warms up
LEAST_S = 0.2  # of one measurement
PART_VIEWS = 4
_COPIES = 2  # of the inputs of each part
Times = dict[str, dict[str, list[float]]]
"""Milliseconds per view, by kind and number of views."""
Call = Callable[[Any], Any]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, compare the features, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--kernels", default="cudnn,hopper")
    parser.add_argument(
        "--weights", help="compare these instead of the kernels, with the fastest kernel: bf16,int8,fp8"
    )
    options = parser.parse_args(argv)
    # The text model is not used: one layer of it is enough.
    shape = SHAPES["4b"]
    text = replace(shape.text, layers=1, vocabulary=1024)
    model, _ = random_model(replace(shape, name="vision", text=text), dtype=torch.bfloat16, device="cuda")
    default = VisionLayers(model)
    chosen = f"{default.attention} ({default.reason})"
    print(f"chosen: {chosen}")
    measure = _by_weights if options.weights else _by_kernel
    with Power(torch.device("cuda")) as power:
        measured = measure((options.weights or options.kernels).split(","), model, default)
    record = {
        "command": ["python", "-m", "benchmarks.vision_tower", *(sys.argv[1:] if argv is None else argv)],
        "chosen": chosen,
        **measured,
        "power": power.summary(),
        "environment": environment(),
    }
    options.output.write_text(json.dumps(record, indent=1) + "\n")


def _by_kernel(names: Sequence[str], model: Any, _: VisionLayers) -> dict[str, Any]:
    """Return times by attention kernel, and how far the kernels' features differ."""
    layers = {name: VisionLayers(model, name) for name in names}
    times = _interleaved(layers, KERNEL_VIEWS, KERNEL_ROUNDS)
    for views in KERNEL_VIEWS:
        listed = ", ".join(f"{name} {median(times[name][str(views)]):.2f}" for name in names)
        print(f"{views} views at once, ms per view: {listed}")
    encoded = [tower(_pixels(4)) for tower in layers.values()]
    return {"ms_per_view": times, "relative_difference": max(_error(other, encoded[0]) for other in encoded)}


def _by_weights(names: Sequence[str], model: Any, default: VisionLayers) -> dict[str, Any]:
    """Return times by weights, errors against float32, and times of the parts of a layer."""
    exact = VisionLayers(deepcopy(model).float(), "default")(_pixels(PART_VIEWS).float())
    layers = {name: _tower(name, model, default.attention) for name in names}
    errors = {name: _error(tower(_pixels(PART_VIEWS)), exact) for name, tower in layers.items()}
    times = _interleaved(layers, WEIGHTS_VIEWS, WEIGHTS_ROUNDS)
    for views in WEIGHTS_VIEWS:
        listed = ", ".join(f"{name} {views * median(times[name][str(views)]):.1f}" for name in names)
        print(f"{views} views, ms per batch: {listed}")
    print("relative error against float32: " + ", ".join(f"{name} {error:.2e}" for name, error in errors.items()))
    parts = {**_products(PART_VIEWS * SIGLIP.patches), **_between(PART_VIEWS * SIGLIP.patches)}
    print(f"parts of a layer, us with {PART_VIEWS} views:")
    for name, part_us in parts.items():
        print(f"  {name:<24}" + ", ".join(f"{kind} {time:.0f}" for kind, time in part_us.items()))
    return {"ms_per_view": times, "relative_error": errors, "part_us": parts}


def _tower(name: str, model: Any, attention: str) -> VisionLayers:
    """Return the tower with dense bf16 weights or with quantised copies of them."""
    if name == "bf16":
        return VisionLayers(model, attention)
    quantized = deepcopy(model)
    quantize_vision_tower(quantized, name)
    return VisionLayers(quantized, attention)


def _pixels(views: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(views)
    return torch.randn(views, 3, 896, 896, device="cuda", dtype=torch.bfloat16, generator=generator)


def _interleaved(layers: Mapping[str, VisionLayers], numbers: Sequence[int], rounds: int) -> Times:
    """Return milliseconds per view of each tower, by number of views at once, in rounds of all of them."""
    times: Times = {name: {str(views): [] for views in numbers} for name in layers}
    for turn in range(rounds + 1):
        for views in numbers:
            pixels = _pixels(views)
            for name, tower in layers.items():
                spent = _milliseconds(tower, pixels)
                if turn:
                    times[name][str(views)].append(spent / views)
    return times


def _milliseconds(layers: VisionLayers, pixels: torch.Tensor) -> float:
    """Return the milliseconds of one call, averaged over enough calls to take ``LEAST_S``."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types for it
    count = max(1, round(LEAST_S * 1e3 / (11.5 * len(pixels))))
    layers(pixels)
    start.record()
    for _ in range(count):
        layers(pixels)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / count


def _error(features: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative difference of encoded views from others."""
    return float((features.float() - exact.float()).norm() / exact.float().norm())


def _products(rows: int) -> dict[str, dict[str, float]]:
    """Return microseconds of each matrix of a layer, by method, for quantised rows."""
    hidden, inner = SIGLIP.hidden, SIGLIP.intermediate
    sides = {"qkv": (hidden, 3 * hidden), "out": (hidden, hidden), "fc1": (hidden, inner), "fc2": (inner, hidden)}
    return {
        name: {method: _microseconds(call, inputs) for method, call, inputs in _methods(rows, *side)}
        for name, side in sides.items()
    }


def _methods(rows: int, inputs: int, outputs: int) -> Iterator[tuple[str, Call, Sequence[Any]]]:
    """Yield the name of each method for a matrix, its function, and copies of its input."""
    dense = _drawn(rows, inputs)
    weight, bias = 0.02 * _drawn(outputs, inputs)[0], _drawn(outputs, 1)[0][:, 0].contiguous()
    yield "bf16", partial(functional.linear, weight=weight, bias=bias), dense
    yield "bf16 with GELU", lambda values: torch._addmm_activation(bias, values, weight.t(), use_gelu=True), dense
    stored, scale = quantize_rows(weight, torch.int8)
    narrow = [quantize_rows(values, torch.int8) for values in dense]
    int8 = partial(multiply_int8, weight=stored, scale=scale[:, 0], dtype=torch.bfloat16, bias=bias)
    yield "int8 Triton", partial(int8, most=ANY_ROWS), narrow
    yield "int8 cuBLAS", partial(int8, most=0), narrow
    if not supports("fp8", torch.cuda.get_device_capability()):
        return
    stored, scale = quantize_rows(weight, torch.float8_e4m3fn)
    narrow = [quantize_rows(values, torch.float8_e4m3fn) for values in dense]
    fp8: dict[str, Any] = {"weight": stored, "scale": scale[:, 0], "dtype": torch.bfloat16}
    yield "fp8, scales and bias", partial(multiply_fp8_scaled, bias=bias, **fp8), narrow
    yield "fp8 unscaled", partial(multiply_fp8, **fp8), narrow


def _between(rows: int) -> dict[str, dict[str, float]]:
    """Return microseconds of the kernels between the products, by the type that they quantise to."""
    hidden, inner = _drawn(rows, SIGLIP.hidden), _drawn(rows, SIGLIP.intermediate)
    sums = [*zip(hidden, reversed(hidden), strict=True)]
    norm = nn.LayerNorm(SIGLIP.hidden, device="cuda", dtype=torch.bfloat16)
    parts: dict[str, dict[str, float]] = {"sum and layer norm": {}, "quantise attention": {}, "GELU and quantise": {}}
    for name, kind in {"bf16": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}.items():
        if name == "fp8" and not supports("fp8", torch.cuda.get_device_capability()):
            continue
        parts["sum and layer norm"][name] = _microseconds(partial(_add_norm, norm=norm, kind=kind), sums)
        if kind is not None:
            parts["quantise attention"][name] = _microseconds(partial(kernels.quantize, dtype=kind), hidden)
            parts["GELU and quantise"][name] = _microseconds(partial(layer_kernels.gelu_rows, input_dtype=kind), inner)
    return parts


def _add_norm(pair: tuple[torch.Tensor, torch.Tensor], norm: nn.LayerNorm, kind: torch.dtype | None) -> Any:
    return layer_kernels.add_layer_norm(*pair, norm, kind)


def _drawn(rows: int, width: int) -> list[torch.Tensor]:
    """Return copies of random rows that together exceed the L2 cache."""
    return [torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(_COPIES)]


@torch.no_grad()
def _microseconds(method: Call, inputs: Sequence[Any]) -> float:
    return microseconds([partial(method, values) for values in inputs])


if __name__ == "__main__":
    main()
