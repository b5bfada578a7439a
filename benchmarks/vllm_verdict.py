"""Verdicts of the engine, ``generate()`` and vLLM on one saved checkpoint: python -m benchmarks.vllm_verdict

    python -m benchmarks.vllm_verdict --model-shape 27b --layers 6 --output verdict-27b.json
    python -m benchmarks.vllm_verdict --model tiny --runner engine,generate --output verdict.json

vLLM draws other random weights, so its answers are compared on a checkpoint: true layer shapes, random weights and
as few layers as one local-global pattern has. The comparison is that of ``panscan bench``: float32 eager attention on
the same weights and views. The second line checks on a CPU that the script runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from msgspec import structs
from training.tiny import rename_as_published

from benchmarks.workloads.common import RequestSeeds, say
from benchmarks.workloads.pages import PAGE, page, question
from panscan.analysis.cells import MeasuredCell, measured_rows
from panscan.core.files import write_file
from panscan.images.views import plan_views
from panscan.model.bundled.random_weights import random_model
from panscan.model.checkpoint import load_reader
from panscan.model.machine import resolve_device
from panscan.model.shapes import PATTERN, SHAPES, Shape
from panscan.records.store import read_run
from panscan.settings import Settings

_OPTIONS = (
    "--preprocess",
    "device",
    "--vllm-attention",
    "TRITON_ATTN",
    "--max-new-tokens",
    "32",
    "--ignore-eos",
    "--repeats",
    "1",
)
_TEXT_TOKENS = 78


def write_checkpoint(shape: Shape, directory: Path, device: torch.device) -> None:
    """Write a checkpoint of random weights in bfloat16, under the names of published checkpoints.

    Args:
        shape: of the model.
        directory: empty.
        device: where the weights are drawn.
    """
    model, processor = random_model(shape, dtype=torch.bfloat16, device=device)
    model.to("cpu").save_pretrained(directory, max_shard_size="1000GB")
    processor.save_pretrained(directory)
    rename_as_published(directory / "model.safetensors")


def write_questions(model: str, directory: Path, count: int) -> Path:
    """Write pages and questions as W1 asks them, and return the dataset's file."""
    prompts = load_reader(model, None).prompts
    crops = plan_views(*PAGE, Settings().pan_and_scan).crops
    rows = []
    for request in (RequestSeeds(seed, seed) for seed in range(count)):
        name = f"{request.page:05d}.png"
        page(request.page).save(directory / name, compress_level=1)
        text = question(prompts, request.question, crops=crops, text_tokens=_TEXT_TOKENS)
        rows.append(json.dumps({"image": name, "question": text, "id": name}))
    path = directory / "questions.jsonl"
    path.write_text("\n".join(rows) + "\n", "utf-8")
    return path


def side_of(cell: MeasuredCell) -> str:
    """Return the name of a cell's side in the comparison."""
    runner = str(cell.settings["runner"])
    return "vllm-exact" if runner == "vllm" else runner


def verdicts_of(run_directory: Path) -> dict[str, dict[str, Any]]:
    """Return word, ratio to the noise, reason and divergences of each side of a run."""
    return {
        side_of(cell): {
            "verdict": cell.verdict.word,
            "ratio": cell.verdict.ratio,
            "reason": cell.verdict.reason,
            "answer": None if cell.verdict.answer is None else structs.asdict(cell.verdict.answer),
            "image": None if cell.verdict.image is None else structs.asdict(cell.verdict.image),
        }
        for cell in measured_rows(read_run(run_directory))
    }


def measure(model: str, runners: str, requests: int, options: Sequence[str]) -> dict[str, Any]:
    """Run ``panscan bench`` in a separate process and return its header's facts and verdicts.

    Raises:
        SystemExit: it failed.
    """
    with TemporaryDirectory(prefix="panscan-verdict-") as folder:
        questions = write_questions(model, Path(folder), requests)
        words = [
            sys.executable,
            "-m",
            "panscan",
            "bench",
            "--model",
            model,
            "--dataset",
            str(questions),
            "--num-samples",
            str(requests),
            "--runner",
            runners,
            "--output-dir",
            f"{folder}/runs",
            *_OPTIONS,
            *options,
        ]
        say(" ".join(words[1:]))
        process = subprocess.run(words, check=False)
        if process.returncode:
            sys.exit(f"panscan bench ended with exit code {process.returncode}")
        [run_directory] = Path(folder, "runs").iterdir()
        return {"environment": read_run(run_directory).header.environment, "verdicts": verdicts_of(run_directory)}


def main(argv: Sequence[str] | None = None) -> int:
    """Write a checkpoint unless one is named, compare, write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Other options go to panscan bench.",
    )
    shapes = sorted(name for name, shape in SHAPES.items() if shape.vision is not None)
    parser.add_argument("--model", help="a checkpoint, instead of random weights")
    parser.add_argument("--model-shape", choices=shapes, default="27b", help="of the random weights")
    parser.add_argument("--layers", type=int, default=PATTERN, help="decoder layers; default %(default)s")
    parser.add_argument("--runner", default="engine,generate,vllm", help="sides to compare")
    parser.add_argument("--requests", type=int, default=4, help="documents with one question each")
    parser.add_argument("--output", type=Path, required=True, help="the record, a JSON file")
    args, options = parser.parse_known_args(argv)
    if args.model is not None:
        record = {"model": args.model, "layers": None} | measure(args.model, args.runner, args.requests, options)
    else:
        shape = SHAPES[args.model_shape]
        shape = replace(shape, text=replace(shape.text, layers=args.layers))
        with TemporaryDirectory(prefix="panscan-checkpoint-") as folder:
            say(f"writing {args.model_shape} with {args.layers} layers")
            write_checkpoint(shape, Path(folder), resolve_device("auto"))
            torch.cuda.empty_cache()
            results = measure(folder, args.runner, args.requests, options)
        record = {"model": args.model_shape, "layers": args.layers} | results
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_file(args.output, json.dumps(record, indent=1).encode() + b"\n")
    say(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
