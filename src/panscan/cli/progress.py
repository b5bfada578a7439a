"""A sweep's progress on the terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from panscan.bench.grid import Cell
from panscan.bench.plan import Plan
from panscan.settings import Settings

__all__ = ["SweepProgress"]


class SweepProgress:
    """Watches a sweep: a bar over batches with the time left, and one line for each kind of problem."""

    def __init__(self, plan: Plan, done: set[tuple[str, int | None]], console: Console) -> None:
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
        self._bar.update(self._task, description=f"loading {settings.model_name}")

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
