"""The nouns of the engine's bookkeeping: a request's tokens and blocks, and what one pass computes. No tensors."""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from panscan.engine.layout import Layout

__all__ = ["Chunk", "Sequence", "Step"]


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
    layout: Layout
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
    preempted: Rows[Sequence] = ()
