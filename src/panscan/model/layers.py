"""What the engine gives a model's layers and asks of them, and the layers of a loaded model's family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from panscan.model.families import family_module
from panscan.model.sharding import SINGLE_RANK, Ranks

if TYPE_CHECKING:  # the interface of every family's layers
    from panscan.model.gemma3.text_layers import TextLayers
    from panscan.model.gemma3.vision_layers import VisionLayers


class AttentionPlan(Protocol):
    """The attention of one pass in the layers of one kind, prepared by the engine."""

    @property
    def slots(self) -> torch.Tensor:
        """int64 ``[T]`` on the device: KV cache slot of each row."""
        ...

    def attend(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scaling: float) -> torch.Tensor:
        """Compute attention over the cache, which already holds the keys and values of the pass's own rows.

        Args:
            query: ``[T, heads, D]``, contiguous in D.
            k_cache: contiguous ``[N, kv_heads, D]``: the layer's keys by slot. Slots outside the rows' key intervals
                are not read.
            v_cache: the layer's values, like ``k_cache``.
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
