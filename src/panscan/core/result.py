"""What comes back: time stamps, tokens, results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta, Struct

from panscan.core.errors import PanscanError
from panscan.core.process import now
from panscan.core.tools import ToolCall, ToolCallDelta

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""``stop``: an end mark, stop text or stop id; ``length``: ``max_new_tokens`` or the end of the context."""


LARGEST = 2.0**64
"""Far more seconds, bytes or operations than any machine has, and no arithmetic overflows."""
Seconds = Annotated[float, Meta(gt=-LARGEST, lt=LARGEST)]


class Stamps(Struct, forbid_unknown_fields=True):
    """Boundaries of a request's life, in seconds of :func:`now`. Metrics are derived from them, never measured twice.

    ``accepted`` -> ``preparing`` (a thread took it) -> ``loaded`` (pixels decoded) -> ``preprocessed`` (views and ids
    on the device) -> ``scheduled`` (its first pass was launched) -> ``vision`` (image embeddings ready; None without
    images or where the runner cannot see it) -> ``tokens[0]`` (first token) -> ... -> ``tokens[-1]`` -> ``end``.
    Stages of a batch are shared by its requests. ``vision_start`` is when the vision tower was entered. ``preparing``
    and ``scheduled`` are None where nothing waits. ``waits`` are further (start, end) in which no work was done on it:
    while it waited for a lock, or had been preempted.
    """

    accepted: Seconds
    preparing: Seconds | None = None
    loaded: Seconds | None = None
    preprocessed: Seconds | None = None
    scheduled: Seconds | None = None
    vision_start: Seconds | None = None
    vision: Seconds | None = None
    tokens: list[Seconds] = []
    waits: list[tuple[Seconds, Seconds]] = []
    end: Seconds | None = None

    @property
    def ttft(self) -> float | None:
        """Accepted to first token, seconds."""
        return self.tokens[0] - self.accepted if self.tokens else None

    @property
    def e2e(self) -> float | None:
        """Accepted to last token, seconds."""
        return self.tokens[-1] - self.accepted if self.tokens else None

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first one, seconds; None for fewer than two."""
        count = len(self.tokens) - 1
        return (self.tokens[-1] - self.tokens[0]) / count if count > 0 else None

    def stages(self, *, unanswered: bool = False) -> dict[str, float | None]:
        """Seconds of load, preprocess, queue, vision, prefill and decode; together they are :attr:`e2e`.

        With ``unanswered``, of a request that was cancelled or failed, those before the first token end at :attr:`end`.

        ``queue`` is all waiting: for a thread that prepares the request, for the engine's first pass, and ``waits``.
        ``vision`` is the time in the vision tower and its projector, ``prefill`` the rest of the way to the first
        token. A stage whose boundary was not stamped is None, and its time is in the next one.
        """
        since = self.accepted
        seconds: dict[str, float | None] = dict.fromkeys(("load", "preprocess", "queue", "vision", "prefill", "decode"))
        queued: list[float] = []
        for name, boundary in (
            ("queue", self.preparing),
            ("load", self.loaded),
            ("preprocess", self.preprocessed),
            ("queue", self.scheduled),
        ):
            if boundary is None:
                continue
            if name == "queue":
                queued.append(boundary - since)
            else:
                seconds[name] = self._worked(since, boundary, queued)
            since = boundary
        if self.vision is not None:
            seconds["vision"] = self.vision - (since if self.vision_start is None else self.vision_start)
        if self.tokens:
            seconds["prefill"] = self._worked(since, self.tokens[0], queued) - (seconds["vision"] or 0.0)
            seconds["decode"] = self._worked(self.tokens[0], self.tokens[-1], queued)
        elif unanswered and self.end is not None:
            last, worked = self.last_stage, self._worked(since, self.end, queued) - (seconds["vision"] or 0.0)
            if last == "queue":
                queued.append(worked)
            else:
                seconds[last] = worked
        seconds["queue"] = sum(queued) if queued else None
        return seconds

    @property
    def last_stage(self) -> str:
        """The stage that a request without a token has reached."""
        starts = {
            "load": self.preparing,
            "preprocess": self.loaded,
            "queue": self.preprocessed,
            "prefill": self.scheduled,
        }
        return next((name for name in reversed(starts) if starts[name] is not None), "queue")

    def _worked(self, start: float, end: float, queued: list[float]) -> float:
        """Seconds from ``start`` to ``end`` without the waits between them, which are added to ``queued``."""
        waited = [min(until, end) - max(since, start) for since, until in self.waits]
        waited = [seconds for seconds in waited if seconds > 0]
        queued += waited
        return end - start - sum(waited)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one token (natural): its own, and those of the most probable ids, highest first.

    ``rank``: 1 for the most probable token; known of prompt tokens only.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


@dataclass(unsafe_hash=True, slots=True)  # frozen ones take several times as long to create, and each token has one
class TokenEvent:
    """One output token of a stream, or its end.

    Args:
        token_id: None at an end without a token (cancelled, failed).
        text: what may be shown now; empty while a character, or a text that may become a stop text, is incomplete.
            The texts of a stream put together are its result's.
        at: seconds of :func:`now`.
        logprobs: if the request asked for them.
        finish_reason: finish reason of the last event; None before.
        prompt_tokens: ids of the prompt; 0 at an end without a token.
        tool_calls: pieces of calls, which are not in ``text``.
        cut_call: whether the answer ends inside a call.
    """

    token_id: int | None
    text: str
    at: float
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    tool_calls: tuple[ToolCallDelta, ...] = ()
    cut_call: bool = False


@dataclass(slots=True)
class Result:
    """What became of a request. Token counts are counts of real ids.

    ``token_ids`` are all that were computed, an end mark or the tokens of a stop text among them. ``cached_tokens`` of
    the prompt were not computed again. ``error`` says why with ``finish_reason`` "error"; tokens up to there are kept.
    ``forced_tokens`` of the answer were not sampled, because its grammar allowed only these.
    ``retries``: further attempts, because an engine replica was lost. ``tool_calls``: what the answer calls, not part
    of ``text``; none if a stop text ended it inside a call, which is ``text`` then. ``pages``: width and height in
    pixels of each image as it was read, before it became views.
    ``prompt_logprobs``: of each token of ``prompt_ids`` given those before it, None for the first; if requested.
    """

    id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    views: int
    crops: int
    image_tokens: int
    prompt_tokens: int
    stamps: Stamps
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    error: PanscanError | None = None
    retries: int = 0
    tool_calls: list[ToolCall] = field(default_factory=list)
    pages: tuple[tuple[int, int], ...] = ()
    forced_tokens: int = 0
    prompt_ids: list[int] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def page_sizes(self) -> list[str]:
        """Width and height of each page in pixels, such as ``600x1800``."""
        return [f"{width}x{height}" for width, height in self.pages]

    @classmethod
    def unanswered(cls, id: str, accepted: float, error: PanscanError | None = None) -> Result:
        """Return the result of a request that ends without an answer: cancelled, or failed with an error."""
        reason: FinishReason = "cancelled" if error is None else "error"
        return cls(
            id=id,
            text="",
            token_ids=[],
            finish_reason=reason,
            views=0,
            crops=0,
            image_tokens=0,
            prompt_tokens=0,
            stamps=Stamps(accepted=accepted, end=now()),
            error=error,
        )

    @property
    def output_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def stages_ms(self) -> dict[str, float]:
        """Milliseconds of each stage that was seen (see :meth:`Stamps.stages`)."""
        stages = self.stamps.stages(unanswered=self.finish_reason in ("cancelled", "error"))
        return {name: 1e3 * seconds for name, seconds in stages.items() if seconds is not None}


@dataclass(frozen=True, slots=True)
class Stats:
    """What an engine holds now, and what it has done since it started.

    Args:
        running: requests that compute.
        waiting: accepted requests that do not run: to be prepared, in preparation, queued, or preempted.
        steps: passes through the model.
        prompt_tokens: tokens computed in prefill; those of a preempted request count each time.
        cached_tokens: prompt tokens found in the prefix cache.
        output_tokens: tokens generated, forced ones among them.
        forced_tokens: tokens that were not sampled, because a grammar allowed only these.
        preemptions: times that a request gave its blocks back, to be computed again.
        views_encoded: views that went through the vision tower.
        views_reused: views found in the vision cache.
        vision_cache_bytes: size of the encoded views in the cache.
        kv_slabs_used: equal parts of the KV cache in use; those of cached prefixes without a request do not count.
        kv_slabs: equal parts of the KV cache.
    """

    running: int
    waiting: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    forced_tokens: int
    preemptions: int
    views_encoded: int
    views_reused: int
    vision_cache_bytes: int
    kv_slabs_used: int
    kv_slabs: int

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV cache in use, 0 to 1."""
        return self.kv_slabs_used / self.kv_slabs
