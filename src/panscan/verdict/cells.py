"""Verify each cell: compare its measured tokens and its next-token distributions with the reference.

Measured tokens are compared with the reference after every repeat. The distributions are compared after the cell's last
repeat, with the cell's own configuration, while its compiled code is still loaded. Checks that need the bare model
(tokens beyond the reference, margins of tokens that differ between runs) run once all cells of a loaded model are
measured.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from msgspec import structs

from panscan.core import Result, now
from panscan.records.fields import AXES
from panscan.records.verdict_records import AxisCheck, TokenCheck, VerdictRecord
from panscan.runners.base import calls
from panscan.settings import Settings, default_of
from panscan.verdict.invariance import RunAnswers, answer_again, compare, shared_axis, variants, warm_variant
from panscan.verdict.judgement import merged_axes
from panscan.verdict.reference import Reference, compare_answers
from panscan.verdict.references import References, ReferenceStates, failure_text, precision_name
from panscan.verdict.replay import MeasuredAnswer, replay
from panscan.verdict.tokens import Judge, ReferenceRows, compared_with_reference, first_difference
from panscan.workload.requests import Item, request_of, view_counts

if TYPE_CHECKING:
    from panscan.runners.base import Runner


class SweepCell(Protocol):
    """A cell of a sweep: what the verifier knows of it."""

    @property
    def id(self) -> str:
        """The cell's id in the records."""
        ...

    @property
    def settings(self) -> Settings:
        """The settings that it is measured with."""
        ...


_AGAIN = 0.1  # of the measuring time: warm caches are compared for requests that take no longer


@dataclass(slots=True)
class _CellAnswers:
    """What a cell answered so far.

    Args:
        settings: the cell's.
        runs: its measured answers first, then those under other conditions.
        longest: tokens of its longest prompt.
        seconds: measuring time.
        record: its verdict, until it is concluded.
    """

    settings: Settings
    runs: list[RunAnswers] = field(default_factory=list)
    longest: int = 0
    seconds: float = 0.0
    record: VerdictRecord | None = None

    def keep_repeat(self, results: Sequence[Result]) -> None:
        """Keep the answers of a measured repeat, or of one like it."""
        self.longest = max(result.prompt_tokens for result in results)
        self.keep(RunAnswers.of("repeats", "", results))

    def keep(self, variant: RunAnswers) -> None:
        """Keep answers for later checks: eight bytes per token, and identical answers only once."""
        first = self.runs[0].answers if self.runs else {}
        compact = {
            name: first[name] if name in first and list(first[name]) == list(tokens) else array("q", tokens)
            for name, tokens in variant.answers.items()
        }
        self.runs.append(replace(variant, answers=compact))


@dataclass(slots=True)
class Verifier:
    """Compares the cells of a sweep with their references.

    Args:
        references: the references.
        everything: all items, for the invariance checks and for resumed runs.
        invariance: answer each cell's requests again under different conditions.
        budget: share of the measuring time that the replay of measured answers may take.
    """

    references: References
    everything: Sequence[Item] = ()
    invariance: bool = False
    budget: float = default_of("verify_budget", "bench") / 100
    _cells: dict[str, _CellAnswers] = field(default_factory=dict)

    def check(self, runner: Runner, cell: SweepCell, results: Sequence[Result], seed: int | None) -> TokenCheck | None:
        """Compare the tokens of a measured repeat with the reference, and keep them for :meth:`conclude`.

        Args:
            runner: the runner that measured the repeat.
            cell: the measured cell.
            results: one result per request of the repeat.
            seed: sampler seed; None for greedy cells.

        Returns:
            The comparison; None without a reference.
        """
        answers = self._answers_of(cell)
        ends = [result.stamps.end or result.stamps.accepted for result in results]
        answers.seconds += max(ends) - min(result.stamps.accepted for result in results)
        answers.keep_repeat(results)
        follows = self.references.follows
        try:
            if follows:
                self.references.note_weights(runner, cell.settings)
            reference = self.references.find(cell.settings, runner.pixels(cell.settings))
            if reference is None:
                return TokenCheck.of(note="no reference for these weights and views") if follows else None
            expected = {
                item.id: request for item, request in zip(self.references.items, reference.requests, strict=True)
            }
            return compared_with_reference(self._judge_of(runner, cell.settings, reference), expected, results, seed)
        except Exception as error:  # a failed comparison does not invalidate the measurement
            return TokenCheck.of(note=failure_text(error, "comparing measured tokens"))

    def verify(self, runner: Runner, cell: SweepCell) -> VerdictRecord:
        """Return the verdict record of the cell that ``runner`` is configured for."""
        started, settings = now(), cell.settings
        record = VerdictRecord.without_figures(cell.id, "unverified")
        pixels = runner.pixels(settings)
        reference = self.references.find(settings, pixels)
        if reference is None:
            record.reason = self.references.why_missing(settings, pixels)
        else:
            self.references.record(runner, settings, reference, "reference", 0.0)
            try:
                record = self._compared(runner, cell, reference)
            except Exception as error:  # the cell is unverified, and the sweep continues
                record.reason = failure_text(error, "comparing answers")
            record.truth = reference.id
            if settings.sampling.greedy and not settings.penalised:
                self._vary(runner, self._answers_of(cell))
        record.concluded = reference is None or settings.penalised
        record.seconds = now() - started
        self._answers_of(cell).record = record
        return record

    def conclude(self, runner: Runner, cells: Sequence[SweepCell]) -> Iterator[VerdictRecord]:
        """Yield the final verdict records, with the checks that need the bare model.

        These compare measured tokens beyond the reference, and answers under different conditions with each other.

        Args:
            runner: the runner that measured the cells; releases everything except its model if a check requires it.
            cells: measured cells of this model.
        """
        with ExitStack() as stack:
            states = ReferenceStates(self.references, self.everything, runner, stack)
            for answers in map(self._answers_of, cells):
                record, answers.record = answers.record, None
                if record is None or record.concluded:
                    continue
                started = now()
                reference = self.references.find(answers.settings, runner.pixels(answers.settings))
                assert reference is not None  # otherwise the record is already concluded
                judge, rows = self._judge_of(runner, answers.settings, reference), states.of(answers.settings)
                beyond = self._replayed(answers, reference, judge, states)
                axes = self._axes(answers, judge, rows) if answers.settings.sampling.greedy else None
                seconds = record.seconds + now() - started
                yield structs.replace(record, beyond=beyond, invariance=axes, concluded=True, seconds=seconds)
        for cell in cells:
            del self._answers_of(cell).runs[1:]  # cells of models loaded later are compared with the first run

    def _answers_of(self, cell: SweepCell) -> _CellAnswers:
        return self._cells.setdefault(cell.id, _CellAnswers(cell.settings))

    def _judge_of(self, runner: Runner, settings: Settings, reference: Reference) -> Judge:
        head = self.references.with_head(runner, settings)
        return Judge(head, settings, reference.noise[precision_name(settings)].margin)

    def _compared(self, runner: Runner, cell: SweepCell, reference: Reference) -> VerdictRecord:
        todo = calls(view_counts(self.references.items, cell.settings), cell.settings)
        say = self.references.say
        tally = compare_answers(
            runner,
            self.references.with_head(runner, cell.settings),
            reference,
            self.references.requests(cell.settings),
            todo,
            lambda number: say(f"comparing answers: batch {number + 1} of {len(todo)}"),
        )
        precision = precision_name(cell.settings)
        noise, steps = reference.noise[precision], cell.settings.max_new_tokens
        return tally.verdict(cell.id, noise, steps, float32=precision == "fp32")

    def _vary(self, runner: Runner, answers: _CellAnswers) -> None:
        """Answer a cell's requests again under different conditions, for :meth:`conclude` to compare.

        Measured tokens are not recorded, so a resumed run first answers the requests as they were measured.
        """
        settings, say = answers.settings, self.references.say
        requests = [request_of(item, settings, self.references.source) for item in self.everything]
        views = view_counts(self.everything, settings)
        if requests and not answers.runs:
            say("answering again: tokens measured before this run was resumed are not stored")
            try:
                results = answer_again(runner, requests, views, range(len(requests)))
            except Exception as error:  # the measurement and the other checks remain valid
                say(f"not answered again: {failure_text(error, 'answering again')}")
                return
            answers.keep_repeat(results)
        if not self.invariance:
            repeats = sum(run.axis == "repeats" for run in answers.runs)
            sample = requests[: int(len(requests) * repeats * _AGAIN)] if answers.seconds else []
            if sample and hasattr(runner, "answer"):
                answers.keep(warm_variant(runner, sample))
        else:
            for variant in variants(runner, requests, views, answers.longest):
                say(f"answering again: {AXES[variant.axis]}")
                answers.keep(variant)

    def _replayed(
        self, answers: _CellAnswers, reference: Reference, judge: Judge, states: ReferenceStates
    ) -> TokenCheck | None:
        """Compare measured answers with the reference beyond its own tokens. A failure leaves a note."""
        runs = [variant for variant in answers.runs if variant.axis == "repeats"]
        if not runs:
            return TokenCheck.of(note="tokens measured before this run was resumed are not stored")
        pairs = zip(self.references.items, reference.requests, strict=True)
        expected = {item.id: request.tokens for item, request in pairs}
        measured: dict[tuple[str, tuple[int, ...]], int] = {}
        for run in runs:
            for request, tokens in run.answers.items():
                start = first_difference(tokens, covered := expected.get(request, ()))
                covered_to = len(covered) if start is None else start
                measured[request, tuple(tokens)] = covered_to if answers.settings.sampling.greedy else 0
        self.references.say("replaying measured answers through the reference model, to find rare faults")
        check = replay(
            judge,
            [MeasuredAnswer(*answer, start) for answer, start in measured.items()],
            lambda group: states.along(answers.settings, [(answer.request, answer.tokens) for answer in group]),
            states.of(answers.settings),
            self.budget * answers.seconds,
        )
        return structs.replace(check, measured_seconds=answers.seconds)

    def _axes(self, answers: _CellAnswers, judge: Judge, rows: ReferenceRows) -> list[AxisCheck]:
        """Compare the cell with its other runs, and with cells that differ from it in one axis only."""
        measured, *others = answers.runs or [RunAnswers("repeats", "", {})]
        checks = [compare(variant, measured.answers, judge, rows, same_cell=True) for variant in others]
        for other in self._cells.values():
            if other is not answers and other.runs and (axis := shared_axis(answers.settings, other.settings)):
                variant = RunAnswers(axis, "other cells of this run", other.runs[0].answers)
                checks.append(compare(variant, measured.answers, judge, rows, same_cell=False))
        return merged_axes(checks)
