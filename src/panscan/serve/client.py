"""The one way to reach an engine in another process: submit, cancel, count, statistics, and retries after a loss."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar

from panscan.core import EngineError, PanscanError, Request, Result, Stats, Stream, TokenEvent, now
from panscan.images.views import PromptCost

log = logging.getLogger("panscan.serve")

T = TypeVar("T")

Question = Literal["count", "token_texts", "stats"]
"""Methods of a loaded model that a client may call."""
ATTEMPTS = 3
"""Attempts per request, so that a request that kills its engine fails eventually."""


class EngineLostError(EngineError):
    """The process of an engine died or cannot be reached."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of a loaded model.

    Args:
        max_model_len: context length, tokens.
        cost: prompt tokens of an image; None for a text-only model.
        dtype: PyTorch dtype of the weights, such as ``bfloat16``.
        max_concurrency: maximum number of requests computed at the same time.
        vocabulary: number of token ids.
    """

    max_model_len: int
    cost: PromptCost | None
    dtype: str
    max_concurrency: int
    vocabulary: int


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
        alone: whether it may have killed two engines, so that it needs one without other requests.
        model: name of the model in the API; None: the server's.
    """

    views: int
    prompt_tokens: int
    max_new_tokens: int
    keys: tuple[bytes, ...] = ()
    alone: bool = False
    model: str | None = None


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """The engine's requests for one HTTP request.

    Args:
        requests: one request per choice, each with a unique id.
        work: estimated work of one request.
    """

    requests: list[Request]
    work: RequestWork

    @property
    def image_bytes(self) -> int:
        """Bytes of images in transit to the engine: each choice carries a copy."""
        files = {id(page.content): len(page.content) for page in self.requests[0].images}
        return sum(files.values()) * len(self.requests)


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A submitted request that has not ended.

    Args:
        request: request to answer.
        work: its estimated work.
        stream: stream that receives its events and its result.
        streams: whether the caller reads its events.
        accepted: time of submission, seconds of :func:`panscan.core.now`.
        cancelled: whether its engine was told to end it.
        delivered: whether an event was delivered.
        lost: number of engines that died while computing it.
    """

    request: Request
    work: RequestWork
    stream: Stream
    streams: bool
    accepted: float = field(default_factory=now)
    cancelled: bool = False
    delivered: bool = False
    lost: int = 0

    def on_event(self, event: TokenEvent) -> None:
        """Deliver an event."""
        self.delivered = True
        self.stream.on_event(event)


class EngineClient(ABC):
    """A client of engines in other processes. Call all methods from one event loop.

    A request whose engine dies is sent again, unless a part of its answer was delivered.

    Attributes:
        info: properties of the model; None until it has loaded.
        retried: number of attempts after a loss.
    """

    def __init__(self) -> None:
        self.info: ModelInfo | None = None
        self.retried = 0
        self._closed = False
        self._inflight: dict[str, asyncio.Task[Result]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether an engine can start a request now."""

    @property
    def inflight(self) -> int:
        """Number of submitted requests that have not ended."""
        return len(self._inflight)

    @abstractmethod
    async def start(self) -> None:
        """Wait until a model has loaded.

        Raises:
            PanscanError: the model cannot be loaded.
        """

    @abstractmethod
    async def watch(self) -> NoReturn:
        """Wait until no engine can be reached any more. Call it after :meth:`start`.

        Raises:
            EngineError: the reason.
        """

    async def close(self) -> None:
        """Cancel all requests and free all resources."""
        self._closed = True
        for task in self._inflight.values():
            task.cancel()

    def submit(self, request: Request, work: RequestWork, *, stream: bool) -> Stream:
        """Submit a request and return its stream. ``Stream.cancel()`` cancels it.

        Args:
            request: request with a unique id.
            work: estimated work of the request.
            stream: whether the caller reads the events. Otherwise only ``Stream.result()`` may be awaited.

        Raises:
            EngineError: the client is closed, or no model has loaded.
        """
        if self._closed:
            raise EngineError("the server is shutting down")
        if self.info is None:
            raise EngineError("the model is loading")
        pending = PendingRequest(request, work, Stream(request.id, lambda: self._cancel(pending)), stream)
        task = self._inflight[request.id] = self._spawn(self._answer(pending))
        task.add_done_callback(partial(self._end, pending))
        return pending.stream

    async def count(self, request: Request) -> TokenCounts:
        """Count the tokens of a prompt without computing it.

        Raises:
            SettingError: the prompt is malformed or too long.
            ImageError: an image cannot be read.
            EngineError: no engine answers.
        """
        counts: TokenCounts = await self._ask("count", request)
        return counts

    async def token_texts(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token; empty for special tokens.

        Raises:
            EngineError: no engine answers.
        """
        texts: list[bytes] = await self._ask("token_texts", tuple(ids))
        return texts

    @abstractmethod
    async def _ask(self, method: Question, *arguments: Any) -> Any:
        """Call a method of any engine's :class:`panscan.serve.loaded_model.LoadedModel`.

        Raises:
            EngineError: no engine answers.
            PanscanError: the error of the call itself.
        """

    @abstractmethod
    async def stats(self) -> Mapping[str, Stats]:
        """Return the statistics of each engine by its name, without engines that do not answer in time."""

    @abstractmethod
    async def _attempt(self, pending: PendingRequest) -> Result:
        """Have one engine answer a request.

        Raises:
            EngineLostError: the engine died.
        """

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run work in the background, in an empty context: Ray treats calls with the same request id in it as one."""
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, PanscanError):
            log.error("a background task failed", exc_info=error)

    def _cancel(self, pending: PendingRequest) -> None:
        """Cancel a request. Does nothing if it has ended."""
        if (task := self._inflight.get(pending.request.id)) is not None:
            with suppress(RuntimeError):  # the event loop is closed
                task.cancel()

    async def _answer(self, pending: PendingRequest) -> Result:
        while True:
            try:
                result = await self._attempt(pending)
            except EngineLostError as error:
                pending.lost += 1
                if pending.delivered:
                    raise EngineError(f"{error}; send the request again") from None
                if pending.lost == ATTEMPTS:
                    message = f"{ATTEMPTS} engines died while computing this request"
                    raise EngineLostError(f"{message}: {error}") from None
                self.retried += 1
            else:
                result.stamps.accepted = min(result.stamps.accepted, pending.accepted)
                result.retries = pending.lost
                return result

    def _end(self, pending: PendingRequest, task: asyncio.Task[Result]) -> None:
        """Deliver the result of a request, whatever ended it. A task may be cancelled before it starts."""
        self._inflight.pop(pending.request.id, None)
        error = None if task.cancelled() else task.exception()
        if not task.cancelled() and error is None:
            pending.stream.on_end(task.result())
            return
        if error is not None and not isinstance(error, PanscanError):
            log.error("request %s failed", pending.request.id)
            error = EngineError(f"{type(error).__name__}: {error}")
        result = Result.unanswered(pending.request.id, pending.accepted, error)
        result.retries = max(0, min(pending.lost, ATTEMPTS - 1))
        if pending.streams:
            pending.stream.on_event(TokenEvent(None, "", now(), finish_reason=result.finish_reason))
        pending.stream.on_end(result)
