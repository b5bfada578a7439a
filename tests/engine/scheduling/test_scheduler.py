"""The scheduler and its blocks after any history of requests, with tiny pools, against a record of what every slot of
every block holds."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.engine.drawn import IMAGES, PIECES, Piece, content, new_sequence, prompt, seen_until

from panscan.engine.scheduling.batch import Chunk, Sequence, Step
from panscan.engine.scheduling.kv_blocks import KVBlocks
from panscan.engine.scheduling.kv_sizes import KVShape
from panscan.engine.scheduling.pacing import PrefillLimit
from panscan.engine.scheduling.scheduler import Scheduler
from panscan.plan.mix import PageShare, WorkloadMix
from panscan.plan.simulate import EngineSizes, SimulatedEngine, SimulatedRequest, route_arrivals

LONGEST = max(IMAGES.values())
GLOBAL = KVShape(1, 1, 0)
LIMITS = (None, None, None, *(PrefillLimit(seconds, 1.0, 3.0) for seconds in (-1.0, 2.0, 7.0, 12.0)))


SETUPS = st.fixed_dictionaries(
    {
        "size": st.integers(1, 4),
        "window": st.none() | st.integers(2, 10),
        "layers": st.sampled_from([(1, 1), (1, 3), (2, 5), (3, 1), (0, 1)]),
        "chunk": st.integers(1, 20),
        "seats": st.integers(2, 6),
        "views": st.just(inf) | st.integers(1, 2),
        "tokens": st.integers(20, 45),
        "spare": st.sampled_from([0, 6, 36]) | st.integers(0, 40),
        "caching": st.sampled_from([True, True, True, False]),
        "overlap": st.booleans(),
        "worth": st.sampled_from([1, 5, 128]),
        "forced": st.integers(0, 4),
    }
)
OF_HISTORIES = ("size", "window", "chunk", "seats", "views", "caching", "overlap", "worth", "forced")


class History(RuleBasedStateMachine):
    @initialize(setup=SETUPS)
    def build(self, setup: dict[str, Any]) -> None:
        """A pool that holds a sequence of ``tokens`` and a few slabs more. ``overlap``: a step is scheduled before the
        tokens of the one before are known."""
        vars(self).update({name: setup[name] for name in OF_HISTORIES})
        layers, tokens, spare, chunk = (setup[name] for name in ("layers", "tokens", "spare", "chunk"))
        shape = KVShape(1, 1, 0) if self.window is None else KVShape(1, *layers)
        self.groups = [kind for kind in (0, 1) if shape[1 + kind]]

        def blocks(slabs: int) -> KVBlocks:
            sizes = {"block_size": self.size, "window": self.window, "worth_waiting": self.worth}
            return KVBlocks(shape, slabs, prefix_caching=self.caching, **sizes)

        self.blocks = blocks(blocks(1).needed(tokens, chunk) + spare)
        self.scheduler = Scheduler(self.blocks, max_num_seqs=self.seats, prefill_chunk_size=chunk, max_views=self.views)
        self.ids: dict[Sequence, list[int]] = {}  # of all that are not finished: what their tokens must be
        self.cached: dict[Sequence, int] = {}
        self.slots: dict[tuple[int, int, int], object] = {}  # group, block, offset: what was written there last
        self.preemptions = self.added = 0
        self.ending = False
        self.inflight: dict[Sequence, int] = {}  # tokens that are not known yet

    @rule(several=st.lists(st.tuples(PIECES, st.integers(1, 16), st.integers(0, 4).map(bool)), min_size=1, max_size=5))
    def add(self, several: list) -> None:
        for pieces, outputs, reuse in several:
            new = new_sequence(self.added, pieces, outputs, reuse=reuse)
            if not self.blocks.fits(new.limit, max(self.chunk, new.layout.longest)):
                with pytest.raises(RuntimeError, match="does not fit"):
                    self.scheduler.add(new)
                continue
            self.added += 1
            self.scheduler.add(new)
            self.ids[new] = list(new.ids)

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.remove(data.draw(st.sampled_from(list(self.ids))))

    @rule()
    def reset(self) -> None:
        self.blocks.reset()

    @rule(steps=st.integers(1, 8), seed=st.integers(0, 3))
    def run(self, steps: int, seed: int) -> None:
        for _ in range(steps):
            self.step(seed)
            self.holds()

    @rule()
    def run_while_one_is_cancelled(self) -> None:
        self.step(seed=0, cancel=True)

    @rule(seed=st.integers(0, 3))
    def run_until_an_image_is_lost(self, seed: int) -> None:
        self.step(seed, lose=True)

    def step(self, seed: int, cancel: bool = False, lose: bool = False) -> None:
        random = Random(seed)
        before = tuple(self.scheduler.running)
        limit = None if self.ending else random.choice(LIMITS)
        decoding = {sequence for sequence in before if sequence.decodes and not sequence.full}
        step = self.scheduler.schedule(limit)
        if step is None:
            assert not self.ids or self.inflight, "who waits for a last token may hold what all others need"
            self.preemptions = self.scheduler.preemptions
            self.finish_step()
            return
        limits = [limit] if decoding else []
        if decoding <= {*self.scheduler.preempted}:  # if the limit held back all others, they run without it
            limits.append(None)
        self.check_rules(step, before, limits[0])
        chunks = [(chunk.sequence, chunk.start, chunk.end) for chunk in step]
        assert chunks in [self.planned(limit, before) for limit in limits]
        reading = [chunk.sequence for chunk in step if not chunk.sequence.decodes]
        if lose and reading:  # it ends, because its image cannot be read again; the others are computed without it
            lost = random.choice(reading)
            self.remove(lost)
            step = tuple(chunk for chunk in step if chunk.sequence is not lost)
        written = self.written(step)
        self.finish_step()
        self.write_and_read(step, written)
        left = [chunk.sequence for chunk in step if chunk.sequence in self.ids]
        if cancel and left:  # while the pass runs
            self.remove(random.choice(left))
        tokens = {chunk.sequence: random.choice((1, 2)) for chunk in step if chunk.samples}
        self.scheduler.advance(step)
        for chunk in step:
            assert chunk.sequence not in self.ids or chunk.sequence.computed == chunk.end
        self.inflight = tokens
        if not self.overlap:
            self.finish_step()

    def teardown(self) -> None:
        """All that is left ends: in every step the oldest running sequence computes a token at least."""
        self.ending = True
        for _ in range(sum(sequence.limit for sequence in getattr(self, "ids", ()))):
            self.step(seed=0)
            self.holds()
        if hasattr(self, "ids"):
            assert not self.ids and self.scheduler.schedule() is None
            assert self.blocks.pool.used == 0

    def finish_step(self) -> None:
        """The pass under way is over: its tokens are known, and who is as long as it may be ends. Some tokens force
        others behind them, even while the next pass computes them."""
        for one, token in self.inflight.items():
            if one in self.ids:
                one.settle(token)
                forced = [3] * min(self.forced * (token == 2), one.limit - len(one.ids))
                one.ids += forced
                self.ids[one] += [token, *forced]
                if len(one.ids) == one.limit:
                    self.remove(one)
        self.inflight = {}

    def remove(self, one: Sequence) -> None:
        self.scheduler.remove(one)
        del self.ids[one]
        assert not any(one.tables)

    def check_rules(self, step: Step, before: tuple[Sequence, ...], limit: PrefillLimit | None) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        admitted = [sequence for sequence in running if sequence not in before]
        self.preemptions += len(self.scheduler.preempted)
        assert self.scheduler.preemptions == self.preemptions
        assert {*before} - {*running} == {*self.scheduler.preempted} <= {*waiting}
        assert not (admitted and self.scheduler.preempted), "room freed by preemption is not given to new requests"
        served = sorted(running, key=lambda one: one not in before)
        oldest = next((sequence for sequence in served if len(sequence.ids) < sequence.limit), None)
        assert step and (limit or oldest in [chunk.sequence for chunk in step])
        for sequence in self.scheduler.preempted:
            assert (sequence.computed, sequence.registered, any(sequence.tables)) == (0, 0, False)
            assert sequence.ids[: len(sequence.ids) - sequence.pending] == self.ids[sequence]
        for sequence in admitted:
            assert sequence.cached == self.cached.setdefault(sequence, sequence.computed)
            assert sequence.computed % self.size == 0 and (sequence.reuse or sequence.computed == 0)
            older = [chunk for chunk in step if chunk.sequence.number < sequence.number]
            assert sum(chunk.end - chunk.start for chunk in older if not chunk.sequence.decodes) < self.chunk
            ends = {chunk.sequence: chunk.end for chunk in step}
            earlier = [one for one in running if one.number < sequence.number and not one.decodes]
            unfinished = any(ends.get(one) != len(one.ids) for one in earlier)
            assert not unfinished or ends.get(sequence) == len(sequence.ids), "admitted behind an unfinished prompt"
            if any(one.number < sequence.number for one in waiting):
                assert unfinished and limit is None and len(running) < self.seats, "overtook another without need"
            end = (sequence.computed + self.worth) // self.size * self.size
            for other in (chunk.sequence for chunk in older) if self.caching and sequence.reuse and end else ():
                same = all(content(sequence, at) == content(other, at) for at in range(min(end, len(other.ids))))
                makes = other.reuse and same and other.computed < end <= other.prompt_tokens
                assert not makes or end > len(sequence.ids), "computed twice"

    def planned(self, limit: PrefillLimit | None, before: tuple[Sequence, ...]) -> list[tuple[Sequence, int, int]]:
        """Return the chunk of each running sequence as plain search finds it within the budgets: oldest first, but
        those that ran ``before`` the step before others, since a forced run may be younger than what it overtook."""
        tokens, views, prefilled = self.chunk, self.views, False
        seconds = inf if limit is None else limit.seconds
        decodes, prefills = [], []
        for sequence in sorted(self.scheduler.running, key=lambda one: one not in before):
            start = sequence.computed
            if len(sequence.ids) == sequence.limit:
                continue
            if start == len(sequence.ids) - 1 >= sequence.prompt_tokens:
                decodes.append((sequence, start, len(sequence.ids)))
                continue
            inside = {at for span in sequence.layout.spans for at in range(span.start + 1, span.end)}
            ends = [at for at in range(start + 1, len(sequence.ids) + 1) if at not in inside]
            fitting = [at for at in ends if at - start <= tokens] or ([] if prefilled else ends[:1])
            count = {at: sum(start <= span.start < at for span in sequence.layout.spans) for at in fitting}
            fitting = [at for at in fitting if count[at] <= views]
            fitting = [at for at in fitting if at - start + 3.0 * count[at] <= seconds]
            if start >= sequence.prompt_tokens and not fitting:  # no slower than tokens that are not forced
                fitting, count = [start + 1], {start + 1: 0}
            if fitting:
                prefills.append((sequence, start, fitting[-1]))
                tokens, prefilled = max(0, tokens - (fitting[-1] - start)), True
                views -= count[fitting[-1]]
                seconds -= fitting[-1] - start + 3.0 * count[fitting[-1]]
        return decodes + prefills

    def written(self, step: Step) -> list[tuple[Chunk, int, tuple[int, int, int]]]:
        """Which slots the pass writes: chunk, position and slot. No two sequences may hold one."""
        writes = []
        for group in self.groups:
            holders = Counter(block for sequence in self.scheduler.running for block in sequence.tables[group])
            for chunk in step:
                for position in range(chunk.start, chunk.end):
                    block = chunk.sequence.tables[group][position // self.size]
                    assert block >= 0 and holders[block] == 1, "written while shared"
                    writes.append((chunk, position, (group, block, position % self.size)))
        return writes

    def write_and_read(self, step: Step, written: list[tuple[Chunk, int, tuple[int, int, int]]]) -> None:
        """What a pass does: all writes, then all reads, which must find what each row's interval of keys needs. Rows of
        sequences that ended meanwhile write what nobody may read."""
        for chunk, position, slot in written:
            known = chunk.sequence in self.ids
            self.slots[slot] = content(chunk.sequence, position) if known else object()
        for chunk in step:
            for group in self.groups if chunk.sequence in self.ids else ():
                self.read(chunk, group)

    def read(self, chunk: Chunk, group: int) -> None:
        one = chunk.sequence
        keys: set[int] = set()
        for position in range(chunk.start, chunk.end):
            low = 0 if group == 0 else max(0, position - self.window + 1)
            keys |= set(range(low, seen_until(one.layout, position)))
        for position in keys:
            block = one.tables[group][position // self.size]
            assert block >= 0, f"position {position} is not held"
            assert self.slots[group, block, position % self.size] == content(one, position)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "ids"):
            return
        running, waiting = self.scheduler.running, self.scheduler.waiting
        for queue in (running, waiting):
            assert [sequence.number for sequence in queue] == sorted(sequence.number for sequence in queue)
        assert {*running, *waiting} == {*self.ids} and len(running) + len(waiting) == len(self.ids), "one is lost"
        assert len(running) <= self.seats
        assert all(not any(sequence.tables) and sequence.computed == 0 for sequence in waiting)
        for sequence in waiting:
            assert all(self.blocks.may_hit(sequence, tokens) for tokens in range(self.blocks.hit(sequence) + 1))
        assert all(sequence.ids[: len(sequence.ids) - sequence.pending] == self.ids[sequence] for sequence in self.ids)
        slabs = []
        for group in (0, 1):
            tables = [[block for block in sequence.tables[group] if block != -1] for sequence in running]
            assert all(len(set(table)) == len(table) for table in tables), "held twice by one table"
            slabs.append({block % self.blocks.pool.lane for table in tables for block in table})
        assert not slabs[0] & slabs[1], "a slab serves two kinds of layers"
        used, count = self.blocks.pool.used, self.blocks.pool.count
        assert used == len(slabs[0]) + len(slabs[1]) <= count and self.blocks.pool.available == count - used
        for sequence in running:
            for group in self.groups:
                low = sequence.computed - self.window + 1 if group else 0
                present = [block != -1 for block in sequence.tables[group]]
                assert present == [(index + 1) * self.size > low for index in range(len(present))]


def run_step(scheduler: Scheduler, token: int = 1) -> Step | None:
    """Compute a step, if there is one; who is as long as it may be leaves."""
    step = scheduler.schedule()
    scheduler.advance(step or ())
    for sequence in tuple(scheduler.running):
        if sequence.pending:
            sequence.settle(token)
        if len(sequence.ids) == sequence.limit:
            scheduler.remove(sequence)
    return step


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=150, stateful_step_count=30)


@settings(max_examples=200)
@given(
    prompts=st.lists(PIECES, min_size=2, max_size=5),
    chunk=st.integers(1, 16),
    size=st.integers(1, 4),
    window=st.none() | st.integers(2, 10),
    layers=st.sampled_from([(1, 1), (1, 3), (2, 5)]),
    spare=st.integers(0, 60),
)
def test_nobody_is_admitted_to_be_preempted_by_what_others_were_about_to_take(
    prompts: list, chunk: int, size: int, window: int | None, layers: tuple[int, int], spare: int
) -> None:
    """Outputs that end in the block after the prompt's last are known at admission."""
    sequences = [new_sequence(number, pieces, outputs=size) for number, pieces in enumerate(prompts)]
    shape = KVShape(1, 1, 0) if window is None else KVShape(1, *layers)
    unsharded = KVBlocks(shape, 1, block_size=size, window=window)
    slabs = max(unsharded.needed(added.limit, max(chunk, LONGEST)) for added in sequences) + spare
    blocks = KVBlocks(shape, slabs, block_size=size, window=window, prefix_caching=window is None)
    scheduler = Scheduler(blocks, max_num_seqs=4, prefill_chunk_size=chunk)
    for added in sequences:
        scheduler.add(added)
    while run_step(scheduler):
        pass
    assert scheduler.preemptions == 0


TEXT, PAGED = [(1,)], [(2,), b"a"]
ADMITTED = [(TEXT, 4, 99, [0, 1, 2]), (PAGED, 4, 99, [0, 2]), (PAGED, 2, 99, [0]), (PAGED, 4, 16, [0, 2])]


@pytest.mark.parametrize("views", [inf, 1])
@pytest.mark.parametrize(("second", "seats", "blocks", "admitted"), [*ADMITTED, (PAGED, 4, 15, [0])])
def test_the_rest_of_a_budget_goes_to_prompts_that_end_in_it(
    views: float, second: list[bytes | tuple[int, ...]], seats: int, blocks: int, admitted: list[int]
) -> None:
    """The first prompt continues with a view that does not fit. The third overtakes a second one that would only begin,
    if it leaves a place and the blocks that the second will need."""
    held = KVBlocks(GLOBAL, blocks, block_size=1, window=None)
    scheduler = Scheduler(held, max_num_seqs=seats, prefill_chunk_size=7, max_views=views)
    for number, pieces in enumerate([[(1,), b"a", (1,), b"b"], second, [(2,)]]):
        scheduler.add(new_sequence(number, pieces))
    step = scheduler.schedule()
    assert step is not None and step[0].end == 5
    assert [chunk.sequence.number for chunk in step] == admitted
    assert [running.number for running in scheduler.running] == admitted


def with_cached_page(max_num_seqs: int) -> Scheduler:
    """Return a scheduler with a decoding question, the page of which is cached."""
    blocks = KVBlocks(GLOBAL, 300, block_size=1, window=None, prefix_caching=True)
    scheduler = Scheduler(blocks, max_num_seqs=max_num_seqs, prefill_chunk_size=7)
    scheduler.add(new_sequence(0, [*PAGE, (1,)], outputs=90))
    run_step(scheduler)
    return scheduler


PAGE = [(5,), b"a"]


def test_a_document_waits_for_the_one_before_it_only() -> None:
    """Two more questions about a cached page arrive in every step, and never end."""
    scheduler = with_cached_page(12)
    documents = [new_sequence(number, [(number,), *[b"a", b"b"] * 4]) for number in (1, 2)]
    for document in documents:
        scheduler.add(document)
    started, overtook = [], 0
    for number in range(3, 40, 2):
        started.append([chunk.end for chunk in run_step(scheduler) if chunk.sequence in documents])
        overtook += documents[1] in scheduler.waiting and len(scheduler.running) > 2
        if documents[1] in scheduler.running:
            break
        for question in (number, number + 1):
            scheduler.add(new_sequence(question, [*PAGE, (question,)], 90))
    assert overtook and documents[0].prompt_tokens in (*started[-2], *started[-1])


@pytest.mark.parametrize(
    ("prompts", "chunk", "steps"),
    [
        ([(1,) * 9, (1,) * 9, (2,) * 9], 20, [[(0, 0)], [(0, 9), (1, 8), (2, 0)]]),
        ([(1,) * 14] * 2, 9, [[(0, 0)], [(0, 9)], [(0, 14), (1, 12)]]),  # until the part worth waiting for is computed
    ],
)
def test_who_begins_as_another_waits_for_it_and_takes_over_what_it_computed(
    prompts: list[tuple[int, ...]], chunk: int, steps: list[list[tuple[int, int]]]
) -> None:
    blocks = KVBlocks(GLOBAL, 40, block_size=2, window=None, prefix_caching=True, worth_waiting=4)
    scheduler = Scheduler(blocks, max_num_seqs=4, prefill_chunk_size=chunk)
    for number, tail in enumerate(prompts):
        scheduler.add(new_sequence(number, [tail], outputs=2))
    assert [[(chunk.sequence.number, chunk.start) for chunk in run_step(scheduler)] for _ in steps] == steps


@pytest.mark.parametrize(("more", "outputs", "preemptions"), [(3, 1, 0), (1, 4, 1)])
def test_a_cached_prefix_that_takes_too_many_slabs_is_computed_again(more: int, outputs: int, preemptions: int) -> None:
    """Three slabs of three blocks each. Four of the blocks of a prompt that ended are in two of them; another prompt
    that begins with these blocks would need two slabs for its own, at once or as it grows."""
    blocks = KVBlocks(KVShape(1, 1, 3), 3, block_size=1, window=None, prefix_caching=True)
    scheduler = Scheduler(blocks, max_num_seqs=2, prefill_chunk_size=20)
    steps = 0
    for one in (new_sequence(0, [(1, 1, 1, 1, 2)]), new_sequence(1, [(1, 1, 1, 1), (3,) * more], outputs)):
        scheduler.add(one)
        while run_step(scheduler, token=4):
            steps += 1
    assert (scheduler.preemptions, steps) == (preemptions, 1 + outputs)
    assert one.cached == (0 if more == 3 else 4)


# Pacing of prefill: chunks within a time, and the TPOT that a simulated engine keeps with it.


DECODE, ROW, VIEW = 0.015, 0.0001, 0.008
"""Seconds of a decode pass, a prompt token and a view."""
SIZES = EngineSizes(kv_shape=KVShape(1, 1, 1), slabs=200_000, window=1024)
SEEDS = st.integers(0, 99)
LESSONS = [0.2 * index for index in range(8)]
"""Arrivals of requests that teach an engine its costs."""
MIX = WorkloadMix((PageShare(0, 1.0), PageShare(1, 2.0), PageShare(4, 2.0)), 40, (2, 60))


class Linear:
    """Pass times that are sums of the three costs."""

    def pass_seconds(
        self, decode_contexts: list[int], prefill: list[tuple[int, int]], views: int, *, graph: bool
    ) -> float:
        rows = sum(end - start for start, end in prefill)
        return DECODE * bool(decode_contexts or prefill) + ROW * rows + VIEW * views

    def prepare_seconds(self, views: int, known: int) -> float:
        return 0.0


def answered(target: float | None, arrivals: list[float], seed: int = 0) -> list[SimulatedRequest]:
    """Return the requests of ``MIX`` after an engine with this TPOT target has answered them."""
    engine = SimulatedEngine(replace(SIZES, tpot_target=target), Linear())
    return route_arrivals([engine], MIX.requests(len(arrivals), seed), arrivals)


def over_time(gaps: list[float]) -> list[float]:
    return [sum(gaps[: index + 1]) for index in range(len(gaps))]


@given(pieces=PIECES, seconds=st.integers(-2, 30), view=st.integers(0, 9), data=st.data())
def test_the_longest_chunk_that_cuts_no_image(pieces: list[Piece], seconds: int, view: int, data: Any) -> None:
    ids, layout = prompt(pieces)
    ends = [at for at in range(len(ids) + 1) if layout.around(at) is None]
    start = data.draw(st.sampled_from(ends))
    end = data.draw(st.sampled_from([at for at in ends if at >= start]))
    images = {span.start for span in layout.spans}

    def cost(to: int) -> int:
        return to - start + view * sum(at in images for at in range(start, to))

    fitting = [at for at in ends if start <= at <= end and cost(at) <= seconds]
    assert PrefillLimit(seconds, 1.0, view).reach(layout, start, end) == max(fitting, default=start)


@settings(max_examples=30)
@given(gaps=st.lists(st.floats(0.3, 1.0), min_size=1, max_size=25), seed=SEEDS)
def test_requests_that_the_engine_keeps_up_with_have_the_target(gaps: list[float], seed: int) -> None:
    requests = answered(0.05, [*LESSONS, *(4.0 + at for at in over_time(gaps))], seed)[len(LESSONS) :]
    for request in requests:
        assert request.tokens[0] - request.arrived < 1.5, "no wait raised the target"
        spans = [later - earlier for earlier, later in zip(request.tokens, request.tokens[8:], strict=False)]
        assert all(span <= 8 * 0.05 for span in spans), "any 8 tokens"


@settings(max_examples=20)
@given(st.sampled_from([1e-4, 0.016, 0.03, 0.2]), st.lists(st.floats(0, 0.2), min_size=1, max_size=40), SEEDS)
def test_every_request_ends_whatever_the_target(target: float, gaps: list[float], seed: int) -> None:
    arrivals = over_time(gaps)
    requests, unpaced = answered(target, arrivals, seed), answered(None, arrivals, seed)
    assert all(request.done for request in requests)
    assert [len(request.tokens) for request in requests] == [len(request.tokens) for request in unpaced]


def test_a_backlog_is_computed_at_full_throughput() -> None:
    seconds = [max(request.tokens[-1] for request in answered(target, [0.0] * 120)) for target in (None, 0.05)]
    assert seconds[1] < 1.05 * seconds[0]


@pytest.mark.parametrize("burst", [4, 12])
def test_a_burst_of_prompts_delays_no_token_by_several_chunks(burst: int) -> None:
    longest = []
    for target in (None, 0.05):
        requests = answered(target, [*LESSONS, *[4.0] * burst])[len(LESSONS) :]
        first = min(requests, key=lambda request: request.tokens[0])
        longest.append(max(later - earlier for earlier, later in pairwise(first.tokens)))
    assert longest[1] <= 0.06 < longest[0]
