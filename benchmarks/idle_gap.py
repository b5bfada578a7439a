"""GPU idle time per decode step of ``generate()`` and of the engine, for Gemma 3 and Gemma 3n with random weights.

    python -m benchmarks.idle_gap --output idle-gap.json --traces traces/
    python -m benchmarks.idle_gap --model tiny --output idle-gap.json

Profiles one warm request in each mode of ``panscan profile``: dynamic cache, static cache, compiled decode step, CUDA
graphs, engine. Gemma 3 answers about a drawn document; Gemma 3n, as its vision tower needs timm, has its text decoder
alone. The record is rewritten after each mode, those that compile last, so an interrupted run keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3nTextConfig, GenerationConfig

from panscan.core import PanscanError, Request, now
from panscan.core.files import write_file
from panscan.inspect.profile.capture import CaptureOptions, start_profiler_once
from panscan.inspect.profile.results import summary_of
from panscan.inspect.profile.run import (
    ENGINE,
    GENERATE_MODES,
    Mode,
    Profiled,
    checked_modes,
    mode_settings,
    profile_modes,
    profile_runner,
)
from panscan.model.bundled import tiny_directory
from panscan.model.bundled.random_weights import tokenizer_for
from panscan.model.checkpoint import Loaded, ready_model
from panscan.model.machine import release_memory, resolve_device, resolve_dtype
from panscan.model.runtime import quiet_libraries
from panscan.records.environment import environment
from panscan.runners.gemma3n import Gemma3nRunner, gemma3n_reader
from panscan.settings import Settings
from panscan.workload.profiled import profiled_requests

_LARGEST_TRACE = 5_000_000  # bytes of a trace that is kept
_PROMPT = "Explain in a few sentences how a GPU works. " * 20  # about as long as a short page
_GEMMA3, _GEMMA3N = "gemma3", "gemma3n"
_GROUPS = (("dynamic", "static"), (ENGINE.name,), ("cuda-graphs",), ("compiled",))
_MODES = tuple(name for group in _GROUPS for name in group)
_DEVIATION = 0.02  # of random weights
_E2B: dict[str, Any] = {"num_hidden_layers": 30, "intermediate_size": 8192, "num_kv_shared_layers": 10}
"""Sizes of Gemma 3n E2B's text decoder that differ from the defaults of ``Gemma3nTextConfig``, which are E4B's."""
_TINY_3N: dict[str, Any] = {
    "hidden_size": 64,
    "hidden_size_per_layer_input": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_kv_shared_layers": 2,
    "laurel_rank": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size": 1024,
    "vocab_size_per_layer_input": 1024,
}
Say = Callable[[str], None]


def main(argv: Sequence[str] | None = None) -> None:
    """Profile each mode of each model and write the record."""
    options = _parsed(argv)
    quiet_libraries()
    device = resolve_device("auto")
    start_profiler_once(device)
    record: dict[str, Any] = {
        "command": ["python", "-m", "benchmarks.idle_gap", *(sys.argv[1:] if argv is None else argv)],
        "output_tokens": options.output_tokens,
        "environment": environment(),
        "models": {name: {} for name in options.families},
    }
    for group, family in product(_GROUPS, options.families):
        modes = [GENERATE_MODES.get(name, ENGINE) for name in group if name in options.modes]
        if (device.type == "cuda" or group != ("cuda-graphs",)) and (family == _GEMMA3 or group != (ENGINE.name,)):
            with tempfile.TemporaryDirectory() as folder:
                for name, figures in _measured(family, modes, options, Path(folder)):
                    record["models"][family][name] = figures
                    write_file(options.output, f"{json.dumps(record, indent=1)}\n".encode())


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="The record, a JSON file.")
    parser.add_argument("--traces", type=Path, help="Directory for the traces below 5 MB; default: none are kept.")
    parser.add_argument("--model", choices=("4b", "tiny"), default="4b", help="tiny: small models, for a CPU.")
    parser.add_argument("--families", nargs="+", choices=(_GEMMA3, _GEMMA3N), default=[_GEMMA3, _GEMMA3N])
    parser.add_argument("--modes", nargs="+", choices=_MODES, default=_MODES)
    parser.add_argument("--output-tokens", type=int, default=12)
    return parser.parse_args(argv)


def _measured(
    family: str, modes: Sequence[Mode], options: argparse.Namespace, folder: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the figures of each mode of a group; stop at the first mode that fails, and yield its error instead."""
    profiles = (_gemma3n if family == _GEMMA3N else _gemma3)(modes, options, folder)
    for mode in modes:
        try:
            profiled = next(profiles)
        except (PanscanError, RuntimeError) as error:  # RuntimeError: compilers and the GPU
            yield mode.name, {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
            return
        yield mode.name, _figures(profiled, family, options.traces)


def _gemma3(modes: Sequence[Mode], options: argparse.Namespace, folder: Path) -> Iterator[Profiled]:
    shape = {"model": "tiny"} if options.model == "tiny" else {"random_weights": True, "model_shape": options.model}
    settings = Settings(max_new_tokens=options.output_tokens, ignore_eos=True, preprocess="device", **shape)
    requests = profiled_requests(None, [], settings, folder, max_pages=1)
    yield from profile_modes(requests, checked_modes(settings, modes), folder, CaptureOptions())


def _gemma3n(modes: Sequence[Mode], options: argparse.Namespace, folder: Path) -> Iterator[Profiled]:
    settings = Settings(max_new_tokens=options.output_tokens, ignore_eos=True)
    requests = [Request(prompt=_PROMPT, sampling=settings.sampling, id="request-0")]
    with _gemma3n_runner(options.model, settings) as (runner, load_s):
        for mode in modes:
            runner.configure(mode_settings(settings, mode, on_gpu=runner.loaded.device.type == "cuda"))
            path = folder / f"{mode.name}.json.gz"
            yield profile_runner(runner, mode, requests, path, CaptureOptions(), load_s)


@contextmanager
def _gemma3n_runner(size: str, settings: Settings) -> Iterator[tuple[Gemma3nRunner, float]]:
    """Yield a runner of a random Gemma 3n text decoder and the seconds that building it took."""
    device = resolve_device(settings.device)
    name = "Gemma 3n E2B shape, random weights" if size == "4b" else "small Gemma 3n, random weights"
    started = now()
    config = Gemma3nTextConfig(**(_E2B if size == "4b" else _TINY_3N))
    runner = Gemma3nRunner(random_gemma3n(name, config, resolve_dtype(settings.dtype, device), device), settings)
    try:
        yield runner, now() - started
    finally:
        torch.compiler.reset()
        runner.close()
        release_memory()


@torch.no_grad()
def random_gemma3n(name: str, config: Gemma3nTextConfig, dtype: torch.dtype, device: torch.device) -> Loaded:
    """Build a text-only Gemma 3n with random weights, N(0, 0.02), and a bundled tokenizer, whose token ids it uses."""
    tokenizer = tokenizer_for(config.vocab_size)
    config.pad_token_id, config.bos_token_id = tokenizer.pad_token_id, tokenizer.bos_token_id
    config.eos_token_id = tokenizer.eos_token_id
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        generator = torch.Generator(device).manual_seed(0)
        for parameter in model.parameters():
            parameter.normal_(0, _DEVIATION, generator=generator)
    model.generation_config = GenerationConfig.from_pretrained(tiny_directory())
    return ready_model(model, gemma3n_reader(name, tokenizer, config))


def _figures(profiled: Profiled, family: str, traces: Path | None) -> dict[str, Any]:
    """Return facts and summary of a profile, and keep its trace if it is small."""
    facts = {name: value for name, value in profiled.facts.items() if name != "environment"}
    if family == _GEMMA3N:
        facts["model"] = "Gemma 3n"
    size = profiled.trace.stat().st_size
    trace_name = None
    if traces is not None and size < _LARGEST_TRACE:
        traces.mkdir(parents=True, exist_ok=True)
        trace_name = f"{family}-{profiled.mode.name}.json.gz"
        shutil.copyfile(profiled.trace, traces / trace_name)
    summary = summary_of(profiled, compared=False)
    step = summary.steps
    if step is not None:
        _say(f"{family} {profiled.mode.name}: {step.step_ms:.2f} ms per {step.name}, idle {step.idle_ms:.2f} ms")
    return {"facts": facts, "trace_bytes": size, "trace": trace_name, "summary": asdict(summary)}


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
