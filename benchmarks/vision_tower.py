"""The vision tower by attention kernel, interleaved on one GPU: python -m benchmarks.vision_tower --output RECORD.json

SigLIP at Gemma 3's true shape with random weights: milliseconds per view, encoded 1, 4 and 32 at once, as the engine
encodes them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from benchmarks.workloads.device import Power
from panscan.model.bundled.random_weights import random_model
from panscan.model.gemma3.vision_layers import VisionLayers
from panscan.model.shapes import SHAPES
from panscan.records.environment import environment

VIEWS = (1, 4, 32)
ROUNDS = 7  # after one that warms up
LEAST_S = 0.2  # of one measurement


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, check that both kernels agree, write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--kernels", default="cudnn,hopper")
    given = parser.parse_args(argv)
    kernels: list[str] = given.kernels.split(",")
    # The text model is not used: one layer of it is enough.
    shape = SHAPES["4b"]
    text = replace(shape.text, layers=1, vocabulary=1024)
    model, _ = random_model(replace(shape, name="vision", text=text), dtype=torch.bfloat16, device="cuda")
    default = VisionLayers(model)
    chosen = f"{default.attention} ({default.reason})"
    print(f"chosen: {chosen}")
    layers = {kernel: VisionLayers(model, kernel) for kernel in kernels}
    found: dict[str, dict[str, list[float]]] = {kernel: {str(views): [] for views in VIEWS} for kernel in kernels}
    pixels = {views: torch.randn(views, 3, 896, 896, device="cuda", dtype=torch.bfloat16) for views in VIEWS}
    with Power(torch.device("cuda")) as power:
        for turn in range(ROUNDS + 1):
            for views in VIEWS:
                for kernel in kernels:
                    spent = _milliseconds(layers[kernel], pixels[views])
                    if turn:
                        found[kernel][str(views)].append(spent / views)
    record = {
        "command": ["python", "-m", "benchmarks.vision_tower", *(sys.argv[1:] if argv is None else argv)],
        "chosen": chosen,
        "ms_per_view": found,
        "relative_difference": _difference([each(pixels[4]) for each in layers.values()]),
        "power": power.summary(),
        "environment": environment(),
    }
    given.output.write_text(json.dumps(record, indent=1) + "\n")
    for views in VIEWS:
        times = ", ".join(f"{kernel} {median(found[kernel][str(views)]):.2f}" for kernel in kernels)
        print(f"{views} views at once, ms per view: {times}")


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


def _difference(encoded: Sequence[torch.Tensor]) -> float:
    """Return the largest relative difference of encoded views from the first kernel's."""
    first = encoded[0].float()
    return max(float((each.float() - first).norm() / first.norm()) for each in encoded)


if __name__ == "__main__":
    main()
