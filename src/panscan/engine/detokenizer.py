"""The text of one answer, token by token: only what no later token can change, and nothing of a stop text."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Any

__all__ = ["Detokenizer", "token_bytes"]

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BROKEN = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Decodes one answer as its tokens come.

    The pieces that :meth:`push` and :meth:`finish` give, put together, are :attr:`text`; and that is what
    ``tokenizer.decode(ids, skip_special_tokens=True)`` gives for all tokens, cut before the first of the stop texts.
    A stop text may begin and end inside tokens; it counts at the token that completes it, and of several that the
    same token completes, the one that begins first. Special tokens and ids beyond the vocabulary have no text.

    A byte token is held back until an ordinary token follows: Gemma's decoder (``ByteFallback`` of ``tokenizers``)
    shows a run of bytes as replacement characters, all of it, as soon as one byte does not fit. (``DecodeStream`` of
    ``tokenizers`` shows the bytes at once, and raises when they change.)

    Args:
        tokenizer: a Gemma tokenizer of Transformers: the texts of its tokens, put together, are the decoded text,
            apart from bytes (``<0x00>`` to ``<0xFF>``).
        stop: texts that end the answer; none is empty.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._shown: list[str] = []
        self._held = ""  # may be the beginning of a stop text
        self._bytes = _Bytes()
        self._tail = ""  # what was searched last, of held text and whole characters in bytes
        self.stopped = False

    @property
    def text(self) -> str:
        """All that was shown so far."""
        return "".join(self._shown)

    def push(self, token: int) -> str:
        """What may be shown after one more token. Nothing once a stop text was found (:attr:`stopped`)."""
        if self.stopped:
            return ""
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:  # beyond the vocabulary
            return ""
        if (byte := _BYTE.fullmatch(name)) is not None:
            character = self._bytes.add(int(byte[1], 16))
            return self._show("") if character and self._completes(character) else ""
        text = self._tokenizer.decode([token], skip_special_tokens=True)
        return self._show(text) if text else ""

    def finish(self) -> str:
        """The rest of the text, at the end of the answer."""
        if self.stopped:
            return ""
        shown, rest = self._show(""), self._held
        self._held = ""
        self._shown.append(rest)
        return shown + rest

    def _completes(self, character: str) -> bool:
        """Whether a character of the bytes completes a stop text, whatever may become of them later."""
        if not self._stop:
            return False
        self._tail = ((self._tail or self._held) + character)[-self._longest :]
        return self._tail.endswith(self._stop)

    def _show(self, text: str) -> str:
        """Shows held text, the bytes and ``text``, as far as no stop text begins there."""
        text = self._held + self._bytes.end() + text
        self._tail = ""
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        self.stopped = bool(found)
        end = min(found) if found else len(text) - self._beginning(text)
        self._held = "" if found else text[end:]
        self._shown.append(text[:end])
        return text[:end]

    def _beginning(self, text: str) -> int:
        """How many characters at the end of ``text`` may be the beginning of a stop text."""
        lengths = range(min(self._longest - 1, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stop)), 0)


class _Bytes:
    """A run of byte tokens, read as UTF-8 while it comes."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._count = 0
        self._characters: list[str] = []
        self._decoder: codecs.IncrementalDecoder | None = codecs.getincrementaldecoder("utf-8")()

    def add(self, byte: int) -> str:
        """One more byte. The character that it completes, if the run is right so far."""
        self._count += 1
        if self._decoder is None:
            return ""
        try:
            character = self._decoder.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._decoder = None
            return ""
        self._characters.append(character)
        return character

    def end(self) -> str:
        """The run's text; then it begins anew."""
        if not self._count:
            return ""
        whole = self._decoder is not None and not self._decoder.getstate()[0]
        text = "".join(self._characters) if whole else _BROKEN * self._count
        self._start()
        return text


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return the bytes that one token stands for; empty for special tokens and ids beyond the vocabulary.

    Args:
        tokenizer: as for :class:`Detokenizer`.
        token: the token id.
    """
    name = tokenizer.convert_ids_to_tokens(token)
    if name is None:
        return b""
    if (byte := _BYTE.fullmatch(name)) is not None:
        return bytes([int(byte[1], 16)])
    text: str = tokenizer.decode([token], skip_special_tokens=True)
    return text.encode()
