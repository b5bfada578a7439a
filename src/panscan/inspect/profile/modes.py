"""The ways of decoding that profiles compare: ``generate()`` with each cache and compilation, and the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from panscan.core import SettingError, UnsupportedError
from panscan.settings import ENGINE_AXES, ENGINE_LIMITS, Settings, axes, nearest


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


_GRAPHS = "reduce-overhead"  # torch.compile's name of the mode that records CUDA graphs
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
RUNNERS = ("generate", "engine")


def chosen_modes(runners: Sequence[str], modes: Sequence[str]) -> list[Mode]:
    """Return what to profile, each mode once: the modes of ``generate()``, then the engine.

    Args:
        runners: names of :data:`RUNNERS`; not empty.
        modes: names of :data:`GENERATE_MODES`, or ``all``; empty: ``dynamic`` if ``generate`` is among the runners.

    Raises:
        SettingError: an unknown name, or modes without ``generate``.
    """
    for runner in runners:
        if runner not in RUNNERS:
            raise SettingError(f"--runner takes {', '.join(RUNNERS)}; got {runner!r}{nearest(runner, RUNNERS)}")
    known = (*GENERATE_MODES, "all")
    for mode in modes:
        if mode not in known:
            raise SettingError(f"--mode takes {', '.join(known)}; got {mode!r}{nearest(mode, known)}")
    if modes and "generate" not in runners:
        raise SettingError("--mode is for --runner generate: add generate to --runner, or leave --mode out")
    selected = []
    if "generate" in runners:
        wanted = tuple(GENERATE_MODES) if "all" in modes else tuple(modes) or ("dynamic",)
        selected += [GENERATE_MODES[name] for name in dict.fromkeys(wanted)]
    return [*selected, ENGINE] if "engine" in runners else selected


def without_graphs(modes: Sequence[Mode]) -> list[Mode]:
    """Return the modes that need no NVIDIA GPU."""
    return [mode for mode in modes if mode.decode_compile != _GRAPHS]


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
