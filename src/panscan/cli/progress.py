"""Progress on standard error: one updating line on a terminal, an occasional line otherwise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType

from panscan.analysis.cells import distinguishing_names, effective_settings, plain_name
from panscan.analysis.setting_words import label
from panscan.cli.console import errors, note
from panscan.core import escape_controls, now
from panscan.core.activity import Activity, activity, displayed

if TYPE_CHECKING:
    from rich.live import Live
    from rich.spinner import Spinner

    from panscan.batch.jsonl import AnswerRecord
    from panscan.bench.grid import Cell
    from panscan.bench.plan import FinishedVisits, SweepPlan
    from panscan.settings import Settings


_DELAY_S = 2.0  # until a step is shown where lines cannot be updated
_EVERY_S = 30.0  # between lines there
_TICK_S = 0.25
MEASURING = "measured batches"


@contextmanager
def progress_line(console: Console) -> Iterator[None]:
    """Show the activities of the block on a console."""
    line = ProgressLine(console)
    try:
        with displayed(line.show):
            yield
    finally:
        line.close()


class ProgressLine:
    """Shows the innermost activity. See :data:`panscan.core.activity.Show`.

    A terminal gets a line that is updated in place and disappears at the end. Elsewhere, such as in a log file, a step
    gets a line once it has run for two seconds, and another every 30 seconds, also if each inner step is quick.

    Args:
        console: console to print on.
        delay: seconds until a step is shown where lines cannot be updated.
        every: seconds between lines there.
    """

    def __init__(self, console: Console, *, delay: float = _DELAY_S, every: float = _EVERY_S) -> None:
        self._console, self._delay, self._every = console, delay, every
        self._running: list[Activity] = []
        self._resumed = 0.0  # when the innermost step became that again, because one within it ended
        self._live: Live | None = None
        self._spinner: Spinner | None = None
        self._printed, self._printed_at = "", 0.0
        self._ticker: threading.Thread | None = None
        self._closed = threading.Event()

    def show(self, running: list[Activity]) -> None:
        """Show the running activities, the outermost first."""
        self._resumed = now() if len(running) < len(self._running) else 0.0
        self._running = running
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._show_live()
        elif running and self._ticker is None and not self._console.quiet:
            self._ticker = threading.Thread(target=self._print_at_intervals, name="panscan-progress", daemon=True)
            self._ticker.start()

    def close(self) -> None:
        """Remove the line, and stop."""
        self._closed.set()
        self._running = []
        self._show_live()
        if self._ticker is not None:
            self._ticker.join()

    def _show_live(self) -> None:
        if not self._running:
            if self._live is not None:
                self._live.stop()
                self._live = None
        elif self._live is None:
            from rich.live import Live

            # Results go to standard output, which may be a pipe: they must not be redirected to this console.
            self._live = Live(
                get_renderable=self._line,
                console=self._console,
                transient=True,
                redirect_stdout=False,
                refresh_per_second=8,
            )
            self._live.start()

    def _line(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        running = self._running
        if not running:
            return Text()
        step = running[-1]
        passed = now() - step.started
        self._spinner = self._spinner or Spinner("dots")
        line = Table.grid(padding=(0, 1))
        parts: list[RenderableType] = [self._spinner, Text(escape_controls(step.text))]
        if step.total:
            parts.append(ProgressBar(step.total, step.done, width=24))
        parts.append(Text(step.status() or (f"{passed:.0f} s" if passed >= 1 else ""), style="dim"))
        for _ in parts:
            line.add_column(no_wrap=True, overflow="ellipsis")
        line.add_row(*parts)
        return line

    def _print_at_intervals(self) -> None:
        while not self._closed.wait(_TICK_S):
            self.print_due()

    def print_due(self) -> None:
        """Print the innermost activity if a line about it is due. Called at intervals where there is no terminal."""
        running, time = self._running, now()
        if not running:
            return
        step = running[-1]
        changed = step.text != self._printed and time - max(step.renamed, self._resumed) >= self._delay
        # Steps that are all quick, such as computations of a verification, get lines by the time of the outermost one.
        if changed or time - max(self._printed_at, running[0].started) >= self._every:
            self._printed, self._printed_at = step.text, time
            status = step.status() or ("" if changed else f"{time - step.renamed:.0f} s")
            self._console.print(f"{step.text}: {status}" if status else f"{step.text} ...", soft_wrap=True)


@contextmanager
def batch_progress(expected: Callable[[], int]) -> Iterator[Callable[[AnswerRecord], None]]:
    """Show the progress of a batch job; yield a callback that takes each answer's record.

    Args:
        expected: returns the number of documents to answer that are known so far.
    """
    failed = 0
    with activity("answering", total=expected()) as step:

        def on_answer(answer: AnswerRecord) -> None:
            nonlocal failed
            if answer.error is not None:
                failed += 1
                step.rename(f"answering ({failed} failed)")
            step.update(step.done + 1, expected())

        yield on_answer


class SweepProgress:
    """Shows the progress of a sweep over its batches, and each kind of problem once.

    An observer of :func:`panscan.bench.run.start`.

    Args:
        plan: the sweep.
        done: visits that an earlier start finished.
        step: the sweep as an activity.
    """

    def __init__(self, plan: SweepPlan, done: FinishedVisits, step: Activity) -> None:
        self._step = step
        self._reported: set[str] = set()
        runnable = [cell for cell in plan.cells if cell.id not in plan.skipped]
        pending = [cell for cell in runnable for repeat in range(plan.repeats) if (cell.id, repeat) not in done]
        batches = {cell.id: len(plan.batches(cell.settings)) for cell in runnable}
        self._visit, self._visits, self._least = 0, len(pending), "at least " * plan.adaptive
        most = self._visits + (plan.most_repeats - plan.repeats) * len(runnable)
        self._again = f" of at most {most}, as speeds vary by more than {plan.precision or 0:g}%"
        settings = {cell.id: effective_settings(asdict(cell.settings)) for cell in plan.cells}
        varying = distinguishing_names(list(settings.values()))
        self._names = {cell: label(values, varying) or plain_name(values) for cell, values in settings.items()}
        self._batches, self._done = sum(batches[cell.id] for cell in pending), 0
        step.update(0, self._batches)

    def loading(self, settings: Settings) -> None:
        """Show that a model is being loaded."""
        self._step.rename(f"loading {settings.model_name}")

    def ready(self, cell: Cell, repeat: int) -> None:
        """Show that a cell is warmed up. Without a terminal, print which one."""
        self._visit += 1
        self._measuring()
        if not errors().is_terminal:
            total = f" of {self._least}{self._visits}" if self._visit <= self._visits else self._again
            note(f"measuring {self._visit}{total}: {self._names[cell.id]}")

    def batch_done(self) -> None:
        """Count a measured batch."""
        self._done += 1
        self._batches = max(self._batches, self._done)
        self._measuring()

    def stage(self, what: str) -> None:
        """Show work that is not measured, without the number of batches."""
        self._step.rename(what)
        self._step.total = None

    def _measuring(self) -> None:
        self._step.rename(MEASURING)
        self._step.update(self._done, self._batches)

    def problem(self, cell: Cell, outcome: str, reason: str) -> None:
        """Print why a cell was not finished, each reason once."""
        if reason not in self._reported:
            self._reported.add(reason)
            note(f"{outcome}: {reason}", "yellow")
