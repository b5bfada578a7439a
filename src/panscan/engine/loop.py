"""The engine's thread: schedule, launch a pass, deliver its tokens, while requests are prepared ahead of need."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from math import ceil
from queue import SimpleQueue
from typing import TypeVar

import torch

from panscan.core import (
    EngineError,
    FinishReason,
    ImageError,
    InputError,
    PanscanError,
    Sampling,
    SettingError,
    UnsupportedError,
    now,
)
from panscan.engine.daemons import DaemonThreads
from panscan.engine.inflight import InFlightPass, Mark, Seeing
from panscan.engine.options import EngineOptions
from panscan.engine.prepare import Preparer
from panscan.engine.request_state import RequestState, Sight
from panscan.engine.sampling import Chosen, Sampler, SamplingRow
from panscan.engine.scheduling.kv_blocks import KVBlocks
from panscan.engine.scheduling.scheduler import Scheduler
from panscan.engine.scheduling.sequence import Sequence as Tokens
from panscan.engine.scheduling.sequence import Step
from panscan.engine.startup import Startup
from panscan.engine.vision import VisionCache, VisionEncoder
from panscan.model.checkpoint import Loaded
from panscan.model.machine import is_out_of_memory, release_memory, synchronize

__all__ = ["FORKED", "Loop", "Stats", "Worker"]


class Loop:
    """Prepared requests in, events out; one :meth:`step` launches one pass through the model.

    Raises:
        UnsupportedError: the memory does not hold the KV cache.
        SettingError: an unknown attention backend, or a cache size that holds nothing.
    """

    def __init__(self, loaded: Loaded, options: EngineOptions) -> None:
        self.loaded, self.options = loaded, options
        self.started = Startup(loaded, options)
        self.decoder = self.started.decoder
        counts = self.started.blocks
        self.blocks = KVBlocks(
            block_size=options.block_size,
            global_blocks=counts[0],
            local_blocks=counts[1],
            window=self.decoder.window if counts[1] else None,
            prefix_caching=options.prefix_caching,
        )
        self.vision = VisionCache(round(options.vision_cache_gb * 1e9))
        self._encoder = VisionEncoder(self.started.encode, self.vision, options.vision_batch_size)
        self._scheduler = Scheduler(
            self.blocks,
            max_num_seqs=options.max_num_seqs,
            prefill_chunk_size=options.prefill_chunk_size,
            max_views=max(1, self._views_held),
        )
        self._executor = self.started.executor
        self._sampler = Sampler(loaded.model.generation_config.suppress_tokens or [], loaded.device)
        self.preparer = Preparer(loaded, options, self.vision.holds)
        self._overlap = self.started.fast if options.overlap is None else options.overlap
        self._inflight: InFlightPass | None = None
        self._states: dict[Tokens, RequestState] = {}
        self._steps = self._prompt_tokens = self._cached_tokens = self._output_tokens = 0

    def step(self) -> bool:
        """Launch a pass, then hand out the tokens of the one before; False if there is nothing to do.

        So a device that computes by itself has its next pass waiting when it is done with one, and a request is known
        to have ended one pass late: that pass's row of it is for nothing. Whatever fails in a pass ends the requests
        that it came with.
        """
        step = self._scheduler.schedule()
        for preempted in self._scheduler.preempted:
            self._states[preempted].preempted()
        if step is None:
            return self.land()
        try:
            inflight = self._launch(step)
        except _LostImageError as lost:  # that request's own failure: the others are scheduled again
            self.end(lost.state, "error", lost.reason)
            self.land()
            return True
        except Exception as error:  # whatever a pass raises is its requests' failure: the engine and the others go on
            self._fail(step, error)
            self.land()  # before anything is scheduled again: who was preempted may wait for a token of that pass
            return True
        self._count(step)
        self.land()
        self._scheduler.advance(step)
        self._inflight = inflight
        if not self._overlap or any(self._states[each].looks_back for each in inflight.sampled if each in self._states):
            self.land()
        return True

    def land(self) -> bool:
        """Wait for the pass under way and hand out its tokens; False if there is none."""
        inflight, self._inflight = self._inflight, None
        if inflight is None:
            return False
        try:
            chosen = inflight.draws.wait()
        except Exception as error:  # a device tells what went wrong when it is waited for
            for chunk in inflight.step.chunks:
                if chunk.sequence in self._states:
                    self.end(self._states[chunk.sequence], "error", _explained(error))
            return True
        landed = now()
        if inflight.seeing is not None:
            inflight.seeing.tell(inflight.draws.readback.done, landed)
        self._hand_out(self._settle(inflight, chosen), landed)
        return True

    def add(self, state: RequestState) -> None:
        """Take a prepared request; one that can never run fails at once."""
        sequence = state.sequence
        assert sequence is not None  # it is prepared
        sequence.limit = min(sequence.limit, self.decoder.max_positions)
        if (refusal := self._refusal(state, sequence)) is not None:
            state.end("error", refusal)
        else:
            self._states[sequence] = state
            self._scheduler.add(sequence)

    def end(self, state: RequestState, reason: FinishReason, error: PanscanError | None = None) -> None:
        """End a request now, with the tokens it has, wherever it stands."""
        if state.sequence is not None and state.sequence in self._states:
            self._cached_tokens += state.sequence.cached or 0
            self._scheduler.remove(state.sequence)
            del self._states[state.sequence]
        state.end(reason, error)

    def close(self) -> None:
        """Wait for the pass under way, of which nothing may be freed, and give the model back as it was."""
        self.land()
        self.started.close()

    def reset_caches(self) -> None:
        """Forget every prefix and view that nobody uses."""
        self.blocks.reset()
        self.vision.clear()

    @property
    def states(self) -> list[RequestState]:
        """Requests that compute or wait for their turn."""
        return list(self._states.values())

    @property
    def waiting(self) -> int:
        """Prepared requests that wait for their turn."""
        return len(self._scheduler.waiting)

    def stats(self) -> Stats:
        """Figures of this moment."""
        (used, count), (local_used, local_count) = self.blocks.usage()
        return Stats(
            running=len(self._scheduler.running),
            waiting=self.waiting,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            preemptions=self._scheduler.preemptions,
            views_encoded=self._encoder.encoded,
            views_reused=self._encoder.reused,
            vision_cache_bytes=self.vision.bytes,
            kv_blocks_used=(used, local_used),
            kv_blocks=(count, local_count),
            block_size=self.options.block_size,
        )

    @property
    def _views_held(self) -> int:
        """Encoded views that the vision cache has room for."""
        return self.vision.max_bytes // self.decoder.view_bytes if self.decoder.view_bytes else 0

    def _refusal(self, state: RequestState, sequence: Tokens) -> SettingError | None:
        """Why a request can never run here."""
        what = f"the prompt has {sequence.prompt_tokens} tokens ({state.views} views)"
        if sequence.prompt_tokens >= self.decoder.max_positions:
            return SettingError(f"{what}; the model's context ends at {self.decoder.max_positions}")
        if state.sights and not self._views_held:
            least = ceil(self.decoder.view_bytes / 1e4) / 1e5
            return SettingError(
                f"--vision-cache-gb {self.options.vision_cache_gb:g} does not hold one encoded view:"
                f" raise it to at least {least:g} GB, or leave it out"
            )
        chunk = self._scheduler.longest_chunk(sequence)
        if not self.blocks.fits(sequence.limit, chunk):
            return SettingError(
                f"{what} and asks for {sequence.limit - sequence.prompt_tokens} more; the KV cache holds"
                f" {self.blocks.longest(chunk)} tokens of one request: raise --kv-cache-gb, or lower --max-new-tokens"
            )
        return None

    def _launch(self, step: Step) -> InFlightPass:
        try:
            seeing = self._see(step)
            pending = None if self._inflight is None else self._inflight.pending
            done = self._executor.run(step, self.vision.features, self._places(step), pending)
        finally:
            self._encoder.release()
        sampled = [chunk.sequence for chunk in step.chunks if chunk.samples]
        draws = self._sampler.launch(done.logits, [self._row(tokens) for tokens in sampled])
        return InFlightPass(step, sampled, done, draws, seeing)

    def _see(self, step: Step) -> Seeing | None:
        """Have the features of every view whose block this step computes; tells if any had to be encoded."""
        wanted, seeing = [], []
        for chunk in step.chunks:
            state = self._states[chunk.sequence]
            state.runs()
            if spans := chunk.sequence.layout.within(chunk.start, chunk.end):
                seeing.append(state)
                wanted += [(span.key, state, state.sights[span.key]) for span in spans]
        if not wanted:
            return None
        start = Mark.set(self.loaded.device)
        encoded = self._encoder.encode([(key, partial(self._pixels, state, sight)) for key, state, sight in wanted])
        for _, _, sight in wanted:
            sight.pixels = None
        if not encoded:
            return None
        if self.loaded.device.type != "cuda":
            synchronize(self.loaded.device)
        return Seeing(seeing, start, Mark.set(self.loaded.device))

    def _pixels(self, state: RequestState, sight: Sight) -> torch.Tensor:
        try:
            return self.preparer.see(sight)
        except ImageError as error:
            raise _LostImageError(state, error) from error

    def _places(self, step: Step) -> dict[Tokens, Sequence[int]]:
        """Positions of this step whose hidden states somebody wants."""
        found = {}
        for chunk in step.chunks:
            watched = self._states[chunk.sequence].watched if chunk.sequence in self._states else None
            if watched is not None:
                found[chunk.sequence] = [at for at in watched.forced_tokens.places if chunk.start <= at < chunk.end]
        return {tokens: places for tokens, places in found.items() if places}

    def _settle(self, inflight: InFlightPass, chosen: Sequence[Chosen]) -> dict[Tokens, Chosen]:
        """The tokens of a pass that is over, of the sequences that are still there."""
        for tokens, places in self._places(inflight.step).items():
            watched = self._states[tokens].watched
            if watched is not None:
                watched.places |= zip(places, inflight.done.hidden[tokens], strict=True)
        settled = {}
        for row, tokens in enumerate(inflight.sampled):
            if tokens not in self._states:
                continue
            settled[tokens] = chosen[row]
            watched = self._states[tokens].watched
            if watched is not None:
                watched.answer.append(inflight.done.logits[row].float().cpu())
                if (forced := watched.next(len(tokens.outputs))) is not None:
                    settled[tokens] = Chosen(forced, None)
            tokens.settle(settled[tokens].token)
        return settled

    def _row(self, tokens: Tokens) -> SamplingRow:
        state = self._states[tokens]
        sampling = state.request.sampling if state.watched is None else Sampling()
        return SamplingRow(sampling, state.seed, len(tokens.ids) - tokens.prompt_tokens, tokens.ids)

    def _hand_out(self, chosen: Mapping[Tokens, Chosen], at: float) -> None:
        """Tell requests their new tokens, and end those whose token was the last."""
        self._output_tokens += len(chosen)
        for tokens, each in chosen.items():
            state = self._states[tokens]
            if (reason := state.take(each, at, self.loaded.eos_ids, full=tokens.full)) is not None:
                self.end(state, reason)

    def _fail(self, step: Step, error: Exception) -> None:
        """End the requests that came into this step with more than one token, or all if there are none.

        Those that decode have lost nothing: their next step computes the same positions again.
        """
        if is_out_of_memory(error):
            release_memory()
        came = [chunk.sequence for chunk in step.chunks if not chunk.sequence.decodes]
        for tokens in came or [chunk.sequence for chunk in step.chunks]:
            self.end(self._states[tokens], "error", _explained(error))

    def _count(self, step: Step) -> None:
        self._steps += 1
        self._prompt_tokens += sum(chunk.end - chunk.start for chunk in step.chunks if not chunk.sequence.decodes)


class _LostImageError(Exception):
    """A request's image had to be read again, and could not."""

    def __init__(self, state: RequestState, reason: ImageError) -> None:
        super().__init__(str(reason))
        self.state, self.reason = state, reason


def _explained(error: Exception) -> PanscanError:
    if isinstance(error, PanscanError):
        return error
    text = " ".join(str(error).split())[:300]
    if is_out_of_memory(error):
        mend = "lower --prefill-chunk-size, --vision-batch-size, --max-num-seqs or --kv-cache-gb"
        return UnsupportedError(f"out of memory in the engine's pass: {mend} ({text})")
    return PanscanError(f"the engine's pass failed: {type(error).__name__}: {text}")


FORKED = "the engine was made in another process: create the Engine after the fork, or start the process with 'spawn'"
_THREADS = 4  # that decode and resize; Pillow lets go of the interpreter while it does
Answer = TypeVar("Answer")


class Worker:
    """One thread that owns a loop. Everything reaches it as a message; only its thread touches the loop.

    Args:
        build: makes the loop, in the thread that turns it: PyTorch keeps some of what a start warms up per thread.
        ahead: requests at most that are prepared, or being prepared, and wait for their turn. What their images take is
            bounded by ``--image-memory-gb``.

    Raises: what ``build`` does.
    """

    def __init__(self, build: Callable[[], Loop], ahead: int) -> None:
        self._ahead = ahead
        self._messages: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._accepted: deque[RequestState] = deque()
        self._preparing: set[RequestState] = set()
        self._broken: EngineError | None = None
        self._lock = threading.Lock()
        self._closed = self._closing = False
        self._process = os.getpid()
        self._pool = DaemonThreads(_THREADS, "panscan-prepare")
        built: Future[None] = Future()
        self._thread = threading.Thread(target=self._live, args=(build, built), name="panscan-engine", daemon=True)
        self._thread.start()
        try:
            built.result()
        except BaseException:  # also an impatient user's: the thread ends as soon as it can
            self._closed = True
            self._messages.put(self._close)
            self._pool.shutdown()
            raise

    def accept(self, state: RequestState) -> None:
        """Take a request. It always ends with a result."""
        self._send(lambda: self._accept(state))

    def cancel(self, state: RequestState) -> None:
        """End a request with the tokens it has; nothing happens if it has ended."""
        self._send(lambda: self._end(state, "cancelled"))

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """What ``question`` gives, called between two steps."""
        answer: Future[Answer] = Future()

        def put() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:  # the asker's to handle, whatever it is; the loop goes on
                answer.set_exception(error)

        self._send(put)
        return answer.result()

    def check_process(self) -> None:
        """Refuse a forked child, which has a copy of everything but the engine's thread.

        Raises:
            EngineError: this process did not make the engine.
        """
        if os.getpid() != self._process:
            raise EngineError(FORKED)

    def close(self) -> None:
        """Cancel all requests and end the thread. No further request is accepted.

        In a forked child nothing happens: locks that a thread of the parent held are never released there.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._messages.put(self._close)
        if threading.current_thread() is not self._thread:  # which may be the one that collects garbage
            self._thread.join()
        self._pool.shutdown()

    def _send(self, message: Callable[[], None]) -> None:
        self.check_process()
        with self._lock:  # so that nothing comes behind the last message, and waits for ever
            if self._closed:
                raise EngineError("the engine is closed")
            self._messages.put(message)

    def _live(self, build: Callable[[], Loop], built: Future[None]) -> None:
        try:
            self.loop = build()
        except BaseException as error:  # the maker's to handle, whatever it is
            built.set_exception(error)
            return
        built.set_result(None)
        self._turn()

    def _turn(self) -> None:
        with torch.no_grad():
            while not self._closing:
                try:
                    self._prepare_ahead()
                    if self._broken is not None or not self.loop.step():
                        self._messages.get()()
                    while not self._messages.empty():
                        self._messages.get()()
                except BaseException as error:  # a bug, or a library's panic: whoever waits must hear of it
                    self._break(error)

    def _accept(self, state: RequestState) -> None:
        if self._broken is not None:
            state.end("error", self._broken)
        else:
            self._accepted.append(state)

    def _prepare_ahead(self) -> None:
        while self._accepted and len(self._preparing) + self.loop.waiting < self._ahead:
            state = self._accepted.popleft()
            self._preparing.add(state)
            self._pool.submit(partial(self._prepare, state))

    def _prepare(self, state: RequestState) -> None:
        """In a thread of the pool."""
        error: PanscanError | None = None
        try:
            if not state.ended:
                self.loop.preparer.prepare(state)
        except PanscanError as known:
            error = known
        except BaseException as unknown:  # whatever a file makes a decoder raise, a panic too, is its request's failure
            text = " ".join(str(unknown).split())[:300]
            error = InputError(f"request {state.request.id!r}: {type(unknown).__name__}: {text}")
        self._messages.put(lambda: self._prepared(state, error))

    def _prepared(self, state: RequestState, error: PanscanError | None) -> None:
        self._preparing.discard(state)
        if state.ended:  # cancelled meanwhile
            state.drop_pixels()
            return
        if error is not None:
            state.end("error", error)
        else:
            self.loop.add(state)

    def _end(self, state: RequestState, reason: FinishReason, error: PanscanError | None = None) -> None:
        if state.ended:
            return
        if state in self._accepted:
            self._accepted.remove(state)
        self.loop.end(state, reason, error)

    def _break(self, error: BaseException) -> None:
        """End all requests and accept no others: after a bug the bookkeeping cannot be trusted."""
        self._broken = EngineError(f"the engine stopped: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        for state in self._left():
            if not state.ended:
                state.end("error", self._broken)
        self._accepted.clear()

    def _close(self) -> None:
        self._closing = True
        for state in self._left():
            self._end(state, "cancelled")
        self.loop.preparer.memory.close()
        self.loop.close()

    def _left(self) -> list[RequestState]:
        return [*self.loop.states, *self._preparing, *self._accepted]


@dataclass(frozen=True, slots=True)
class Stats:
    """What an engine holds now, and what it has done since it was made.

    Args:
        running: requests that compute.
        waiting: prepared requests that wait for their turn.
        steps: passes through the model.
        prompt_tokens: computed in prefill; those of a preempted request as often as they were computed.
        cached_tokens: of prompts, taken over from requests before.
        output_tokens: written.
        preemptions: times that a request gave its blocks back, to be computed again.
        views_encoded: views that went through the vision tower.
        views_reused: views that were needed and did not have to.
        vision_cache_bytes: of encoded views that are kept.
        kv_blocks_used: of global and of local layers; those that only wait to be reused are not used.
        kv_blocks: of global and of local layers.
        block_size: tokens of a block.
    """

    running: int
    waiting: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    views_encoded: int
    views_reused: int
    vision_cache_bytes: int
    kv_blocks_used: tuple[int, int]
    kv_blocks: tuple[int, int]
    block_size: int
