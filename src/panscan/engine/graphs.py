"""CUDA graphs of short passes: one launch instead of thousands, for a few numbers of rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from panscan.engine.scheduling.batch import FlatBatch
from panscan.engine.scheduling.graph_sizes import MOST_CHUNKS, Size
from panscan.engine.triton_attention import KernelInputs, TritonBackend, TritonPlan, pack, shares_prefix, unpack
from panscan.images.transfer import upload
from panscan.model.machine import side_stream

_WARM_UPS = 1  # passes before a capture: one-time compilation and allocation must not happen while recording
_one_at_a_time = Lock()
_capture_stream = cache(side_stream)  # one for all engines: PyTorch keeps 32 MiB for each stream that ran a product

RunLayers = Callable[[torch.Tensor, torch.Tensor, Mapping[bool, TritonPlan]], torch.Tensor]
"""Computes final hidden states ``[T, hidden]`` from embeddings ``[T, hidden]``, positions (int64 ``[T]``) and the plans
of local (True) and global (False) layers."""


def padded(batch: FlatBatch, singles: int, others: int, spare: int) -> FlatBatch:
    """Return the batch with more rows, which read and write nothing but a spare block.

    Single rows follow the batch's decode rows; one chunk of text follows its last chunk. The result is for attention
    plans only: it has no images and nothing to encode, sample or watch.

    Args:
        batch: the pass.
        singles: decode rows of the result; at least ``batch.decode_rows``.
        others: other rows of the result; at least those of the batch, and more than one if the batch has none.
        spare: a block that no sequence uses.
    """
    decode, size = batch.decode_rows, batch.block_size
    more, tail = np.zeros(singles - decode, np.int64), np.arange(others - (batch.rows - decode))
    counts = _inserted(np.diff(batch.offsets), decode, more + 1, np.full(int(len(tail) > 0), len(tail)))
    tables, end, tail_blocks = [], singles + len(batch.offsets) - 1 - decode, -(-len(tail) // size)
    for table in batch.tables:
        width = table.shape[1]
        wider = np.full((len(counts), max(width, tail_blocks, 1)), -1, np.int32)
        wider[:decode, :width] = table[:decode]
        wider[decode:singles, 0] = spare
        wider[singles:end, :width] = table[decode:]
        wider[end:, :tail_blocks] = spare
        tables.append(wider)
    return FlatBatch(
        ids=_inserted(batch.ids, decode, more, np.zeros_like(tail)),
        positions=_inserted(batch.positions, decode, more, tail),
        ends=_inserted(batch.ends, decode, more + 1, tail + 1),
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        tables=(tables[0], tables[1]),
        block_size=size,
        window=batch.window,
    )


def _inserted(array: NDArray[Any], at: int, middle: NDArray[Any], tail: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([array[:at], middle, array[at:], tail]).astype(array.dtype)


class Graphs:
    """The layers' part of short passes, replayed from CUDA graphs.

    Args:
        run: computes all layers and the final norm; called while recording, never after.
        backend: attention backend.
        kinds: the kinds of layers that the model has, as ``local`` flags.
        hidden_size: size of the hidden states.
        dtype: dtype of the hidden states.
        device: device of the model.
        spare: a block that no sequence uses; padding reads and writes it.
        window: positions that a local layer attends to.
        sizes: to record.
        longest: maximum tokens per sequence.
        block_size: tokens per KV cache block.
        capture: record graphs. Without, ``run`` computes the same padded passes, on any device.
    """

    def __init__(
        self,
        run: RunLayers,
        backend: TritonBackend,
        kinds: Collection[bool],
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        spare: int,
        window: int,
        sizes: Sequence[Size],
        longest: int,
        block_size: int,
        capture: bool = True,
    ) -> None:
        self._run, self._backend = run, backend
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device
        self._spare, self._window, self._block_size = spare, window, block_size
        self.capture, self.sizes = capture, sizes
        self._recorded: dict[tuple[Size, bool], _Recorded] = {}  # by size, and whether decode rows share prefixes
        self._pool: Any = None
        # All recorded passes share their block tables, wide enough for any sequence: only one of them runs at a time.
        decode_rows, chunk_rows = (max(rows) for rows in zip(*sizes, strict=True))
        width = -(-max(longest, chunk_rows) // block_size)
        self._tables = {
            local: tuple(
                torch.zeros(rows, width, dtype=torch.int32, device=device) for rows in (decode_rows, MOST_CHUNKS)
            )
            for local in sorted(set(kinds))
        }

    @torch.no_grad()
    def prepare(self) -> Iterator[Size]:
        """Record all passes and yield the size of each when it is done: the largest first, as the others share its
        memory."""
        for size in sorted(self.sizes, key=sum, reverse=True):
            for shared in (False, True) if self._may_share(size) else (False,):
                self._recorded[size, shared] = self._record(size, shared)
            yield size

    @torch.no_grad()
    def run(self, batch: FlatBatch, embedded: torch.Tensor) -> torch.Tensor | None:
        """Return final hidden states ``[T, hidden]``, valid until the next pass; None if no graph is large enough.

        Args:
            batch: the pass.
            embedded: ``[T, hidden]``: embeddings of its rows.
        """
        singles = batch.decode_rows
        others, chunks = batch.rows - singles, len(batch.offsets) - 1 - singles
        fitting = (
            (first, second)
            for first, second in self.sizes
            if first >= singles and second >= others and bool(first) == bool(singles) and bool(second) == bool(others)
        )
        size = min(fitting, key=lambda size: (size[1], size[0]), default=None)
        if size is None or chunks >= MOST_CHUNKS:
            return None
        arrays = self._arrays(padded(batch, *size, self._spare), size)
        recorded = self._recorded[size, arrays.shared and self._may_share(size)]
        behind = slice(size[0], size[0] + others)
        self._load(recorded.inputs, arrays)
        recorded.embedded[:singles].copy_(embedded[:singles])
        recorded.embedded[behind].copy_(embedded[singles:])
        hidden = recorded.replay()
        if singles == size[0] or not others:
            return hidden[: batch.rows]
        return torch.cat((hidden[:singles], hidden[behind]))

    def _may_share(self, size: Size) -> bool:
        """Return whether passes of this size are recorded twice: for decode rows with and without common prefixes.

        Passes with rows of longer chunks are not: where many questions about the same documents are answered, most
        passes have decode rows only.
        """
        return not size[1] and size[0] >= max(self._backend.units, 2)

    def _record(self, size: Size, shared: bool) -> _Recorded:
        """Record a pass that consists of padding."""
        arrays = self._arrays(padded(FlatBatch.empty(self._block_size, self._window), *size, self._spare), size)
        inputs = torch.empty(len(pack(arrays.fixed)), dtype=torch.uint8, device=self._device)
        positions, *parts = unpack(inputs, arrays.fixed)
        plans = {}
        for local, (decode_tables, prefill_tables) in self._tables.items():
            slots, lengths, groups, members, ends, tiles, *parts = parts
            kernel_inputs = KernelInputs(
                slots, lengths, groups, members, ends, tiles, decode_tables[: size[0]], prefill_tables
            )
            window = self._window if local else 0
            plans[local] = TritonPlan(kernel_inputs, self._backend.tile_rows, self._block_size, window, shared)
        self._load(inputs, arrays)
        embedded = torch.zeros(sum(size), self._hidden_size, dtype=self._dtype, device=self._device)

        def body() -> torch.Tensor:
            return self._run(embedded, positions, plans)

        return _Recorded(embedded, inputs, self._captured(body) if self.capture else body)

    def _arrays(self, batch: FlatBatch, size: Size) -> _Arrays:
        """Return what a padded pass reads."""
        fixed: list[NDArray[Any]] = [batch.positions]
        tables, shared = [], False
        for local in self._tables:
            inputs = self._backend.inputs(batch, local=local)
            tiles = np.zeros((-(-size[1] // self._backend.tile_rows) + MOST_CHUNKS, 4), np.int32)
            tiles[: len(inputs.tiles)] = inputs.tiles
            fixed += [inputs.slots, inputs.lengths, inputs.groups, inputs.members, inputs.ends, tiles]
            tables += [inputs.decode_tables, inputs.prefill_tables]
            shared |= shares_prefix(inputs)
        return _Arrays(fixed, tables, shared)

    def _load(self, inputs: torch.Tensor, arrays: _Arrays) -> None:
        """Fill the inputs of a recorded pass, and the block tables, with one copy from the host."""
        packed = upload(pack([*arrays.fixed, *arrays.tables]), self._device)
        inputs.copy_(packed[: len(inputs)])
        # The inputs are the first part of the buffer, and the tables begin where they end: pack() aligns each array.
        held = (table for pair in self._tables.values() for table in pair)
        for to, table in zip(held, unpack(packed[len(inputs) :], arrays.tables), strict=True):
            to[: len(table), : table.shape[1]].copy_(table)

    def _captured(self, body: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        device = self._device
        stream = _capture_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        graph: Any = torch.cuda.CUDAGraph
        graph = graph()
        with _one_at_a_time:  # engines of one process share the stream
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    body()
            torch.cuda.current_stream(device).wait_stream(stream)
            torch.cuda.synchronize(device)
            # Other threads may allocate and copy pixels meanwhile; "thread_local" does not treat that as an error.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                hidden = body()
        self._pool = self._pool or graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return hidden

        return replay


@dataclass(frozen=True, slots=True)
class _Arrays:
    """What a padded pass reads.

    Args:
        fixed: arrays whose shapes depend on the pass's size alone.
        tables: block tables.
        shared: whether decode rows share prefixes.
    """

    fixed: list[NDArray[Any]]
    tables: list[NDArray[np.int32]]
    shared: bool


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One recorded pass. Its tensors live as long as the graph, which refers to them by address only.

    Args:
        embedded: ``[rows, hidden]``: the embeddings that it reads.
        inputs: uint8: positions and kernel inputs, packed.
        replay: computes the final hidden states ``[rows, hidden]``.
    """

    embedded: torch.Tensor
    inputs: torch.Tensor
    replay: Callable[[], torch.Tensor]
