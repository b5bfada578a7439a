"""Scheduling data types: a request's tokens, image spans and block tables, and the chunks of a pass. No tensors."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import abc
from collections.abc import Mapping, MutableSequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from panscan.engine.scheduling.batch import FlatBatch, ImageRows

__all__ = ["Chunk", "PromptLayout", "Sequence", "Span", "Step", "flatten"]


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
        spans: list[Span] = []
        start = None
        for at, token in enumerate([*ids, None]):
            if token == soft_id and soft_id is not None:
                start = at if start is None else start
            elif start is not None:
                spans.append(Span(start, at, keys[len(spans)] if len(spans) < len(keys) else b""))
                start = None
        if len(spans) != len(keys):
            raise ValueError(f"{len(spans)} image spans and {len(keys)} views")
        return cls(spans)

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
    """One request in the engine.

    Args:
        number: arrival order, starting at 0; earlier requests have priority.
        ids: the prompt and all output tokens so far.
        prompt_tokens: number of prompt tokens in ``ids``.
        layout: image spans of the prompt.
        limit: maximum number of tokens, prompt and output together.
        reuse: whether the request may start with cached blocks of other requests (not while the positions of its prompt
            are observed).
        computed: number of leading tokens whose keys and values are in the cache. While decoding: all but the last.
        cached: number of prompt tokens taken from the prefix cache at first admission; None before.
        tables: block numbers of global and of local layers by position // block size; -1 where a local layer's block
            left the window (or was never needed).
        hashes: hashes of leading full blocks; grows as needed.
        registered: number of leading full blocks registered in the prefix cache.
        pending: whether the last of ``ids`` is a placeholder for the token of an unfinished pass.
    """

    number: int
    ids: list[int]
    prompt_tokens: int
    layout: PromptLayout
    limit: int
    reuse: bool = True
    computed: int = 0
    cached: int | None = None
    tables: tuple[MutableSequence[int], MutableSequence[int]] = field(default_factory=lambda: (array("i"), array("i")))
    hashes: list[bytes] = field(default_factory=list)
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


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions ``[start, end)`` of a sequence that one pass computes. ``start`` is the sequence's ``computed``."""

    sequence: Sequence
    start: int
    end: int

    @property
    def samples(self) -> bool:
        """Whether the pass computes the distribution of the sequence's next token."""
        return self.end == len(self.sequence.ids)


@dataclass(frozen=True, slots=True)
class Step:
    """What one pass computes: chunks in the order of their rows. Blocks for all their positions are allocated."""

    chunks: abc.Sequence[Chunk]


def flatten(
    chunks: abc.Sequence[Chunk], *, block_size: int, window: int, slots: Mapping[bytes, int] | None = None
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
        np.maximum(np.array(ids, np.int64), 0),
        positions,
        ends,
        offsets,
        (_block_table(chunks, 0, block_size, None), _block_table(chunks, 1, block_size, window)),
        block_size,
        window,
        tuple(images),
    )


def _block_table(chunks: abc.Sequence[Chunk], kind: int, block_size: int, window: int | None) -> NDArray[np.int32]:
    table = np.full((len(chunks), max((-(-chunk.end // block_size) for chunk in chunks), default=0)), -1, np.int32)
    for row, chunk in zip(table, chunks, strict=True):
        first = 0 if window is None else max(0, chunk.start - window + 1) // block_size
        last = -(-chunk.end // block_size)
        held = chunk.sequence.tables[kind]
        if len(held):  # the model may have no layer of this kind
            row[first:last] = held[first:last]
    return table
