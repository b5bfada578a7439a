"""Structured answers as constraints on the next token: JSON schemas, regular expressions, grammars, by llguidance."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache, cached_property, partial
from itertools import count
from typing import Any, TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from panscan.core import Sampling, SettingError, now
from panscan.core.daemons import native_work, run_in_daemon
from panscan.core.errors import brief
from panscan.core.lru import LruCache
from panscan.core.sampling import STRUCTURED
from panscan.core.tools import Tool, ToolUse
from panscan.engine.structured.schemas import UNSATISFIABLE, closed_schema, literal_length
from panscan.engine.structured.tool_calls import json_call_grammar, text_or_call_grammar

_CACHED = 256  # lexers of compiled grammars, of up to 20 MB; a batch job uses one grammar
_OPTIONS: Any = {  # no optional whitespace: a model could write it without end
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "lenient": False,
    "coerce_one_of": False,
}
# Sets of tokens that masks allow as a whole: llguidance's own for JSON, and one for each small number of characters
# that a ``maxLength`` may leave. Masks of the last ten characters take 2.5 ms instead of 5 for Gemma's vocabulary.
_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_CHARACTER}{{1,{most}}}" for most in (*range(1, 11), 30)), f"{_CHARACTER}+"]
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
_MOST_FORCED = 20_000  # bytes of forced text: 20 ms in the engine's thread; ``a{1000000}`` would take seconds
_FORCED_AT_ONCE = 256  # tokens: delivering them takes 12 ms, and their pass has room for other requests
_LIMITS, _GRAMMAR_LIMITS = (
    LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=fuel,
        step_lexer_fuel=100_000,  # 7 ms per token
        step_max_items=50_000,  # 3 ms per token
        max_lexer_states=20_000,  # 20 MB per lexer, which all its answers fill; usual schemas take 0.1 MB
        max_grammar_size=100_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
    for fuel in (1_000_000, 100_000)  # 20 ms for a schema; 300 ms for terminals that double each other
)
_STACK = 512 << 20  # bytes; only what is used takes memory
_STACK_LOCK = threading.Lock()  # the size is one for all threads that start
_LEXERS = min(16, os.cpu_count() or 1)  # of a grammar
_SLOW_SECONDS = 0.02  # of a compilation; usual schemas take 1 to 2 ms
_QUICK = 4096  # characters of a structure whose compilation need not be moved out of the way
_REASON_LENGTH = 300
_SEARCH_SECONDS = 0.3  # for the cause of an error: each of 128 tools may take 80 ms, and other requests wait

_Computed = TypeVar("_Computed")


class Constraint:
    """The tokens that the grammar allows next in one answer. When it is complete, only end tokens are allowed.

    Args:
        matcher: llguidance matcher, at the start of the answer.
        field: field of :class:`panscan.core.Sampling` that the grammar comes from, for messages.
        tokenizer: the matcher's tokenizer.
        lexer: number of the lexer, of those of its grammar.
        drop_lexer: called if the lexer is full, which would fail further answers.

    Raises:
        SettingError: no answer satisfies the grammar, or it is too complex.
    """

    def __init__(
        self, matcher: LLMatcher, field: str, tokenizer: LLTokenizer, lexer: int, drop_lexer: Callable[[int], None]
    ) -> None:
        self._matcher, self._field, self._tokenizer, self._lexer = matcher, field, tokenizer, lexer
        self._drop_lexer = drop_lexer
        self._filling: Future[None] | None = None  # sets the mask
        self._mask: NDArray[np.uint8] | None = None
        self._possible = True  # whether the mask allows a token
        _ = self.allowed  # raises if no token may begin the answer

    def advance(self, token: int) -> None:
        """Append a token to the answer.

        Raises:
            SettingError: the token was not allowed, or the grammar is too complex.
        """
        if not self._matcher.consume_token(token):
            raise self._error(f"the answer cannot continue with token {token}: ")
        self._filling = self._mask = None

    @property
    def allowed(self) -> NDArray[np.uint8]:
        """Bit mask over the vocabulary (see :class:`panscan.engine.scheduling.batch.SamplingRow`).

        Raises:
            SettingError: no token can follow, or the grammar is too complex.
        """
        if self._filling is not None:
            self._filling.result()
        if self._mask is None:
            _compute_masks([self])
        if self._matcher.is_error():
            raise self._error()
        if self._mask is None or not self._possible:
            raise SettingError(f"{self._field}: no token of the model can continue the answer: loosen it")
        return self._mask

    def forced(self) -> list[int]:
        """Return tokens that must follow: the canonical ones of a text that the grammar forces. Often there are none;
        of a long text, they are the first ones.

        Masks allow no other tokens of such a text, so the same ones would be sampled.
        """
        tokens: list[int] = self._matcher.compute_ff_tokens()[:_FORCED_AT_ONCE]
        return tokens

    def _error(self, problem: str = "") -> SettingError:
        if "too many states" in self._matcher.get_error():
            self._drop_lexer(self._lexer)
        return SettingError(f"{self._field}: {problem}{_rejection(self._matcher)}")


def fill_masks(constraints: Sequence[Constraint]) -> None:
    """Begin to compute :attr:`Constraint.allowed` of answers of one model, in parallel and in other threads.

    Until it is known, nothing else may be asked of a constraint.
    """
    stale = [constraint for constraint in constraints if constraint._filling is None]
    if not stale:
        return
    stale.sort(key=lambda constraint: constraint._lexer)  # threads get consecutive ones, and wait for no other's lexer

    def fill() -> None:
        with native_work(wait=False):  # the engine's thread waits for the masks, and the exit for the engine
            _compute_masks(stale)

    with suppress(RuntimeError):  # no thread can be started: masks are computed where they are needed
        filling = run_in_daemon(fill, "panscan-masks")
        for constraint in stale:
            constraint._filling = filling


def _compute_masks(constraints: Sequence[Constraint]) -> None:
    """Set the masks of constraints of one model."""
    matchers = [(constraint._matcher, row) for row, constraint in enumerate(constraints)]
    words = allocate_token_bitmask(len(matchers), constraints[0]._tokenizer.vocab_size)
    fill_next_token_bitmask_par(_executor(), matchers, words)
    masks: NDArray[np.uint8] = words.astype("<u4", copy=False).view(np.uint8)
    for constraint, mask, possible in zip(constraints, masks, masks.max(-1).tolist(), strict=True):
        constraint._mask, constraint._possible = mask, bool(possible)


@cache
def _executor() -> LLExecutor:
    return LLExecutor()


class _Compiled:
    """A grammar, compiled several times: copies of a matcher share its lexer, and only one computes a mask at a time.

    Compiling for each answer would take longer than it gains, since Python's lock is held meanwhile.

    Args:
        structure: name and value of the field.
        tokenizer: of the matchers.

    Attributes:
        most: how many lexers it may have; 1 until the first is compiled.
    """

    def __init__(self, structure: tuple[str, Any], tokenizer: LLTokenizer) -> None:
        self._structure, self._tokenizer = structure, tokenizer
        self._matchers: dict[int, LLMatcher] = {}
        self._refusal: str | None = None
        self.most = 1
        self._turns = count()
        self._lock = threading.Lock()

    def matcher(self) -> tuple[LLMatcher, int]:
        """Return a matcher at the start of an answer, and the number of its lexer.

        Raises:
            SettingError: see :meth:`Grammars.start`; a new one for each answer, because a traceback holds its images.
        """
        with self._lock:  # answers of one grammar wait for its first lexer, and their turns have an order
            if self._refusal is not None:
                raise SettingError(self._refusal)
            lexer = next(self._turns) % self.most
            if lexer not in self._matchers:
                started, is_first = now(), not self._matchers
                try:
                    self._matchers[lexer] = _compile(self._structure, self._tokenizer)
                except SettingError as error:
                    self._refusal = str(error)
                    raise
                if is_first and now() - started < _SLOW_SECONDS:
                    self.most = _LEXERS
            return self._matchers[lexer].deep_copy(), lexer

    def drop(self, lexer: int) -> None:
        """Forget a lexer; the next answer whose turn it is compiles it again."""
        with self._lock:
            self._matchers.pop(lexer, None)


class Grammars:
    """A thread-safe cache of the grammars compiled for one checkpoint.

    The tokenizer is converted on first use: about 2 s and 200 MB for Gemma 3's vocabulary.

    Args:
        tokenizer: Transformers tokenizer with a ``tokenizers`` backend.
        eos_ids: ids of the tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, eos_ids: Collection[int]) -> None:
        self._source, self._eos_ids = tokenizer, sorted(eos_ids)
        self._lock = threading.Lock()
        # Grammars, and how many lexers each was known to have.
        self._compiled = LruCache[tuple[str, Any], tuple[_Compiled, int]](_CACHED, lambda entry: entry[1])

    def start(self, sampling: Sampling, tools: ToolUse | None = None) -> Constraint | None:
        """Return the constraint of a new answer; None if its request has none.

        Args:
            sampling: the request's parameters.
            tools: what the answer may call.

        Raises:
            SettingError: the schema or grammar is invalid, unsupported, unsatisfiable or too complex, or the checkpoint
                has no fast tokenizer or no end token.
        """
        structure = _structure(sampling, tools)
        if structure is None:
            return None
        with self._lock:
            tokenizer = self._vocabulary
            compiled, _ = self._compiled.computed(structure, lambda: (_Compiled(structure, tokenizer), 1))
        matcher, lexer = compiled.matcher()  # outside the lock: others wait for their own grammars only
        self._compiled.put(structure, (compiled, compiled.most))
        return Constraint(matcher, structure[0], tokenizer, lexer, compiled.drop)

    def compiles_slowly(self, sampling: Sampling, tools: ToolUse | None) -> bool:
        """Return whether the constraint of an answer must be compiled, and is long enough to delay other requests."""
        structure = _structure(sampling, tools)
        return structure is not None and self._compiled.get(structure) is None and len(str(structure)) > _QUICK

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        backend = getattr(self._source, "backend_tokenizer", None)
        if backend is None:
            raise SettingError("structured answers: the checkpoint has no fast tokenizer: add its tokenizer.json")
        if not self._eos_ids:
            fix = "set eos_token_id in its configuration"
            raise SettingError(f"structured answers: the checkpoint has no end token: {fix}")
        try:
            return LLTokenizer(backend.to_str(), eos_token=self._eos_ids, slices=_SLICES)
        except ValueError as error:
            raise SettingError(f"structured answers: unsupported tokenizer: {_one_line(str(error))}") from error


def check_structure(sampling: Sampling) -> None:
    """Reject what no checkpoint can satisfy. :class:`Grammars` checks what depends on the tokenizer.

    Raises:
        SettingError: it is invalid, unsupported or too complex.
    """
    if (structure := _structure(sampling, None)) is not None:
        lark, limits = _lark(*structure)
        if (reason := _refusal(lark, limits)) is not None:
            raise SettingError(f"{structure[0]}: {reason}")


def _refusal(lark: str, limits: LLParserLimits) -> str | None:
    """Return why llguidance does not take a grammar; None if it does."""
    failed, reasons = _with_deep_stack(partial(LLMatcher.validate_grammar_with_warnings, lark, limits=limits))
    return _one_line(reasons[0]) if failed else None


def _compile(structure: tuple[str, Any], tokenizer: LLTokenizer) -> LLMatcher:
    """Return the matcher of a structure.

    Raises:
        SettingError: see :meth:`Grammars.start`.
    """
    field, value = structure
    lark, limits = _lark(field, value)
    matcher = _with_deep_stack(lambda: LLMatcher(tokenizer, lark, log_level=0, limits=limits))
    if matcher.is_error():
        if field == "tools":
            _check_tools(value)  # names the tool, if one alone is the cause
        raise SettingError(f"{field}: {_rejection(matcher)}")
    return matcher


def _structure(sampling: Sampling, tools: ToolUse | None) -> tuple[str, Any] | None:
    """Return the name and value of the field that constrains the answer."""
    if tools is not None:
        return "tools", tools
    return next(((name, value) for name in STRUCTURED if (value := getattr(sampling, name)) is not None), None)


def _lark(field: str, value: Any) -> tuple[str, LLParserLimits]:
    """Return the value of a field as llguidance's grammar, with the limits of its compilation.

    Raises:
        SettingError: the value allows no answer, is invalid, overrides panscan's options, or exceeds a limit.
    """
    match field:
        case "json_schema":
            text = f"start: {_expression(closed_schema(value), lenient=False)}"
            return LLMatcher.grammar_from_lark(_head(literal_length(value)) + text), _LIMITS
        case "tools":
            text = _tools_grammar(value)
            schemas = [tool.parameters for tool in value.callable] + ([] if value.schema is None else [value.schema])
            return LLMatcher.grammar_from_lark(_head(sum(map(literal_length, schemas))) + text), _LIMITS
        case "regex":
            text = json.loads(LLMatcher.grammar_from_regex(value))["grammars"][0]["lark_grammar"]
        case "choice":
            text = "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in value)
        case _:
            if re.search("%(json|llguidance)", value):  # schemas would escape panscan's limits, and options change them
                raise SettingError("grammar: schemas and options in grammars are not supported; use json_schema")
            try:
                text = any_to_lark(value)
            except Exception as error:  # of its parser, which has several
                raise SettingError(f"grammar: {_one_line(str(error))}") from error
    return LLMatcher.grammar_from_lark(_NO_FORCING + text), _GRAMMAR_LIMITS


def _head(length: int) -> str:
    """Return the options of a grammar, given a bound on the length of the texts that it can force."""
    return "" if length <= _MOST_FORCED else _NO_FORCING


def _tools_grammar(use: ToolUse) -> str:
    """Return the Lark grammar of an answer that may call tools."""
    if use.schema is None and not use.required:
        return text_or_call_grammar(use, [*map(_tool_rule, use.callable)])
    schema = None if use.schema is None or use.required else _expression(closed_schema(use.schema), lenient=False)
    return json_call_grammar(use, [_tool_rule(tool, use.key) for tool in use.callable], schema)


def _tool_rule(tool: Tool, key: str | None = None) -> str:
    """Return a tool's arguments as an expression of a Lark grammar, less strict if it is not strict.

    Args:
        tool: the tool.
        key: name of the arguments in a call, to return the whole call; None: only the arguments.
    """
    try:
        schema = closed_schema(tool.parameters, "" if key is None else f"/properties/{key}")
    except SettingError as error:
        reason = str(error).removeprefix("json_schema: ")
        raise SettingError(f"tools: {tool.name}: {reason}") from error
    if key is not None:
        properties = {"name": {"const": tool.name}, key: schema}
        schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return _expression(schema, lenient=not tool.strict)


def _check_tools(use: ToolUse) -> None:
    """Raise a SettingError that names the first tool whose schema cannot be compiled, if it is found soon."""
    end = now() + _SEARCH_SECONDS
    for tool in use.callable:
        if now() > end:
            return
        lark = LLMatcher.grammar_from_lark(f"{_NO_FORCING}start: {_tool_rule(tool)}")
        if (reason := _refusal(lark, _LIMITS)) is not None:
            raise SettingError(f"tools: {tool.name}: {reason}")


def _expression(schema: dict[str, Any], *, lenient: bool) -> str:
    """Return a schema in Lark (``lenient``: ignore keywords that are not supported, take ``oneOf`` as ``anyOf``)."""
    options = {**_OPTIONS, "lenient": lenient, "coerce_one_of": lenient}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _with_deep_stack(compute: Callable[[], _Computed]) -> _Computed:
    """Return what a function returns that recurses deeply: llguidance does with each rule or schema inside another."""
    with ThreadPoolExecutor(1) as pool:
        with _STACK_LOCK:
            before = threading.stack_size(_STACK)
            try:
                future = pool.submit(compute)  # starts the thread
            finally:
                threading.stack_size(before)
        return future.result()


def _rejection(matcher: LLMatcher) -> str:
    text = _one_line(matcher.get_error())
    return UNSATISFIABLE if text.startswith("NoExtension") else text or "the grammar does not allow it"


def _one_line(text: str) -> str:
    """Return an error of llguidance without its place in the grammar that panscan wrote, and without the excerpt."""
    text = re.split(r"\n\s*\d+ \| ", text.replace("<non-verbose/>", ""), maxsplit=1)[0]
    text = re.sub(r"^(?:at )?\d+\(\d+\): (?:failed to compile JSON schema: )?", "", text)
    text = re.sub(r"^.*recursion limit exceeded.*", "nested too deeply: flatten it, or use $ref", text)
    return brief(text, _REASON_LENGTH)
