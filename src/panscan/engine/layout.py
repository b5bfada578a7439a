"""Where image blocks stand in a prompt, and what follows: chunks that cut none, segments of attention. No tensors."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Layout", "Segment", "Span"]


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


class Layout:
    """The image blocks of one prompt, in order.

    Args:
        spans: disjoint, ascending, none empty.
    """

    def __init__(self, spans: Sequence[Span] = ()) -> None:
        self.spans = tuple(spans)
        self._starts = [span.start for span in self.spans]

    @classmethod
    def of(cls, ids: Sequence[int], soft_id: int | None, keys: Sequence[bytes]) -> Layout:
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
