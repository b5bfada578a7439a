"""Names that an answer in JSON has used in its objects: none may come twice, which a grammar cannot say."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from copy import copy

import numpy as np
from numpy.typing import NDArray

_QUOTE, _BACKSLASH, _COMMA, _OBJECT = b'"\\,{'


class QuoteTokens:
    """The tokens of a vocabulary that contain quotation marks: only these begin and end names.

    Args:
        tokens: bytes of these tokens by id.
    """

    def __init__(self, tokens: Mapping[int, bytes]) -> None:
        self.pieces = tokens
        self.all = np.array([*tokens], np.int64)
        self.several = np.array([token for token, piece in tokens.items() if piece.count(_QUOTE) > 1], np.int64)
        self.by_end: dict[str, list[int]] = {}
        """Tokens by the end of a name that precedes their first mark."""
        for token, piece in tokens.items():
            if (end := _decoded(piece.partition(b'"')[0])) is not None:
                self.by_end.setdefault(end, []).append(token)


class UniqueNames:
    """The open objects of one answer with their names.

    Args:
        quotes: the vocabulary's tokens with quotation marks.
    """

    def __init__(self, quotes: QuoteTokens) -> None:
        self._quotes = quotes
        self._open: list[set[str] | None] = []  # names of each open object; None: an array
        self._string: bytearray | None = None  # the string that is being written; of a value, nothing is kept
        self._escaped = self._is_name = self._name_next = False

    def advance(self, piece: bytes) -> None:
        """Append a token's bytes."""
        for name in self._names(piece):
            if (names := self._open[-1]) is not None:
                names.add(name)

    def fresh(self, pieces: Iterable[bytes]) -> int:
        """Return how many of the next tokens' bytes can follow before some repeat a name."""
        trial, count = copy(self), 0
        trial._open = [None if names is None else {*names} for names in self._open]
        trial._string = None if self._string is None else bytearray(self._string)
        for piece in pieces:
            for name in trial._names(piece):
                names = trial._open[-1]
                if names is None or name in names:
                    return count
                names.add(name)
            count += 1
        return count

    def repeating(self, allowed: NDArray[np.uint8]) -> Iterator[int]:
        """Yield the tokens that would repeat a name.

        Args:
            allowed: bit mask of the tokens that the grammar allows.
        """
        if not any(self._open):
            return
        candidates = self._quotes.several
        if self._string is not None and self._is_name:
            if (begun := _decoded(self._string)) is None:  # inside a character or an escape sequence
                candidates = self._quotes.all
            else:
                for name in self._open[-1] or ():
                    if name.startswith(begun):
                        yield from self._quotes.by_end.get(name[len(begun) :], ())
        known = candidates[candidates < 8 * len(allowed)]
        for token in known[allowed[known >> 3] >> (known & 7) & 1 == 1].tolist():
            if not self.fresh([self._quotes.pieces[token]]):
                yield token

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
                self._open.append(set() if self._name_next else None)
            elif byte in b"]}" and self._open:
                self._open.pop()
            elif byte == _COMMA:
                self._name_next = bool(self._open) and self._open[-1] is not None


def _decoded(raw: bytes | bytearray) -> str | None:
    """Return the text of a JSON string without its marks; None if it ends inside a character or an escape sequence."""
    try:
        text: str = json.loads(b'"' + bytes(raw) + b'"')
        text.encode()
    except ValueError:
        return None
    return text
