"""Token ids of the texts that endpoints report beside log-probabilities."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cached_property
from typing import Any

__all__ = ["TokenIndex"]

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"


class TokenIndex:
    """The texts of a tokenizer's tokens, in both directions.

    Args:
        tokenizer: a Gemma tokenizer of Transformers.
        vocabulary: number of token ids of the model; those without a token have no text.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary

    def text(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token; of a special token, those of its name; empty for ids without a token."""
        return self._texts[token] if 0 <= token < len(self._texts) else b""

    def ids(self, text: str | bytes) -> list[int]:
        """Return every token id with this text, ascending: a character may be a token and also a byte."""
        return self._ids.get(text.encode("utf-8", "replace") if isinstance(text, str) else text, [])

    @cached_property
    def _texts(self) -> list[bytes]:
        count = min(self._vocabulary, len(self._tokenizer))
        return [_bytes_of(piece or "") for piece in self._tokenizer.convert_ids_to_tokens(range(count))]

    @cached_property
    def _ids(self) -> dict[bytes, list[int]]:
        found: defaultdict[bytes, list[int]] = defaultdict(list)
        for token, text in enumerate(self._texts):
            if text:
                found[text].append(token)
        return dict(found)


def _bytes_of(piece: str) -> bytes:
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()
