"""A flat batch: everything a model runner needs to compute one pass, as integers and arrays that can be pickled."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from panscan.core import Sampling
from panscan.engine.scheduling.sequence import Chunk

__all__ = ["NO_ROWS", "FlatBatch", "ImageRows", "SamplingRow", "ViewToEncode", "flatten"]

NO_ROWS: NDArray[np.int64] = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Rows ``[row, row + tokens)`` take the encoded view in a slot of the vision cache."""

    row: int
    tokens: int
    slot: int


@dataclass(frozen=True, slots=True)
class ViewToEncode:
    """A view that must go through the vision tower before the pass.

    Args:
        slot: vision cache slot for its features.
        pixels: handle under which its pixels were given to the runner.
        rank: the rank that has the pixels and encodes the view; 0 without tensor parallelism.
    """

    slot: int
    pixels: int
    rank: int = 0


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How the next token of one request is chosen.

    Args:
        sampling: the request's sampling parameters.
        seed: seed of the request's random stream; any integer.
        position: index of the token in the answer, starting at 0.
        seen: ids of the prompt and the answer so far; only needed with a repetition penalty.
    """

    sampling: Sampling
    seed: int
    position: int
    seen: Rows[int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class FlatBatch:
    """One pass: T rows (tokens) in C chunks, one chunk per sequence, chunk after chunk.

    A row at position p attends to the keys ``[lo, hi)`` of its sequence. ``hi`` is its entry in ``ends``: the end of
    the image block for an image token, p + 1 for text. ``lo`` is ``max(0, p - window + 1)`` in local layers and 0 in
    global ones. Position p of a sequence is in slot ``table[p // block_size] * block_size + p % block_size`` of a
    layer's KV cache.

    Args:
        ids: int64 ``[T]``: token ids; anything at image tokens and at ``pending_rows``.
        positions: int64 ``[T]``: position of each row in its sequence.
        ends: int32 ``[T]``: end of the key interval of each row.
        offsets: int32 ``[C + 1]``: first row of each chunk, and T.
        tables: int32 ``[C, W]`` for global and for local layers: blocks by position // block_size. -1 marks a block
            that no row of the chunk reads or writes.
        block_size: tokens per KV cache block.
        window: positions that a local layer attends to, the row's own included.
        images: rows that take features of encoded views instead of embeddings.
        encode: views to encode first; their slots may appear in ``images`` of this pass and of later ones.
        pending_rows: int64 ``[P]``: rows whose ids are tokens that the previous pass sampled.
        pending_sources: int64 ``[P]``: their indices among the previous pass's ``sampled``.
        sampled: int64 ``[S]``: rows whose next token is sampled, ascending.
        sampling: how, for each of ``sampled``.
        watched: int64: rows whose final hidden states and logits the result returns.
        watched_samples: int64: indices into ``sampled`` whose logits the result returns.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    ends: NDArray[np.int32]
    offsets: NDArray[np.int32]
    tables: tuple[NDArray[np.int32], NDArray[np.int32]]
    block_size: int
    window: int
    images: tuple[ImageRows, ...] = ()
    encode: tuple[ViewToEncode, ...] = ()
    pending_rows: NDArray[np.int64] = field(default_factory=lambda: NO_ROWS)
    pending_sources: NDArray[np.int64] = field(default_factory=lambda: NO_ROWS)
    sampled: NDArray[np.int64] = field(default_factory=lambda: NO_ROWS)
    sampling: tuple[SamplingRow, ...] = ()
    watched: NDArray[np.int64] = field(default_factory=lambda: NO_ROWS)
    watched_samples: NDArray[np.int64] = field(default_factory=lambda: NO_ROWS)

    @property
    def rows(self) -> int:
        """T, the number of rows."""
        return len(self.ids)

    @property
    def chunk_of_row(self) -> NDArray[np.int64]:
        """int64 ``[T]``: the chunk that each row belongs to."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    @property
    def decode_rows(self) -> int:
        """Number of single-row chunks that the pass begins with."""
        longer = np.flatnonzero(np.diff(self.offsets) > 1)
        return int(longer[0]) if len(longer) else len(self.offsets) - 1

    def slots(self, *, local: bool) -> NDArray[np.int64]:
        """int64 ``[T]``: KV cache slot of each row, in layers of one kind."""
        blocks = self.tables[local][self.chunk_of_row, self.positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + self.positions % self.block_size

    def first_keys(self, *, local: bool) -> NDArray[np.int64]:
        """int64 ``[T]``: first key of each row's interval, in layers of one kind."""
        return np.maximum(self.positions - self.window + 1, 0) if local else np.zeros_like(self.positions)


def flatten(
    chunks: Rows[Chunk], *, block_size: int, window: int, slots: Mapping[bytes, int] | None = None
) -> FlatBatch:
    """Write the chunks of a pass into one flat batch, without anything to encode, sample or watch.

    Ids that the previous pass has yet to give are 0.

    Args:
        chunks: in the order of their rows; blocks for all their positions are in the sequences' tables.
        block_size: tokens per KV cache block.
        window: positions that a local layer attends to.
        slots: vision cache slot by view key, of every image block in the chunks.
    """
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    counts = np.array([chunk.end for chunk in chunks], np.int64) - starts
    offsets = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    positions = np.arange(offsets[-1], dtype=np.int64) + np.repeat(starts - offsets[:-1], counts)
    ids: list[int] = []
    ends = (positions + 1).astype(np.int32)
    images = []
    for chunk, offset in zip(chunks, offsets[:-1].tolist(), strict=True):
        ids += chunk.sequence.ids[chunk.start : chunk.end]
        for span in chunk.sequence.layout.within(chunk.start, chunk.end):
            row = span.start + offset - chunk.start
            ends[row : row + span.end - span.start] = span.end
            images.append(ImageRows(row, span.end - span.start, 0 if slots is None else slots[span.key]))
    return FlatBatch(
        np.maximum(np.array(ids, np.int64), 0), positions, ends, offsets,
        (_table(chunks, 0, block_size, None), _table(chunks, 1, block_size, window)), block_size, window, tuple(images),
    )  # fmt: skip


def _table(chunks: Rows[Chunk], kind: int, block_size: int, window: int | None) -> NDArray[np.int32]:
    table = np.full((len(chunks), max((-(-chunk.end // block_size) for chunk in chunks), default=0)), -1, np.int32)
    for row, chunk in zip(table, chunks, strict=True):
        first = 0 if window is None else max(0, chunk.start - window + 1) // block_size
        last = -(-chunk.end // block_size)
        held = chunk.sequence.tables[kind]
        if len(held):  # the model may have no layer of this kind
            row[first:last] = held[first:last]
    return table
