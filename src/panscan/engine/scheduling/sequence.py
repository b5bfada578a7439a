"""The nouns of scheduling: a request's tokens, image blocks and block tables, and the rows of one pass. No tensors."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, MutableSequence
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

__all__ = ["AttentionRows", "Chunk", "ChunkRows", "PromptLayout", "Segment", "Sequence", "Span", "Step"]


@dataclass(frozen=True, slots=True)
class Span:
    """One image block: positions ``[start, end)`` of a prompt, and the key of the view that stands there."""

    start: int
    end: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions ``[start, end)`` of one kind. A text position sees keys up to itself, an image's up to ``end``."""

    start: int
    end: int
    image: bool


class PromptLayout:
    """The image blocks of one prompt, in order.

    Args:
        spans: disjoint, ascending, none empty.
    """

    def __init__(self, spans: Rows[Span] = ()) -> None:
        self.spans = tuple(spans)
        self._starts = [span.start for span in self.spans]

    @classmethod
    def of(cls, ids: Rows[int], soft_id: int | None, keys: Rows[bytes]) -> PromptLayout:
        """The layout of a prompt's ids: each run of ``soft_id`` is one image block, the views' keys in order.

        Raises:
            ValueError: runs and keys differ in number.
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
            raise ValueError(f"{len(spans)} image blocks and {len(keys)} views")
        return cls(spans)

    @property
    def longest(self) -> int:
        """Tokens of the longest image block; 0 without."""
        return max((span.end - span.start for span in self.spans), default=0)

    def within(self, start: int, end: int) -> tuple[Span, ...]:
        """The image blocks that begin in ``[start, end)``."""
        return self.spans[bisect_left(self._starts, start) : bisect_left(self._starts, end)]

    def cut_back(self, position: int) -> int:
        """The last place up to ``position`` where a chunk may end: ``position`` itself unless inside an image block."""
        span = self.around(position)
        return position if span is None else span.start

    def cut(self, start: int, end: int) -> int:
        """Where a chunk from ``start`` that would like to end at ``end`` ends: before an image block that ``end`` is
        inside of, or behind it if the chunk would be empty otherwise."""
        span = self.around(end)
        if span is None:
            return end
        return span.start if span.start > start else span.end

    def segments(self, start: int, end: int) -> Iterator[Segment]:
        """Positions ``[start, end)``, which cut no image block, as runs of text and image blocks."""
        at = start
        for span in self.within(start, end):
            if span.start > at:
                yield Segment(at, span.start, image=False)
            yield Segment(span.start, span.end, image=True)
            at = span.end
        if at < end:
            yield Segment(at, end, image=False)

    def around(self, position: int) -> Span | None:
        """The image block that has ``position`` strictly between its first token and its end."""
        index = bisect_right(self._starts, position) - 1
        if index < 0:
            return None
        span = self.spans[index]
        return span if span.start < position < span.end else None


_PENDING = -1  # no id


@dataclass(slots=True, eq=False)
class Sequence:
    """One request while the engine has it.

    Args:
        number: of its arrival; earlier ones go first.
        ids: the prompt, and every output token so far.
        prompt_tokens: how many of ``ids`` are the prompt.
        layout: where image blocks stand in the prompt.
        limit: tokens that it may grow to, prompt and output together.
        reuse: whether it may begin with blocks of others (not while somebody watches its prompt's positions).
        computed: leading tokens whose keys and values are in the cache. While it decodes: all but the last token.
        cached: of the prompt, taken over from other requests when it was first admitted.
        tables: block numbers of global and of local layers by position // block size; -1 where a local layer's block
            left the window (or was never needed).
        hashes: of full blocks, the first ones; grows as needed.
        registered: leading full blocks that have been offered to the cache, so that others find them.
        pending: the last of ``ids`` stands for the token of a pass that is not over.
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
        """The answer so far."""
        return self.ids[self.prompt_tokens : len(self.ids) - self.pending]

    @property
    def decodes(self) -> bool:
        """Whether all but its newest token are computed."""
        return self.computed == len(self.ids) - 1 and len(self.ids) > self.prompt_tokens

    @property
    def full(self) -> bool:
        """Whether it has grown as long as it may: it is over as soon as its last token is known."""
        return len(self.ids) >= self.limit

    def expect(self) -> None:
        """A pass that gives the next token was launched."""
        self.ids.append(_PENDING)
        self.pending = True

    def settle(self, token: int) -> None:
        """The pending token is known."""
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
        """Whether the pass gives the distribution of the sequence's next token."""
        return self.end == len(self.sequence.ids)


@dataclass(frozen=True, slots=True)
class Step:
    """What one pass computes: chunks in the order of its rows. Blocks for all of their positions are there."""

    chunks: Rows[Chunk]


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """One chunk's rows: positions ``[start, end)``, as segments, and the block tables of global and local layers."""

    start: int
    end: int
    segments: tuple[Segment, ...]
    tables: tuple[Rows[int], Rows[int]]

    @classmethod
    def spare(cls, rows: int, blocks: tuple[int, int], block_size: int) -> ChunkRows:
        """Text of a sequence that stands in one block (of each kind) alone, positions in the places of others: rows
        that pad a pass, or try one out."""
        tables = tuple([block] * -(-rows // block_size) for block in blocks)
        return cls(0, rows, (Segment(0, rows, image=False),), (tables[0], tables[1]))


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """The rows of one pass, chunk after chunk.

    A row at position p sees keys ``[lo, hi)`` of its sequence: ``hi`` is the end of its image block for an image token
    and p + 1 for text; ``lo`` is ``max(0, p - window + 1)`` in local layers and 0 in global ones.

    Args:
        chunks: in the order of their rows.
        block_size: tokens of a block. Position p of a sequence is in slot
            ``table[p // block_size] * block_size + p % block_size`` of a layer's keys and values.
        window: positions that a local layer sees, its own included.
    """

    chunks: tuple[ChunkRows, ...]
    block_size: int
    window: int

    @classmethod
    def of(cls, step: Step, block_size: int, window: int) -> AttentionRows:
        """Those of a step, with its sequences' tables as they are now."""
        chunks = tuple(
            ChunkRows(
                chunk.start,
                chunk.end,
                tuple(chunk.sequence.layout.segments(chunk.start, chunk.end)),
                chunk.sequence.tables,
            )
            for chunk in step.chunks
        )
        return cls(chunks, block_size, window)

    def first_key(self, position: int, *, local: bool) -> int:
        """``lo`` of a row at ``position``."""
        return max(0, position - self.window + 1) if local else 0

    def slots(self, *, local: bool) -> list[int]:
        """Where each row's key and value go."""
        size = self.block_size
        return [
            chunk.tables[local][at // size] * size + at % size
            for chunk in self.chunks
            for at in range(chunk.start, chunk.end)
        ]
