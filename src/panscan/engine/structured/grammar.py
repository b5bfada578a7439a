"""JSON schemas as constraints on the next token, compiled by llguidance."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from panscan.core import SettingError
from panscan.core.lru import LruCache
from panscan.engine.structured.schemas import closed_schema
from panscan.engine.structured.unique_names import QuoteTokens, UniqueNames

_CACHED = 64  # compiled schemas; a batch job uses one
_OPTIONS: Any = {  # no optional whitespace: a model could write it without end
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "lenient": False,
    "coerce_one_of": False,
}
_LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,  # 20 ms
    step_lexer_fuel=100_000,  # 7 ms per token
    step_max_items=50_000,  # 3 ms per token
    max_lexer_states=20_000,  # 40 MB per request
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
_REASON_LENGTH = 300
_UNSATISFIABLE = "no value satisfies the schema: loosen it"


class Constraint:
    """The tokens that the grammar allows next in one answer.

    ``allowed``: uint8 bit mask over the vocabulary (see :class:`panscan.engine.scheduling.batch.SamplingRow`). When the
    JSON value is complete, only end tokens are allowed.

    Args:
        matcher: llguidance matcher, at the start of the answer.
        tokenizer: the matcher's tokenizer.
        quotes: its tokens with quotation marks.

    Raises:
        SettingError: no value satisfies the schema, or the schema is too complex.
    """

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, quotes: QuoteTokens) -> None:
        self._matcher, self._tokenizer, self._names = matcher, tokenizer, UniqueNames(quotes)
        self.allowed = self._mask()

    def advance(self, token: int) -> None:
        """Append a token to the answer.

        Raises:
            SettingError: no token can follow, the schema is too complex, or the token was not allowed.
        """
        if not self._matcher.consume_token(token):
            raise SettingError(
                f"json_schema: the answer cannot continue with token {token}: {_rejection(self._matcher)}"
            )
        self._names.advance(self._tokenizer.decode_bytes([token]))
        self.allowed = self._mask()

    def _mask(self) -> NDArray[np.uint8]:
        words = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise SettingError(f"json_schema: {_rejection(self._matcher)}")
        mask: NDArray[np.uint8] = np.frombuffer(words, np.uint32).astype("<u4").view(np.uint8)
        for token in [*self._names.repeating(mask)]:
            mask[token // 8] &= ~(1 << token % 8) & 0xFF
        if not mask.any():
            raise SettingError("json_schema: no token of the model can continue the answer: loosen the schema")
        return mask


class Grammars:
    """A thread-safe cache of the JSON schemas compiled for one checkpoint.

    The tokenizer is converted on first use: about 2 s and 200 MB for Gemma 3's vocabulary.

    Args:
        tokenizer: Transformers tokenizer with a ``tokenizers`` backend.
        eos_ids: ids of the tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, eos_ids: Collection[int]) -> None:
        self._source, self._eos_ids = tokenizer, sorted(eos_ids)
        self._lock = threading.Lock()
        self._compiled: LruCache[str, LLMatcher] = LruCache(_CACHED)

    def start(self, schema: str) -> Constraint:
        """Return the constraint of a new answer.

        Args:
            schema: JSON schema, as in :class:`panscan.core.Sampling`.

        Raises:
            SettingError: the schema is invalid, unsupported, unsatisfiable or too complex, or the checkpoint has no
                fast tokenizer or no end token.
        """
        with self._lock:
            if (matcher := self._compiled.get(schema)) is None:
                grammar = _grammar_of(schema)
                tokenizer, _ = self._vocabulary
                matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
                if matcher.is_error():
                    raise SettingError(f"json_schema: {_rejection(matcher)}")
            self._compiled.put(schema, matcher)
            return Constraint(matcher.deep_copy(), *self._vocabulary)

    @cached_property
    def _vocabulary(self) -> tuple[LLTokenizer, QuoteTokens]:
        backend = getattr(self._source, "backend_tokenizer", None)
        if backend is None:
            raise SettingError("json_schema: the checkpoint has no fast tokenizer: add its tokenizer.json")
        if not self._eos_ids:
            raise SettingError("json_schema: the checkpoint has no end token: set eos_token_id in its configuration")
        try:
            tokenizer = LLTokenizer(backend.to_str(), eos_token=self._eos_ids)
        except ValueError as error:
            raise SettingError(f"json_schema: unsupported tokenizer: {_one_line(str(error))}") from error
        marks = [token for text, token in backend.get_vocab().items() if '"' in text or text == "<0x22>"]
        return tokenizer, QuoteTokens({token: tokenizer.decode_bytes([token]) for token in marks})


def check_schema(schema: str) -> None:
    """Reject a schema that no checkpoint can satisfy. :class:`Grammars` checks what depends on the tokenizer.

    Raises:
        SettingError: the schema is invalid, unsupported or too complex.
    """
    failed, reasons = LLMatcher.validate_grammar_with_warnings(_grammar_of(schema), limits=_LIMITS)
    if failed:
        raise SettingError(f"json_schema: {_one_line(reasons[0])}")


def _grammar_of(schema: str) -> str:
    """Return a schema as llguidance's grammar.

    Raises:
        SettingError: the schema allows no value, overrides panscan's options, or exceeds a limit.
    """
    closed = closed_schema(schema)
    if closed is False:
        raise SettingError(f"json_schema: {_UNSATISFIABLE}")
    closed = {} if closed is True else closed  # llguidance takes objects only
    if "x-guidance" in closed:
        raise SettingError("json_schema: x-guidance is not supported; remove it")
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(closed), overrides=_OPTIONS)
    except ValueError as error:
        raise SettingError(f"json_schema: {_one_line(str(error))}") from error


def _rejection(matcher: LLMatcher) -> str:
    text = _one_line(matcher.get_error())
    return _UNSATISFIABLE if text.startswith("NoExtension") else text or "the schema does not allow it"


def _one_line(text: str) -> str:
    return " ".join(text.replace("<non-verbose/>", "").split())[:_REASON_LENGTH]
