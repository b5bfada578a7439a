"""The state of one request in the engine, from its acceptance to its result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any

import torch
from msgspec import structs

from panscan.core import (
    EngineError,
    FinishReason,
    InputError,
    PanscanError,
    Request,
    Result,
    Sampling,
    Stamps,
    TokenEvent,
    TokenLogprobs,
    ToolCallDelta,
    View,
    now,
)
from panscan.core.deadline import Deadline
from panscan.core.errors import brief
from panscan.core.sampling import STRUCTURED
from panscan.engine.detokenizer import Detokenizer
from panscan.engine.scheduling.batch import SamplingRow
from panscan.engine.scheduling.batch import Sequence as Tokens
from panscan.engine.structured.grammar import Constraint
from panscan.engine.structured.tool_calls import ToolCallParser
from panscan.model.observation import ForcedTokens, Observation

log = logging.getLogger("panscan.engine")


def described(error: BaseException) -> str:
    """Return any exception on one short line."""
    try:
        text = brief(error, 300)
    except BaseException as fault:  # of somebody else's class
        text = f"its text cannot be read ({type(fault).__name__})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def drop_frames(error: BaseException) -> None:
    """Drop the tracebacks of an exception and of its causes.

    Their frames refer to the exception and hold images: gigabytes that only a garbage collection would free.
    """
    pending: list[BaseException | None] = [error]
    dropped: set[int] = set()
    while pending:
        fault = pending.pop()
        if fault is not None and id(fault) not in dropped:
            dropped.add(id(fault))
            fault.__traceback__ = None
            pending += [fault.__cause__, fault.__context__]


@dataclass(slots=True)
class RequestView:
    """One view of a request and the handle of its pixels.

    The image is not kept. If the pixels are needed again after the runner consumed them, the image is read again.

    Args:
        image: index of the image in the request.
        digest: digest of the image's levels.
        view: box in the image.
        forget: drops pixels in the model runner.
        pixels: handle of its pixels in the model runner; None: not computed, or already encoded.
    """

    image: int
    digest: bytes
    view: View
    forget: Callable[[list[int]], None]
    pixels: int | None = None

    def drop(self) -> None:
        """Drop the pixels, because the view's features are available or no longer needed."""
        if self.pixels is not None:
            self.forget([self.pixels])
            self.pixels = None


@dataclass(slots=True)
class ObservationState:
    """Observations of a request so far (see :class:`panscan.model.observation.ForcedTokens`).

    Args:
        forced_tokens: tokens to force, and prompt positions to observe.
        answer: logits before each token.
        positions: logits by observed position; overwritten if the prompt is preempted.
    """

    forced_tokens: ForcedTokens
    answer: list[torch.Tensor] = field(default_factory=list)
    positions: dict[int, torch.Tensor] = field(default_factory=dict)

    def settle(self, logits: torch.Tensor, sampled: int) -> int:
        """Record the logits before the next token of the answer; return the forced token, or else the sampled one."""
        self.answer.append(logits)
        forced = self.forced_tokens.tokens
        return sampled if forced is None else forced[len(self.answer) - 1]

    def observation(self, tokens: list[int]) -> Observation:
        """Return the observations, given the output tokens."""
        positions = self.forced_tokens.positions
        image = torch.stack([self.positions[position] for position in positions]) if positions else None
        return Observation(tokens, positions, torch.stack(self.answer), image)


@dataclass(slots=True, eq=False, kw_only=True)
class RequestState(Tokens):
    """One request in the engine: what the scheduler knows of it, set by preparation, and everything else.

    Args:
        request: the submitted request.
        stamps: times, set as the request advances.
        on_event: called with each event, from the engine's thread. If it raises, it is not called again. None:
            events are not read.
        on_end: called once with the result after the last event, from the engine's thread.
        seed: seed of the request's random stream.
        observation: observations so far; None: the request is not observed.
        request_views: views by key; set by preparation.
        text: detokenizer of the answer; set by preparation.
        memory: the share of a budget that its pixels take; closed with them.
        constraint: tokens that the schema or grammar allows next; set by preparation; None: all tokens.
        tool_calls: separates calls from text; set by preparation; None: the answer may call nothing.
        slow: whether it is prepared among documents, with a budget of memory of their own.
        ended: whether the result was delivered.
        result: the result so far. Log-probabilities of the prompt are overwritten if it is preempted.
        deadline: abandoned at the end of the request, so that its preparation stops.
        admitted: set once the scheduler has admitted the request, or it has ended.
    """

    request: Request
    stamps: Stamps
    on_event: Callable[[TokenEvent], None] | None
    on_end: Callable[[Result], None]
    seed: int
    observation: ObservationState | None = None
    request_views: Mapping[bytes, RequestView] = field(default_factory=dict)
    text: Detokenizer | None = None
    memory: ExitStack = field(default_factory=ExitStack)
    constraint: Constraint | None = None
    tool_calls: ToolCallParser | None = None
    slow: bool = False
    ended: bool = False
    result: Result = field(init=False)
    deadline: Deadline = field(default_factory=Deadline)
    admitted: Event = field(default_factory=Event)
    _preempted_at: float | None = None
    _sampling: Sampling = field(init=False)

    def __post_init__(self) -> None:
        self.result = Result.unanswered(self.request.id, self.stamps.accepted)
        self.result.stamps = self.stamps
        if self.request.sampling.logprobs is not None:
            self.result.logprobs = []
        off: dict[str, Any] = dict.fromkeys(STRUCTURED)  # ranks need only the mask, not up to 64 KiB
        self._sampling = Sampling() if self.observation is not None else replace(self.request.sampling, **off)

    @property
    def max_new_tokens(self) -> int:
        """Maximum number of output tokens."""
        if self.observation is None:
            return self.request.sampling.max_new_tokens
        return self.observation.forced_tokens.limit

    @property
    def computes_prompt(self) -> bool:
        """Whether results of the prompt's positions are wanted, so that none may come from the prefix cache."""
        if self.observation is None:
            return self.request.sampling.prompt_logprobs is not None
        return bool(self.observation.forced_tokens.positions)

    @property
    def needs_last_token(self) -> bool:
        """Whether choosing the next token requires the last one on the host."""
        return self.constraint is not None or self.request.sampling.penalised

    def sampling_row(self, position: int) -> SamplingRow:
        """Return the sampling parameters and the state for the token at a position of prompt and answer.

        Raises:
            SettingError: the schema or grammar allows no token there.
        """
        token_ids = self.ids[:position] if self._sampling.penalised else None
        allowed = None if self.constraint is None else self.constraint.allowed
        return SamplingRow(self._sampling, self.seed, position - self.prompt_tokens, token_ids, allowed)

    def advance_grammar(self, token: int, *, force: bool) -> Sequence[int]:
        """Advance the constraint by the newest token, and by those that must follow it, which are returned.

        Args:
            token: the token.
            force: whether tokens may be forced. None are if they must be sampled for their log-probabilities.

        Raises:
            SettingError: the schema or grammar allows no such token.
        """
        assert self.constraint is not None  # its caller knows
        self.constraint.advance(token)
        if not force or self.request.sampling.logprobs is not None:
            return ()
        forced = self.constraint.forced()
        for following in forced:
            self.constraint.advance(following)
        return forced

    def force(self, token: int) -> None:
        """Append a token that was not sampled."""
        self.ids.append(token)
        self.result.forced_tokens += 1

    def on_preempted(self) -> None:
        """Record that the request waits again."""
        if self.stamps.scheduled is not None and self._preempted_at is None:
            self._preempted_at = now()

    def on_scheduled(self) -> None:
        """Record that a pass that computes part of the request is about to be launched."""
        at = now()
        if self._preempted_at is not None:
            self.stamps.waits.append((self._preempted_at, at))
            self._preempted_at = None
        if self.stamps.scheduled is None:
            self.stamps.scheduled = at
            self.admitted.set()

    def on_views_encoded(self, start: float, end: float) -> None:
        """Record that views were encoded from ``start`` to ``end``, in seconds of :func:`panscan.core.now`.

        Views of a chunked prompt are encoded in parts. The start is shifted, so that the stage lasts as long as all
        parts together.
        """
        stamps = self.stamps
        if stamps.tokens:  # encoded again after preemption: the stages before the first token are over
            return
        if stamps.vision is not None and stamps.vision_start is not None:
            start -= stamps.vision - stamps.vision_start
        stamps.vision_start, stamps.vision = start, end

    def deliver(
        self, token: int, logprobs: TokenLogprobs | None, at: float, eos_ids: Collection[int]
    ) -> FinishReason | None:
        """Deliver the event of the newest token; return the finish reason if it ends the answer, else None.

        Args:
            token: the token.
            logprobs: its log-probabilities.
            at: time at which it reached the host, in seconds of :func:`panscan.core.now`.
            eos_ids: ids of the checkpoint's end-of-sequence tokens.

        Raises:
            BaseException: whatever ``on_event`` raises.
        """
        assert self.text is not None  # it is prepared
        if not self.stamps.tokens:
            self.drop_pixels()  # includes views whose tokens came from the prefix cache
        self.stamps.tokens.append(at)
        if logprobs is not None and self.result.logprobs is not None:
            self.result.logprobs.append(logprobs)
        piece = self.text.push(token)
        reason = self._reason(token, self.text, eos_ids)
        if reason is not None:
            piece += self.text.finish()
        piece, calls = self._separated(piece, ended=reason is not None)
        cut = reason is not None and self.tool_calls is not None and self.tool_calls.cut
        self._emit(TokenEvent(token, piece, at, logprobs, reason, self.prompt_tokens, calls, cut))
        return reason

    def _separated(self, piece: str, *, ended: bool) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Return text that can be delivered, and pieces of calls. Of text, only a schema constrains the rest."""
        if (parser := self.tool_calls) is None:
            return piece, ()
        piece, calls = parser.push(piece)
        if ended:
            piece += parser.finish()[0]
        if parser.is_text and self.request.sampling.json_schema is None:
            self.constraint = None
        return piece, calls

    def drop_pixels(self) -> None:
        """Drop all pixels and free their memory: the views are encoded or no longer needed."""
        try:
            for view in self.request_views.values():
                view.drop()
        finally:
            self.memory.close()

    def end(self, reason: FinishReason, error: PanscanError | None = None) -> None:
        """End the request and deliver its result, once: a second call has no effect. Raises nothing.

        A cancelled or failed request gets a final event without a token. If ``on_event`` raises, that is the request's
        error. If ``on_end`` raises, the exception is only logged.
        """
        if self.ended:
            return
        self.ended = True
        self.deadline.abandon()
        self.admitted.set()
        self.stamps.end = now()
        if self._preempted_at is not None:
            self.stamps.waits.append((self._preempted_at, self.stamps.end))
        try:
            self.drop_pixels()
            if reason in ("cancelled", "error"):
                rest = "" if self.text is None else self.text.finish()
                rest, calls = self._separated(rest, ended=True)
                self._emit(TokenEvent(None, rest, self.stamps.end, finish_reason=reason, tool_calls=calls))
        except BaseException as fault:  # of a callback, or of a runner that is lost
            reason, error = "error", error or self.error_of(fault)
        self.request_views = {}
        result, parser = self.result, self.tool_calls
        result.finish_reason, result.error = reason, error
        result.token_ids, result.cached_tokens = self.outputs, self.cached or 0
        if parser is not None and not (parser.cut and reason == "stop"):
            result.text, result.tool_calls = parser.text, parser.calls
        elif self.text is not None:  # includes the text of a call that a stop text has cut
            result.text = self.text.text
        try:
            # Copies: the request may still be in preparation, which fills its own.
            self.on_end(replace(result, stamps=structs.replace(self.stamps, waits=[*self.stamps.waits])))
        except BaseException:
            log.exception("request %r: its on_end callback failed", self.request.id)

    def error_of(self, fault: BaseException) -> PanscanError:
        """Return the error of a request that fails alone, caused by any exception.

        An :class:`EngineError`, such as a callback gets from another engine, would say that the engine has failed.
        """
        if isinstance(fault, PanscanError) and not isinstance(fault, EngineError):
            return fault
        error = InputError(f"request {self.request.id!r}: {described(fault)}")
        error.__cause__ = fault
        return error

    def _emit(self, event: TokenEvent) -> None:
        try:
            if self.on_event is not None:
                self.on_event(event)
        except BaseException:
            self.on_event = None
            raise

    def ends_at(self, token: int, eos_ids: Collection[int]) -> bool:
        """Return whether the newest token ends the answer whatever its text is."""
        return self.full or self._is_last(token, eos_ids)

    def _is_last(self, token: int, eos_ids: Collection[int]) -> bool:
        sampling = self.request.sampling
        if self.observation is not None and self.observation.forced_tokens.tokens is not None:
            return False
        return (not sampling.ignore_eos and token in eos_ids) or token in sampling.stop_token_ids

    def _reason(self, token: int, text: Detokenizer, eos_ids: Collection[int]) -> FinishReason | None:
        if text.stopped or self._is_last(token, eos_ids):
            return "stop"
        return "length" if self.full else None
