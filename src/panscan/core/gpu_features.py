"""What GPU generations can do, by compute capability: the only module that knows, as one table.

Everybody else asks :func:`supports` or :func:`refusal`. Rates and memory of GPU models are in ``plan/gpus.yaml``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Capability = tuple[int, int]
"""Major and minor compute capability of an NVIDIA GPU."""


@dataclass(frozen=True, slots=True)
class Feature:
    """What some generations lack.

    Args:
        first: the lowest compute capability that has it.
        instead: what to use without it; a name that is a feature itself counts only where it is supported.
        on_cpu: whether CPUs have it.
        later: whether we use it on later generations too.
    """

    first: Capability
    instead: tuple[str, ...] = ()
    on_cpu: bool = False
    later: bool = True


FEATURES: Mapping[str, Feature] = {
    "bf16": Feature((8, 0), ("fp32",), on_cpu=True),
    "int8": Feature((8, 0), ("bnb-8bit", "bnb-4bit"), on_cpu=True),
    "int4": Feature((8, 0), ("bnb-8bit", "bnb-4bit"), on_cpu=True),
    "fp8": Feature((8, 9), ("int8", "int4")),  # correct on a CPU, but slower than float32 weights
    "int8_tower": Feature((8, 0), ("none",), on_cpu=True),
    "fp8_tower": Feature((8, 9), ("int8", "none")),
    "fp8_cache": Feature((8, 9), ("--kv-cache-dtype int8",), on_cpu=True),
    "triton": Feature((8, 0)),  # our kernels use bfloat16
    "flash_attention_2": Feature((8, 0), ("sdpa",)),
    "flash_attention_3": Feature((9, 0), ("sdpa",)),
    "flash_attention_4": Feature((9, 0), ("sdpa",)),
    "tensor_memory_accelerator": Feature((9, 0)),
    "warpgroup_products": Feature((9, 0), later=False),  # Blackwell has other instructions
    "dependent_launch": Feature((9, 0), later=False),  # Blackwell has it, but no such GPU was tested
}
"""Features by name; quantised weights and attention kernels have the name of their option."""

SHARED_BYTES: Mapping[Capability, int] = {
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (12, 0): 101_376,
}
"""Shared memory that one program may use (CUDA C++ Programming Guide, "Technical Specifications")."""


def supports(feature: str, capability: Capability | None) -> bool:
    """Return whether a GPU has a feature; ``capability`` None: whether CPUs have it."""
    known = FEATURES[feature]
    if capability is None:
        return known.on_cpu
    return capability >= known.first if known.later else capability == known.first


def refusal(
    needs: str, feature: str, capability: Capability | None, gpu: str = "this GPU", note: str = ""
) -> str | None:
    """Return why a GPU lacks a feature, and what to use instead; None if it has it.

    Args:
        needs: start of the sentence, such as ``--kv-cache-dtype fp8 needs``.
        feature: a name in :data:`FEATURES`.
        capability: of the GPU; None: a CPU.
        gpu: the GPU's name.
        note: a remark on its compute capability.
    """
    if supports(feature, capability):
        return None
    first, instead = "{}.{} or later".format(*FEATURES[feature].first), " or ".join(_alternatives(feature, capability))
    if capability is None:
        return f"{needs} an NVIDIA GPU of compute capability {first}" + (f"; on a CPU use {instead}" if instead else "")
    reason = "{} compute capability {}; {} has {}.{}".format(needs, first, gpu, *capability) + note
    return f"{reason}: use {instead}" if instead else reason


def _alternatives(feature: str, capability: Capability | None) -> Sequence[str]:
    """Return what to use without a feature: where its alternatives are missing too, theirs."""
    instead = FEATURES[feature].instead
    usable = [name for name in instead if name not in FEATURES or supports(name, capability)]
    return usable if usable or not instead else _alternatives(instead[0], capability)


def runs_on(architectures: Sequence[str], capability: Capability) -> str | None:
    """Return how a build runs on a GPU: ``binary``, ``PTX`` (compiled by the driver), or None if it does not.

    Args:
        architectures: as ``torch.cuda.get_arch_list()`` reports them: ``sm_90``, ``sm_90a``, ``compute_90``.
        capability: of the GPU.
    """
    result = None
    for architecture in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
        if match is None:
            continue
        kind, version, exact = match[1], (int(match[2]), int(match[3])), match[4] == "a"
        if kind == "sm" and (
            version == capability or (version[0] == capability[0] and version <= capability and not exact)
        ):
            return "binary"
        if kind == "compute" and version <= capability and not exact:
            result = "PTX"
    return result
