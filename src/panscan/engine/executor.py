"""One pass through the decoder: chunks become logits, eagerly or as a CUDA graph; keys and values fill the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from panscan.engine.attention import Backend
from panscan.engine.kv_memory import KVCache
from panscan.engine.scheduling.sequence import AttentionRows, ChunkRows, Sequence, Step
from panscan.images.transfer import upload
from panscan.model.decoder import Decoder
from panscan.model.paged_attention import Attend

__all__ = ["Executor", "Pass", "Pending", "Replay"]


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass gave.

    Args:
        logits: float32 ``[n, vocabulary]`` of the step's chunks that sample, in their order.
        hidden: final hidden states ``[places, hidden]`` of each sequence at those of its places that were computed.
    """

    logits: torch.Tensor
    hidden: dict[Sequence, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Pending:
    """Tokens of the pass before, which the host does not know yet.

    Args:
        tokens: int64 ``[n]``, on the device.
        rows: of each sequence's token among them.
    """

    tokens: torch.Tensor
    rows: Mapping[Sequence, int]


class Replay(Protocol):
    """Replays recorded passes; implemented by :class:`panscan.engine.graphs.Graphs`."""

    def run(self, rows: AttentionRows, embedded: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Final hidden states ``[1, T, hidden]`` of a pass; None if no recorded one is large enough."""
        ...


class Executor:
    """Runs steps on a decoder, a cache and a backend of attention. It does not make the host wait for the device (a
    backend's plan may).

    Args:
        decoder: the model.
        cache: of its keys and values.
        backend: of attention.
        block_size: tokens of a block of the cache.
        graphs: of passes of few rows, where there are any.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, backend: Backend, block_size: int, graphs: Replay | None = None
    ) -> None:
        self._decoder, self._cache, self._backend, self._block_size = decoder, cache, backend, block_size
        self.graphs = graphs

    @torch.no_grad()
    def run(
        self,
        step: Step,
        features: Callable[[bytes], torch.Tensor],
        places: Mapping[Sequence, Rows[int]] | None = None,
        pending: Pending | None = None,
    ) -> Pass:
        """Compute a step.

        Args:
            step: its chunks; blocks of their positions are in the sequences' tables.
            features: encoded view ``[image tokens, hidden]`` by its key.
            places: positions whose final hidden states are wanted; those outside of a sequence's chunk are left out.
            pending: where the tokens are that sequences of the step have pending.
        """
        hidden = self._hidden(step, self._embed(step, features, pending))[0]
        sampled, watched, at = [], {}, 0
        for chunk in step.chunks:
            shift = at - chunk.start
            at = chunk.end + shift
            if chunk.samples:
                sampled.append(at - 1)
            wanted = (places or {}).get(chunk.sequence, ())
            if rows := [place + shift for place in wanted if chunk.start <= place < chunk.end]:
                watched[chunk.sequence] = _rows(hidden, rows)
        return Pass(self._decoder.logits(_rows(hidden, sampled)), watched)

    @torch.no_grad()
    def try_out(self, rows: int) -> None:
        """A prefill pass of so many rows in the cache's spare block, for what it compiles and allocates."""
        chunk = ChunkRows.spare(rows, self._cache.spare, self._block_size)
        attend = self._attention(AttentionRows((chunk,), self._block_size, self._decoder.window))
        embedded = self._decoder.embed(torch.zeros(rows, dtype=torch.long, device=self._decoder.device))
        positions = torch.arange(rows, device=self._decoder.device)
        hidden = self._decoder.run(embedded, positions, self._cache.k, self._cache.v, attend)
        self._decoder.logits(hidden[0, -1:])

    def _embed(
        self, step: Step, features: Callable[[bytes], torch.Tensor], pending: Pending | None
    ) -> torch.Tensor:  # fmt: skip
        """``[1, T, hidden]``: embeddings of ids, and encoded views in the places of their blocks."""
        hidden = self._decoder.embed(self._ids(step, pending))
        at = 0
        for chunk in step.chunks:
            shift = at - chunk.start
            for span in chunk.sequence.layout.within(chunk.start, chunk.end):
                hidden[0, span.start + shift : span.end + shift] = features(span.key)
            at = chunk.end + shift
        return hidden

    def _ids(self, step: Step, pending: Pending | None) -> torch.Tensor:
        """int64 ``[T]``; those that are pending come from the device."""
        ids: list[int] = []
        rows, sources = [], []
        for chunk in step.chunks:
            ids += chunk.sequence.ids[chunk.start : chunk.end]
            if chunk.sequence.pending and chunk.samples:
                assert pending is not None  # its pass was launched
                rows.append(len(ids) - 1)
                sources.append(pending.rows[chunk.sequence])
                ids[-1] = 0
        placed = upload(np.array(ids, dtype=np.int64), self._decoder.device)
        if pending is not None and rows:
            placed[upload(np.array(rows), placed.device)] = _rows(pending.tokens, sources)
        return placed

    def _hidden(self, step: Step, embedded: torch.Tensor) -> torch.Tensor:
        """Final hidden states ``[1, T, hidden]``, from a graph if one is large enough."""
        rows = AttentionRows.of(step, self._block_size, self._decoder.window)
        at = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in step.chunks])
        positions = upload(at, self._decoder.device)
        if self.graphs is not None and (hidden := self.graphs.run(rows, embedded, positions)) is not None:
            return hidden
        return self._decoder.run(embedded, positions, self._cache.k, self._cache.v, self._attention(rows))

    def _attention(self, rows: AttentionRows) -> Attend:
        """Attention of all layers, planned once for those of a kind on a device."""
        kinds = {(layer.local, layer.device) for layer in self._decoder.layers}
        plans = {kind: self._backend.plan(rows, local=kind[0], device=kind[1]) for kind in kinds}

        def attend(local: bool, query: torch.Tensor, *others: Any) -> torch.Tensor:
            return plans[local, query.device].attend(query, *others)

        return attend


def _rows(tensor: torch.Tensor, rows: Rows[int]) -> torch.Tensor:
    return tensor.index_select(0, upload(np.array(rows, dtype=np.int64), tensor.device))
