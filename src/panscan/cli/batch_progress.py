"""A batch job's progress: a bar on a terminal, lines in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from panscan.core import now

__all__ = ["batch_progress"]

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
