"""The scheduler: chooses which tokens the next step computes, first come, first served, within budgets and blocks.

Short prompts, such as questions about a cached page, overtake longer ones where those cannot use the rest of a step.
"""

from __future__ import annotations

from bisect import insort
from collections import abc
from dataclasses import dataclass, field, replace
from math import inf
from typing import Generic, TypeVar

from panscan.engine.scheduling.batch import Chunk, Sequence, Step
from panscan.engine.scheduling.kv_blocks import KVBlocks
from panscan.engine.scheduling.pacing import PrefillLimit

_MOST_CONSIDERED = 64  # waiting sequences that may overtake, per step


S = TypeVar("S", bound=Sequence)


@dataclass(slots=True)
class _StepPlan(Generic[S]):
    """A step while it is being scheduled.

    Args:
        tokens: prompt tokens that remain for its prefill.
        views: image spans that remain.
        limit: device time that remains; None: no limit.
        decodes: chunks of decoding sequences.
        prefills: other chunks.
        preempted: sequences that were preempted for it.
        cut_short: whether a prompt continues in a later step.
        claimed: KV cache slabs that running sequences, and a waiting one that was overtaken, will soon need; None: not
            computed.
    """

    tokens: int
    views: float
    limit: PrefillLimit | None
    decodes: list[Chunk[S]] = field(default_factory=list)
    prefills: list[Chunk[S]] = field(default_factory=list)
    preempted: list[S] = field(default_factory=list)
    cut_short: bool = False
    claimed: int | None = None

    @property
    def spent(self) -> bool:
        """Whether no more prompt token fits."""
        return not self.tokens or (self.limit is not None and self.limit.seconds < self.limit.row_seconds)

    def end(self, sequence: S, start: int) -> int:
        """Return the end of a sequence's prefill chunk from ``start``; ``start`` if it must wait for a later step."""
        wanted = min(start + self.tokens, len(sequence.ids))
        end = sequence.layout.cut(start, wanted)
        if end > wanted and self.prefills:
            return start
        images = sequence.layout.within(start, end)
        if len(images) > self.views:
            end = images[int(self.views)].start
        return end if self.limit is None else self.limit.reach(sequence.layout, start, end)

    def add(self, chunk: Chunk[S]) -> None:
        """Add a chunk, and take a prefill off what remains."""
        if chunk.sequence.decodes:
            self.decodes.append(chunk)
            return
        self.prefills.append(chunk)
        self.tokens = max(0, self.tokens - (chunk.end - chunk.start))
        layout = chunk.sequence.layout
        self.views -= len(layout.within(chunk.start, chunk.end))
        if self.limit is not None:
            cost = self.limit.cost(layout, chunk.start, chunk.end)
            self.limit = replace(self.limit, seconds=self.limit.seconds - cost)


class Scheduler(Generic[S]):
    """Admits sequences, divides each step among them, and preempts the youngest when blocks run out.

    ``running``: admitted sequences, oldest first. ``waiting``: sequences that hold no blocks, including preempted ones,
    oldest first. Both are only to be read.

    Args:
        blocks: KV cache blocks.
        max_num_seqs: maximum running sequences.
        prefill_chunk_size: maximum prompt tokens per step, over all sequences. A longer image span is computed whole,
            as the only prefill of its step.
        max_views: maximum image spans per step, at least 1.
    """

    def __init__(self, blocks: KVBlocks, *, max_num_seqs: int, prefill_chunk_size: int, max_views: float = inf) -> None:
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._prefill_chunk_size = prefill_chunk_size
        self._max_views = max_views
        self.waiting: list[S] = []
        self.running: list[S] = []
        self.preempted: abc.Sequence[S] = ()  # sequences preempted by the last schedule()
        self.preemptions = 0

    def longest_chunk(self, sequence: Sequence) -> int:
        """Return the most tokens of the sequence that one step computes."""
        return max(self._prefill_chunk_size, sequence.layout.longest)

    def add(self, sequence: S) -> None:
        """Queue a sequence.

        Raises:
            RuntimeError: it cannot run even alone, and would block all later ones.
        """
        if not self._blocks.fits(sequence.limit, self.longest_chunk(sequence)):
            raise RuntimeError(f"a sequence of {sequence.limit} tokens does not fit in the KV cache blocks")
        _insert(self.waiting, sequence)

    def remove(self, sequence: S) -> None:
        """Remove a finished, failed or cancelled sequence from its queue, and release its blocks."""
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
        self._blocks.release(sequence)

    def schedule(self, limit: PrefillLimit | None = None) -> Step[S] | None:
        """Return the next step with its blocks allocated; None if there is nothing to compute.

        Decode rows come first, then prefill chunks, each from the oldest to the youngest sequence; those admitted now
        come last, even behind the forced tokens of a younger one that has overtaken them. Without ``limit``, the first
        of them always gets a chunk, unless it has reached its maximum length and only awaits its last token. Every
        sequence therefore finishes after finitely many steps. The previous step must have been launched; its results
        are not needed.

        Args:
            limit: device time for the step's prefill. Ignored while no sequence decodes. Decoding sequences finish
                after finitely many steps, so the oldest prompt is not blocked indefinitely.
        """
        if not any(sequence.decodes and not sequence.full for sequence in self.running):
            limit = None
        plan = _StepPlan[S](self._prefill_chunk_size, self._max_views, limit)
        for sequence in tuple(self.running):
            if sequence in plan.preempted:
                break
            self._add_chunk(sequence, plan)
        if not plan.preempted:
            self._admit(plan)
        self.preempted = plan.preempted
        chunks = (*plan.decodes, *plan.prefills)
        if not chunks and plan.preempted and (limit is not None or not self.running):
            # All decoding sequences were preempted and the limit held back the others: no TPOT left to protect. Or the
            # last one preempted itself, and begins again.
            step = self.schedule()
            self.preempted = [*plan.preempted, *self.preempted]
            return step
        return chunks or None

    def advance(self, step: Step[S]) -> None:
        """Record that a step was launched.

        Sequences whose chunk samples get a pending token, which must be settled before the next call. Sequences that
        were removed in the meantime are skipped.

        Args:
            step: last result of :meth:`schedule`, maybe without chunks of removed sequences.
        """
        running = set(self.running)
        for chunk in step:
            sequence = chunk.sequence
            if sequence not in running:
                continue
            samples = chunk.samples
            sequence.computed = chunk.end
            self._blocks.commit(sequence)
            if samples:
                sequence.expect()

    def _add_chunk(self, sequence: S, plan: _StepPlan[S]) -> None:
        """Add a running sequence's chunk to the step, preempting the youngest sequences for blocks if necessary.

        A sequence may preempt itself. Sequences are scheduled from the oldest to the youngest, so a preempted one has
        no chunk in the step yet.
        """
        end = len(sequence.ids) if sequence.decodes else plan.end(sequence, sequence.computed)
        if sequence.computed >= sequence.prompt_tokens:  # forced tokens follow: no slower than one by one
            end = max(end, sequence.computed + 1)
        plan.cut_short |= end < len(sequence.ids)
        if end == sequence.computed or sequence.full:
            return
        while not self._blocks.extend(sequence, end):
            youngest = self.running[-1]
            self._wait(youngest)
            plan.preempted.append(youngest)
            self.preemptions += 1
            if youngest is sequence:
                return
        plan.add(Chunk(sequence, sequence.computed, end))

    def _wait(self, sequence: S) -> None:
        """Move a running sequence back to those that wait, and release its blocks."""
        self.running.remove(sequence)
        self._blocks.release(sequence)
        _insert(self.waiting, sequence)

    def _admit(self, plan: _StepPlan[S]) -> None:
        """Admit waiting sequences in order, while running sequences, prefill budget and blocks allow it.

        If a prompt continues in a later step, because its next image span exceeds the remaining tokens or views, only
        prompts that end in this step are admitted, and they may overtake others. Without this rule, the text before the
        first image of every other prompt would fit, and the whole queue would be admitted far too early, holding blocks
        and pixels.

        They leave one place among the running sequences, and the blocks that the oldest one will soon need. They are
        admitted only while a running prompt is unfinished, so it waits for finitely many of them. With a limit on
        device time there are none: they would use up what earlier steps saved for the next view.

        A sequence whose prefix a running sequence is still computing waits, then reuses those blocks. Unless prompts
        may overtake, later sequences wait behind it, so the step's prefill budget goes to running sequences.
        """
        behind: list[S] = []  # the oldest sequence, once others overtake it
        for sequence in self.waiting[: max(self._max_num_seqs, _MOST_CONSIDERED)]:
            if len(self.running) + len(behind) >= self._max_num_seqs or plan.spent:
                return
            if behind and not self._blocks.may_hit(sequence, len(sequence.ids) - plan.tokens):
                continue
            hit = self._blocks.hit(sequence)
            if (behind or plan.cut_short) and plan.end(sequence, hit) < len(sequence.ids):
                if plan.limit is not None:
                    return
                if not behind:
                    behind = [sequence]
                    plan.claimed = None
                continue
            if not self._begin(sequence, hit, plan, behind) and not behind:
                return

    def _begin(self, sequence: S, hit: int, plan: _StepPlan[S], behind: list[S]) -> bool:
        """Admit a waiting sequence and add its first chunk.

        Args:
            sequence: a waiting sequence.
            hit: length of its cached prefix.
            plan: the step.
            behind: the waiting sequence that it overtakes, if any.

        Returns:
            False if it was not admitted, because a running sequence is computing its prefix, or too few slabs remain
            beside those that other sequences will soon need: admitted into these, it would be preempted at once.
        """
        if plan.claimed is None:
            plan.claimed = self._claims([*self.running, *behind])
        if self._blocks.prefix_in_progress(sequence, hit, self.running):
            return False
        if not self._blocks.can_begin(sequence, hit, self.longest_chunk(sequence), plan.claimed):
            if self.running or not hit:
                return False
            hit = 0  # a cached prefix of several prompts may take more slabs than one that is computed at once
        self.waiting.remove(sequence)
        _insert(self.running, sequence)
        self._blocks.begin(sequence, hit)
        self._add_chunk(sequence, plan)
        plan.claimed += self._claims([sequence])
        return True

    def _claims(self, sequences: abc.Sequence[Sequence]) -> int:
        """Return the slabs that these sequences will soon need in addition to those they hold."""
        return sum(self._blocks.claim(sequence, self.longest_chunk(sequence)) for sequence in sequences)


def _insert(queue: list[S], sequence: S) -> None:
    insort(queue, sequence, key=lambda other: other.number)
