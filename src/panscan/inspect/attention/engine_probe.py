"""Which positions attend to which in the engine: its scheduler cuts the prompt, its attention backend is measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from panscan.engine.model_runner import choose_backend
from panscan.engine.options import EngineOptions
from panscan.engine.scheduling.batch import FlatBatch, PromptLayout, flatten
from panscan.engine.scheduling.batch import Sequence as EngineSequence
from panscan.engine.scheduling.kv_blocks import KVBlocks
from panscan.engine.scheduling.scheduler import Scheduler
from panscan.model.attention_masks import PROBE_COLUMNS, LayerKind, measured_mask
from panscan.model.layers import LayerFacts


def engine_mask(
    ids: Sequence[int], soft_id: int | None, window: int, options: EngineOptions, device: torch.device
) -> tuple[dict[LayerKind, NDArray[np.bool_]], str]:
    """Return which positions of a prompt attend to which, by layer kind: bool ``[queries, keys]``; and the backend.

    Args:
        ids: token ids of the prompt.
        soft_id: id of image tokens; None for a text-only checkpoint.
        window: positions that a local layer attends to, the query's own included.
        options: of the engine; those of passes, blocks and the attention backend count.
        device: that computes attention.

    Raises:
        UnsupportedError: the attention backend cannot run here.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    facts = LayerFacts(False, 1, PROBE_COLUMNS, dtype, dtype, device)
    choice = choose_backend(options.attention_backend, facts)
    batches = list(_passes(ids, soft_id, window, options))
    kinds: dict[LayerKind, bool] = {"global": False, "local": True}
    plans = {
        kind: [choice.backend.plan(batch, local=local, device=device) for batch in batches]
        for kind, local in kinds.items()
    }

    def means(values: torch.Tensor, kind: LayerKind) -> torch.Tensor:
        parts = []
        for batch, plan in zip(batches, plans[kind], strict=True):
            cached = _cache(batch, values, local=kinds[kind]).to(device, dtype)[:, None]
            query = torch.zeros(batch.rows, 1, PROBE_COLUMNS, dtype=dtype, device=device)
            parts.append(plan.attend(query, torch.zeros_like(cached), cached, 1.0)[:, 0].float().cpu())
        return torch.cat(parts)

    with torch.inference_mode():
        masks = measured_mask(
            lambda values: {kind: means(values, kind) for kind in kinds}, image_positions(ids, soft_id), window
        )
    return masks, choice.name


def image_positions(ids: Sequence[int], soft_id: int | None) -> NDArray[np.bool_]:
    """Return which positions of a prompt are image tokens: bool ``[tokens]``.

    Args:
        ids: token ids of the prompt.
        soft_id: id of image tokens; None for a text-only checkpoint.
    """
    return np.array([token == soft_id for token in ids], np.bool_)


def _passes(ids: Sequence[int], soft_id: int | None, window: int, options: EngineOptions) -> Iterator[FlatBatch]:
    """Yield the passes that compute a prompt's keys and values, as the scheduler of an idle engine cuts them."""
    spans = int(np.count_nonzero(np.diff(image_positions(ids, soft_id), prepend=False, append=False))) // 2
    layout = PromptLayout.of(ids, soft_id, [str(number).encode() for number in range(spans)])
    sequence = EngineSequence(0, list(ids), len(ids), layout, limit=len(ids) + 1)
    count = -(-sequence.limit // options.block_size)
    blocks = KVBlocks(
        block_size=options.block_size, global_blocks=count, local_blocks=count, window=window, prefix_caching=False
    )
    scheduler = Scheduler(blocks, max_num_seqs=1, prefill_chunk_size=options.prefill_chunk_size)
    scheduler.add(sequence)
    slots = {span.key: slot for slot, span in enumerate(layout.spans)}
    while sequence.computed < len(ids):
        step = scheduler.schedule()
        assert step is not None  # the blocks hold the whole prompt
        yield flatten(step.chunks, block_size=options.block_size, window=window, slots=slots)
        scheduler.advance(step)


def _cache(batch: FlatBatch, values: torch.Tensor, *, local: bool) -> torch.Tensor:
    """Return the values of a prompt's positions by KV cache slot, as a pass of one chunk finds them."""
    table = batch.tables[local][0]
    positions = np.arange(min(len(values), len(table) * batch.block_size))
    held = table[positions // batch.block_size]
    positions, held = positions[held >= 0], held[held >= 0].astype(np.int64)
    slots = held * batch.block_size + positions % batch.block_size
    cache = torch.zeros(int(slots.max()) + batch.block_size, values.shape[1])
    cache[torch.from_numpy(slots)] = values[torch.from_numpy(positions)]
    return cache
