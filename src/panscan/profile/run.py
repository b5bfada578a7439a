"""A profile of each mode: load, warm up, time without the profiler, then one request or batch under it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import panscan
from panscan.core import Request, Result, SettingError, now
from panscan.model.machine import resolve_device
from panscan.model.support import require_supported
from panscan.profile.capture import CaptureOptions, captured, start_profiler_once
from panscan.profile.modes import ENGINE, Mode, mode_settings
from panscan.records.environment import environment
from panscan.runners.engine import EngineRunner
from panscan.runners.factory import ready_runner
from panscan.runners.gemma3n import Gemma3nRunner, is_gemma3n, require_gemma3n_settings
from panscan.runners.generate import GenerateRunner
from panscan.settings import Settings

__all__ = ["Profiled", "Timing", "checked_modes", "profile_modes", "profile_runner", "runs_gemma3n"]

_WARM_UPS, _TIMED = 2, 3
ProfiledRunner = GenerateRunner | EngineRunner


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one request or batch.

    Args:
        ttft_ms: accepted to first token, the mean over the batch.
        tpot_ms: mean time between output tokens; None for fewer than two tokens.
        seconds: time from the first acceptance to the last token.
        tokens_per_s: output tokens of the batch in these seconds.
    """

    ttft_ms: float
    tpot_ms: float | None
    seconds: float
    tokens_per_s: float

    @classmethod
    def of(cls, results: Sequence[Result]) -> Timing:
        """Return the times of a finished batch."""
        stamps = [result.stamps for result in results]
        seconds = max(each.tokens[-1] for each in stamps) - min(each.accepted for each in stamps)
        steps = [(each.tokens[-1] - each.tokens[0]) / (len(each.tokens) - 1) for each in stamps if len(each.tokens) > 1]
        return cls(
            ttft_ms=1e3 * sum(each.tokens[0] - each.accepted for each in stamps) / len(stamps),
            tpot_ms=1e3 * sum(steps) / len(steps) if steps else None,
            seconds=seconds,
            tokens_per_s=sum(len(each.tokens) for each in stamps) / seconds,
        )


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


def runs_gemma3n(settings: Settings) -> bool:
    """Return whether settings name a Gemma 3n checkpoint, which only Transformers' ``generate()`` runs.

    Raises:
        ModelError: the checkpoint is not available.
    """
    return not settings.random_weights and is_gemma3n(settings.model, settings.revision)


def checked_modes(settings: Settings, modes: Sequence[Mode]) -> list[tuple[Mode, Settings]]:
    """Return each mode with its settings, in their order, once this machine is known to have what they need.

    Raises:
        ModelError: the checkpoint is not available.
        UnsupportedError: a mode, setting or device that this machine or every runner among the modes lacks.
    """
    on_gpu = resolve_device(settings.device).type == "cuda"
    found = [(mode, mode_settings(settings, mode, on_gpu=on_gpu)) for mode in modes]
    if ENGINE not in modes:
        require_supported(settings)  # refuses what only the engine has
    if runs_gemma3n(settings):
        require_gemma3n_settings(settings)
    for _, chosen in found:
        require_supported(chosen)
    return found


def profile_modes(
    requests: Sequence[Request],
    modes: Sequence[tuple[Mode, Settings]],
    folder: Path,
    options: CaptureOptions,
    say: Callable[[str], None],
) -> Iterator[Profiled]:
    """Profile requests, as one batch, in each mode; yield each profile when its trace is written.

    The modes of ``generate()`` share one loaded model; the engine loads it again.

    Args:
        requests: the batch; not empty.
        modes: result of :func:`checked_modes`; not empty.
        folder: existing folder for the trace files, ``MODE.json.gz``.
        options: contents of the traces.
        say: takes what is being done, in a few words.

    Raises:
        ModelError: the checkpoint is not available.
        PanscanError: a request failed.
    """
    settings = modes[0][1]
    gemma3n = runs_gemma3n(settings)
    start_profiler_once(resolve_device(settings.device))
    opened: tuple[str, ProfiledRunner, float] | None = None
    try:
        for mode, chosen in modes:
            if opened is None or opened[0] != chosen.runner:
                if opened is not None:
                    closing, opened = opened[1], None  # nothing is open if the next runner cannot be opened
                    _close(closing)
                say(f"loading {chosen.model_name} for {mode.label}")
                started = now()
                opened = chosen.runner, _opened(chosen, gemma3n), now() - started
            _, runner, load_s = opened
            runner.configure(chosen)
            yield profile_runner(runner, mode, requests, folder / f"{mode.name}.json.gz", options, load_s, say)
    finally:
        if opened is not None:
            _close(opened[1])


def profile_runner(
    runner: ProfiledRunner,
    mode: Mode,
    requests: Sequence[Request],
    path: Path,
    options: CaptureOptions,
    load_s: float,
    say: Callable[[str], None],
) -> Profiled:
    """Warm a configured runner up, time it without the profiler, and profile it once.

    Args:
        runner: has the mode's settings.
        mode: decoding mode.
        requests: the batch.
        path: path of the trace file.
        options: contents of the trace.
        load_s: seconds that loading the model took, for the facts.
        say: takes what is being done.

    Raises:
        PanscanError: a request failed.
        RecordsError: the trace cannot be written.
    """
    device = runner.loaded.device
    with _decoding(runner, mode):
        say(f"{mode.label}: warm-up")
        started = now()
        for _ in range(_WARM_UPS):
            runner.run(requests)
        warm_up_s = now() - started
        say(f"{mode.label}: timing without the profiler")
        plain = sorted((Timing.of(runner.run(requests)) for _ in range(_TIMED)), key=lambda each: each.seconds)
        plain_median = plain[len(plain) // 2]
        facts: dict[str, Any] = {
            "version": panscan.__version__,
            "mode": mode.name,
            "label": mode.label,
            "model": runner.settings.model_name,
            "settings": runner.settings.changed(),
            "batch_size": len(requests),
            "load_s": load_s,
            "warm_up_s": warm_up_s,
            "without_profiler": asdict(plain_median),
            "environment": environment(),
        }

        def described(results: Sequence[Result]) -> Mapping[str, Any]:
            first = results[0]
            facts.update(
                output_tokens=len(first.token_ids),
                prompt_tokens=first.prompt_tokens,
                views=first.views,
                profiled=asdict(Timing.of(results)),
            )
            return facts

        say(f"{mode.label}: profiling")
        captured(lambda: runner.run(requests), device, path, options, described)
    return Profiled(mode, path, facts)


def _opened(settings: Settings, gemma3n: bool) -> ProfiledRunner:
    """Load a model in its runner; of an engine, also its caches and graphs.

    Raises:
        ModelError: the checkpoint is not available.
        PanscanError: the engine cannot be opened.
    """
    if gemma3n:
        return Gemma3nRunner.from_settings(settings)
    runner = ready_runner(settings)
    if isinstance(runner, EngineRunner):
        try:
            runner.engine  # noqa: B018 - opened on first use
        except BaseException:  # interruptions included: the model must not stay in memory
            _close(runner)
            raise
    elif not isinstance(runner, GenerateRunner):
        raise SettingError(f"--runner {settings.runner}: only generate and engine are profiled")
    return runner


def _close(runner: ProfiledRunner) -> None:
    """Release a model, and what was compiled of it, so that the next one has the memory."""
    torch.compiler.reset()
    runner.close()


@contextmanager
def _decoding(runner: ProfiledRunner, mode: Mode) -> Iterator[None]:
    """Let ``generate()`` decode as the mode says, while in the block."""
    if isinstance(runner, GenerateRunner):
        runner.decode_compile = mode.decode_compile
    try:
        yield
    finally:
        if isinstance(runner, GenerateRunner):
            runner.decode_compile = None
