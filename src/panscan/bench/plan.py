"""The plan of a sweep (cells, requests, order), and the protocols of its writer and observer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Protocol

from panscan.bench.grid import Cell
from panscan.core import SettingError
from panscan.records.metrics import RepeatWork, relative_half_width
from panscan.records.schema import DatasetFacts
from panscan.records.store import AnyRecord
from panscan.runners.base import calls
from panscan.settings import NO_IMAGES, Settings, default_of
from panscan.workload.requests import Item, Source, plans_of, view_counts

MOST_TIMES = 2
"""So many times the least number of repeats are measured for a narrow interval, at most."""
MAX_SECONDS = 120.0
"""Measured seconds of a cell after which it is not measured again for a narrow interval."""
MAX_MEASUREMENTS = 100_000
"""Repeats of all cells together."""

Visit = tuple[Cell, int | None]
"""A cell and the repeat to measure; None: compare its answers with the reference's."""

FinishedVisits = set[tuple[str, int | None]]
"""Visits that need not be made again, each with its cell's id."""


class Writer(Protocol):
    """Takes records, such as a :class:`panscan.records.store.RecordWriter`."""

    def write(self, records: Sequence[AnyRecord]) -> None: ...


class Observer(Protocol):
    """Receives the progress of a sweep."""

    def loading(self, settings: Settings) -> None: ...
    def ready(self, cell: Cell, repeat: int) -> None: ...
    def batch_done(self) -> None: ...
    def stage(self, what: str) -> None: ...
    def problem(self, cell: Cell, outcome: str, reason: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """What a sweep does; the same plan gives the same cells, requests and order.

    Args:
        cells: points to measure.
        items: requests of every cell.
        source: where the items come from.
        repeats: times that each cell is measured.
        precision: half of the 95% interval over the throughput, in percent: a cell is measured again, at most
            :data:`MOST_TIMES` as often, until its interval is so narrow, and less often if it takes more than
            :data:`MAX_SECONDS`. None, and with replicas: exactly ``repeats`` times.
        warmup: batches run and thrown away before each repeat; a compiling cell runs them all, unless 0.
        seed: of the order of cells, and of the sampler in cells that name none.
        include_content: keep prompts and answers in the records.
        verify: compare each cell's answers with the reference's.
        verify_requests: maximum number of requests to compare with the reference.
        verify_tokens: maximum number of reference tokens per request.
        verify_budget: percent of a cell's measuring time that the replay of its measured answers may take.
        check_invariance: answer each cell's requests again under other conditions (order, company, chunks, caches).
        reference: reference file or run directory to use instead of computing a reference.
        replicas: copies of all of this that run at the same time, each a process with separate devices.
        gpus_per_replica: GPUs of each copy; with a larger tensor parallel size, each has as many as that.
        dataset: what became of the questions of a dataset.
        quality_metric: the metric that is the run's quality; None without answers.
        max_accuracy_loss: the loss of accuracy that decisions exclude, in points; None for the default.

    Raises:
        SettingError: more than :data:`MAX_MEASUREMENTS` repeats in all.
    """

    cells: Sequence[Cell]
    items: Sequence[Item]
    source: Source
    repeats: int = 1
    precision: float | None = None
    warmup: int = 1
    seed: int = 0
    include_content: bool = False
    verify: bool = True
    verify_requests: int = 16
    verify_tokens: int = 32
    verify_budget: float = default_of("verify_budget", "bench")
    check_invariance: bool = False
    reference: str | None = None
    replicas: int = 1
    gpus_per_replica: int = 1
    dataset: DatasetFacts | None = None
    quality_metric: str | None = None
    max_accuracy_loss: float | None = None

    def __post_init__(self) -> None:
        if not self.verify and self.reference is not None:
            raise SettingError("--no-verify and --reference exclude each other")
        if (count := len(self.cells) * self.repeats) > MAX_MEASUREMENTS:
            raise SettingError(
                f"--repeats {self.repeats} of {len(self.cells)} cells are {count:,} measurements,"
                f" the limit is {MAX_MEASUREMENTS:,}"
            )

    @property
    def adaptive(self) -> bool:
        """Whether results decide how often a cell is measured. Replicas cannot know each other's."""
        return self.precision is not None and self.replicas == 1

    @property
    def most_repeats(self) -> int:
        """The repeats of a cell at most."""
        return self.repeats * (MOST_TIMES if self.adaptive else 1)

    def is_last(self, repeat: int, work: Sequence[RepeatWork]) -> bool:
        """Return whether a cell needs no more repeats after this one.

        Args:
            repeat: its number, from 0.
            work: of the cell's repeats so far.
        """
        if self.adaptive and sum(one.seconds for one in work) > MAX_SECONDS:
            return True
        if repeat + 1 < self.repeats:
            return False
        if repeat + 1 >= self.most_repeats:
            return True
        half = relative_half_width(work)
        return half is not None and 100 * half <= (self.precision or 0.0)

    @property
    def sample(self) -> list[Item]:
        """The items whose answers are compared, in order: those with the most views, the longest prompts and several
        images, a fifth of the sample each, and a draw of the others."""
        count = min(self.verify_requests, len(self.items))
        order = random.Random(self.seed).sample(range(len(self.items)), len(self.items))
        longest = sorted(order, key=lambda index: -len(self.items[index].prompt))
        several = [index for index in order if len(self.items[index].documents) > 1]
        chosen: dict[int, None] = {}
        # Longer over shorter sides: more views in any cell, whichever cells a plan has.
        stretches = [
            sum(max(d.width, d.height) / min(d.width, d.height) for d in item.documents) for item in self.items
        ]
        for kind in (sorted(order, key=lambda index: -stretches[index]), longest, several):
            chosen |= dict.fromkeys([index for index in kind if index not in chosen][: count // 5])
        chosen |= dict.fromkeys([index for index in order if index not in chosen][: count - len(chosen)])
        return [self.items[index] for index in sorted(chosen)]

    def batches(self, settings: Settings) -> list[list[int]]:
        """Indices of items, batch by batch, in a cell."""
        return calls(view_counts(self.items, settings), settings)

    @cached_property
    def skipped(self) -> dict[str, str]:
        """Why cells cannot run on this machine, by id; found out once, before any model is loaded."""
        from panscan.model.support import unsupported_reason

        reasons = {}
        images = any(item.documents for item in self.items)
        for cell in self.cells:
            try:
                for item in self.items:
                    plans_of(item, cell.settings)
            except SettingError as error:  # crops without pixels, for one of these images
                reasons[cell.id] = str(error)
                continue
            reason = unsupported_reason(cell.settings)
            if reason is None and cell.settings.runner == "generate_batch" and images:
                reason = NO_IMAGES
            if reason is not None:
                reasons[cell.id] = reason
        return reasons

    def order(self) -> Iterator[list[Visit]]:
        """Visits, one list per load of a model. Each repeat visits all models shuffled, and the cells of each shuffled.

        So what changes with time, such as a machine that warms up, does not favour a runner. The model that is loaded
        at the end of a repeat comes first in the next one: two models take turns as ABBAAB, with half of the loads. A
        cell is compared right after its last repeat, while its compiled code is still loaded. In the first repeat,
        quantised weights come after the others, whose reference they share.
        """
        by_load = sorted(self.cells, key=lambda cell: (cell.settings.quantized, repr(cell.settings.load_key)))
        groups = [list(group) for _, group in groupby(by_load, key=lambda cell: cell.settings.load_key)]
        loads: list[list[Visit]] = []
        previous: list[Cell] = []
        for repeat in range(self.most_repeats):
            draws = random.Random(f"{self.seed}-{repeat}")
            chosen = draws.sample(groups, len(groups))
            if repeat == 0:
                chosen.sort(key=lambda cells: cells[0].settings.quantized)
            for cells in sorted(chosen, key=lambda cells: cells is not previous):
                visits = self._visits(draws.sample(cells, len(cells)), repeat)
                if cells is previous:
                    loads[-1] += visits
                else:
                    loads.append(visits)
                previous = cells
        yield from loads

    def _visits(self, cells: Sequence[Cell], repeat: int) -> list[Visit]:
        compared = self.verify and repeat == self.most_repeats - 1
        return [visit for cell in cells for visit in ((cell, repeat), (cell, None))[: 2 if compared else 1]]
