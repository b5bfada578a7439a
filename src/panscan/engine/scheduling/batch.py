"""A flat batch: everything a model runner needs to compute one pass, as integers and arrays that can be pickled."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from panscan.core import Sampling

__all__ = ["NO_ROWS", "FlatBatch", "ImageRows", "SamplingRow", "ViewToEncode"]

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
    """Sampling parameters and state for the next token of one request.

    Args:
        sampling: the request's sampling parameters.
        seed: seed of the request's random stream; any integer.
        position: index of the token in the answer, starting at 0.
        token_ids: ids of the prompt and the answer so far; only needed with a repetition penalty.
        allowed: uint8 bit mask of the ids that may be chosen: id i is bit i % 8 of byte i // 8; ids beyond it are
            forbidden. None: all ids.
    """

    sampling: Sampling
    seed: int
    position: int
    token_ids: abc.Sequence[int] | None = None
    allowed: NDArray[np.uint8] | None = field(default=None, compare=False)  # == of arrays is an array


@dataclass(frozen=True, slots=True, eq=False)
class FlatBatch:
    """One pass: T rows (tokens) in C chunks, one chunk per sequence, chunk after chunk.

    A row at position p attends to the keys ``[lo, hi)`` of its sequence. ``hi`` is its entry in ``ends``: the end of
    the image span for an image token, p + 1 for text. ``lo`` is ``max(0, p - window + 1)`` in local layers and 0 in
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
        sampled: int64 ``[S]``: rows whose next token is sampled, ascending; each is the last row of its chunk.
        sampling: parameters and state of each row in ``sampled``.
        observed_rows: int64: rows whose final hidden states and logits the result returns.
        observed_samples: int64: indices into ``sampled`` whose logits the result returns.
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
    observed_rows: NDArray[np.int64] = field(default_factory=lambda: NO_ROWS)
    observed_samples: NDArray[np.int64] = field(default_factory=lambda: NO_ROWS)

    @classmethod
    def empty(cls, block_size: int, window: int) -> Self:
        """Return a batch without rows."""
        no_blocks = np.empty((0, 0), np.int32)
        return cls(
            NO_ROWS, NO_ROWS, np.empty(0, np.int32), np.zeros(1, np.int32), (no_blocks, no_blocks), block_size, window
        )

    @property
    def rows(self) -> int:
        """T, the number of rows."""
        return len(self.ids)

    @property
    def chunk_of_row(self) -> NDArray[np.int64]:
        """int64 ``[T]``: the chunk that each row belongs to."""
        return np.repeat(np.arange(len(self.offsets) - 1), self.offsets[1:] - self.offsets[:-1])

    @property
    def decode_rows(self) -> int:
        """Number of single-row chunks that the pass begins with."""
        longer = self.offsets[1:] - self.offsets[:-1] > 1
        return int(longer.argmax()) if longer.any() else len(longer)

    def slots(self, *, local: bool) -> NDArray[np.int64]:
        """Return the KV cache slot of each row in layers of one kind, int64 ``[T]``."""
        blocks = self.tables[local][self.chunk_of_row, self.positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + self.positions % self.block_size

    def first_keys(self, *, local: bool) -> NDArray[np.int64]:
        """Return the first key of each row's interval in layers of one kind, int64 ``[T]``."""
        return np.maximum(self.positions - self.window + 1, 0) if local else np.zeros_like(self.positions)

    def sampled_rows(self) -> Self:
        """Return the sampled rows as single-row chunks, which attend as they do here. For attention plans only.

        A chunk does not cut an image span, so its last row attends to no later key, like a decode row.
        """
        rows = self.sampled
        chunks = self.chunk_of_row[rows]
        return type(self)(
            ids=self.ids[rows],
            positions=self.positions[rows],
            ends=self.ends[rows],
            offsets=np.arange(len(rows) + 1, dtype=np.int32),
            tables=(self.tables[0][chunks], self.tables[1][chunks]),
            block_size=self.block_size,
            window=self.window,
        )
