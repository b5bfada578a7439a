"""Incremental detokenization of one answer: shows only text that no later token can change, and no stop text."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import regex

# By tokenizer: text or byte of the tokens that came up, at most all. Asking the tokenizer takes 10 us, in the thread
# that launches passes.
_TEXTS: WeakKeyDictionary[Any, dict[int, str | bytes]] = WeakKeyDictionary()
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Decodes one answer incrementally.

    The pieces returned by :meth:`push` and :meth:`finish` concatenate to :attr:`text`, which equals
    ``tokenizer.decode(ids, skip_special_tokens=True)`` of all tokens, cut before the first stop text. A stop text may
    begin and end inside tokens, and takes effect at the token that completes it; of several completed by the same
    token, the one that begins first. Special tokens and ids beyond the vocabulary have no text.

    A byte token is held back until an ordinary token follows: Gemma's decoder (``ByteFallback`` of ``tokenizers``)
    replaces a whole run of bytes with replacement characters if one byte is invalid. (``DecodeStream`` of
    ``tokenizers`` shows the bytes at once, and raises when they change.)

    Args:
        tokenizer: Transformers tokenizer of a Gemma model. The decoded text is the concatenation of its tokens' texts,
            except for byte tokens (``<0x00>`` to ``<0xFF>``).
        stop: texts that end the answer; none is empty.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._texts = tokenizer, _TEXTS.setdefault(tokenizer, {})
        self._stop = regex.compile("|".join(map(regex.escape, stop))) if stop else None
        self._shown: list[str] = []
        self._held = ""  # may be the beginning of a stop text
        self._bytes = bytearray()  # the current run of byte tokens
        self.stopped = False

    @property
    def text(self) -> str:
        """Text shown so far."""
        return "".join(self._shown)

    def push(self, token: int) -> str:
        """Add a token and return the text that can now be shown; empty once :attr:`stopped`."""
        if self.stopped:
            return ""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = _text_or_byte(self._tokenizer, token)
        if isinstance(text, bytes):
            self._bytes += text
            # The byte may complete a stop text, even if the run turns out invalid later.
            stops = self._stop is not None and self._stop.search(self._held + self._characters()[0])
            return self._show("") if stops else ""
        if self._stop is not None or self._bytes:
            return self._show(text) if text else ""
        self._shown.append(text)
        return text

    def finish(self) -> str:
        """End the answer and return the rest of its text."""
        if self.stopped:
            return ""
        shown, rest = self._show(""), self._held
        self._held = ""
        self._shown.append(rest)
        return shown + rest

    def _show(self, text: str) -> str:
        """Show the held text, the byte run and ``text``, up to where a stop text may begin."""
        run, decoded = self._characters()
        run = run if decoded == len(self._bytes) else _REPLACEMENT * len(self._bytes)
        self._bytes.clear()
        text = self._held + run + text
        match = None if self._stop is None else self._stop.search(text) or self._stop.search(text, partial=True)
        end = len(text) if match is None else match.start()
        self.stopped = match is not None and not match.partial
        self._held = "" if self.stopped else text[end:]
        self._shown.append(text[:end])
        return text[:end]

    def _characters(self) -> tuple[str, int]:
        """Return the complete characters of the byte run and the number of their bytes; none if a byte is invalid."""
        try:
            return codecs.utf_8_decode(self._bytes)
        except UnicodeDecodeError:
            return "", 0


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return the bytes of one token; empty for special tokens and ids beyond the vocabulary.

    Args:
        tokenizer: see :class:`Detokenizer`.
        token: the token id.
    """
    text = _text_or_byte(tokenizer, token)
    return text if isinstance(text, bytes) else text.encode()


def _text_or_byte(tokenizer: Any, token: int) -> str | bytes:
    name = tokenizer.convert_ids_to_tokens(token)
    if name is None:  # beyond the vocabulary
        return ""
    if (byte := _BYTE.fullmatch(name)) is not None:
        return bytes([int(byte[1], 16)])
    text: str = tokenizer.decode([token], skip_special_tokens=True)
    return text
