"""Passes of few rows as CUDA graphs: one launch instead of thousands, for a few numbers of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from threading import Lock
from typing import Any

import torch

from panscan.engine.attention import AttentionRows, ChunkRows
from panscan.engine.download import side_stream
from panscan.engine.kv_memory import KVCache
from panscan.engine.triton_attention import DecodeRows, PrefillRows, TritonBackend, TritonPlan
from panscan.model.decoder import Decoder

__all__ = ["Graphs", "decode_sizes", "short_sizes"]

_WARM_UPS = 2  # passes before a capture: what is compiled or allocated once must not happen while it is recorded
_CHUNKS = 16  # of a short pass at most: their single rows cost more there than among decode rows
_one_at_a_time = Lock()


def decode_sizes(most: int) -> list[int]:
    """Numbers of rows that decode passes are recorded for, ascending; the last is ``most``.

    Padding costs little where a pass waits for weights, so they lie at most 8 rows apart up to 64, and 16 after that.
    """
    sizes = [*(1, 2, 4), *range(8, 64, 8), *range(64, most, 16)]
    return [size for size in sizes if size < most] + [most]


def short_sizes(most: int) -> list[int]:
    """Numbers of rows that short passes are recorded for: questions about known images, tails of prompts. Longer ones
    keep the device busy while they are launched one by one."""
    return [size for size in (32, 64, 128, 256) if size <= most]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One pass: what it reads, and what computes the final hidden states ``[1, rows, hidden]`` from it."""

    hidden: torch.Tensor
    positions: torch.Tensor
    plans: dict[bool, TritonPlan]
    replay: Callable[[], torch.Tensor]


class Graphs:
    """The layers' part of passes of few rows, replayed from CUDA graphs.

    A pass is padded with rows of a sequence of its own, whose only block is the cache's spare one.

    Args:
        decoder: the model, all of it on one device.
        cache: of keys and values.
        backend: of attention.
        decode_rows: of the largest pass of single rows.
        short_rows: of the largest other pass.
        longest: tokens of the longest sequence.
        block_size: tokens of a block.
        capture: record graphs. Without, the same passes run launch by launch, on any device.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, backend: TritonBackend, *,
        decode_rows: int, short_rows: int, longest: int, block_size: int, capture: bool = True,
    ) -> None:  # fmt: skip
        self._decoder, self._cache, self._backend, self._block_size = decoder, cache, backend, block_size
        self.capture, self._width = capture, -(-longest // block_size)
        self.sizes = {"decode": decode_sizes(decode_rows), "short": short_sizes(short_rows)}
        self._recorded: dict[tuple[str, int], _Recorded] = {}
        self._tables: dict[tuple[str, bool], torch.Tensor] = {}
        self._pool: Any = None

    @torch.no_grad()
    def prepare(self) -> Iterator[tuple[str, int]]:
        """Record all passes, the largest of a kind first, as the others share its memory; gives each as it is done."""
        for kind, sizes in self.sizes.items():
            for size in reversed(sizes):
                self._recorded[kind, size] = self._record(kind, size)
                yield kind, size

    @torch.no_grad()
    def run(self, rows: AttentionRows, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Final hidden states ``[1, T, hidden]``, valid until the next pass; None if no graph is large enough.

        Args:
            rows: of the pass.
            hidden: embeddings ``[1, T, hidden]``.
            positions: int64 ``[T]``, on the device.
        """
        count = hidden.shape[1]
        kind = "decode" if count == len(rows.chunks) else "short"
        size = min((size for size in self.sizes[kind] if size >= count), default=None)
        if size is None or (kind == "short" and len(rows.chunks) >= _CHUNKS):
            return None
        recorded = self._recorded[kind, size]
        recorded.hidden[:, :count].copy_(hidden)
        recorded.positions[:count].copy_(positions)
        padded = self._padded(rows, kind, size - count)
        for local, plan in recorded.plans.items():
            _copy(self._plan(padded, kind, local), plan)
        return recorded.replay()[:, :count]

    def _padded(self, rows: AttentionRows, kind: str, count: int) -> AttentionRows:
        """With so many rows more: single ones, or all of one chunk."""
        if kind == "decode":
            return replace(rows, chunks=rows.chunks + (self._spare(1),) * count)
        return replace(rows, chunks=rows.chunks + ((self._spare(count),) if count else ()))

    def _spare(self, rows: int) -> ChunkRows:
        return ChunkRows.spare(rows, self._cache.spare, self._block_size)

    def _plan(self, rows: AttentionRows, kind: str, local: bool) -> TritonPlan:
        return self._backend.plan(rows, local=local, device=self._decoder.device, decode=kind == "decode")

    def _record(self, kind: str, size: int) -> _Recorded:
        """A pass of rows that all pad. Its tensors live as long as it does: a graph knows nothing but addresses."""
        device = self._decoder.device
        spare = self._padded(AttentionRows((), self._block_size, self._decoder.window), kind, size)
        kinds = {layer.local for layer in self._decoder.layers}
        plans = {local: self._widened(self._plan(spare, kind, local), kind, local) for local in kinds}
        hidden = self._decoder.embed(torch.zeros(size, dtype=torch.long, device=device))
        positions = torch.zeros(size, dtype=torch.long, device=device)

        def body() -> torch.Tensor:
            def attend(local: bool, *others: Any) -> torch.Tensor:
                return plans[local].attend(*others)

            return self._decoder.run(hidden, positions, self._cache.k, self._cache.v, attend)

        return _Recorded(hidden, positions, plans, self._captured(body) if self.capture else body)

    def _widened(self, plan: TritonPlan, kind: str, local: bool) -> TritonPlan:
        """The same with tables for sequences of any length, and room for the tiles and tables of more chunks. Tables
        are those of the largest pass of a kind: only one of them runs at a time."""
        if (decode := plan.decode) is not None:
            if (kind, local) not in self._tables:
                self._tables[kind, local] = _room(decode.tables, len(decode.tables), self._width)
            tables = self._tables[kind, local][: len(decode.tables)]
            return replace(plan, decode=DecodeRows(tables, decode.lengths, decode.window))
        prefill = plan.prefill
        assert prefill is not None  # the only other kind
        if (kind, local) not in self._tables:
            self._tables[kind, local] = _room(prefill.tables, _CHUNKS, self._width)
        tiles = _room(prefill.tiles, len(prefill.tiles) + _CHUNKS, 4)
        return replace(plan, prefill=replace(prefill, tiles=tiles, tables=self._tables[kind, local]))

    def _captured(self, body: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        device = self._decoder.device
        stream = _capture_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        graph: Any = torch.cuda.CUDAGraph
        graph = graph()
        with _one_at_a_time:  # of all engines: they share the stream
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    body()
            torch.cuda.current_stream(device).wait_stream(stream)
            torch.cuda.synchronize(device)
            # What other threads do meanwhile, with pixels, is no mistake.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                hidden = body()
        self._pool = self._pool or graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return hidden

        return replay


@cache
def _capture_stream(device: torch.device) -> Any:
    """One for all engines of a process: PyTorch keeps 32 MiB for each stream that products ever ran on."""
    return side_stream(device)


def _room(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A larger one of zeros that begins with it."""
    larger = tensor.new_zeros(rows, max(columns, tensor.shape[1]))
    larger[: len(tensor), : tensor.shape[1]] = tensor
    return larger


def _copy(plan: TritonPlan, to: TritonPlan) -> None:
    """What a plan of as many rows says, into the tensors of one that was widened."""
    to.slots.copy_(plan.slots)
    if plan.decode is not None and to.decode is not None:
        to.decode.lengths.copy_(plan.decode.lengths)
        to.decode.tables[:, : plan.decode.tables.shape[1]].copy_(plan.decode.tables)
    if plan.prefill is not None and to.prefill is not None:
        _copy_prefill(plan.prefill, to.prefill)


def _copy_prefill(prefill: PrefillRows, to: PrefillRows) -> None:
    to.ends.copy_(prefill.ends)
    to.tiles.zero_()  # tiles of no rows
    to.tiles[: len(prefill.tiles)].copy_(prefill.tiles)
    to.tables[: len(prefill.tables), : prefill.tables.shape[1]].copy_(prefill.tables)
