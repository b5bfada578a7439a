"""The engine's public interface: continuous batching for Gemma 3 with pan and scan, offline or streaming."""

from __future__ import annotations

import asyncio
import secrets
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import count, islice
from queue import SimpleQueue
from typing import Any, Self

from panscan.core import (
    EngineError,
    Message,
    PanscanWarning,
    QueueFullError,
    Request,
    Result,
    SettingError,
    Stamps,
    Stats,
    Stream,
    TokenEvent,
    now,
)
from panscan.core.option import integers
from panscan.core.request import checked_request, request_list
from panscan.engine.loop import Loop
from panscan.engine.model_runner import ModelRunner
from panscan.engine.options import EngineOptions
from panscan.engine.passes import PassExecutor
from panscan.engine.ranks import RankGroup
from panscan.engine.request_state import ObservationState, RequestState
from panscan.engine.worker import Worker
from panscan.model.bundled import warn_of_demonstration
from panscan.model.checkpoint import Loaded
from panscan.model.inputs import count_prompt
from panscan.model.load import load_for, load_meta_model_for
from panscan.model.machine import release_memory
from panscan.model.observation import ForcedTokens, Observation
from panscan.model.runtime import apply_attention
from panscan.model.support import require_supported
from panscan.settings import Settings, axes, foreign_settings, range_of, settings_from
from panscan.settings.preset_files import single_preset

MAX_QUEUED_REQUESTS = 1024
"""Default number of requests that :meth:`Engine.submit` queues in addition to running ones."""

_QUEUED = integers(0, 1_000_000)


class Engine:
    """Gemma 3 with continuous batching: requests join and leave at any step, and reuse cached prefixes and views.

    Args:
        loaded: the model; on the meta device if ``ranks`` hold the weights.
        options: engine sizes; None: taken from ``settings``.
        settings: defaults of :meth:`request` and of ``options``.
        max_queued_requests: requests that :meth:`submit` queues in addition to running ones.
        ranks: processes that share the model.

    Example:
        >>> with Engine.from_pretrained("mini") as engine:
        ...     results = engine.generate([engine.request("What is the total?", ["receipt.png"])])
        >>> results[0].text, results[0].views, results[0].finish_reason
    """

    def __init__(
        self,
        loaded: Loaded,
        options: EngineOptions | None = None,
        settings: Settings | None = None,
        *,
        max_queued_requests: int = MAX_QUEUED_REQUESTS,
        ranks: RankGroup | None = None,
    ) -> None:
        _QUEUED.check("max_queued_requests", max_queued_requests)
        self._loaded: Loaded | None = loaded
        self.settings = Settings() if settings is None else settings
        self.options = EngineOptions.of(self.settings) if options is None else options
        full = f"the engine's queue is full: {max_queued_requests} submitted requests wait; raise max_queued_requests"
        self._admission = Admission(self.options.max_num_seqs + max_queued_requests, f"{full}, or await submit_wait()")
        self._worker = Worker(partial(_loop, loaded, self.options, ranks))
        self.decisions: tuple[str, ...] = self._worker.loop.facts.decisions
        """Startup choices with reasons, and startup timings; one line each."""
        self._numbers = count()
        self._streams: dict[str, RequestState] = {}
        self._finalizer = weakref.finalize(self, self._worker.close)

    @classmethod
    def from_pretrained(
        cls,
        model: str = "mini",
        *,
        preset: str | None = None,
        max_queued_requests: int = MAX_QUEUED_REQUESTS,
        **settings: Any,
    ) -> Engine:
        """Load a checkpoint and start an engine.

        Args:
            model: ``mini``, ``tiny``, a directory or a hub id.
            preset: name of a preset, or a YAML file; explicit settings override it.
            max_queued_requests: requests that :meth:`submit` queues in addition to the ``max_num_seqs`` running ones.
            settings: settings as on the command line: ``dtype``, ``device``, ``quantization``, ``max_num_seqs``,
                ``kv_cache_gb``, ``pan_and_scan_max_num_crops``, ``max_new_tokens``, ...

        Raises:
            ModelError: the checkpoint cannot be loaded.
            SettingError: an unknown setting or value, or a preset with several values for one setting.
            UnsupportedError: this machine does not support the settings.
        """
        if settings.get("runner", "engine") != "engine":
            raise SettingError(
                f"runner: expected 'engine', got {settings['runner']!r}; see docs/python.md for other runners"
            )
        chosen: dict[str, Any] = {}
        if preset is not None:
            chosen, ignored = single_preset(preset, axes().keys() - {*foreign_settings("engine")})
            if ignored:
                text = f"preset {preset}: ignoring {', '.join(ignored)}: not supported by the engine"
                warnings.warn(text, PanscanWarning, stacklevel=2)
        named = settings_from({**chosen, "model": model, "runner": "engine", **settings})
        warn_of_demonstration(named)
        return cls.from_settings(named, max_queued_requests=max_queued_requests)

    @classmethod
    def from_settings(cls, settings: Settings, *, max_queued_requests: int = MAX_QUEUED_REQUESTS) -> Engine:
        """Load the model that ``settings`` name and start an engine.

        Raises: as :meth:`from_pretrained`.
        """
        _QUEUED.check("max_queued_requests", max_queued_requests)  # before a model is loaded
        settings = replace(settings, runner="engine")
        require_supported(settings)
        ranks = None
        if settings.tensor_parallel_size == 1:
            loaded = load_for(settings)
            apply_attention(loaded.model, settings.attention)
        else:
            loaded, ranks = load_meta_model_for(settings), RankGroup(settings, one_engine=True)
        try:
            return cls(loaded, settings=settings, max_queued_requests=max_queued_requests, ranks=ranks)
        except BaseException:
            if ranks is not None:
                ranks.close()
            raise

    @property
    def loaded(self) -> Loaded:
        """The model.

        Raises:
            EngineError: the engine is closed.
        """
        if self._loaded is None:
            raise EngineError("the engine is closed")
        return self._loaded

    def request(self, prompt: str | Sequence[Message], images: Sequence[Any] = (), **fields: Any) -> Request:
        """Return a request with this engine's settings as defaults; see :meth:`panscan.settings.Settings.request`."""
        return self.settings.request(prompt, images, fields)

    def generate(self, requests: Iterable[Request], *, progress: bool | None = None) -> list[Result]:
        """Answer requests and return their results in the same order.

        The result of a failed request has ``finish_reason`` "error" and the exception in ``error``. Other requests are
        not affected.

        Args:
            requests: any number of requests.
            progress: show a progress bar on standard error; None: if standard error is a terminal.

        Raises:
            SettingError: an item is not a request; none is answered.
        """
        from rich.console import Console
        from rich.progress import track

        todo = request_list(requests)
        console = Console(stderr=True)
        shown = console.is_terminal if progress is None else progress
        results = dict(
            track(self.stream_results(todo), "answering", total=len(todo), console=console, disable=not shown)
        )
        return [results[index] for index in range(len(todo))]

    def stream_results(
        self, requests: Iterable[Request], *, max_concurrency: int | None = None
    ) -> Generator[tuple[int, Result], None, None]:
        """Answer requests and yield (index, result) as they finish.

        Requests are read from the iterable as others finish, so they need not fit into memory together. Closing the
        generator early cancels requests in flight. As of any generator, only one thread at a time may read it.

        Args:
            requests: any number of requests.
            max_concurrency: maximum requests in flight; None: the engine's setting, or enough to keep it busy.

        Raises:
            EngineError: the engine is closed, or belongs to another process.
        """
        self._worker.check_process()
        if max_concurrency is not None:
            range_of("max_concurrency", "bench").check("max_concurrency", max_concurrency)
        most = max_concurrency or self.settings.max_concurrency or self.options.max_num_seqs + self._worker.ahead
        return self._results(((request, None) for request in requests), most)

    def _results(
        self, requests: Iterable[tuple[Request, ObservationState | None]], most: int
    ) -> Generator[tuple[int, Result], None, None]:
        finished: SimpleQueue[tuple[int, Result]] = SimpleQueue()
        inflight: dict[int, RequestState] = {}
        source = enumerate(requests)

        def put(index: int, result: Result) -> None:
            finished.put((index, result))

        try:
            while True:
                for index, (request, observation) in islice(source, most - len(inflight)):
                    inflight[index] = self._state(request, None, partial(put, index), observation)
                    self._worker.accept(inflight[index])
                if not inflight:
                    return
                self._worker.check_process()  # in a forked child, no result would ever arrive
                index, result = self._worker.receive(finished)
                if (stopped := self._worker.stopped) is not None and result.error is stopped:
                    raise stopped
                del inflight[index]
                yield index, result
        finally:
            for state in inflight.values():
                self._worker.cancel(state)

    def submit(self, request: Request) -> Stream:
        """Submit one request and return its stream of token events. Call it from a running event loop.

        Like ``asyncio.Queue.put_nowait``, it does not wait; :meth:`submit_wait` waits for a free slot.

        Raises:
            SettingError: another request in flight has the same id.
            QueueFullError: ``max_queued_requests`` requests are already queued.
            EngineError: the engine is closed, or belongs to another process.
        """
        self._worker.check_process()
        self._admission.acquire_nowait()
        return self._submit(request)

    async def submit_wait(self, request: Request) -> Stream:
        """Wait for a free slot in the queue, then :meth:`submit`.

        ``asyncio.timeout`` limits the wait; a cancelled wait submits nothing.

        Raises:
            SettingError: another request in flight has the same id.
            EngineError: the engine is closed, or belongs to another process.
        """
        self._worker.check_process()
        await self._admission.acquire()
        return self._submit(request)

    def _submit(self, request: Request) -> Stream:
        """Start a request that holds a slot; release the slot when the request ends or cannot start."""
        try:
            names = (f"request-{next(self._numbers)}" for _ in count())
            name = checked_request(request).id or next(name for name in names if name not in self._streams)
            if name in self._streams:
                raise SettingError(f"a request with id {name!r} is already in flight")
            stream = Stream(name, lambda: self.cancel(name))

            def on_end(result: Result) -> None:
                self._streams.pop(name, None)
                self._admission.release()
                stream.on_end(result)

            state = self._streams[name] = self._state(replace(request, id=name), stream.on_event, on_end)
            try:
                self._worker.accept(state)
            except EngineError:
                del self._streams[name]
                raise
        except BaseException:
            self._admission.release()
            raise
        return stream

    def start(
        self,
        request: Request,
        on_event: Callable[[TokenEvent], None] | None,
        on_end: Callable[[Result], None],
    ) -> Callable[[], None]:
        """Answer one request through callbacks, without the engine's queue limit; return a function that cancels it.

        Args:
            request: request to answer.
            on_event: called with each event from the engine's thread; must not block. If it raises, the request ends
                with that error. None: no events.
            on_end: called once with the result after the last event, from the same thread; must not block. What it
                raises is logged.

        Raises:
            EngineError: the engine is closed, or belongs to another process.
        """
        state = self._state(request, on_event, on_end)
        self._worker.accept(state)
        return partial(self._worker.cancel, state)

    def count(self, request: Request) -> tuple[list[int], int, int]:
        """Return a prompt's token ids, its number of image tokens and its number of views, without running the model.

        Raises:
            SettingError: the prompt is malformed or too long.
            ImageError: an image cannot be read.
        """
        return count_prompt(checked_request(request), self.loaded.reader)

    def cancel(self, id: str) -> None:
        """End a submitted request with the tokens it has. Does nothing if no request in flight has this id."""
        self._worker.check_process()
        if (state := self._streams.get(id)) is not None:
            self._worker.cancel(state)

    def observe(self, requests: Sequence[Request], forced: Sequence[ForcedTokens]) -> list[Observation]:
        """Return next-token distributions along forced tokens, for all requests in one batch. Used by the verdict.

        Raises:
            EngineError: the engine is closed, or belongs to another process.
            PanscanError: the error of the first request that failed.
        """
        self._worker.check_process()
        observations = [*map(ObservationState, forced)]
        most = len(requests) or 1  # at least one, so that lists of different lengths raise
        results = sorted(self._results(zip(requests, observations, strict=True), most))
        for _, result in results:
            if result.error is not None:
                raise result.error
        return [observations[index].observation(result.token_ids) for index, result in results]

    @property
    def waiting(self) -> int:
        """Number of accepted requests that do not run, as in :meth:`stats` but without waiting for the current pass."""
        return self._worker.waiting

    def stats(self) -> Stats:
        """Return current and cumulative statistics, as soon as the current pass ends.

        Raises:
            EngineError: the engine is closed, has failed, or belongs to another process.
            SettingError: called from a callback, which the engine would wait for.
        """
        return self._worker.stats()

    def reset_caches(self) -> None:
        """Evict cached prefixes and encoded views that no running request uses."""
        self._worker.call(lambda: self._worker.loop.reset_caches())  # noqa: PLW0108 - a closed engine has no loop

    def close(self) -> None:
        """Cancel requests in flight, end the engine's thread, and free its memory.

        That includes the weights, unless the caller still has the model that the engine was created with.

        Raises:
            EngineError: the engine belongs to another process, which must close it.
        """
        self._worker.check_process()
        self._end()

    def _end(self) -> None:
        self._finalizer()
        loaded, self._loaded = self._loaded, None
        if loaded is not None and loaded.device.type != "cpu":
            del loaded
            release_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()  # ends nothing in a forked child, and masks no exception

    def _state(
        self,
        request: Request,
        on_event: Callable[[TokenEvent], None] | None,
        on_end: Callable[[Result], None],
        observation: ObservationState | None = None,
    ) -> RequestState:
        seed = checked_request(request).sampling.seed
        seed = secrets.randbits(63) if seed is None else seed
        return RequestState(
            next(self._numbers),
            request=request,
            stamps=Stamps(accepted=now()),
            on_event=on_event,
            on_end=on_end,
            seed=seed,
            observation=observation,
        )


def _loop(loaded: Loaded, options: EngineOptions, ranks: RankGroup | None) -> Loop:
    """Build the loop on this process's device, or on ranks."""
    runner: PassExecutor = ModelRunner(loaded, options) if ranks is None else ranks.start(options)
    try:
        return Loop(loaded, options, runner)
    except BaseException:
        runner.stop()
        raise


class Admission:
    """Slots for submitted requests. Any thread and any event loop may acquire or release one.

    Args:
        slots: number of slots.
        full: message of :class:`QueueFullError`.
    """

    def __init__(self, slots: int, full: str) -> None:
        self._free, self._full = slots, full
        self._waiting: deque[tuple[Future[None], asyncio.AbstractEventLoop]] = deque()
        self._lock = threading.Lock()

    def acquire_nowait(self) -> None:
        """Acquire a slot without waiting.

        Raises:
            QueueFullError: no slot is free.
        """
        with self._lock:
            if not self._free:
                raise QueueFullError(self._full)
            self._free -= 1

    async def acquire(self) -> None:
        """Acquire a slot as soon as one is free, in order of arrival."""
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn: Future[None] = Future()
            self._waiting.append((turn, asyncio.get_running_loop()))
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if not turn.cancel():  # granted at the same moment: pass the slot on
                self.release()
            raise

    def release(self) -> None:
        """Release a slot, or pass it to the request that has waited longest."""
        with self._lock:
            while self._waiting:
                turn, loop = self._waiting.popleft()
                if not loop.is_closed() and turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._free += 1
