"""Which tokens of which sequences the next pass computes: first come, first served, within budgets and cache blocks."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

from panscan.engine.scheduling.kv_blocks import KVBlocks
from panscan.engine.scheduling.pacing import PrefillLimit
from panscan.engine.scheduling.sequence import Chunk, Sequence, Step

__all__ = ["Scheduler"]


@dataclass(slots=True)
class _Budget:
    """Prompt tokens, image blocks (None: any number) and device time (None: any) that one step may still take."""

    tokens: int
    views: int | None
    limit: PrefillLimit | None
    untouched: bool = True

    @property
    def spent(self) -> bool:
        """Whether no prompt token fits any more."""
        return not self.tokens or (self.limit is not None and self.limit.seconds < self.limit.row_seconds)

    def end(self, sequence: Sequence) -> int:
        """Where the sequence's next prefill chunk ends; its start, if it has to wait for another step."""
        start = sequence.computed
        wanted = min(start + self.tokens, len(sequence.ids))
        end = sequence.layout.cut(start, wanted)
        if end > wanted and not self.untouched:
            return start
        images = sequence.layout.within(start, end)
        if self.views is not None and len(images) > self.views:
            end = images[self.views].start
        return end if self.limit is None else self.limit.reach(sequence.layout, start, end)

    def spend(self, chunk: Chunk) -> None:
        self.untouched = False
        self.tokens = max(0, self.tokens - (chunk.end - chunk.start))
        layout = chunk.sequence.layout
        if self.views is not None:
            self.views -= len(layout.within(chunk.start, chunk.end))
        if self.limit is not None:
            cost = self.limit.cost(layout, chunk.start, chunk.end)
            self.limit = replace(self.limit, seconds=self.limit.seconds - cost)


class _PassPlan:
    """A step in the making."""

    def __init__(self, budget: _Budget) -> None:
        self.budget = budget
        self.decodes: list[Chunk] = []
        self.prefills: list[Chunk] = []
        self.preempted: list[Sequence] = []

    def end(self, sequence: Sequence) -> int:
        return len(sequence.ids) if sequence.decodes else self.budget.end(sequence)

    def add(self, chunk: Chunk) -> None:
        if chunk.sequence.decodes:
            self.decodes.append(chunk)
        else:
            self.prefills.append(chunk)
            self.budget.spend(chunk)


class Scheduler:
    """Admits sequences, shares out each step, and takes blocks back from the youngest when they run out.

    Args:
        blocks: cache blocks of both groups of layers.
        max_num_seqs: sequences that run at once.
        prefill_chunk_size: prompt tokens of one step, of all sequences together. An image block that is longer is
            taken whole, as the only prefill of its step.
        max_views: image blocks of one step, at least 1; None: any number.
    """

    def __init__(
        self, blocks: KVBlocks, *, max_num_seqs: int, prefill_chunk_size: int, max_views: int | None = None
    ) -> None:
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._prefill_chunk_size = prefill_chunk_size
        self._max_views = max_views
        self._waiting: list[Sequence] = []  # both in order of number
        self._running: list[Sequence] = []
        self.preempted: Rows[Sequence] = ()  # by the last call of schedule()
        self.preemptions = 0

    @property
    def waiting(self) -> Rows[Sequence]:
        """Sequences that hold no blocks, the oldest first; preempted ones among them."""
        return tuple(self._waiting)

    @property
    def running(self) -> Rows[Sequence]:
        """Admitted sequences, the oldest first."""
        return tuple(self._running)

    def longest_chunk(self, sequence: Sequence) -> int:
        """Most tokens of the sequence that one step computes: what ``KVBlocks.fits`` has to know."""
        return max(self._prefill_chunk_size, sequence.layout.longest)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn.

        Raises:
            RuntimeError: it can never run, even alone, and would hold up all later ones.
        """
        if not self._blocks.fits(sequence.limit, self.longest_chunk(sequence)):
            raise RuntimeError(f"a sequence of {sequence.limit} tokens does not fit in the cache blocks")
        _insert(self._waiting, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that finished, failed or was cancelled, wherever it is, and take its blocks back."""
        for queue in (self._running, self._waiting):
            if sequence in queue:
                queue.remove(sequence)
        self._blocks.release(sequence)

    def schedule(self, limit: PrefillLimit | None = None) -> Step | None:
        """The next step, its blocks allocated; None if nothing is to be computed.

        Rows of decoding sequences come first, then prefill chunks, each from the oldest to the youngest. The oldest
        running sequence always has a chunk, unless only its last token is missing, so that every sequence ends after
        finitely many steps. Nothing has to be known of the pass before but that it was launched.

        Args:
            limit: device time of the step's prefill. It counts only while a sequence decodes: those end after
                finitely many steps, and the oldest has a chunk again.
        """
        if not any(each.decodes and not each.full for each in self._running):
            limit = None
        plan = _PassPlan(_Budget(self._prefill_chunk_size, self._max_views, limit))
        for sequence in self.running:
            if sequence in plan.preempted:
                break
            self._take(sequence, plan)
        if not plan.preempted:
            self._admit(plan)
        self.preempted = plan.preempted
        chunks = (*plan.decodes, *plan.prefills)
        if not chunks and plan.preempted and limit is not None:
            # All that decode were preempted, and the limit held the others back: nothing is left to pace.
            step = self.schedule()
            self.preempted = [*plan.preempted, *self.preempted]
            return step
        return Step(chunks) if chunks else None

    def advance(self, step: Step) -> None:
        """Note that a step was launched; sequences whose chunk samples have a pending token then, to be settled before
        the next step's :meth:`advance`. Sequences that were removed meanwhile are passed over.

        Args:
            step: what :meth:`schedule` gave last.
        """
        running = set(self._running)
        for chunk in step.chunks:
            sequence = chunk.sequence
            if sequence not in running:
                continue
            samples = chunk.samples
            sequence.computed = chunk.end
            self._blocks.commit(sequence)
            if samples:
                sequence.expect()

    def _take(self, sequence: Sequence, plan: _PassPlan) -> None:
        """Schedule a running sequence's chunk; if blocks run out, preempt the youngest sequences, possibly itself.

        Sequences are scheduled oldest first, so a preempted one has no chunk in the step yet.
        """
        end = plan.end(sequence)
        if end == sequence.computed or sequence.full:
            return
        while not self._blocks.extend(sequence, end):
            youngest = self._running.pop()
            self._blocks.release(youngest)
            _insert(self._waiting, youngest)
            plan.preempted.append(youngest)
            self.preemptions += 1
            if youngest is sequence:
                return
        plan.add(Chunk(sequence, sequence.computed, end))

    def _admit(self, plan: _PassPlan) -> None:
        """Let waiting sequences run, in order, while there are seats, prompt tokens and blocks.

        Who begins as a running sequence that still computes its prompt waits until that is done, and takes it over
        then. Younger ones wait with it: what a step computes at most is for those that run.
        """
        while self._waiting and len(self._running) < self._max_num_seqs and not plan.budget.spent:
            oldest = self._waiting[0]
            hit = self._blocks.hit(oldest)
            if self._blocks.in_the_making(oldest, hit, self._running):
                return
            if not self._blocks.can_begin(oldest, hit, self.longest_chunk(oldest), self._claimed()):
                return
            self._waiting.pop(0)
            _insert(self._running, oldest)
            self._blocks.begin(oldest, hit)
            self._take(oldest, plan)

    def _claimed(self) -> tuple[int, int]:
        """Available blocks that running sequences will take before long: who is let in beside them would be preempted
        at once."""
        claims = [self._blocks.claim(sequence, self.longest_chunk(sequence)) for sequence in self._running]
        return sum(count for count, _ in claims), sum(count for _, count in claims)


def _insert(queue: list[Sequence], sequence: Sequence) -> None:
    insort(queue, sequence, key=lambda other: other.number)
