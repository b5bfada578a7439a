"""The sampling options, declared once for requests and commands, and what a request makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from panscan.core.errors import SettingError
from panscan.core.option import Range, integers, option, shorten
from panscan.core.text import listed

MAX_SCHEMA_BYTES = 2**16
"""Longest ``json_schema``, and all texts of ``choice`` together, in bytes of UTF-8."""
MAX_GRAMMAR_BYTES = 2**14
"""Longest ``regex`` and ``grammar`` in bytes of UTF-8."""
STRUCTURED = ("json_schema", "regex", "choice", "grammar")
"""Fields of :class:`Sampling` that constrain the whole answer, of which a request has at most one."""
REST_OF_CONTEXT = 2**20
"""``max_new_tokens`` of an answer that may fill the context, or the KV cache if it holds less."""
TOKENS = integers(1, REST_OF_CONTEXT)
"""Output tokens; the maximum is eight times Gemma 3's context."""
SEEDS = integers(-(2**63), 2**64 - 1)
"""Those of ``torch.manual_seed``."""

_TOKEN = integers(0, 2**31 - 1)
_LOGPROBS = {"range": integers(0, 20)}
_BIASES = Range(ge=-100, le=100)
_MOST_BIASES = 1024
_PENALTIES = Range(ge=-2, le=2)
_ANSWER = "ask batch bench serve"


@dataclass(frozen=True)
class SamplingTable:
    """The sampling options: fields of :class:`Sampling` and of :class:`panscan.settings.Settings`."""

    max_new_tokens: int = option(
        128,
        "Generation",
        "Maximum output tokens.",
        f"{_ANSWER} load profile quantize",
        range=TOKENS,
        by_verb={
            "serve": {"help": "Maximum output tokens of every answer."},
            "serve batch": {"default": REST_OF_CONTEXT, "shown_default": "context"},
            "profile": {"default": 16},
        },
    )
    temperature: float = option(
        0.0,
        "Generation",
        "Sampling temperature; 0 is greedy.",
        _ANSWER,
        range=Range(ge=0, le=1_000_000, note="0 is greedy"),
    )
    top_k: int | None = option(
        None,
        "Generation",
        "Sample from the k most probable tokens.",
        _ANSWER,
        range=integers(1, 2**31 - 1),
        off=(0, -1),
    )
    top_p: float | None = option(
        None,
        "Generation",
        "Sample from top tokens with this total probability.",
        _ANSWER,
        range=Range(gt=0, le=1),
        off=(1.0,),
    )
    min_p: float | None = option(
        None,
        "Generation",
        "Drop tokens below this share of the most probable.",
        _ANSWER,
        range=Range(ge=0, le=1),
        off=(0.0,),
        rare=True,
    )
    repetition_penalty: float | None = option(
        None,
        "Generation",
        "Penalty on repeated tokens; above 1 repeats less.",
        _ANSWER,
        range=Range(ge=1e-6, le=1_000_000),
        rare=True,
    )
    frequency_penalty: float = option(
        0.0,
        "Generation",
        "Subtracted from a token's score per earlier use.",
        _ANSWER,
        range=_PENALTIES,
        rare=True,
    )
    presence_penalty: float = option(
        0.0,
        "Generation",
        "Subtracted once from scores of earlier tokens.",
        _ANSWER,
        range=_PENALTIES,
        rare=True,
    )
    ignore_eos: bool = option(
        False,
        "Generation",
        "Ignore end tokens: always generate the full length.",
        f"{_ANSWER} load profile",
        by_verb={"profile": {"default": True}},
    )

    @property
    def penalised(self) -> bool:
        """Whether scores depend on the ids so far."""
        return self.repetition_penalty not in (None, 1) or bool(self.frequency_penalty or self.presence_penalty)


SAMPLING_NAMES = tuple(item.name for item in fields(SamplingTable))
FILTERS = {item.name: item.metadata["off"] for item in fields(SamplingTable) if "off" in item.metadata}
"""Options that select tokens to sample from, with the values that other APIs use for no selection, here None.

They have no effect at temperature 0.
"""


@dataclass(frozen=True, slots=True)
class Sampling(SamplingTable):
    """How output tokens are chosen. The default is greedy.

    ``temperature`` 0 is greedy; ``ignore_eos`` gives exactly ``max_new_tokens`` tokens (for speed measurements), unless
    something of ``stop`` or ``stop_token_ids`` comes up. An answer ends before the first text of ``stop`` (which may
    begin and end inside tokens) and at the first id of ``stop_token_ids``. ``logprobs``: natural logarithms of the
    probabilities of each chosen token and of this many most probable ones, before temperature and filters;
    ``prompt_logprobs``: the same of each token of the prompt, from the engine only. With a
    ``seed`` a token depends on it, its place in the answer and its probabilities alone. ``json_schema``: a JSON schema
    as text that the answer must satisfy (``{"type": "object"}``: any JSON object). ``regex``: a regular expression in
    Rust's syntax for all of the answer. ``choice``: texts of which the answer is one. ``grammar``: a context-free
    grammar in Lark's or llama.cpp's format (GBNF). Only the engine supports these four, and one at a time.
    ``logit_bias``: numbers from -100 to 100 that are added to the logits of up to 1,024 token ids. Like
    ``frequency_penalty`` and ``presence_penalty``, which count the answer's tokens, it is for the engine and vLLM only.
    """

    seed: int | None = field(default=None, metadata={"range": SEEDS})
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = field(default=None, metadata=_LOGPROBS)
    json_schema: str | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    prompt_logprobs: int | None = field(default=None, metadata=_LOGPROBS)

    def __post_init__(self) -> None:
        for item in fields(self):
            value, allowed = getattr(self, item.name), item.metadata.get("range")
            if allowed is not None and not (value is None and item.default is None):
                allowed.check(item.name, value)
        if not isinstance(self.ignore_eos, bool):
            raise SettingError(f"ignore_eos must be true or false, got {shorten(self.ignore_eos)}")
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise SettingError(f"stop must be a tuple of texts, none of them empty, got {shorten(self.stop)}")
        if not isinstance(self.stop_token_ids, tuple) or not all(token in _TOKEN for token in self.stop_token_ids):
            raise SettingError(f"stop_token_ids must be a tuple of token ids, got {shorten(self.stop_token_ids)}")
        if self.logit_bias is not None:
            _check_biases(self.logit_bias)
        if self.greedy and self.filters():
            raise SettingError(f"{listed(FILTERS, 'and')} need a temperature above 0 (temperature 0 is greedy)")
        if given := [name for name in STRUCTURED if getattr(self, name) is not None]:
            if len(given) > 1:
                raise SettingError(f"{given[0]} and {given[1]} exclude each other: give one of them")
            _check_structure(given[0], getattr(self, given[0]))
            if self.ignore_eos:
                raise SettingError(
                    f"ignore_eos and {given[0]} exclude each other: the {given[0]} decides where an answer ends"
                )

    def filters(self) -> dict[str, Any]:
        """Return the options of :data:`FILTERS` that are set."""
        return {name: value for name in FILTERS if (value := getattr(self, name)) is not None}

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _check_biases(biases: object) -> None:
    """Raise a SettingError unless these are numbers in range for few enough token ids."""
    if not isinstance(biases, Mapping) or not all(token in _TOKEN for token in biases):
        raise SettingError(f"logit_bias must be a dict of token ids and numbers, got {shorten(biases)}")
    if len(biases) > _MOST_BIASES:
        raise SettingError(f"logit_bias has {len(biases):,} entries: give at most {_MOST_BIASES:,}")
    for token, bias in biases.items():
        _BIASES.check(f"logit_bias of token {token}", bias)


def _check_structure(name: str, value: object) -> None:
    """Refuse what cannot be the value of a field of :data:`STRUCTURED`. The engine checks what it means.

    Raises:
        SettingError: a value of another type, too long, or no JSON schema.
    """
    texts = value if name == "choice" else (value,)
    if not isinstance(texts, tuple) or not texts or not all(isinstance(text, str) for text in texts):
        expected = {"json_schema": "a JSON schema as text", "choice": "a tuple of texts"}.get(name, "a text")
        hint = ": use json.dumps(schema)" if name == "json_schema" else ""
        raise SettingError(f"{name} must be {expected}, got {shorten(value)}{hint}")
    most = MAX_SCHEMA_BYTES if name in ("json_schema", "choice") else MAX_GRAMMAR_BYTES
    try:
        size = sum(len(text.encode()) for text in texts)
        schema = json.loads(texts[0]) if name == "json_schema" and size <= most else {}
    except RecursionError:
        raise SettingError("json_schema is nested too deeply: flatten it, or use $ref") from None
    except UnicodeEncodeError:
        raise SettingError(f"{name} is not Unicode text: it has a lone surrogate") from None
    except ValueError as error:
        raise SettingError(f"{name} is not valid JSON: {error}") from None
    if size > most:
        raise SettingError(f"{name} is longer than {most:,} bytes: shorten it")
    if not isinstance(schema, dict | bool):
        raise SettingError(f"json_schema must be a JSON object, true or false, got {shorten(schema)}")
