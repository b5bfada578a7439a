"""Settings in words: ``no pan and scan``, ``up to 3 crops, batch size 4``."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from panscan.core.text import clean
from panscan.settings import axes

if TYPE_CHECKING:
    from panscan.records.store import CellSettings


CROPS = "pan_and_scan_"
"""Prefix of the settings that mean something only with pan and scan."""

_PHRASES = {
    "model": "{}",
    "revision": "revision {}",
    "model_shape": "{} shape",
    "dtype": "{} precision",
    "quantization": "{} weights",
    "quantization_group_size": "groups of {}",
    "quantize_head": "{} head",
    "quantize_vision": "{} vision tower",
    "device": "device {}",
    "device_map": "device map {}",
    "max_memory": "memory {}",
    "tp_plan": "tensor parallel plan {}",
    "tensor_parallel_size": "tensor parallel size {}",
    "attention": "{} attention",
    "vllm_attention": "{} attention in vLLM",
    "cache": "{} cache",
    "compile": "compiled ({})",
    "batch_size": "batch size {}",
    "max_concurrency": "up to {} requests in flight",
    "max_num_seqs": "up to {} sequences",
    "gpu_memory_utilization": "{} of GPU memory",
    "gpu_memory_gb": "{} GB of GPU memory",
    "kv_cache_gb": "{} GB KV cache",
    "kv_cache_dtype": "{} KV cache",
    "vision_cache_gb": "{} GB vision cache",
    "image_memory_gb": "{} GB of images",
    "vision_batch_size": "vision batches of {}",
    "attention_backend": "{} attention backend",
    "prefill_chunk_size": "prefill chunks of {}",
    "pad_to_multiple_of": "padded to multiples of {}",
    "preprocess": "preprocessing on {}",
    "pan_and_scan_min_crop_size": "crops of at least {} pixels",
    "pan_and_scan_max_num_crops": "up to {} crops",
    "pan_and_scan_min_ratio_to_activate": "crops from aspect ratio {}",
    "max_new_tokens": "up to {} new tokens",
    "sampling_seed": "sampling seed {}",
}
_SWITCHES = {
    "do_pan_and_scan": "pan and scan",
    "tf32": "TF32",
    "equal_views": "batches of equal view counts",
    "ignore_eos": "fixed output length",
}
_OFF = {
    "revision": "default revision",
    "quantization_group_size": "default groups",
    "vllm_attention": "default attention in vLLM",
    "gpu_memory_gb": "no GPU memory limit in GB",
    "kv_cache_gb": "automatic KV cache size",
    "quantization": "unquantised weights",
    "quantize_head": "unquantised head",
    "quantize_vision": "unquantised vision tower",
    "compile": "not compiled",
    "max_concurrency": "unlimited requests in flight",
    "prefill_chunk_size": "unchunked prefill",
    "pad_to_multiple_of": "no padding",
    "tf32": "no TF32",
}
_TITLES = {
    "pan_and_scan_max_num_crops": "maximum number of crops",
    "pan_and_scan_min_crop_size": "minimum crop size in pixels",
    "pan_and_scan_min_ratio_to_activate": "minimum aspect ratio for crops",
    "max_num_seqs": "maximum number of sequences",
    "max_concurrency": "requests in flight",
}
_RUNNERS = {"generate": "generate()", "generate_batch": "generate_batch()", "vllm": "vLLM", "engine": "the engine"}


def label(settings: CellSettings, names: Iterable[str] | None = None) -> str:
    """Return settings in words, separated by commas, on one clean line.

    Settings that mean nothing (None, where that is no value of theirs) are omitted, and ``pan and scan`` beside a
    number of crops.

    Args:
        settings: settings by name.
        names: those to return, in this order; None: all.
    """
    if names is not None:
        settings = {name: settings.get(name) for name in names}
    crops = settings.get(f"{CROPS}max_num_crops")
    meaningful = {
        name: value
        for name, value in settings.items()
        if value is not None or name not in axes() or axes()[name].optional
    }
    if meaningful.get("do_pan_and_scan") is True and crops is not None:
        del meaningful["do_pan_and_scan"]
    return clean(", ".join(setting_words(name, value) for name, value in meaningful.items()))


def setting_title(name: str) -> str:
    """Return the name of a setting as the title of an axis or a column."""
    return clean(_TITLES.get(name, _SWITCHES.get(name, name.removeprefix(CROPS).replace("_", " "))))


def setting_words(name: str, value: Any) -> str:
    """Return one setting in words; an unknown one as its name and value."""
    plain = name.removeprefix(CROPS).replace("_", " ")
    if value is None:
        return _OFF.get(name, f"no {plain}")
    if isinstance(value, bool):
        switch = _SWITCHES.get(name, plain)
        return switch if value else f"no {switch}"
    if name == "do_pan_and_scan":  # "yes or no": the same views either way
        return "with or without pan and scan"
    text = shown(value)
    if name == "runner":
        return f"{runner_words(text).removeprefix('the ')} runner"
    if name == f"{CROPS}max_num_crops" and text == "1":
        return "up to 1 crop"
    return _PHRASES.get(name, f"{plain} {{}}").replace("{}", text)


def option_words(preset: str, settings: CellSettings) -> str:
    """Return a preset and settings as one types them: ``--preset balanced --max-num-seqs 16``."""
    words = ["--preset", preset]
    for name, value in settings.items():
        if value is not None and name in axes():
            flag = axes()[name].flag
            switch = {True: [f"--{flag}"], False: [f"--no-{flag}"]}
            words += switch[value] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return shlex.join(words)


def runner_words(name: str) -> str:
    """Return the words for a runner in a sentence."""
    return _RUNNERS.get(name, name)


def shown(value: Any) -> str:
    """Return a setting's value as text."""
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    return f"{value:.4g}" if isinstance(value, float) else clean(value)
