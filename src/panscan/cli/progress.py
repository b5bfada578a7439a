"""Progress on the terminal: of a sweep and of a batch job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from panscan.core import escape_controls, now

if TYPE_CHECKING:
    from panscan.bench.grid import Cell
    from panscan.bench.plan import SweepPlan
    from panscan.settings import Settings

__all__ = ["SweepProgress", "batch_progress"]

_PERIOD_S = 300.0  # over which the time left is estimated: on a CPU a document may take a minute
_EVERY = 100  # documents, or
_EVERY_S = 30.0  # seconds between two lines of a log


@contextmanager
def batch_progress(console: Console, expected: Callable[[], int]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Gives what moves the progress on by one answer's line.

    Args:
        console: where it is shown.
        expected: documents to be answered, as far as is known now.
    """
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    answers = failed = said = 0
    begun = said_at = now()
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown, speed_estimate_period=_PERIOD_S) as bar:
        task = bar.add_task("answering", total=expected())

        def on_answer(record: dict[str, Any]) -> None:
            nonlocal answers, failed, said, said_at
            answers += 1
            failed += record["error"] is not None
            text = f"answering ({failed} failed)" if failed else "answering"
            bar.update(task, advance=1, total=expected(), description=text)
            if not shown and (not said or answers - said >= _EVERY or now() - said_at >= _EVERY_S):
                said, said_at = answers, now()
                console.print(f"{text}: {_so_far(answers, expected(), said_at - begun)}", soft_wrap=True)

        yield on_answer


def _so_far(answers: int, expected: int, seconds: float) -> str:
    """``12 of 40, 1.5/s, 0:00:19 left``, at the mean rate since the beginning."""
    rate = answers / max(seconds, 1e-9)
    left = timedelta(seconds=round(max(expected - answers, 0) / rate))
    return f"{answers} of {expected}, {f'{rate:.0f}' if rate >= 10 else f'{rate:.2g}'}/s, {left} left"


class SweepProgress:
    """Watches a sweep: a bar over batches with the time left, and one line for each kind of problem."""

    def __init__(self, plan: SweepPlan, done: set[tuple[str, int | None]], console: Console) -> None:
        self.console = console
        self._said: set[str] = set()
        columns = (
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn("batches"),
            TimeElapsedColumn(), TimeRemainingColumn(),
        )  # fmt: skip
        self._bar = Progress(*columns, console=console, transient=True)
        runnable = [cell for cell in plan.cells if cell.id not in plan.skipped]
        left = [cell for cell in runnable for repeat in range(plan.repeats) if (cell.id, repeat) not in done]
        batches = {cell.id: len(plan.batches(cell.settings)) for cell in runnable}
        total = sum(batches[cell.id] for cell in left)
        self._visit, self._visits = 0, len(left)
        self._task = self._bar.add_task("measuring", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def loading(self, settings: Settings) -> None:
        """A model is being loaded."""
        self._bar.update(self._task, description=escape_controls(f"loading {settings.model_name}"))

    def ready(self, cell: Cell, repeat: int) -> None:
        """A cell's warm-up is over. Where no bar can be drawn, a line says how far the sweep is."""
        self._visit += 1
        if not self.console.is_terminal:
            changed = ", ".join(f"{name}={value}" for name, value in cell.settings.changed().items())
            self.console.print(f"measuring {self._visit} of {self._visits}: {cell.id} {changed}", soft_wrap=True)

    def batch_done(self) -> None:
        """One measured batch more."""
        self._bar.update(self._task, description="measuring", advance=1)

    def stage(self, what: str) -> None:
        """Something that is not measured goes on."""
        self._bar.update(self._task, description=what)

    def problem(self, cell: Cell, outcome: str, reason: str) -> None:
        """A cell did not come to its end; each reason is said once."""
        if reason not in self._said:
            self._said.add(reason)
            self.console.print(f"{outcome}: {reason}", style="yellow", soft_wrap=True)
