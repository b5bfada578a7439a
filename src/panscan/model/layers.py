"""What the engine gives a model's layers and asks of them, and the layers of a loaded model's family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from panscan.model.families import family_module
from panscan.model.sharding import SINGLE_RANK, Ranks

if TYPE_CHECKING:  # the interface of every family's layers
    from panscan.model.gemma3.text_layers import TextLayers as TextLayers
    from panscan.model.gemma3.vision_layers import VisionLayers


class LayerCache(NamedTuple):
    """Keys and values of one layer by slot: contiguous ``[N, kv_heads, D]``.

    ``scales``: float32 ``[2, kv_heads, N]``, contiguous in N: factors of an int8 cache's keys and of its values; None
    for other types.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def scale_stride(self) -> int:
        """Values from one head's scales to the next's."""
        return 0 if self.scales is None else self.scales.stride(1)

    def scales_of_parts(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the scales of keys and of values, each ``[kv_heads, N]`` or None."""
        return (None, None) if self.scales is None else (self.scales[0], self.scales[1])


class AttentionPlan(Protocol):
    """The attention of one pass in the layers of one kind, prepared by the engine."""

    @property
    def slots(self) -> torch.Tensor:
        """int64 ``[T]`` on the device: KV cache slot of each row."""
        ...

    def attend(self, query: torch.Tensor, cache: LayerCache, scaling: float) -> torch.Tensor:
        """Compute attention over the cache, which already holds the keys and values of the pass's own rows.

        Args:
            query: ``[T, heads, D]``, contiguous in D.
            cache: the layer's keys and values. Slots outside the rows' key intervals are not read.
            scaling: factor of the attention scores.

        Returns:
            Contiguous ``[T, heads, D]``.
        """
        ...


@dataclass(frozen=True, slots=True)
class OutputRows:
    """The rows of a pass whose final hidden states are needed: the last layer computes attention and MLP of no others.

    Args:
        rows: int64 ``[n]`` on the device.
        plan: attention of these rows in the last layer; ``plan.slots`` is not used.
    """

    rows: torch.Tensor
    plan: AttentionPlan


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Keys and values of one layer on this rank: its kind (``local``: sliding window), heads, types and device.

    ``dtype``: type of queries and new keys. ``kv_dtype``: type of keys and values in the cache.
    """

    local: bool
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device

    @property
    def scaled(self) -> bool:
        """Whether keys and values in the cache have a scale per token and head."""
        return self.kv_dtype == torch.int8


def text_layers(
    model: Any, ranks: Ranks = SINGLE_RANK, *, vocab_size: int | None = None, kv_dtype: torch.dtype | None = None
) -> TextLayers:
    """Return the decoder of a loaded Transformers model, with the arguments of its family's ``TextLayers``."""
    layers: type[TextLayers] = family_module(model.config.model_type, "text_layers").TextLayers
    return layers(model, ranks, vocab_size=vocab_size, kv_dtype=kv_dtype)


def vision_layers(model: Any, ranks: Ranks = SINGLE_RANK) -> VisionLayers:
    """Return the vision tower of a loaded Transformers model, with one attention kernel on all ranks."""
    layers: type[VisionLayers] = family_module(model.config.model_type, "vision_layers").VisionLayers
    return layers(model, ranks=ranks)


def quantize_vision_tower(model: Any, kind: str) -> None:
    """Quantise the vision tower of a loaded Transformers model in place, as its family's function of this name does."""
    family_module(model.config.model_type, "vision_layers").quantize_vision_tower(model, kind)
