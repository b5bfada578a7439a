"""Logits of our decoder for one text, without the engine."""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from panscan.model.gemma3.text_layers import TextLayers
from panscan.model.layers import LayerCache, OutputRows


@dataclass(frozen=True)
class Causal:
    """Attention of rows of one text that is no longer than the window; the cache holds nothing else."""

    slots: torch.Tensor
    rows: torch.Tensor

    def attend(self, query: torch.Tensor, cache: LayerCache, scaling: float) -> torch.Tensor:
        parts = [part.transpose(0, 1) for part in (query, cache.keys[self.slots], cache.values[self.slots])]
        mask = torch.arange(len(self.slots)) <= self.rows[:, None]
        out = scaled_dot_product_attention(*parts, mask, scale=scaling, enable_gqa=True)
        return out.transpose(0, 1).contiguous()


def text_logits(layers: TextLayers, ids: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Return logits of these rows of a text, or of all, with its keys and values in slots of reverse order."""
    count = len(ids)
    slots = torch.arange(count).flip(0) + 2
    shapes = [(2, count + 4, facts.kv_heads, facts.head_size) for facts in layers.layers]
    caches = [LayerCache(*torch.full(shape, torch.nan, dtype=layers.dtype)) for shape in shapes]
    plans = {facts.local: Causal(slots, torch.arange(count)) for facts in layers.layers}
    output = None if rows is None else OutputRows(rows, Causal(slots, rows))
    hidden = layers.run(layers.embed(ids), torch.arange(count), caches, plans, output)
    for cache in (part for layer in caches for part in layer[:2]):
        assert cache[[0, 1, count + 2, count + 3]].isnan().all() and cache[slots].isfinite().all()
    return layers.logits(hidden)
