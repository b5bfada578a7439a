"""Passes of few rows as CUDA graphs: one launch instead of thousands, for a few numbers of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from threading import Lock
from typing import Any

import torch

from panscan.engine.kv_memory import KVCache
from panscan.engine.readback import side_stream
from panscan.engine.scheduling.sequence import AttentionRows, ChunkRows
from panscan.engine.triton_attention import DecodeRows, PrefillRows, TritonBackend, TritonPlan, leading_singles
from panscan.model.decoder import Decoder

__all__ = ["Graphs", "decode_sizes", "graph_sizes"]

_WARM_UPS = 2  # passes before a capture: what is compiled or allocated once must not happen while it is recorded
_CHUNKS = 16  # of a pass, beside its decoding rows, at most
_one_at_a_time = Lock()
Size = tuple[int, int]
"""Rows of a recorded pass: single ones, each the last of its sequence, and behind them those of longer chunks."""


def decode_sizes(most: int) -> list[int]:
    """Numbers of rows that decode passes are recorded for, ascending; the last is ``most``.

    Padding costs little where a pass waits for weights, so they lie at most 8 rows apart up to 64, and 16 after that.
    """
    sizes = [*(1, 2, 4), *range(8, 64, 8), *range(64, most, 16)]
    return [size for size in sizes if size < most] + [most]


def graph_sizes(decode_rows: int, chunk_rows: int) -> list[Size]:
    """What passes are recorded for: decoding alone, short chunks alone (questions about known images, tails of
    prompts), and both together. Longer ones keep the device busy while they are launched one by one.

    Args:
        decode_rows: of the largest pass of single rows.
        chunk_rows: of the largest other pass.
    """
    short = [rows for rows in (32, 64, 128, 256, 512) if rows <= chunk_rows]
    beside = sorted({min(rows, decode_rows) for rows in (16, 64, decode_rows)})
    alone = [(rows, 0) for rows in decode_sizes(decode_rows)] + [(0, rows) for rows in short]
    return alone + [(single, rows) for single in beside for rows in short[1:]]


class Graphs:
    """The layers' part of passes of few rows, replayed from CUDA graphs.

    A pass is padded with rows of a sequence of its own, whose only block is the cache's spare one.

    Args:
        decoder: the model, all of it on one device.
        cache: of keys and values.
        backend: of attention.
        decode_rows: of the largest pass of single rows.
        chunk_rows: of the largest other pass.
        longest: tokens of the longest sequence.
        block_size: tokens of a block.
        capture: record graphs. Without, the same passes run launch by launch, on any device.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, backend: TritonBackend, *,
        decode_rows: int, chunk_rows: int, longest: int, block_size: int, capture: bool = True,
    ) -> None:  # fmt: skip
        self._decoder, self._cache, self._backend, self._block_size = decoder, cache, backend, block_size
        self.capture, self._width, self._decode_rows = capture, -(-longest // block_size), decode_rows
        self.sizes = graph_sizes(decode_rows, chunk_rows)
        self._recorded: dict[Size, _Recorded] = {}
        self._tables: dict[tuple[str, bool], torch.Tensor] = {}
        self._pool: Any = None

    @torch.no_grad()
    def prepare(self) -> Iterator[Size]:
        """Record all passes, the largest first, as the others share its memory; gives each as it is done."""
        for size in sorted(self.sizes, key=sum, reverse=True):
            self._recorded[size] = self._record(size)
            yield size

    @torch.no_grad()
    def run(self, rows: AttentionRows, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Final hidden states ``[1, T, hidden]``, valid until the next pass; None if no graph is large enough.

        Args:
            rows: of the pass.
            hidden: embeddings ``[1, T, hidden]``.
            positions: int64 ``[T]``, on the device.
        """
        singles = leading_singles(rows.chunks)
        others, chunks = hidden.shape[1] - singles, len(rows.chunks) - singles
        size = self._fitting(singles, others)
        if size is None or chunks >= _CHUNKS:
            return None
        recorded, first = self._recorded[size], size[0]
        for place, given in ((recorded.hidden, hidden), (recorded.positions[None], positions[None])):
            place[:, :singles].copy_(given[:, :singles])
            place[:, first : first + others].copy_(given[:, singles:])
        padded = self._padded(rows, singles, size)
        for local, plan in recorded.plans.items():
            _copy(self._plan(padded, local), plan)
        found = recorded.replay()
        if singles == first or not others:
            return found[:, : singles + others]
        return torch.cat((found[:, :singles], found[:, first : first + others]), 1)

    def _fitting(self, singles: int, others: int) -> Size | None:
        """The smallest pass with room for so many rows; one without such rows if there are none."""
        fitting = (
            (first, second) for first, second in self.sizes
            if first >= singles and second >= others and bool(first) == bool(singles) and bool(second) == bool(others)
        )  # fmt: skip
        return min(fitting, key=lambda size: (size[1], size[0]), default=None)

    def _padded(self, rows: AttentionRows, singles: int, size: Size) -> AttentionRows:
        """With single rows behind the single ones, and one chunk behind the others."""
        others = sum(chunk.end - chunk.start for chunk in rows.chunks[singles:])
        more = (self._spare(1),) * (size[0] - singles)
        last = (self._spare(size[1] - others),) if size[1] > others else ()
        return replace(rows, chunks=rows.chunks[:singles] + more + rows.chunks[singles:] + last)

    def _spare(self, rows: int) -> ChunkRows:
        return ChunkRows.spare(rows, self._cache.spare, self._block_size)

    def _plan(self, rows: AttentionRows, local: bool) -> TritonPlan:
        return self._backend.plan(rows, local=local, device=self._decoder.device)

    def _record(self, size: Size) -> _Recorded:
        """A pass of rows that all pad. Its tensors live as long as it does: a graph knows nothing but addresses."""
        device, count = self._decoder.device, sum(size)
        spare = self._padded(AttentionRows((), self._block_size, self._decoder.window), 0, size)
        kinds = {layer.local for layer in self._decoder.layers}
        plans = {local: self._widened(self._plan(spare, local), local) for local in kinds}
        hidden = self._decoder.embed(torch.zeros(count, dtype=torch.long, device=device))
        positions = torch.zeros(count, dtype=torch.long, device=device)

        def body() -> torch.Tensor:
            def attend(local: bool, *others: Any) -> torch.Tensor:
                return plans[local].attend(*others)

            return self._decoder.run(hidden, positions, self._cache.k, self._cache.v, attend)

        return _Recorded(hidden, positions, plans, self._captured(body) if self.capture else body)

    def _widened(self, plan: TritonPlan, local: bool) -> TritonPlan:
        """The same with tables for sequences of any length, and room for the tiles and tables of more chunks. All
        passes have the same tables: only one of them runs at a time."""
        if (decode := plan.decode) is not None:
            tables = self._room_for("decode", local, decode.tables, self._decode_rows)
            plan = replace(plan, decode=DecodeRows(tables[: len(decode.tables)], decode.lengths, decode.window))
        if (prefill := plan.prefill) is not None:
            tables = self._room_for("prefill", local, prefill.tables, _CHUNKS)
            tiles = _room(prefill.tiles, len(prefill.tiles) + _CHUNKS, 4)
            plan = replace(plan, prefill=replace(prefill, tiles=tiles, tables=tables))
        return plan

    def _room_for(self, kind: str, local: bool, tables: torch.Tensor, rows: int) -> torch.Tensor:
        held = self._tables.get((kind, local))
        if held is None:
            held = self._tables[kind, local] = tables.new_zeros(rows, max(self._width, tables.shape[1]))
        held[: len(tables), : tables.shape[1]].copy_(tables)
        return held

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


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One pass: what it reads, and what computes the final hidden states ``[1, rows, hidden]`` from it."""

    hidden: torch.Tensor
    positions: torch.Tensor
    plans: dict[bool, TritonPlan]
    replay: Callable[[], torch.Tensor]


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
