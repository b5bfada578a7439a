"""GPUs by name: memory, bandwidth, rates and links from ``gpus.yaml``, or from a specification that the user types."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import yaml

from panscan.core import SettingError
from panscan.core.gpu_features import FEATURES, Capability, refusal
from panscan.core.option import Range, shorten
from panscan.settings import nearest

_RATES = ("bf16", "fp16", "fp32", "fp8", "int8")
_NEEDED = ("memory", "bandwidth", "bf16")
_CUSTOM = (*_NEEDED, "fp16", "fp32", "fp8", "int8", "link", "capability")
_EXAMPLE = "memory=24,bandwidth=936,bf16=71,int8=142,link=32 (GB, GB/s, TFLOP/s, TOP/s, GB/s)"
_LINK = 32.0  # GB/s of PCIe 4.0 x16
_FIGURE = Range(gt=0, le=1_000_000)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model, or a CPU.

    Args:
        name: what ``--gpu`` takes.
        label: the name as the vendor writes it.
        memory_bytes: device memory as the driver reports it, which is less than the vendor's figure.
        bytes_per_s: memory bandwidth.
        flops_per_s: dense rates of products by type (bf16, fp16, fp32, fp8, int8); absent: no such hardware.
        link: connection to other GPUs of the machine.
        link_bytes_per_s: its bandwidth in each direction.
        capability: CUDA compute capability; None: no NVIDIA GPU, or unknown.
        sources: pages that these figures are from.
        aliases: other names that ``--gpu`` takes.
        note: what the figures leave out; empty: nothing.
        assumed: whether a specification left out the capability, so that the lowest possible one is assumed.
    """

    name: str
    label: str
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    link: str
    link_bytes_per_s: float
    capability: Capability | None
    sources: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    note: str = ""
    assumed: bool = False

    @property
    def half_rate(self) -> float:
        """FLOP/s of products in the 16-bit type that the model multiplies in: bf16, or fp16 where that is missing."""
        return self.flops_per_s.get("bf16") or self.flops_per_s["fp16"]

    def refusal(
        self, weights: str | None, kv_cache_dtype: str = "auto", dtype: str = "bf16", tower: str | None = None
    ) -> str | None:
        """Return why the engine cannot run these types here, and what to use; None if it can.

        Args:
            weights: quantisation of the weights; None: none.
            kv_cache_dtype: type of keys and values; int8 has no requirement.
            dtype: type of everything else.
            tower: quantisation of the vision tower; None: none.
        """
        if dtype == "bf16" and self.capability is not None and "bf16" not in self.flops_per_s:
            return f"--dtype bf16: {self.name} has no bf16 products: use fp32"
        asked = {f"--quantization {weights}": weights} if weights else {}
        if tower is not None:
            asked[f"--quantize-vision {tower}"] = f"{tower}_tower"
        if kv_cache_dtype == "fp8":
            asked["--kv-cache-dtype fp8"] = "fp8_cache"
        note = " (assumed; give capability=8.9)" if self.assumed else ""
        reasons = (refusal(f"{option} needs", name, self.capability, self.name, note) for option, name in asked.items())
        return next(filter(None, reasons), None)


@cache
def all_gpus() -> Mapping[str, Gpu]:
    """Return the known GPUs by name, in the order of the data file."""
    text = files(__package__).joinpath("gpus.yaml").read_text(encoding="utf-8")
    return MappingProxyType({name: _gpu(name, values) for name, values in yaml.safe_load(text).items()})


def gpu_named(text: str) -> Gpu:
    """Return a GPU by its name or alias, or one with the figures of a specification.

    Args:
        text: a name in any case, or ``key=value`` pairs: memory in GB (10^9 bytes), bandwidth and link in GB/s, bf16
            and fp8 in TFLOP/s, int8 in TOP/s, capability as in 8.9. Memory, bandwidth and bf16 are required.

    Raises:
        SettingError: an unknown name, key or value.
    """
    if "=" in text:
        return _custom_gpu(text)
    known, wanted = all_gpus(), _letters(text)
    for gpu in known.values():
        if wanted in map(_letters, (gpu.name, gpu.label, *gpu.aliases)):
            return gpu
    hint = nearest(text.strip().lower(), known)
    raise SettingError(f"--gpu: unknown GPU {shorten(text)}{hint}; known: {', '.join(known)}; or type {_EXAMPLE}")


def reported_gpu(name: str, memory_bytes: object = None) -> Gpu | None:
    """Return the GPU that the driver reports; None if it is not known.

    Args:
        name: the driver's name, such as ``NVIDIA A100-SXM4-40GB``.
        memory_bytes: device memory, which tells variants apart; not a positive integer: unknown.
    """
    words = [word for word in name.replace("-", " ").split() if word.upper() not in ("NVIDIA", "GEFORCE", "TESLA")]
    for count in range(len(words), 0, -1):
        with suppress(SettingError):
            return _variant(gpu_named(" ".join(words[:count])), name, memory_bytes)
    return None


def _variant(gpu: Gpu, name: str, memory: object) -> Gpu | None:
    """Return the variant of a GPU model with the form and memory that the driver reports; None: there is none."""
    model = gpu.name.split("-pcie")[0].removesuffix("-40gb").removesuffix("-80gb")
    variants = [gpu, *(other for other in all_gpus().values() if other.name.startswith(f"{model}-"))]
    form = [variant for variant in variants if ("pcie" in variant.name) == ("pcie" in name.lower())] or variants
    if not isinstance(memory, int) or memory <= 0:
        return form[0]
    return next((variant for variant in form if abs(variant.memory_bytes / memory - 1) < 0.1), None)


def _letters(name: str) -> str:
    """Return a name without case, spaces and punctuation."""
    return "".join(filter(str.isalnum, name.lower()))


def _gpu(name: str, values: Mapping[str, Any]) -> Gpu:
    """Return the GPU of an entry of the data file."""
    capability = values["capability"]
    return Gpu(
        name=name,
        label=values["label"],
        memory_bytes=round(values["memory_gib"] * 2**30),
        bytes_per_s=values["bandwidth_gb_s"] * 1e9,
        flops_per_s=MappingProxyType({kind: values[kind] * 1e12 for kind in _RATES if kind in values}),
        link=values["link"],
        link_bytes_per_s=values["link_gb_s"] * 1e9,
        capability=None if capability is None else (capability[0], capability[1]),
        sources=tuple(values.get("sources", ())),
        aliases=tuple(values.get("aliases", ())),
        note=values.get("note", ""),
        assumed=values.get("assumed", False),
    )


def _custom_gpu(text: str) -> Gpu:
    """Return the GPU of a specification such as ``memory=24,bandwidth=936,bf16=71``."""
    given: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in _CUSTOM:
            raise SettingError(f"--gpu: unknown key {shorten(key)}{nearest(key, _CUSTOM)}; expected {_EXAMPLE}")
        if key in given:
            raise SettingError(f"--gpu: {key} is given twice")
        given[key] = _capability(value) if key == "capability" else _FIGURE.parse(f"--gpu: {key}", value)
    if missing := [key for key in _NEEDED if key not in given]:
        raise SettingError(f"--gpu: {', '.join(missing)} missing; expected {_EXAMPLE}")
    values = {
        "label": f"custom GPU ({given['memory']:g} GB)",
        "memory_gib": given["memory"] * 1e9 / 2**30,
        "bandwidth_gb_s": given["bandwidth"],
        "link": "custom" if "link" in given else "PCIe 4.0 x16, assumed",
        "link_gb_s": given.get("link", _LINK),
        "capability": given.get("capability", FEATURES["fp8" if "fp8" in given else "int8"].first),
        "assumed": "capability" not in given,
    }
    return _gpu("custom", given | values)


def _capability(value: str) -> Capability:
    major, _, minor = value.partition(".")
    if not (major.isdecimal() and minor.isdecimal() and len(value) < 6):
        raise SettingError(f"--gpu: capability takes a version such as 8.9; got {shorten(value)}")
    return int(major), int(minor)
