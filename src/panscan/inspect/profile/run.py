"""A profile of each way of decoding: load, warm up, time without the profiler, then one request or batch under it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import panscan
from panscan.core import Request, Result, SettingError, UnsupportedError, now
from panscan.core.activity import activity
from panscan.core.foreign import JsonObject
from panscan.inspect.profile.capture import CaptureOptions, captured, start_profiler_once, write_trace
from panscan.model.machine import resolve_device
from panscan.model.support import require_supported
from panscan.records.environment import environment
from panscan.runners.engine import EngineRunner
from panscan.runners.factory import profile_only_family, profile_only_runner, ready_runner
from panscan.runners.generate import GenerateRunner
from panscan.settings import ENGINE_AXES, ENGINE_LIMITS, Settings, axes

_WARM_UPS, _TIMED = 2, 3
_OF_OTHER_FAMILIES = (
    "quantization",
    "quantize_head",
    "quantize_vision",
    "device_map",
    "max_memory",
    "prefill_chunk_size",
    "preprocess",
)
ProfiledRunner = GenerateRunner | EngineRunner
_GRAPHS = "reduce-overhead"  # torch.compile's name of the mode that records CUDA graphs


@dataclass(frozen=True, slots=True)
class Mode:
    """One way of decoding.

    Args:
        name: name in files and columns.
        label: name in text.
        cache: KV cache of ``generate()``.
        decode_compile: see :attr:`panscan.runners.generate.GenerateRunner.decode_compile`.
    """

    name: str
    label: str
    cache: str = "dynamic"
    decode_compile: str | None = None


GENERATE_MODES = {
    mode.name: mode
    for mode in (
        Mode("dynamic", "generate(), dynamic cache", "dynamic", "off"),
        Mode("static", "generate(), static cache", "static", "off"),
        Mode("compiled", "generate(), static cache, compiled decode step", "static", "default"),
        Mode("cuda-graphs", "generate(), static cache, compiled decode step, CUDA graphs", "static", _GRAPHS),
    )
}
ENGINE = Mode("engine", "panscan's engine")


def chosen_modes(runners: Sequence[str], modes: Sequence[str], *, on_gpu: bool = True) -> list[Mode]:
    """Return what to profile, each mode once: the modes of ``generate()``, then the engine.

    Args:
        runners: ``generate``, ``engine`` or both.
        modes: names of :data:`GENERATE_MODES`, or ``all``; empty: ``dynamic`` if ``generate`` is among the runners.
        on_gpu: whether ``all`` includes the modes that need an NVIDIA GPU.

    Raises:
        SettingError: modes without ``generate``.
    """
    if modes and "generate" not in runners:
        raise SettingError("--mode is for --runner generate: add generate to --runner, or leave --mode out")
    usable = [name for name, mode in GENERATE_MODES.items() if on_gpu or mode.decode_compile != _GRAPHS]
    wanted = usable if "all" in modes else dict.fromkeys(modes or ("dynamic",))
    selected = [GENERATE_MODES[name] for name in wanted] if "generate" in runners else []
    return [*selected, ENGINE] if "engine" in runners else selected


def mode_settings(base: Settings, mode: Mode, *, on_gpu: bool) -> Settings:
    """Return the settings of one mode: the shared ones, without those that its runner does not have.

    Args:
        base: settings that all modes share, with the batch size of the request.
        mode: decoding mode.
        on_gpu: whether the model runs on an NVIDIA GPU.

    Raises:
        UnsupportedError: CUDA graphs without an NVIDIA GPU, or the engine on several.
    """
    if mode is ENGINE:
        if base.tensor_parallel_size > 1:
            raise UnsupportedError(
                f"--tensor-parallel-size {base.tensor_parallel_size}: the profiler records one process; use 1"
            )
        return replace(base, runner="engine", max_num_seqs=base.batch_size, **ENGINE_LIMITS)
    if mode.decode_compile == _GRAPHS and not on_gpu:
        raise UnsupportedError("--mode cuda-graphs needs an NVIDIA GPU; on a CPU use dynamic, static or compiled")
    plain = {name: axes()[name].default for name in ENGINE_AXES}
    return replace(base, **{**plain, "runner": "generate", "cache": mode.cache})


@dataclass(frozen=True, slots=True)
class Profiled:
    """A finished profile.

    Args:
        mode: decoding mode.
        trace: the trace file.
        facts: metadata in the trace file, under ``panscan``.
    """

    mode: Mode
    trace: Path
    facts: Mapping[str, Any]


def checked_modes(settings: Settings, modes: Sequence[Mode]) -> list[tuple[Mode, Settings]]:
    """Return each mode with its settings, in their order, once this machine is known to have what they need.

    Raises:
        ModelError: the checkpoint is not available.
        UnsupportedError: a mode, setting or device that this machine or every runner among the modes lacks.
    """
    on_gpu = resolve_device(settings.device).type == "cuda"
    settings_by_mode = [(mode, mode_settings(settings, mode, on_gpu=on_gpu)) for mode in modes]
    if ENGINE not in modes:
        require_supported(settings)  # refuses what only the engine has
    if (family := profile_only_family(settings)) is not None:
        for name in _OF_OTHER_FAMILIES:
            if getattr(settings, name) != axes()[name].default:
                raise UnsupportedError(f"--{axes()[name].flag} is not supported for {family.name}: leave it out")
    for _, chosen in settings_by_mode:
        require_supported(chosen)
    return settings_by_mode


def profile_modes(
    requests: Sequence[Request],
    modes: Sequence[tuple[Mode, Settings]],
    folder: Path,
    options: CaptureOptions,
) -> Iterator[Profiled]:
    """Profile requests, as one batch, in each mode; yield each profile when its trace is written.

    The modes of ``generate()`` share one loaded model; the engine loads it again.

    Args:
        requests: the batch; not empty.
        modes: result of :func:`checked_modes`; not empty.
        folder: existing folder for the trace files, ``MODE.json.gz``.
        options: contents of the traces.

    Raises:
        ModelError: the checkpoint is not available.
        PanscanError: a request failed.
    """
    settings = modes[0][1]
    open_runner = _opened_runner if profile_only_family(settings) is None else profile_only_runner
    with activity("starting the profiler"):
        start_profiler_once(resolve_device(settings.device))
    name = ""
    with ExitStack() as stack:
        for mode, chosen in modes:
            if name != chosen.runner:
                stack.close()  # nothing is open if the next runner cannot be opened
                started = now()
                with activity(f"loading {chosen.model_name} for {mode.label}"):
                    runner, name = open_runner(chosen), chosen.runner
                load_s = now() - started
                stack.callback(_close, runner)
            runner.configure(chosen)
            yield profile_runner(runner, mode, requests, folder / f"{mode.name}.json.gz", options, load_s)


def profile_runner(
    runner: ProfiledRunner,
    mode: Mode,
    requests: Sequence[Request],
    path: Path,
    options: CaptureOptions,
    load_s: float,
) -> Profiled:
    """Warm a configured runner up, time it without the profiler, and profile it once.

    Args:
        runner: has the mode's settings.
        mode: decoding mode.
        requests: the batch.
        path: path of the trace file.
        options: contents of the trace.
        load_s: seconds that loading the model took, for the facts.

    Raises:
        PanscanError: a request failed.
        RecordsError: the trace cannot be written.
    """
    if isinstance(runner, GenerateRunner):
        runner.decode_compile = mode.decode_compile
    started = now()
    with activity(f"{mode.label}: warm-up"):
        for _ in range(_WARM_UPS):
            runner.run(requests)
    warm_up_s = now() - started
    with activity(f"{mode.label}: timing without the profiler"):
        plain = sorted((_timing(runner.run(requests)) for _ in range(_TIMED)), key=lambda timing: timing["seconds"])
    facts: JsonObject = {
        "version": panscan.__version__,
        "mode": mode.name,
        "label": mode.label,
        "model": runner.settings.model_name,
        "settings": runner.settings.changed(),
        "batch_size": len(requests),
        "load_s": load_s,
        "warm_up_s": warm_up_s,
        "without_profiler": plain[len(plain) // 2],
        "environment": environment(),
    }
    with activity(f"{mode.label}: profiling"):
        results, profiler = captured(lambda: runner.run(requests), runner.loaded.device, options)
        facts |= {
            "output_tokens": len(results[0].token_ids),
            "prompt_tokens": results[0].prompt_tokens,
            "views": results[0].views,
            "profiled": _timing(results),
        }
        write_trace(profiler, path, facts)
    return Profiled(mode, path, facts)


def _timing(results: Sequence[Result]) -> JsonObject:
    """Return the times of a finished batch.

    ``ttft_ms`` is from accepted to first token, the mean over the batch; ``tpot_ms`` the mean time between output
    tokens, None for fewer than two; ``seconds`` the time from the first acceptance to the last token, in which
    ``tokens_per_s`` counts the output tokens.
    """
    stamps = [result.stamps for result in results]
    seconds = max(request.tokens[-1] for request in stamps) - min(request.accepted for request in stamps)
    steps = [request.tpot for request in stamps if request.tpot is not None]
    return {
        "ttft_ms": 1e3 * fmean(request.tokens[0] - request.accepted for request in stamps),
        "tpot_ms": 1e3 * fmean(steps) if steps else None,
        "seconds": seconds,
        "tokens_per_s": sum(len(request.tokens) for request in stamps) / seconds,
    }


def _opened_runner(settings: Settings) -> ProfiledRunner:
    """Load a model in its runner; of an engine, also its caches and graphs.

    Raises:
        ModelError: the checkpoint is not available.
        PanscanError: the engine cannot be opened.
    """
    runner = ready_runner(settings)
    if isinstance(runner, EngineRunner):
        try:
            runner.engine  # noqa: B018 - opened on first use
        except BaseException:  # interruptions included: the model must not stay in memory
            _close(runner)
            raise
    assert isinstance(runner, ProfiledRunner)  # of one of the modes
    return runner


def _close(runner: ProfiledRunner) -> None:
    """Release a model, and what was compiled of it, so that the next one has the memory."""
    torch.compiler.reset()
    runner.close()
