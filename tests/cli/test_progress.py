"""The line that shows slow steps: on a terminal, in a log, and for a program that shows nothing."""

import io

import pytest
from rich.console import Console

from panscan.batch.jsonl import AnswerRecord
from panscan.cli.progress import ProgressLine, batch_progress, progress_line
from panscan.core import now
from panscan.core.activity import Activity, activity, displayed


def started(step: Activity, seconds: float) -> Activity:
    """The step as if it had begun earlier."""
    step.started = step.renamed = now() - seconds
    return step


@pytest.mark.parametrize(
    ("done", "total", "unit", "seconds", "status"),
    [
        (1, 41, "", 2.0, "1 of 41, 0.5/s, 0:01:20 left"),
        (5000, 5000, "", 2.0, "5000 of 5000, 2500/s, 0:00:00 left"),
        (7, 5, "", 2.0, "7 of 5, 3.5/s, 0:00:00 left"),
        (0, 5, "", 60.0, "0 of 5"),
        (2.5e9, 8.6e9, "B", 50.0, "2.50 of 8.60 GB, 50.0 MB/s, 0:02:02 left"),
        (3, None, "", 9.0, ""),
    ],
)
def test_steps_tell_the_time_left(done: float, total: float | None, unit: str, seconds: float, status: str) -> None:
    step = started(Activity("counting", total, unit), seconds)
    step.update(done)
    assert step.status() == status


def test_a_log_has_a_line_for_a_slow_step_and_few_more() -> None:
    written = io.StringIO()
    line = ProgressLine(Console(file=written, width=20), delay=60.0, every=600.0)
    with displayed(line):
        with activity("importing what is quick"):
            line.print_due()
        with activity("answering", total=40) as outer:
            started(outer, 100.0).update(10)
            line.print_due()
            line.print_due()
            with activity("loading google/gemma-3-27b-it") as inner:
                line.print_due()
                started(inner, 61.0)
                line.print_due()
        line.print_due()
    line.close()
    step, load = written.getvalue().splitlines()
    assert (step, load) == ("answering: 10 of 40, 0.1/s, 0:05:00 left", "loading google/gemma-3-27b-it ...")


def test_a_repeated_line_says_for_how_long() -> None:
    written = io.StringIO()
    line = ProgressLine(Console(file=written), delay=0.0, every=0.0)
    with displayed(line), activity("loading") as step:
        line.print_due()
        started(step, 61.0)
        line.print_due()
    line.close()
    assert written.getvalue().splitlines()[:2] == ["loading ...", "loading: 61 s"]


def test_a_terminal_has_one_line_that_disappears() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80, legacy_windows=False, _environ={"TERM": "xterm"})
    with progress_line(console):
        with activity("downloading \x1b[31mgemma", total=2e9, unit="B") as step:
            step.update(1e9)
            console.print("a remark")
        assert written.getvalue().endswith("\x1b[2K"), "the line is erased at the end of the step"
    shown = written.getvalue()
    assert " of 2.00 GB" in shown
    assert "\x1b[31m" not in shown, "a name cannot colour the terminal"
    assert "a remark\n" in shown


def test_a_batch_counts_what_failed_and_what_turned_up_on_the_way() -> None:
    expected = [3, 3, 5]
    seen: list[tuple[str, float, float | None]] = []

    class Recorder:
        def show(self, running: list[Activity]) -> None:
            self.steps = list(running) or self.steps

    recorder = Recorder()
    with displayed(recorder), batch_progress(lambda: expected.pop(0)) as on_answer:
        for error in (None, "no such file"):
            on_answer(AnswerRecord(id="1", image=["1.png"], error=error))
            [step] = recorder.steps
            seen.append((step.text, step.done, step.total))
    assert seen == [("answering", 1, 3), ("answering (1 failed)", 2, 5)]
