"""The model in training: Transformers' Gemma 3, its views encoded once and all questions of a page asked at once."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText

from panscan.model.gemma3.config import gemma3_config
from training.batches import IGNORED, SHAPE, prefix_ids, slots_of
from training.tokenizer import build_tokenizer

_MASKED = -1e9


def new_model() -> Any:
    """A fresh Gemma 3 of the mini's shape, float32. The projector of a fresh one is zero, which hides images: drawn."""
    model = AutoModelForImageTextToText.from_config(
        gemma3_config(SHAPE, build_tokenizer(0)), dtype=torch.float32, attn_implementation="sdpa"
    )
    nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.06)
    return model


class Reader(nn.Module):
    """Loss and hits of a batch.

    The prompt of a page is its prefix (views and the words around them), then slots of questions; a slot sees the
    prefix and itself.
    """

    def __init__(self, model: Any, *, compiled: bool) -> None:
        super().__init__()
        self.model: Any = model
        self.window = model.config.text_config.sliding_window
        if compiled:
            # Layers, not the whole: all of them share two compilations, and the number of pages may change.
            for layer in (*model.model.vision_tower.encoder.layers, *model.model.language_model.layers):
                layer.compile(dynamic=True)

    def _views(self, pixels: Tensor) -> Tensor:
        """``[views, 3, S, S]`` to soft tokens ``[views, tokens, hidden]``."""
        core = self.model.model
        soft: Tensor = core.multi_modal_projector(core.vision_tower(pixel_values=pixels).last_hidden_state)
        return soft

    def _text(self, embedded: Tensor, positions: Tensor, full: Tensor, local: Tensor) -> Tensor:
        masks = {"full_attention": full, "sliding_attention": local}
        hidden: Tensor = self.model.model.language_model(
            inputs_embeds=embedded, attention_mask=masks, position_ids=positions, use_cache=False
        ).last_hidden_state
        return hidden

    def forward(
        self, views: int, pixels: Tensor, ids: Tensor, targets: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Weighted mean loss over targets, and for each token whether it was the likeliest (true where ignored).

        Args:
            views: of each document.
            pixels: ``[documents * views, 3, S, S]`` in -1 to 1.
            ids: ``[documents, slot tokens]``.
            targets: like ``ids``; -100 is not learnt.
            weights: like ``ids``.
        """
        prefix = torch.tensor(prefix_ids(views), device=ids.device)
        soft = (prefix == self.model.config.image_token_id).nonzero().flatten()
        seen = self._views(pixels)
        everything = torch.cat([prefix.expand(len(ids), -1), ids.long()], 1)
        embedded = self.model.get_input_embeddings()(everything)
        if torch.is_autocast_enabled(ids.device.type):
            embedded = embedded.bfloat16()  # and with it the residual stream
        embedded = embedded.index_copy(1, soft, seen.reshape(len(ids), len(soft), -1).to(embedded.dtype))
        positions, *masks = _layout(views, self.window, ids.device)
        full, local = (mask.to(embedded.dtype) for mask in masks)
        hidden = self._text(embedded, positions, full, local)[:, len(prefix) :]
        logits = self.model.lm_head(hidden)
        losses = cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten().long(), ignore_index=IGNORED, reduction="none"
        )
        learnt = (targets != IGNORED).flatten() * weights.flatten()
        hits = (logits.argmax(-1) == targets) | (targets == IGNORED)
        return (losses * learnt).sum() / learnt.sum(), hits


@cache
def _layout(views: int, window: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Positions ``[1, L]`` and additive masks ``[1, 1, L, L]`` (bfloat16) of global and local layers."""
    prefix = torch.tensor(prefix_ids(views))
    start = len(prefix)
    positions, group = [torch.arange(start)], [torch.zeros(start, dtype=torch.long)]
    for number, length in enumerate(slots_of(views), 1):
        positions.append(torch.arange(start, start + length))
        group.append(torch.full((length,), number))
    position, slot = torch.cat(positions), torch.cat(group)
    block = torch.zeros(len(position), dtype=torch.long)
    soft = prefix == _soft_id()
    block[:start] = torch.cumsum(soft & ~torch.roll(soft, 1), 0) * soft
    here, there = position[:, None], position[None]
    mine = (slot[None] == 0) | (slot[:, None] == slot[None])
    same_view = (block[:, None] == block[None]) & (block[:, None] > 0)
    seen = mine & ((there <= here) | same_view)
    near = seen & ((here - there < window) | same_view)
    masks = [
        torch.zeros(mask.shape).masked_fill_(~mask, _MASKED).bfloat16()[None, None].to(device) for mask in (seen, near)
    ]
    return position[None].to(device), masks[0], masks[1]


@cache
def _soft_id() -> int:
    return int(build_tokenizer(0).image_token_id)
