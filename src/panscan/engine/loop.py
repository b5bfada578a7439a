"""The engine's loop: schedule a step, launch it as a pass, deliver the previous pass's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
    now,
)
from panscan.core.sampling import REST_OF_CONTEXT, Sampling
from panscan.engine.options import EngineOptions
from panscan.engine.passes import PassExecutor, PassResult, WaitForPass, pass_error
from panscan.engine.prepare import Preparer
from panscan.engine.request_state import ObservationState, RequestState
from panscan.engine.scheduling.batch import (
    NO_ROWS,
    Chunk,
    FlatBatch,
    SampledToken,
    SamplingRow,
    Step,
    ViewToEncode,
    flatten,
)
from panscan.engine.scheduling.batch import Sequence as Tokens
from panscan.engine.scheduling.kv_blocks import KVBlocks
from panscan.engine.scheduling.pacing import Pacer, PassSize, PrefillLimit
from panscan.engine.scheduling.scheduler import Scheduler
from panscan.engine.structured.grammar import fill_masks
from panscan.engine.vision import VisionCache
from panscan.model.checkpoint import Loaded
from panscan.model.machine import is_out_of_memory, release_memory
from panscan.model.phases import host_work, phase


@dataclass(frozen=True, slots=True)
class _PassInFlight:
    """A launched pass.

    Args:
        step: the chunks that it computes.
        sampled: sequences whose next token it samples, in the order of their rows.
        observed_rows: observations and position of each observed row, in the order of the rows.
        scored: request, position and id of the prompt token that each scored row predicts, in the order of the rows.
        observed: sequences among ``sampled`` whose logits are observed, in order.
        image_requests: requests with image spans in this pass; empty if the pass encodes no view.
        size: numbers of rows and views.
        wait: waits for its result.
    """

    step: Step
    sampled: list[Tokens]
    observed_rows: list[tuple[ObservationState, int]]
    scored: list[tuple[RequestState, int, int]]
    observed: list[Tokens]
    image_requests: list[RequestState]
    size: PassSize
    wait: WaitForPass


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
        self._scheduler = Scheduler(
            self.blocks,
            max_num_seqs=options.max_num_seqs,
            prefill_chunk_size=options.prefill_chunk_size,
            max_views=max(1, held),
        )
        target = options.tpot_target_ms
        self._pacer = None if target is None else Pacer(target / 1e3)
        self.preparer = Preparer(loaded, options, self.vision.holds, runner.pixels, facts.pixel_bytes)
        self._overlap = facts.overlaps if options.overlap is None else options.overlap
        self._inflight: _PassInFlight | None = None
        self._states: dict[Tokens, RequestState] = {}
        self._steps = self._prompt_tokens = self._cached_tokens = self._output_tokens = self._forced_tokens = 0

    def step(self) -> bool:
        """Launch a pass, then deliver the tokens of the previous one; return False if there is nothing to do.

        A GPU therefore finds its next pass queued when it finishes one. The end of a request is noticed one pass late,
        and its extra row is discarded. A pass that fails ends its requests.
        """
        with host_work("engine: schedule"):
            step = self._scheduler.schedule(self._prefill_limit())
        for preempted in self._scheduler.preempted:
            self._states[preempted].on_preempted()
        if step is None:
            return self.finish_pass()
        self._compute(step)
        return True

    def _compute(self, step: Step) -> None:
        """Launch a step, and deliver the tokens of the previous one; only the latter if it has no chunks."""
        if not step:  # its images were lost
            self.finish_pass()
            return
        try:
            with host_work("engine: launch"):
                inflight, late = self._launch(step)
        except _LostImageError as lost:  # only this request fails
            self.end(lost.state, "error", lost.reason)
            self._compute(tuple(chunk for chunk in step if chunk.sequence is not lost.state.sequence))
            return
        except Exception as error:  # a failed pass fails its requests, not the engine
            self._fail(step, error)
            # Before the next schedule: a preempted request may wait for a token of the pass in flight.
            self.finish_pass()
            return
        self._steps += 1
        self._prompt_tokens += sum(chunk.end - chunk.start for chunk in step if not chunk.answers)
        self.finish_pass()
        try:
            if late:
                with host_work("engine: sample"):
                    self.runner.sample(self._late_rows(inflight))
        except Exception as error:
            self._fail(step, error)
            return
        with host_work("engine: schedule"):
            self._scheduler.advance(step)
        self._inflight = inflight
        if not self._overlap or inflight.observed:  # forced tokens of observed requests are on the host only
            self.finish_pass()

    def finish_pass(self) -> bool:
        """Wait for the pass in flight and deliver its tokens; return False if there is none."""
        inflight, self._inflight = self._inflight, None
        if inflight is None:
            return False
        try:
            with host_work("engine: wait for the device"):
                result = inflight.wait()
        except Exception as error:  # devices report failures of a pass at the next synchronisation
            self._fail_all(inflight.step, error)
            return True
        if self._pacer is not None:
            start, end = result.vision or (0.0, 0.0)
            self._pacer.pass_finished(inflight.size, result.finished_at, end - start)
        if result.vision is not None:
            for state in inflight.image_requests:
                if not state.ended:
                    state.on_views_encoded(*result.vision)
        with host_work("engine: deliver tokens"):
            self._deliver(inflight, result)
        return True

    def add(self, state: RequestState) -> None:
        """Queue a prepared request, or end it with an error if it can never run."""
        assert state.sequence is not None  # it is prepared
        try:
            self._limit_length(state, state.sequence)
        except SettingError as error:
            state.end("error", error)
            return
        self._states[state.sequence] = state
        self._scheduler.add(state.sequence)

    def _limit_length(self, state: RequestState, sequence: Tokens) -> None:
        """Limit a request to the context; one for the rest of the context, to the KV cache too.

        Raises:
            SettingError: it does not fit, or is empty.
        """
        chunk, context = self._scheduler.longest_chunk(sequence), self.facts.max_positions
        held = self.blocks.longest(chunk, context)
        sequence.limit = min(sequence.limit, held if state.max_new_tokens >= REST_OF_CONTEXT else context)
        if not sequence.prompt_tokens:
            raise SettingError("prompt: an empty text without special tokens has nothing to continue")
        what = f"the prompt has {sequence.prompt_tokens} tokens ({state.result.views} views)"
        if state.request_views and not self.vision.count:
            least = ceil(self.facts.view_bytes / 1e4) / 1e5
            raise SettingError(
                f"--vision-cache-gb {self.options.vision_cache_gb:g} does not hold one encoded view:"
                f" raise it to at least {least:g} GB, or leave it out"
            )
        if sequence.prompt_tokens >= held:
            beyond = sequence.prompt_tokens >= context
            most = f"{context} tokens" if beyond else f"{held} tokens in this KV cache: raise --kv-cache-gb"
            raise ContextLengthError(f"{what}; this model's maximum context length is {most}", raw=state.request.raw)
        if not self.blocks.fits(sequence.limit, chunk):
            raise SettingError(
                f"{what} and asks for {sequence.limit - sequence.prompt_tokens} more; the KV cache holds"
                f" {held} tokens of one request: raise --kv-cache-gb, or lower --max-new-tokens"
            )

    def end(self, state: RequestState, reason: FinishReason, error: PanscanError | None = None) -> None:
        """End a request now, queued or running, with the tokens it has."""
        if state.sequence is not None and state.sequence in self._states:
            self._cached_tokens += state.sequence.cached or 0
            self._scheduler.remove(state.sequence)
            del self._states[state.sequence]
        state.end(reason, error)

    def close(self) -> None:
        """Wait for the pass in flight, which still uses its memory, and release the device."""
        with suppress(EngineError):  # the ranks were closed, and their pass with them
            self.finish_pass()
        self.runner.close()

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
        requests = ((tokens, each.stamps.accepted, each.stamps.tokens) for tokens, each in self._states.items())
        return self._pacer.limit(now(), inflight, requests)

    def _late_rows(self, inflight: _PassInFlight) -> tuple[SamplingRow, ...]:
        """Return the sampling rows of a pass, given all tokens before it; any row for tokens that are not needed."""
        needed = {chunk.sequence for chunk in inflight.step if chunk.samples}
        states = (self._states.get(tokens) if tokens in needed else None for tokens in inflight.sampled)
        return tuple(SamplingRow(Sampling(), 0, 0) if state is None else state.sampling_row() for state in states)

    def _launch(self, step: Step) -> tuple[_PassInFlight, bool]:
        """Write the step into a flat batch and launch it; return whether its sampling depends on the pass in flight."""
        launched_at = now()
        slots, encode, requests = self._place_views(step)
        try:
            flat = flatten(step, block_size=self.options.block_size, window=self.facts.window or 1, slots=slots)
            sampled = [chunk.sequence for chunk in step if chunk.samples]
            rows = flat.offsets[1:][[chunk.samples for chunk in step]].astype(np.int64) - 1
            states = [self._states[tokens] for tokens in sampled]
            pending, sources = self._pending(sampled)
            late = any(states[index].needs_last_token for index in pending)
            observed = [index for index, state in enumerate(states) if state.observation is not None]
            observed_rows, scored = self._watched_rows(step, flat)
            batch = replace(
                flat,
                encode=tuple(encode.values()),
                sampled=rows,
                sampling=None if late else tuple(state.sampling_row() for state in states),
                pending_rows=rows[pending],
                pending_sources=sources,
                observed_rows=np.array(list(observed_rows), np.int64),
                observed_samples=np.array(observed, np.int64),
                scored_rows=np.array(list(scored), np.int64),
                scored_ids=np.array([token for *_, token in scored.values()], np.int64),
                scored_top=max(
                    (state.request.sampling.prompt_logprobs or 0 for state, *_ in scored.values()), default=0
                ),
            )
            with phase("decode" if all(chunk.answers for chunk in step) else "prefill"):
                wait = self.runner.execute(batch)
        except BaseException:
            self.vision.forget(encode)
            self.runner.pixels.forget(view.pixels for view in encode.values())
            raise
        finally:
            self.vision.release()
        inflight = _PassInFlight(
            step,
            sampled,
            [*observed_rows.values()],
            [*scored.values()],
            [sampled[index] for index in observed],
            requests if encode else [],
            PassSize.of(step, len(encode), launched_at),
            wait,
        )
        return inflight, late

    def _place_views(self, step: Step) -> tuple[dict[bytes, int], dict[bytes, ViewToEncode], list[RequestState]]:
        """Assign a vision cache slot to every view whose image span the step computes.

        Returns:
            Slots by view key, views to encode by key, and the requests that the views belong to.
        """
        wanted: list[tuple[bytes, RequestState]] = []
        for chunk in step:
            state = self._states[chunk.sequence]
            state.on_scheduled()
            wanted += [(span.key, state) for span in chunk.sequence.layout.within(chunk.start, chunk.end)]
        encode: dict[bytes, ViewToEncode] = {}
        try:
            slots = {key: slot for key, _ in wanted if (slot := self.vision.pin(key)) is not None}
            # The last request of a key stays: sorted, so that it is one whose pixels are available, if there is one.
            missing = dict(sorted(wanted, key=lambda each: each[1].request_views[each[0]].pixels is not None))
            for key, state in missing.items():
                if key not in slots:
                    try:
                        handle = self.preparer.place(state.request_views[key])
                    except ImageError as error:
                        raise _LostImageError(state, error) from error
                    slots[key] = self.vision.place(key)
                    encode[key] = ViewToEncode(slots[key], handle)
        except BaseException:
            self.vision.forget(encode)
            self.vision.release()
            raise
        for key, state in wanted:
            state.drop_view(key, taken=key in encode and state is missing[key])
        self.vision.encoded += len(encode)
        self.vision.reused += len(wanted) - len(encode)
        return slots, encode, list(dict.fromkeys(state for _, state in wanted))

    def _watched_rows(
        self, step: Step, flat: FlatBatch
    ) -> tuple[dict[int, tuple[ObservationState, int]], dict[int, tuple[RequestState, int, int]]]:
        """Return observations and position of each observed row, and request, position and id of the prompt token that
        each scored row predicts, by row."""
        observed, scored = {}, {}
        for chunk, offset in zip(step, flat.offsets.tolist(), strict=False):
            state, row = self._states[chunk.sequence], offset - chunk.start  # of position 0
            if (observation := state.observation) is not None:
                for position in observation.forced_tokens.positions:
                    if chunk.start <= position < chunk.end:
                        observed[row + position] = observation, position
            elif not chunk.answers and state.computes_prompt:
                for position in range(chunk.start + 1, min(chunk.end + 1, chunk.sequence.prompt_tokens)):
                    scored[row + position - 1] = state, position, chunk.sequence.ids[position]
        return observed, scored

    def _pending(self, sampled: Sequence[Tokens]) -> tuple[list[int], NDArray[np.int64]]:
        """Return the indices of sampled sequences that wait for a token of the pass in flight, and its index there."""
        waiting = [at for at, tokens in enumerate(sampled) if tokens.pending]
        if not waiting or self._inflight is None:
            return [], NO_ROWS
        indices = {tokens: at for at, tokens in enumerate(self._inflight.sampled)}
        return waiting, np.array([indices[sampled[at]] for at in waiting], np.int64)

    def _deliver(self, inflight: _PassInFlight, result: PassResult) -> None:
        """Deliver the new tokens of requests that have not ended, and end those that are complete."""
        if result.hidden is not None and result.logits is not None:
            rows = zip(inflight.observed_rows, result.hidden, result.logits, strict=True)
            for (observations, position), hidden, logits in rows:
                observations.positions[position] = hidden, logits
        for (scored, position, _), score in zip(inflight.scored, result.scores, strict=True):
            if (scores := scored.result.prompt_logprobs) is not None and not scored.ended:
                scores[position] = replace(score, top=score.top[: scored.request.sampling.prompt_logprobs])
        answers = {} if result.answers is None else dict(zip(inflight.observed, result.answers, strict=True))
        constrained: list[RequestState] = []
        for tokens, sample in zip(inflight.sampled, result.chosen, strict=True):
            if (state := self._states.get(tokens)) is None or not tokens.pending:  # ended, or forced tokens came
                continue
            chosen = sample
            if (observation := state.observation) is not None:
                observation.answer.append(answers[tokens])
                if observation.forced_tokens.tokens is not None:
                    chosen = SampledToken(observation.forced_tokens.tokens[len(tokens.outputs)], None)
            tokens.settle(chosen.token)
            self._append(state, chosen, result.finished_at)
            if state.constraint is not None and not state.ended:
                constrained.append(state)
        if constrained:
            self._force(constrained, result.finished_at)

    def _append(self, state: RequestState, chosen: SampledToken, finished_at: float) -> None:
        """Deliver the newest token of a request, and end the request if it is complete or fails."""
        self._output_tokens += 1
        assert state.sequence is not None  # it runs
        try:
            reason = state.append_token(chosen, finished_at, self.loaded.eos_ids, full=state.sequence.full)
        except BaseException as error:  # of its schema, its callback or a panic in a library: it fails alone
            self.end(state, "error", state.error_of(error))
        else:
            if reason is not None:
                self.end(state, reason)

    def _force(self, states: list[RequestState], finished_at: float) -> None:
        """Append the tokens that grammars force after new ones, and compute what may follow.

        Forced tokens wait for no pass: the next one computes them in one chunk.

        Args:
            states: requests with a constraint that got a token.
            finished_at: time of that token.
        """
        if self.options.force_tokens:
            for state in states:
                for token in state.forced():
                    if state.ended or state.constraint is None:
                        break
                    state.force(token)
                    self._forced_tokens += 1
                    self._append(state, SampledToken(token, None), finished_at)
        going = [(state, state.constraint) for state in states if state.constraint is not None and not state.ended]
        fill_masks([constraint for _, constraint in going])
        for state, constraint in going:
            try:
                _ = constraint.allowed
            except SettingError as error:
                self.end(state, "error", error)

    def _fail(self, step: Step, error: Exception) -> None:
        """End the requests with prefill in a failed step, or all of its requests if there are none.

        Decoding requests have lost nothing: their next step computes the same positions again.
        """
        if is_out_of_memory(error):
            release_memory()
        self._fail_all([chunk for chunk in step if not chunk.answers] or step, error)

    def _fail_all(self, chunks: Sequence[Chunk], error: Exception) -> None:
        """End the requests of chunks in a failed pass."""
        failure = pass_error(error)
        for chunk in chunks:
            if chunk.sequence in self._states:
                self.end(self._states[chunk.sequence], "error", failure)


class _LostImageError(Exception):
    """A request's image could not be read again."""

    def __init__(self, state: RequestState, reason: ImageError) -> None:
        super().__init__(str(reason))
        self.state, self.reason = state, reason
