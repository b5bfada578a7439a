"""CUDA graphs of short passes: one launch instead of thousands, for a few numbers of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from panscan.engine.attention import KernelInputs, KVCache
from panscan.engine.scheduling.batch import FlatBatch, flatten
from panscan.engine.scheduling.graph_sizes import MOST_CHUNKS, Size
from panscan.engine.triton_attention import TritonBackend, TritonPlan, pack, shares_prefix, unpack
from panscan.images.transfer import upload
from panscan.model.machine import GraphRecorder

if TYPE_CHECKING:
    from panscan.model.layers import TextLayers

_FIXED = 6  # kernel inputs whose shapes depend on the size alone: all but the tables


def _padded(array: NDArray[Any], decode: int, size: Size, filler: int = 0) -> NDArray[Any]:
    """Return values of a pass's rows, of which ``decode`` decode, at the places of these rows in a recorded pass."""
    padded = np.full((sum(size), *array.shape[1:]), filler, array.dtype)
    padded[:decode] = array[:decode]
    padded[size[0] : size[0] + len(array) - decode] = array[decode:]
    return padded


def padded_inputs(
    inputs: KernelInputs[NDArray[Any]], size: Size, tile_rows: int, spare_slot: int
) -> KernelInputs[NDArray[Any]]:
    """Return the kernels' inputs of a pass in arrays whose shapes depend on a size alone, but for the tables.

    Rows that only pad the pass are in no group and no tile, so they attend to nothing.

    Args:
        inputs: inputs of the pass.
        size: rows of the recorded pass.
        tile_rows: maximum rows per tile.
        spare_slot: a slot that no sequence uses, for keys and values of padding.
    """
    decode, (singles, others) = len(inputs.lengths), size
    tiles = np.zeros((-(-others // tile_rows) + MOST_CHUNKS, 4), np.int32)
    tiles[: len(inputs.tiles)] = inputs.tiles
    tiles[: len(inputs.tiles), 0] += singles - decode
    return inputs._replace(
        slots=_padded(inputs.slots, decode, size, spare_slot),
        lengths=_padded(inputs.lengths, decode, (singles, 0)),
        groups=_padded(inputs.groups, decode, (singles, 0)),
        members=_padded(inputs.members, decode, (singles, 0)),
        ends=_padded(inputs.ends, 0, (0, others)),
        tiles=tiles,
    )


class Graphs:
    """The layers' part of short passes, replayed from CUDA graphs.

    Args:
        text: the layers, which run only while :meth:`prepare` records.
        cache: keys and values; rows that only pad a pass write to its spare block, and attend to nothing.
        backend: attention backend.
        sizes: to record.
        longest: maximum tokens per sequence.
        block_size: tokens per KV cache block.
        recorder: records the passes.
    """

    def __init__(
        self,
        text: TextLayers,
        cache: KVCache,
        backend: TritonBackend,
        *,
        sizes: Sequence[Size],
        longest: int,
        block_size: int,
        recorder: GraphRecorder,
    ) -> None:
        self._text, self._cache, self._backend, self._block_size = text, cache, backend, block_size
        self.recorder, self.sizes = recorder, sizes
        self._recorded: dict[tuple[Size, bool], _Recorded] = {}  # by size, and whether decode rows share prefixes
        # All recorded passes share their block tables, wide enough for any sequence: only one of them runs at a time.
        decode_rows, chunk_rows = (max(rows) for rows in zip(*sizes, strict=True))
        width = -(-max(longest, chunk_rows) // block_size)
        self._tables = {
            local: tuple(
                torch.zeros(rows, width, dtype=torch.int32, device=text.device) for rows in (decode_rows, MOST_CHUNKS)
            )
            for local in sorted({layer.local for layer in text.layers})
        }

    @torch.no_grad()
    def prepare(self) -> None:
        """Record all passes: the largest first, as the others share its memory."""
        for size in sorted(self.sizes, key=sum, reverse=True):
            for shared in (False, True) if self._may_share(size) else (False,):
                self._recorded[size, shared] = self._record(size, shared)

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
        fixed, tables, shared = self._arrays(batch, size)
        recorded = self._recorded[size, shared and self._may_share(size)]
        behind = slice(size[0], size[0] + others)
        self._load(recorded.inputs, fixed, tables)
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
        text = self._text
        fixed, tables, _ = self._arrays(flatten((), block_size=self._block_size, window=text.window), size)
        inputs = torch.empty(len(pack(fixed)), dtype=torch.uint8, device=text.device)
        positions, *parts = unpack(inputs, fixed)
        plans = {}
        for local, (decode_tables, prefill_tables) in self._tables.items():
            kernel_inputs: KernelInputs[torch.Tensor] = KernelInputs._make(
                [*parts[:_FIXED], decode_tables[: size[0]], prefill_tables]
            )
            parts = parts[_FIXED:]
            window = text.window if local else 0
            plans[local] = TritonPlan(kernel_inputs, self._block_size, window, shared)
        self._load(inputs, fixed, tables)
        embedded = torch.zeros(sum(size), text.hidden_size, dtype=text.dtype, device=text.device)

        def body() -> torch.Tensor:
            return text.run(embedded, positions, self._cache.layers, plans)

        return _Recorded(embedded, inputs, self.recorder.record(body))

    def _arrays(self, batch: FlatBatch, size: Size) -> tuple[list[NDArray[Any]], list[NDArray[np.int32]], bool]:
        """Return what a pass reads, padded to a size: arrays whose shapes depend on the size alone; block tables; and
        whether decode rows share prefixes."""
        fixed: list[NDArray[Any]] = [_padded(batch.positions, batch.decode_rows, size)]
        tables: list[NDArray[np.int32]] = []
        shared, spare_slot = False, self._cache.spare * self._block_size
        for local in self._tables:
            inputs = self._backend.inputs(batch, local=local)
            inputs = padded_inputs(inputs, size, self._backend.tile_rows, spare_slot)
            fixed += inputs[:_FIXED]
            tables += inputs[_FIXED:]
            shared |= shares_prefix(inputs)
        return fixed, tables, shared

    def _load(self, inputs: torch.Tensor, fixed: list[NDArray[Any]], tables: list[NDArray[np.int32]]) -> None:
        """Fill the inputs of a recorded pass, and the block tables, with one copy from the host."""
        packed = upload(pack([*fixed, *tables]), inputs.device)
        inputs.copy_(packed[: len(inputs)])
        # The inputs are the first part of the buffer, and the tables begin where they end: pack() aligns each array.
        held = (table for pair in self._tables.values() for table in pair)
        for to, table in zip(held, unpack(packed[len(inputs) :], tables), strict=True):
            to[: len(table), : table.shape[1]].copy_(table)


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
