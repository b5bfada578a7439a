"""The interface between the HTTP server and its backends: an engine process, or replicas on a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from panscan.core import EngineError, PanscanError, Request, Result, Stats, Stream, TokenEvent, now
from panscan.images.views import PromptCost


class ReplicaLostError(EngineError):
    """A replica died or cannot be reached."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of a loaded model.

    Args:
        max_model_len: context length, tokens.
        cost: prompt tokens of an image; None for a text-only model.
        vocab_size: number of token ids.
        dtype: PyTorch dtype of the weights, such as ``bfloat16``.
        max_concurrency: maximum number of requests computed at the same time.
        decisions: choices made at startup and their reasons, one line each.
    """

    max_model_len: int
    cost: PromptCost | None
    vocab_size: int
    dtype: str
    max_concurrency: int
    decisions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The token counts of a prompt, from the checkpoint's tokenizer.

    Args:
        ids: token ids of the whole prompt, including image tokens.
        image_tokens: number of image tokens among them.
        views: number of views of all images.
    """

    ids: tuple[int, ...]
    image_tokens: int
    views: int


@dataclass(frozen=True, slots=True)
class RequestWork:
    """The estimated work of a request, which the router uses.

    Args:
        views: views that the vision tower would encode.
        prompt_tokens: an estimate of the prompt's length, from its views and characters.
        max_new_tokens: maximum number of output tokens.
        keys: digests of its images, in order. Requests with equal digests share cached views and prefixes.
    """

    views: int
    prompt_tokens: int
    max_new_tokens: int
    keys: tuple[bytes, ...] = ()


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request that a backend has accepted, and that has not ended.

    Args:
        request: request to answer.
        stream: stream that receives its events and its result.
        streams: whether the caller reads its events.
        accepted: time of submission, seconds of :func:`panscan.core.now`.
        attempts: number of processes that it was sent to.
        cancelled: whether its client has disconnected.
        delivered: whether an event was delivered.
    """

    request: Request
    stream: Stream
    streams: bool
    accepted: float = field(default_factory=now)
    attempts: int = 0
    cancelled: bool = False
    delivered: bool = False

    def fail(self, error: PanscanError | None) -> None:
        """End the request without an answer: failed with the error, or cancelled if there is none."""
        result = Result.unanswered(self.request.id, self.accepted, error)
        if self.streams:
            self.stream.on_event(TokenEvent(None, "", now(), finish_reason=result.finish_reason))
        self.stream.on_end(result)


class ServeBackend(Protocol):
    """A backend that answers requests. Call all methods from one event loop."""

    @property
    def info(self) -> ModelInfo | None:
        """Properties of the model; None until it has loaded."""
        ...

    @property
    def ready(self) -> bool:
        """Whether the backend can start a request now."""
        ...

    @property
    def retried(self) -> int:
        """Number of requests retried because a process died."""
        ...

    @property
    def inflight(self) -> int:
        """Number of submitted requests that have not ended."""
        ...

    async def start(self) -> None:
        """Load the model, and return once it can answer requests.

        Raises:
            PanscanError: the model cannot be loaded.
        """
        ...

    async def close(self) -> None:
        """Cancel running requests and free all resources."""
        ...

    def submit(self, request: Request, work: RequestWork, *, stream: bool) -> Stream:
        """Submit a request and return its stream.

        Args:
            request: request with a unique id, whose images are :class:`panscan.images.files.PageBytes`.
            work: estimated work of the request.
            stream: whether the caller reads the events. Otherwise only ``Stream.result()`` may be awaited, and the
                request is retried if its process dies.

        Raises:
            EngineError: no process can answer.
        """
        ...

    async def count(self, request: Request) -> TokenCounts:
        """Count the tokens of a prompt without computing it.

        Raises:
            SettingError: the prompt is malformed or too long.
            ImageError: an image cannot be read.
            EngineError: no process can answer.
        """
        ...

    async def token_texts(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token; empty for special tokens.

        Raises:
            EngineError: no process can answer.
        """
        ...

    async def stats(self) -> Mapping[str, Stats]:
        """Return the statistics of each engine by replica id, without engines that do not answer in time."""
        ...
