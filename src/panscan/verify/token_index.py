"""Token ids of the texts that endpoints report beside log-probabilities."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cached_property
from typing import Any

__all__ = ["TokenIndex"]

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BY_ID = re.compile(rb"token_id:([0-9]{1,9})")  # vLLM with --return-tokens-as-token-ids
_SPACE = "▁"


class TokenIndex:
    """The texts of a tokenizer's tokens, in both directions.

    Endpoints write a token as decoded text, as the tokenizer's piece (``▁total``, ``<0x0A>``) or as ``token_id:123``; a
    byte that is no character, as the replacement character; a special token, by its name.

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
        """Return every token id that an endpoint writes like this, ascending: a character may be a token and a byte."""
        written = text.encode("utf-8", "replace") if isinstance(text, str) else text
        by_id = _BY_ID.fullmatch(written)
        if by_id is not None and int(by_id[1]) < self._vocabulary:
            return [int(by_id[1])]
        return self._ids.get(written, [])

    @cached_property
    def _pieces(self) -> list[str]:
        count = min(self._vocabulary, len(self._tokenizer))
        return [piece or "" for piece in self._tokenizer.convert_ids_to_tokens(range(count))]

    @cached_property
    def _texts(self) -> list[bytes]:
        return [_bytes_of(piece) for piece in self._pieces]

    @cached_property
    def _ids(self) -> dict[bytes, list[int]]:
        found: defaultdict[bytes, list[int]] = defaultdict(list)
        for token, (piece, text) in enumerate(zip(self._pieces, self._texts, strict=True)):
            decoded = text.decode("utf-8", "replace").encode()
            for written in {text, piece.encode(), decoded} - {b""}:
                found[written].append(token)
        return dict(found)


def _bytes_of(piece: str) -> bytes:
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()
