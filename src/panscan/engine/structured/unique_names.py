"""The open objects of a JSON text with their names: none may come twice, which a grammar cannot say."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from copy import copy

import numpy as np
from numpy.typing import NDArray

_QUOTE, _BACKSLASH, _COMMA, _OBJECT = b'"\\,{'


class OpenObjects:
    """Where a JSON text is: the open objects with their names. ``open``: the same, outermost first; None: an array."""

    def __init__(self) -> None:
        self.open: list[set[str] | None] = []
        self._string: bytearray | None = None  # the string that is being written; of a value, nothing is kept
        self._escaped = self._is_name = self._name_next = False

    def advance(self, piece: bytes) -> None:
        """Append bytes."""
        for name in self._names(piece):
            if (names := self.open[-1]) is not None:
                names.add(name)

    def fresh(self, pieces: Iterable[bytes]) -> int:
        """Return how many of the next pieces can follow before some repeat a name."""
        trial, count = copy(self), 0
        trial.open = [None if names is None else {*names} for names in self.open]
        trial._string = None if self._string is None else bytearray(self._string)
        for piece in pieces:
            for name in trial._names(piece):
                names = trial.open[-1]
                if names is None or name in names:
                    return count
                names.add(name)
            count += 1
        return count

    def endings(self) -> list[str] | None:
        """Return what would complete the name that is being written to one that its object has; None inside a
        character or an escape sequence."""
        if self._string is None or not self._is_name:
            return []
        begun = _decoded(self._string)
        return None if begun is None else [name[len(begun) :] for name in self.open[-1] or () if name.startswith(begun)]

    def _names(self, piece: bytes) -> Iterator[str]:
        """Append bytes, and yield each name as it is complete."""
        for byte in piece:
            if self._string is not None:
                if self._escaped or byte != _QUOTE:
                    self._escaped = byte == _BACKSLASH and not self._escaped
                    if self._is_name:
                        self._string.append(byte)
                    continue
                if self._is_name and (name := _decoded(self._string)) is not None:
                    yield name
                self._string = None
            elif byte == _QUOTE:
                self._string, self._is_name, self._name_next = bytearray(), self._name_next, False
            elif byte in b"{[":
                self._name_next = byte == _OBJECT
                self.open.append(set() if self._name_next else None)
            elif byte in b"]}" and self.open:
                self.open.pop()
            elif byte == _COMMA:
                self._name_next = bool(self.open) and self.open[-1] is not None


class QuoteTokens:
    """The tokens of a vocabulary that contain quotation marks: only these begin and end names.

    Args:
        tokens: bytes of these tokens by id.
    """

    def __init__(self, tokens: Mapping[int, bytes]) -> None:
        self._pieces = tokens
        self._all = _MaskBits(tokens)
        self._several = _MaskBits(token for token, piece in tokens.items() if piece.count(_QUOTE) > 1)
        self._by_ending: dict[str, list[int]] = {}  # the end of a name that precedes their first mark
        for token, piece in tokens.items():
            if (ending := _decoded(piece.partition(b'"')[0])) is not None:
                self._by_ending.setdefault(ending, []).append(token)

    def repeating(self, objects: OpenObjects, allowed: NDArray[np.uint8]) -> Iterator[int]:
        """Yield the tokens that would repeat a name.

        Args:
            objects: where the text is.
            allowed: bit mask of the tokens that the grammar allows, for at least all of these.
        """
        if not any(objects.open):
            return
        endings = objects.endings()
        for ending in endings or ():
            yield from self._by_ending.get(ending, ())
        for token in (self._all if endings is None else self._several).within(allowed):
            if not objects.fresh([self._pieces[token]]):
                yield token


class _MaskBits:
    """Where tokens are in bit masks over the vocabulary.

    Args:
        tokens: their ids.
    """

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = np.fromiter(tokens, np.int64)
        self._bytes = self._tokens >> 3
        self._bits = (1 << (self._tokens & 7)).astype(np.uint8)

    def within(self, mask: NDArray[np.uint8]) -> list[int]:
        """Return those of the tokens that a mask allows."""
        bits = mask[self._bytes] & self._bits
        return self._tokens[bits != 0].tolist() if bits.any() else []


def _decoded(raw: bytes | bytearray) -> str | None:
    """Return the text of a JSON string without its marks; None if it ends inside a character or an escape sequence."""
    try:
        text: str = json.loads(b'"' + bytes(raw) + b'"')
        text.encode()
    except ValueError:
        return None
    return text
