"""What each runner supports, and which one runs given settings."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from panscan.settings.sweep_settings import SettingValues, axes

ENGINE_AXES = tuple(axis.name for axis in axes().values() if axis.only == "engine")
"""Settings of the engine alone."""
VLLM_AXES = tuple(axis.name for axis in axes().values() if axis.only == "vllm")
"""Settings of vLLM alone."""
ENGINE_LIMITS: SettingValues = {
    "attention": "sdpa",
    "cache": "dynamic",
    "compile": None,
    "batch_size": 1,
    "equal_views": False,
}
"""Settings of ``generate()`` that the engine does not have, or decides itself: the only value that each may have."""
VLLM_LIMITS: SettingValues = {**ENGINE_LIMITS, "preprocess": "cpu", "prefill_chunk_size": None}
"""Settings that vLLM does not have, or decides itself: the only value that each may have."""
RUNNER_LIMITS: dict[str, SettingValues] = {
    "engine": {**ENGINE_LIMITS, "device_map": None},
    "vllm": {**VLLM_LIMITS, "quantization": None, "quantize_head": None, "quantize_vision": None, "device_map": None},
    "pipeline": {"batch_size": 1, "preprocess": "cpu"},
    "generate_batch": {
        "cache": "dynamic",
        "compile": None,
        "prefill_chunk_size": None,
        "preprocess": "cpu",
    },
}
"""What each runner does not offer: the only value that a setting may have with it."""
NO_IMAGES = "runner generate_batch: images are not supported; use the runner engine"
"""Why Transformers' continuous batching is refused: it ignores images without a word."""
ENGINE_COMMANDS = ("batch", "serve")
"""Commands that run on the engine only."""
GENERATE_AXES = (*ENGINE_LIMITS, "device_map", "max_memory")
"""Settings of ``generate()`` that commands on the engine do not have."""
NEEDS_GENERATE = "not supported by panscan {verb}, which runs on the engine; use panscan ask or panscan bench"
"""Why a command on the engine refuses another runner, or an option of ``generate()``."""
ALL_AT_ONCE = ("engine", "vllm")
"""Runners that take all requests of a cell at once, and mix prefill and decode in one step."""


def foreign_settings(runner: str) -> Collection[str]:
    """Return the settings that a runner does not have: those of others alone, or those of all runners but it."""
    lacking = {"engine": (*ENGINE_LIMITS, *VLLM_AXES), "vllm": (*VLLM_LIMITS, *ENGINE_AXES)}
    return lacking.get(runner, (*ENGINE_AXES, *VLLM_AXES))


class RunnerChoice(NamedTuple):
    """A runner, and why it was chosen.

    Args:
        runner: name of the runner.
        reason: empty where the user or a preset names the runner.
        option: option, with its value, that the engine does not support; empty without one.
    """

    runner: str
    reason: str = ""
    option: str = ""


def choose_runner(given: SettingValues, preset: SettingValues) -> RunnerChoice:
    """Choose the runner for some settings: the one that they name, or the engine, or ``generate()``.

    ``generate()`` replaces the engine where the engine does not support a given setting. It also does so for a preset
    that names the engine, where an option overrides a setting of the preset.

    Args:
        given: typed settings that the user gave; a list or tuple holds the values of a sweep.
        preset: typed settings of a preset.
    """
    if "runner" in given:
        return RunnerChoice(str(given["runner"]))
    named = preset.get("runner")
    if named not in (None, "engine"):
        return RunnerChoice(str(named))
    limits = RUNNER_LIMITS["engine"]
    for name, value in (given if named else {**preset, **given}).items():
        for single in value if isinstance(value, list | tuple) else (value,):
            if (name, single) == ("device", "mps") or (name in limits and single != limits[name]):
                option = f"--{axes()[name].flag} {axes()[name].written(single)}"
                advice = "; --max-num-seqs limits its batches" if name == "batch_size" else ""
                return RunnerChoice("generate", f"the engine does not support {option}{advice}", option)
    return RunnerChoice("engine", "" if named else "the default; it supports all your options")
