"""A loaded model behind callbacks: the engine, or Transformers for settings that the engine lacks."""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Protocol

from panscan.core import EngineError, InputError, PanscanError, Request, Result, Stats, TokenEvent, now
from panscan.engine.detokenizer import token_bytes
from panscan.engine.engine import Engine
from panscan.model.checkpoint import Loaded
from panscan.model.inputs import count_prompt
from panscan.runners.base import Runner
from panscan.serve.backend import ModelInfo, TokenCounts
from panscan.settings import Settings

__all__ = ["LoadedModel", "open_model"]

OnEvent = Callable[[TokenEvent], None]
OnEnd = Callable[[Result], None]
Cancel = Callable[[], None]


class LoadedModel(Protocol):
    """A loaded model that answers requests through callbacks. Thread-safe."""

    info: ModelInfo

    def start(self, request: Request, on_event: OnEvent | None, on_end: OnEnd) -> Cancel:
        """Answer one request (see :meth:`panscan.engine.engine.Engine.start`)."""
        ...

    def count(self, request: Request) -> TokenCounts:
        """Count the tokens of a prompt."""
        ...

    def token_texts(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token; empty for special tokens."""
        ...

    def stats(self) -> Stats:
        """Return current statistics. Waits for the current step, so the call blocks while the engine hangs."""
        ...

    def close(self) -> None:
        """Cancel running requests and free the model."""
        ...


def open_model(settings: Settings) -> LoadedModel:
    """Load the model in the runner that the settings name, in a process that does nothing else.

    What is there afterwards is exempt from garbage collection. With PyTorch and Transformers loaded, a full collection
    visits several hundred thousand objects, and stops all threads for a tenth of a second or more.

    Raises:
        PanscanError: see :func:`panscan.runners.factory.open_runner` and :meth:`Engine.from_settings`.
    """
    from panscan.model.runtime import quiet_libraries

    quiet_libraries()
    model: LoadedModel
    if settings.runner == "engine":
        model = _EngineModel(Engine.from_settings(settings))
    else:
        from panscan.runners.factory import ready_runner

        model = _RunnerModel(ready_runner(settings))
    gc.collect()
    gc.freeze()
    return model


def _info(loaded: Loaded, settings: Settings, *, max_concurrency: int, decisions: tuple[str, ...] = ()) -> ModelInfo:
    prompts = loaded.reader.prompts
    return ModelInfo(
        runner=settings.runner,
        max_model_len=prompts.context or 0,
        cost=prompts.cost() if loaded.reader.reads_images else None,
        vocab_size=len(loaded.reader.tokenizer),
        dtype=str(loaded.dtype).removeprefix("torch."),
        max_concurrency=max_concurrency,
        decisions=decisions,
    )


def _count(request: Request, loaded: Loaded) -> TokenCounts:
    ids, image_tokens, views = count_prompt(request, loaded.reader)
    return TokenCounts(tuple(ids), image_tokens, views)


class _EngineModel:
    """The engine as a :class:`LoadedModel`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.info = _info(
            engine.loaded, engine.settings, max_concurrency=engine.options.max_num_seqs, decisions=engine.decisions
        )

    def start(self, request: Request, on_event: OnEvent | None, on_end: OnEnd) -> Cancel:
        """See :class:`LoadedModel`."""
        return self._engine.start(request, on_event, on_end)

    def count(self, request: Request) -> TokenCounts:
        """See :class:`LoadedModel`."""
        return _count(request, self._engine.loaded)

    def token_texts(self, ids: Sequence[int]) -> list[bytes]:
        """See :class:`LoadedModel`."""
        return [token_bytes(self._engine.loaded.reader.tokenizer, token) for token in ids]

    def stats(self) -> Stats:
        """See :class:`LoadedModel`."""
        return self._engine.stats()

    def close(self) -> None:
        """See :class:`LoadedModel`."""
        self._engine.close()


class _RunnerModel:
    """A runner without continuous batching as a :class:`LoadedModel`: batches of ``--batch-size``, one after another.

    Requests of one batch have equal sampling settings. All tokens of an answer are delivered when its batch ends.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.info = _info(runner.loaded, runner.settings, max_concurrency=runner.settings.batch_size)
        self._queue: deque[_Queued] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._running = self._output_tokens = self._prompt_tokens = 0
        self._numbers = count()
        self._thread = threading.Thread(target=self._work, name="panscan-runner", daemon=True)
        self._thread.start()

    def start(self, request: Request, on_event: OnEvent | None, on_end: OnEnd) -> Cancel:
        """See :class:`LoadedModel`."""
        queued = _Queued(request, on_event, on_end, accepted=now())
        with self._changed:
            if self._closed:
                raise EngineError("the runner is closed")
            self._queue.append(queued)
            self._changed.notify()
        return lambda: self._cancel(queued)

    def count(self, request: Request) -> TokenCounts:
        """See :class:`LoadedModel`."""
        return _count(request, self._runner.loaded)

    def token_texts(self, ids: Sequence[int]) -> list[bytes]:
        """See :class:`LoadedModel`."""
        return [token_bytes(self._runner.loaded.reader.tokenizer, token) for token in ids]

    def stats(self) -> Stats:
        """See :class:`LoadedModel`."""
        return Stats(
            running=self._running,
            waiting=len(self._queue),
            steps=0,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=0,
            output_tokens=self._output_tokens,
            preemptions=0,
            views_encoded=0,
            views_reused=0,
            vision_cache_bytes=0,
            kv_blocks_used=(0, 0),
            kv_blocks=(0, 0),
            block_size=1,
        )

    def close(self) -> None:
        """See :class:`LoadedModel`. Waits for the current batch: ``generate()`` cannot be interrupted."""
        with self._changed:
            self._closed = True
            left = list(self._queue)
            self._queue.clear()
            self._changed.notify()
        for queued in left:
            queued.end_early()
        self._thread.join()
        self._runner.close()

    def _cancel(self, queued: _Queued) -> None:
        with self._changed:
            waiting = queued in self._queue
            if waiting:
                self._queue.remove(queued)
        if waiting:  # a running request is answered in full: generate() cannot be interrupted
            queued.end_early()

    def _work(self) -> None:
        while (batch := self._next_batch()) is not None:
            self._running = len(batch)
            self._answer(batch)
            self._running = 0

    def _next_batch(self) -> list[_Queued] | None:
        """Wait for requests and return the next batch; None once the runner is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if not self._queue:
                return None
            batch = [self._queue.popleft()]
            size = self._runner.settings.batch_size
            while self._queue and len(batch) < size and self._queue[0].request.sampling == batch[0].request.sampling:
                batch.append(self._queue.popleft())
            return batch

    def _answer(self, batch: list[_Queued]) -> None:
        try:
            results = self._runner.run([queued.request for queued in batch])
        except BaseException as error:  # a library may raise anything, even a panic; only these requests fail
            if len(batch) > 1:  # one unreadable image fails the whole batch: retry each request alone
                for queued in batch:
                    self._answer([queued])
                return
            known = error if isinstance(error, PanscanError) else InputError(f"{type(error).__name__}: {error}")
            batch[0].end_early(known)
            return
        for queued, result in zip(batch, results, strict=True):
            self._output_tokens += result.output_tokens
            self._prompt_tokens += result.prompt_tokens
            queued.end(result)


class _Queued:
    """A queued request."""

    def __init__(self, request: Request, on_event: OnEvent | None, on_end: OnEnd, *, accepted: float) -> None:
        self.request = request
        self._on_event, self._on_end, self._accepted = on_event, on_end, accepted

    def end(self, result: Result) -> None:
        """Deliver an answer: its whole text with the last token."""
        stamps = replace(result.stamps, accepted=self._accepted, preparing=result.stamps.accepted)
        result = replace(result, id=self.request.id, stamps=stamps)
        if self._on_event is not None:
            for index, token in enumerate(result.token_ids):
                last = index == len(result.token_ids) - 1
                at = stamps.tokens[index] if index < len(stamps.tokens) else now()
                reason = result.finish_reason if last else None
                text, prompt_tokens = result.text if last else "", result.prompt_tokens
                self._on_event(TokenEvent(token, text, at, finish_reason=reason, prompt_tokens=prompt_tokens))
        self._on_end(result)

    def end_early(self, error: PanscanError | None = None) -> None:
        """End the request without an answer: failed with the error, or cancelled if there is none."""
        result = Result.unanswered(self.request.id, self._accepted, error)
        if self._on_event is not None:
            self._on_event(TokenEvent(None, "", now(), finish_reason=result.finish_reason))
        self._on_end(result)
