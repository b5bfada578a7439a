"""Plain data of requests and passes: tokens, image spans and block tables, the chunks of a step, and the flat batch.

A flat batch is everything that a model runner needs to compute one pass, as integers and arrays that can be pickled.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import abc
from collections.abc import Mapping, MutableSequence
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from panscan.core import Sampling

NO_TOKEN = -1
"""Stands for the token of a row with scores that are NaN or infinite."""
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
        pixels: handle under which its pixels were given to the runner. With tensor parallelism, rank
            ``pixels % number of ranks`` has them and encodes the view.
    """

    slot: int
    pixels: int


@dataclass(slots=True)  # frozen ones take several times as long to create, and each row of a pass has one
class SamplingRow:
    """Sampling parameters and state for the next token of one request.

    Args:
        sampling: the request's sampling parameters.
        seed: seed of the request's random stream; any integer.
        position: index of the token in the answer, starting at 0.
        token_ids: ids of the prompt and the answer so far; only needed with a penalty.
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
        sampling: parameters and state of each row in ``sampled``; None: they depend on tokens of the previous pass, and
            follow later (:class:`panscan.engine.passes.PassExecutor`).
        observed_rows: int64: rows whose logits the result returns.
        observed_samples: int64: indices into ``sampled`` whose logits the result returns.
        scored_rows: int64: rows whose log-probabilities of the next prompt token the result returns.
        scored_ids: int64: these tokens.
        scored_top: number of most probable tokens to return for each of these rows.
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
    sampling: tuple[SamplingRow, ...] | None = ()
    observed_rows: NDArray[np.int64] = field(default_factory=lambda: NO_ROWS)
    observed_samples: NDArray[np.int64] = field(default_factory=lambda: NO_ROWS)
    scored_rows: NDArray[np.int64] = field(default_factory=lambda: NO_ROWS)
    scored_ids: NDArray[np.int64] = field(default_factory=lambda: NO_ROWS)
    scored_top: int = 0

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


@dataclass(frozen=True, slots=True)
class Span:
    """One image span: positions ``[start, end)`` of a prompt, and the key of its view."""

    start: int
    end: int
    key: bytes


class PromptLayout:
    """The image spans of one prompt, in order.

    Args:
        spans: disjoint, ascending, none empty.
    """

    def __init__(self, spans: abc.Sequence[Span] = ()) -> None:
        self.spans = tuple(spans)
        self._starts = [span.start for span in self.spans]

    @classmethod
    def of(cls, ids: abc.Sequence[int], soft_id: int | None, keys: abc.Sequence[bytes]) -> PromptLayout:
        """Return the layout of a prompt's ids: each run of ``soft_id`` is one image span; ``keys`` are in order.

        Raises:
            ValueError: the numbers of runs and keys differ.
        """
        soft = np.array(ids) == (-1 if soft_id is None else soft_id)  # -1: no id
        edges = np.flatnonzero(np.diff(soft, prepend=False, append=False)).reshape(-1, 2).tolist()
        if len(edges) != len(keys):
            raise ValueError(f"{len(edges)} image spans and {len(keys)} views")
        return cls([Span(start, end, key) for (start, end), key in zip(edges, keys, strict=True)])

    @property
    def longest(self) -> int:
        """Number of tokens of the longest image span; 0 if there is none."""
        return max((span.end - span.start for span in self.spans), default=0)

    def within(self, start: int, end: int) -> tuple[Span, ...]:
        """Return the image spans that begin in ``[start, end)``."""
        return self.spans[bisect_left(self._starts, start) : bisect_left(self._starts, end)]

    def cut_back(self, position: int) -> int:
        """Return the last position up to ``position`` where a chunk may end, that is, outside of image spans."""
        span = self.around(position)
        return position if span is None else span.start

    def cut(self, start: int, end: int) -> int:
        """Return the end of a chunk ``[start, end)`` that does not cut an image span: ``end``, or the start of the
        span around it, or the end of the span if the chunk would be empty otherwise."""
        span = self.around(end)
        if span is None:
            return end
        return span.start if span.start > start else span.end

    def around(self, position: int) -> Span | None:
        """Return the image span that has ``position`` strictly between its first token and its end."""
        index = bisect_right(self._starts, position) - 1
        if index < 0:
            return None
        span = self.spans[index]
        return span if span.start < position < span.end else None


_PENDING = -1  # not a token id


@dataclass(slots=True, eq=False)
class Sequence:
    """One request, as the scheduler knows it.

    Args:
        number: arrival order, starting at 0; earlier requests have priority.
        ids: the prompt and all output tokens so far.
        prompt_tokens: number of prompt tokens in ``ids``.
        layout: image spans of the prompt.
        limit: maximum number of tokens, prompt and output together.
        reuse: whether the request may start with cached blocks of other requests (not while the positions of its prompt
            are observed or scored).
        computed: number of leading tokens whose keys and values are in the cache. While decoding: all but the last.
        cached: number of prompt tokens taken from the prefix cache at first admission; None before.
        tables: blocks of global and of local layers by position // block size; -1 where a local layer's block left the
            window (or was never needed).
        shared: number of leading blocks taken from the prefix cache, or that left the window before they were needed.
        hashes: hashes of leading full blocks; grows as needed.
        registered: number of leading full blocks registered in the prefix cache.
        pending: whether the last of ``ids`` is a placeholder for the token of an unfinished pass.
    """

    number: int
    ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    layout: PromptLayout = field(default_factory=PromptLayout)
    limit: int = 0
    reuse: bool = True
    computed: int = 0
    cached: int | None = None
    tables: tuple[MutableSequence[int], MutableSequence[int]] = field(default_factory=lambda: (array("i"), array("i")))
    hashes: list[bytes] = field(default_factory=list)
    shared: int = 0
    registered: int = 0
    pending: bool = False

    @property
    def outputs(self) -> list[int]:
        """The output tokens so far."""
        return self.ids[self.prompt_tokens : len(self.ids) - self.pending]

    @property
    def decodes(self) -> bool:
        """Whether all but the newest token are computed."""
        return self.computed == len(self.ids) - 1 and len(self.ids) > self.prompt_tokens

    @property
    def full(self) -> bool:
        """Whether the sequence has reached its limit: it finishes as soon as its last token is known."""
        return len(self.ids) >= self.limit

    def expect(self) -> None:
        """Append a placeholder for the token of a pass that was launched."""
        self.ids.append(_PENDING)
        self.pending = True

    def settle(self, token: int) -> None:
        """Replace the placeholder with the sampled token."""
        self.ids[-1] = token
        self.pending = False


S_co = TypeVar("S_co", bound=Sequence, covariant=True)


@dataclass(slots=True)  # see SamplingRow
class Chunk(Generic[S_co]):
    """Positions ``[start, end)`` of a sequence that one pass computes. ``start`` is the sequence's ``computed``."""

    sequence: S_co
    start: int
    end: int

    @property
    def answers(self) -> bool:
        """Whether the chunk has tokens of the answer only: the newest one, and forced ones behind it."""
        return self.start >= self.sequence.prompt_tokens

    @property
    def samples(self) -> bool:
        """Whether the pass computes the distribution of the sequence's next token."""
        return self.end == len(self.sequence.ids)


Step = tuple[Chunk[S_co], ...]
"""What one pass computes: chunks in the order of their rows. Blocks for all their positions are allocated."""


def flatten(
    chunks: abc.Sequence[Chunk[Sequence]], *, block_size: int, window: int, slots: Mapping[bytes, int] | None = None
) -> FlatBatch:
    """Write the chunks of a pass into one flat batch, without anything to encode, sample or observe.

    Ids that the previous pass has yet to give are 0.

    Args:
        chunks: chunks in the order of their rows; their sequences' tables have blocks for all positions.
        block_size: tokens per KV cache block.
        window: positions that a local layer attends to.
        slots: vision cache slot by view key, of every image span in the chunks.
    """
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    counts = np.array([chunk.end for chunk in chunks], np.int64) - starts
    offsets = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    positions = np.arange(offsets[-1], dtype=np.int64) + np.repeat(starts - offsets[:-1], counts)
    ends = (positions + 1).astype(np.int32)
    tables = np.full((2, len(chunks), -(-max((chunk.end for chunk in chunks), default=0) // block_size)), -1, np.int32)
    ids, images = list[int](), list[ImageRows]()
    for index, (chunk, offset) in enumerate(zip(chunks, offsets.tolist(), strict=False)):
        sequence, last = chunk.sequence, -(-chunk.end // block_size)
        ids += sequence.ids[chunk.start : chunk.end]
        for span in sequence.layout.within(chunk.start, chunk.end):
            row = span.start + offset - chunk.start
            ends[row : row + span.end - span.start] = span.end
            images.append(ImageRows(row, span.end - span.start, 0 if slots is None else slots[span.key]))
        for kind, first in enumerate((0, max(0, chunk.start - window + 1) // block_size)):
            if held := sequence.tables[kind]:  # the model may have no layer of this kind
                tables[kind, index, first:last] = held[first:last]
    token_ids = np.maximum(np.array(ids, np.int64), 0)
    return FlatBatch(token_ids, positions, ends, offsets, (tables[0], tables[1]), block_size, window, tuple(images))
