"""The engine's loop: schedule a step, launch it as a pass, deliver the previous pass's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import ceil

import numpy as np
from numpy.typing import NDArray

from panscan.core import (
    ContextLengthError,
    EngineError,
    FinishReason,
    ImageError,
    PanscanError,
    SettingError,
    Stats,
    TokenLogprobs,
    now,
)
from panscan.core.sampling import REST_OF_CONTEXT, Sampling
from panscan.engine.options import EngineOptions
from panscan.engine.passes import PassExecutor, PassResult, WaitForPass, pass_error
from panscan.engine.prepare import Preparer
from panscan.engine.request_state import ObservationState, RequestState, RequestView
from panscan.engine.scheduling.batch import (
    NO_ROWS,
    NO_TOKEN,
    Chunk,
    FlatBatch,
    SamplingRow,
    Step,
    ViewToEncode,
    flatten,
)
from panscan.engine.scheduling.kv_blocks import KVBlocks
from panscan.engine.scheduling.pacing import Pacer, PassSize, PrefillLimit
from panscan.engine.scheduling.scheduler import Scheduler
from panscan.engine.structured.grammar import fill_masks
from panscan.engine.vision import VisionCache
from panscan.model.checkpoint import Loaded
from panscan.model.machine import is_out_of_memory, release_memory
from panscan.model.phases import host_work, phase

_ENDED = SamplingRow(Sampling(), 0, 0)  # of a request that ended, or needs no token; a new one takes 7 us
_NO_NUMBERS = (
    "the model's scores of the next token are no finite numbers (NaN or infinity): its weights are"
    " damaged, or it overflows, as Gemma 3 does with --dtype fp16: use bf16"
)


@dataclass(slots=True, kw_only=True)
class _Pass:
    """A pass that is about to be launched, or in flight.

    Args:
        batch: what the device computes.
        step: the chunks of its rows.
        sampled: those among them whose next token it samples.
        observed: observations and position of each observed row, in the order of the rows.
        scored: request and position of the prompt token that each scored row predicts, in the order of the rows.
        late: whether its sampling still waits for tokens of the pass before it, on the host.
        size: numbers of rows and views; None without a pacer.
        wait: waits for its result; set when it is launched.
    """

    batch: FlatBatch
    step: Step[RequestState]
    sampled: list[Chunk[RequestState]]
    observed: list[tuple[ObservationState, int]]
    scored: list[tuple[RequestState, int]]
    late: bool
    size: PassSize | None
    wait: WaitForPass = field(init=False)


class Loop:
    """Turns prepared requests into token events. Each :meth:`step` launches one pass.

    Args:
        loaded: the model; on the meta device if the runner has the weights.
        options: sizes of passes and caches.
        runner: executor of passes.
    """

    def __init__(self, loaded: Loaded, options: EngineOptions, runner: PassExecutor) -> None:
        self.loaded, self.options, self.runner = loaded, options, runner
        self.facts = facts = runner.facts
        self.blocks = KVBlocks(
            facts.kv_shape,
            facts.slabs,
            block_size=options.block_size,
            window=facts.window,
            prefix_caching=options.prefix_caching,
        )
        held = round(options.vision_cache_gb * 1e9) // facts.view_bytes if facts.view_bytes else 0
        self.vision = VisionCache(held)
        self._scheduler = Scheduler[RequestState](
            self.blocks,
            max_num_seqs=options.max_num_seqs,
            prefill_chunk_size=options.prefill_chunk_size,
            max_views=max(1, held),
        )
        target = options.tpot_target_ms
        self._pacer = None if target is None else Pacer(target / 1e3)
        self.preparer = Preparer(loaded, options, self.vision.holds, runner.pixels, facts.pixel_bytes)
        self._overlap = facts.overlaps if options.overlap is None else options.overlap
        self._inflight: _Pass | None = None
        self._steps = self._prompt_tokens = self._cached_tokens = self._output_tokens = self._forced_tokens = 0

    def step(self) -> bool:
        """Launch a pass, then deliver the tokens of the previous one; return False if there is nothing to do.

        A GPU therefore finds its next pass queued when it finishes one. The end of a request is noticed one pass late,
        and its extra row is discarded. A pass that fails ends its requests.
        """
        with host_work("engine: schedule"):
            step = self._scheduler.schedule(self._prefill_limit())
        for preempted in self._scheduler.preempted:
            preempted.on_preempted()
        if step is None:
            return self.finish_pass()
        self._compute(step)
        return True

    def _compute(self, step: Step[RequestState]) -> None:
        """Launch a step, and deliver the tokens of the previous one."""
        inflight = None
        try:
            with host_work("engine: launch"):
                inflight = self._launch(step)
        except Exception as error:  # a failed pass fails its requests, not the engine
            # Decoding requests have lost nothing: their next step computes the same positions again.
            self._fail([chunk for chunk in step if not chunk.answers] or step, error)
        # Before the next schedule: a preempted request may wait for a token of the pass in flight.
        self.finish_pass()
        if inflight is None:
            return
        self._steps += 1
        self._prompt_tokens += sum(chunk.end - chunk.start for chunk in inflight.step if not chunk.answers)
        with host_work("engine: schedule"):
            self._scheduler.advance(inflight.step)
        self._inflight = inflight
        if not self._overlap or len(inflight.batch.observed_samples):  # whose tokens are forced, on the host
            self.finish_pass()

    def _sample_late(self) -> None:
        """Choose the tokens of the pass in flight, if they have waited for those before them.

        It happens as late as possible, because masks are computed meanwhile. If it fails, the pass does.
        """
        inflight = self._inflight
        if inflight is None or not inflight.late:
            return
        inflight.late = False
        try:
            with host_work("engine: sample"):
                self.runner.sample(self._sampling_rows(inflight.sampled, late=True))
        except Exception as error:
            self._inflight = None
            self._fail(inflight.step, error)

    def _sampling_rows(self, sampled: Sequence[Chunk[RequestState]], *, late: bool = False) -> tuple[SamplingRow, ...]:
        """Return the sampling rows of chunks, given all tokens before them. A request ends here if its schema allows no
        further token.

        Args:
            sampled: the chunks.
            late: whether their pass was launched before, so that forced tokens may have come instead of the new one.
        """
        rows = []
        for chunk in sampled:
            state, row = chunk.sequence, _ENDED
            if not state.ended and (state.pending or not late):
                try:
                    row = state.sampling_row(chunk.end)
                except BaseException as error:  # a panic in a library too: the request fails alone
                    self.end(state, "error", state.error_of(error))
            rows.append(row)
        return tuple(rows)

    def finish_pass(self) -> bool:
        """Wait for the pass in flight and deliver its tokens; return False if there is none."""
        launched = self._inflight is not None
        self._sample_late()
        inflight, self._inflight = self._inflight, None
        if inflight is None:
            return launched  # its requests have ended, so that others may run
        try:
            with host_work("engine: wait for the device"):
                result = inflight.wait()
        except Exception as error:  # devices report failures of a pass at the next synchronisation
            self._fail(inflight.step, error)
            return True
        if self._pacer is not None and inflight.size is not None:
            start, end = result.vision or (0.0, 0.0)
            self._pacer.pass_finished(inflight.size, result.finished_at, end - start)
        if result.vision is not None:
            for chunk in inflight.step:
                if not chunk.sequence.ended and chunk.sequence.layout.within(chunk.start, chunk.end):
                    chunk.sequence.on_views_encoded(*result.vision)
        with host_work("engine: deliver tokens"):
            self._deliver(inflight, result)
        return True

    def add(self, state: RequestState) -> None:
        """Queue a prepared request, or end it with an error if it can never run."""
        try:
            self._limit_length(state)
        except SettingError as error:
            state.end("error", error)
            return
        self._scheduler.add(state)

    def _limit_length(self, state: RequestState) -> None:
        """Limit a request to the context; one for the rest of the context, to the KV cache too.

        Raises:
            SettingError: it does not fit, or is empty.
        """
        chunk, context = self._scheduler.longest_chunk(state), self.facts.max_positions
        held = self.blocks.longest(chunk, context)
        state.limit = min(state.limit, held if state.max_new_tokens >= REST_OF_CONTEXT else context)
        if not state.prompt_tokens:
            raise SettingError("prompt: an empty text without special tokens has nothing to continue")
        what = f"the prompt has {state.prompt_tokens} tokens ({state.result.views} views)"
        if state.request_views and not self.vision.count:
            least = ceil(self.facts.view_bytes / 1e4) / 1e5
            raise SettingError(
                f"--vision-cache-gb {self.options.vision_cache_gb:g} does not hold one encoded view:"
                f" raise it to at least {least:g} GB, or leave it out"
            )
        if state.prompt_tokens >= held:
            beyond = state.prompt_tokens >= context
            most = f"{context} tokens" if beyond else f"{held} tokens in this KV cache: raise --kv-cache-gb"
            raise ContextLengthError(f"{what}; this model's maximum context length is {most}", raw=state.request.raw)
        if not self.blocks.fits(state.limit, chunk):
            raise SettingError(
                f"{what} and asks for {state.limit - state.prompt_tokens} more; the KV cache holds"
                f" {held} tokens of one request: raise --kv-cache-gb, or lower --max-new-tokens"
            )

    def end(self, state: RequestState, reason: FinishReason, error: PanscanError | None = None) -> None:
        """End a request now, queued or running, with the tokens it has."""
        if not state.ended:
            self._cached_tokens += state.cached or 0
            self._scheduler.remove(state)
        state.end(reason, error)

    def close(self) -> None:
        """Wait for the pass in flight, which still uses its memory, and release the device."""
        with suppress(EngineError):  # the ranks were closed, and their pass with them
            self.finish_pass()
        self.runner.stop()

    def reset_caches(self) -> None:
        """Evict all unused prefixes and encoded views."""
        self.blocks.reset()
        self.vision.clear()

    @property
    def waiting(self) -> int:
        """Number of prepared requests in the queue."""
        return len(self._scheduler.waiting)

    @property
    def running(self) -> int:
        """Number of admitted requests."""
        return len(self._scheduler.running)

    def stats(self) -> Stats:
        """Return current statistics; of waiting requests, only prepared ones are known here."""
        return Stats(
            running=self.running,
            waiting=self.waiting,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            forced_tokens=self._forced_tokens,
            preemptions=self._scheduler.preemptions,
            views_encoded=self.vision.encoded,
            views_reused=self.vision.reused,
            vision_cache_bytes=len(self.vision) * self.facts.view_bytes,
            kv_slabs_used=self.blocks.pool.used,
            kv_slabs=self.blocks.pool.count,
        )

    def _prefill_limit(self) -> PrefillLimit | None:
        """Return the limit on the next pass's prefill; None without a target for the time per output token."""
        if self._pacer is None:
            return None
        inflight = None if self._inflight is None else self._inflight.size
        requests = (*self._scheduler.running, *self._scheduler.waiting)
        times = ((state, state.stamps.accepted, state.stamps.tokens) for state in requests)
        return self._pacer.limit(now(), inflight, times)

    def _launch(self, step: Step[RequestState]) -> _Pass | None:
        """Launch a step as a pass; return None if all of its requests have ended, because their images were lost."""
        encode: dict[bytes, ViewToEncode] = {}
        launched = None
        try:
            slots = self._place_views(step, encode)
            written = self._written(step, slots, encode)
            self._sample_late()
            if any(chunk.sequence.ended for chunk in written.step):
                written = self._written(step, slots, encode)
            if written.step:
                with phase("decode" if all(chunk.answers for chunk in written.step) else "prefill"):
                    written.wait = self.runner.execute(written.batch)
                launched = written
        finally:
            if launched is None:  # forget views that were placed, but are not encoded
                self.vision.forget(encode)
                self.runner.pixels.forget(view.pixels for view in encode.values())
        return launched

    def _written(
        self, step: Step[RequestState], slots: Mapping[bytes, int], encode: Mapping[bytes, ViewToEncode]
    ) -> _Pass:
        """Return the pass that computes the chunks whose requests have not ended. Their views have these slots."""
        launched_at = now()
        step = tuple(chunk for chunk in step if not chunk.sequence.ended)
        flat = flatten(step, block_size=self.options.block_size, window=self.facts.window or 1, slots=slots)
        samples = [index for index, chunk in enumerate(step) if chunk.samples]
        sampled = [step[index] for index in samples]
        rows = flat.offsets[1:][samples].astype(np.int64) - 1
        pending, sources = self._pending(sampled)
        late = any(sampled[index].sequence.needs_last_token for index in pending)
        watched = [at for at, chunk in enumerate(sampled) if chunk.sequence.observation is not None]
        observed, scored = _watched_rows(step, flat)
        batch = replace(
            flat,
            encode=tuple(encode.values()),
            sampled=rows,
            sampling=None if late else self._sampling_rows(sampled),
            pending_rows=rows[pending],
            pending_sources=sources,
            observed_rows=np.array([*observed], np.int64),
            observed_samples=np.array(watched, np.int64),
            scored_rows=np.array([*scored], np.int64),
            scored_ids=np.array([state.ids[position] for state, position in scored.values()], np.int64),
            scored_top=max((state.request.sampling.prompt_logprobs or 0 for state, _ in scored.values()), default=0),
        )
        return _Pass(
            batch=batch,
            step=step,
            sampled=sampled,
            observed=[*observed.values()],
            scored=[*scored.values()],
            late=late,
            size=None if self._pacer is None else PassSize.of(step, len(encode), launched_at),
        )

    def _place_views(self, step: Step[RequestState], encode: dict[bytes, ViewToEncode]) -> dict[bytes, int]:
        """Return a vision cache slot by key for every view whose image span the step computes.

        A request whose image must be read again, but cannot be, ends; the others are computed.

        Args:
            step: the step.
            encode: set to the views to encode, by key.
        """
        wanted: list[tuple[bytes, RequestState, RequestView]] = []
        for chunk in step:
            state = chunk.sequence
            state.on_scheduled()
            spans = state.layout.within(chunk.start, chunk.end)
            wanted += [(span.key, state, state.request_views[span.key]) for span in spans]
        slots = {key: slot for key, *_ in wanted if (slot := self.vision.use(key)) is not None}
        # Of the requests that show a view, the first whose pixels are available gives them.
        for key, state, view in sorted(wanted, key=lambda item: item[2].pixels is None):
            if key in slots or state.ended:
                continue
            try:
                handle = self.preparer.place(state, view)
            except ImageError as error:
                self.end(state, "error", error)
                continue
            slots[key] = self.vision.add(key)
            encode[key] = ViewToEncode(slots[key], handle)
            view.pixels = None  # the model runner consumes them
        for *_, view in wanted:
            view.drop()
        self.vision.encoded += len(encode)
        self.vision.reused += len(wanted) - len(encode)
        return slots

    def _pending(self, sampled: Sequence[Chunk[RequestState]]) -> tuple[list[int], NDArray[np.int64]]:
        """Return the indices of sampled chunks that wait for a token of the pass in flight, and its index there."""
        waiting = [at for at, chunk in enumerate(sampled) if chunk.sequence.pending]
        if not waiting or self._inflight is None:
            return [], NO_ROWS
        indices = {chunk.sequence: at for at, chunk in enumerate(self._inflight.sampled)}
        return waiting, np.array([indices[sampled[at].sequence] for at in waiting], np.int64)

    def _deliver(self, inflight: _Pass, result: PassResult) -> None:
        """Deliver the new tokens of requests that have not ended, and end those that are complete."""
        if result.logits is not None:
            for (observation, position), logits in zip(inflight.observed, result.logits, strict=True):
                observation.positions[position] = logits
        for (state, position), score in zip(inflight.scored, result.scores, strict=True):
            if (scores := state.result.prompt_logprobs) is not None and not state.ended:
                scores[position] = replace(score, top=score.top[: state.request.sampling.prompt_logprobs])
        answers = iter(() if result.answers is None else result.answers)
        arrived: list[tuple[RequestState, int, TokenLogprobs | None]] = []
        for row, (chunk, sample) in enumerate(zip(inflight.sampled, result.tokens, strict=True)):
            state, token = chunk.sequence, sample
            answer = None if state.observation is None else next(answers)
            if state.ended or not state.pending:  # forced tokens came
                continue
            if sample == NO_TOKEN:
                self.end(state, "error", PanscanError(_NO_NUMBERS))
                continue
            if state.observation is not None and answer is not None:
                token = state.observation.settle(answer, sample)
            state.settle(token)
            arrived.append((state, token, result.logprobs.get(row)))
        following = self._advance_grammars(arrived)
        for state, token, logprobs in arrived:
            self._append(state, token, result.finished_at, logprobs)
            self._append_forced(state, following.get(state, ()), result.finished_at)

    def _append(
        self, state: RequestState, token: int, finished_at: float, logprobs: TokenLogprobs | None = None
    ) -> None:
        """Deliver the newest token of a request, and end the request if it is complete or fails."""
        self._output_tokens += 1
        try:
            reason = state.deliver(token, logprobs, finished_at, self.loaded.eos_ids)
        except BaseException as error:  # of its schema, its callback or a panic in a library: it fails alone
            self.end(state, "error", state.error_of(error))
        else:
            if reason is not None:
                self.end(state, reason)

    def _advance_grammars(
        self, arrived: Sequence[tuple[RequestState, int, TokenLogprobs | None]]
    ) -> dict[RequestState, Sequence[int] | BaseException]:
        """Advance grammars by the newest tokens and those that they force; return these, or why a request cannot go on.

        It comes before the tokens are delivered, because threads compute meanwhile what may follow.
        """
        forced: dict[RequestState, Sequence[int] | BaseException] = {}
        constraints = []
        for state, token, _ in arrived:
            if state.constraint is None or state.ends_at(token, self.loaded.eos_ids):
                continue
            try:
                forced[state] = state.advance_grammar(token, force=self.options.force_tokens)
                constraints.append(state.constraint)
            except BaseException as error:  # a panic in a library too: the request fails alone
                forced[state] = error
        fill_masks(constraints)
        return forced

    def _append_forced(self, state: RequestState, forced: Sequence[int] | BaseException, finished_at: float) -> None:
        """Append the tokens that a grammar forces after a new one, or end the request with its grammar's error.

        Forced tokens wait for no pass: the next one computes them in one chunk.
        """
        if state.constraint is None:  # free text
            return
        if isinstance(forced, BaseException):
            self.end(state, "error", state.error_of(forced))
            return
        for token in forced:
            if state.ended:
                return
            state.force(token)
            self._forced_tokens += 1
            self._append(state, token, finished_at)

    def _fail(self, chunks: Sequence[Chunk[RequestState]], error: Exception) -> None:
        """End the requests of chunks in a failed pass."""
        if is_out_of_memory(error):
            release_memory()
        failure = pass_error(error)
        for chunk in chunks:
            self.end(chunk.sequence, "error", failure)


def _watched_rows(
    step: Step[RequestState], flat: FlatBatch
) -> tuple[dict[int, tuple[ObservationState, int]], dict[int, tuple[RequestState, int]]]:
    """Return observations and position of each observed row, and request and position of the prompt token that each
    scored row predicts, by row."""
    observed, scored = {}, {}
    for chunk, offset in zip(step, flat.offsets.tolist(), strict=False):
        state, row = chunk.sequence, offset - chunk.start  # of position 0
        if (observation := state.observation) is not None:
            for position in observation.forced_tokens.positions:
                if chunk.start <= position < chunk.end:
                    observed[row + position] = observation, position
        elif state.computes_prompt:
            for position in range(chunk.start + 1, min(chunk.end + 1, state.prompt_tokens)):
                scored[row + position - 1] = state, position
    return observed, scored
