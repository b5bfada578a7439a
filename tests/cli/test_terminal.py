"""What a terminal shows: control characters of answers and names are escaped, slow steps have a line of progress."""

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from tests.conftest import RecordedSteps, noise

from panscan.batch.jsonl import AnswerRecord
from panscan.cli.console import errors, note, out, show
from panscan.cli.progress import ProgressLine, batch_progress, progress_line
from panscan.core import escape_controls, now
from panscan.core.activity import Activity, activity, displayed, track
from panscan.report.formatting import print_line
from panscan.report.table import print_table, table_of

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")

TITLE = "\x1b]0;owned\x07"  # sets the title of a terminal's window
EVIL = f"{TITLE}\x9b31m\u202e\x7f"
ESCAPED = r"\u001b]0;owned\u0007\u009b31m\u202e\u007f"
SHOW = """
import sys
from panscan.cli.ask import _print_answer
from panscan.core import Result, Stamps
from panscan.settings import Settings
result = Result("0", sys.argv[1], [1], "stop", 1, 0, 64, 70, Stamps(0.0))
_print_answer(result, {}, Settings(), as_json=sys.argv[2] == "json")
"""


def on_a_terminal(*command: str) -> str:
    """What a command prints to a terminal, standard output and standard error together."""
    controller, terminal = os.openpty()
    line = [sys.executable, *command]
    with subprocess.Popen(line, stdout=terminal, stderr=terminal, stdin=subprocess.DEVNULL) as process:
        os.close(terminal)
        printed = b""
        while True:
            try:
                piece = os.read(controller, 4096)
            except OSError:  # on Linux: the other end is closed
                break
            if not piece:
                break
            printed += piece
        process.wait(timeout=60)
    os.close(controller)
    return printed.decode()


def in_a_pipe(*command: str) -> str:
    return subprocess.run([sys.executable, *command], capture_output=True, timeout=60, check=True).stdout.decode()


def test_an_answer_is_escaped_on_a_terminal_only() -> None:
    text = f"1,000 \u20ac\tТотал [bold]a[/x]\tb:c:d {'long ' * 40}:100:\n{EVIL}"
    printed = on_a_terminal("-c", SHOW, text, "text")
    assert text.replace("\n", "\r\n").replace(EVIL, f"{ESCAPED}\r\n") in printed
    assert TITLE not in printed
    assert in_a_pipe("-c", SHOW, text, "text") == f"{text}\n"


def test_json_on_a_terminal_is_escaped_and_stays_json() -> None:
    text = f'"{EVIL}"\t\u20ac'
    printed = on_a_terminal("-c", SHOW, text, "json")
    assert "\u20ac" in printed
    assert not set(EVIL) - set("]0;owned31m") & set(printed)
    assert json.loads(printed)["text"] == text
    assert json.loads(in_a_pipe("-c", SHOW, text, "json"))["text"] == text


@pytest.mark.parametrize("readable", [True, False])
def test_names_are_escaped_on_a_terminal_only(tmp_path: Path, readable: bool) -> None:
    path = tmp_path / f"{EVIL}.png"
    noise(90, 60).save(path)
    if not readable:
        path.write_bytes(b"no picture")
    printed = on_a_terminal("-m", "panscan", "crops", str(path), "-o", str(tmp_path / "views.png"))
    assert TITLE not in printed
    assert "\x9b" not in printed
    assert "]0;owned" in printed
    if readable:
        assert ESCAPED in printed.replace("\r\n", "")
        assert "\x1b]0;owned" in in_a_pipe("-m", "panscan", "crops", str(path), "-o", str(tmp_path / "views.png"))


TEXTS = [
    ("a\tb\nc\r\nd", "a\tb\nc\r\nd"),
    ("100\r200", r"100\u000d200"),
    ("\u200f\u05d0\u200d\u00a0\U0001f469\u200d\U0001f52c", "\u200f\u05d0\u200d\u00a0\U0001f469\u200d\U0001f52c"),
    ("\u2066x\u2069", r"\u2066x\u2069"),
    ("\0\x08\x1b[2J", r"\u0000\u0008\u001b[2J"),
]


@pytest.mark.parametrize(("text", "escaped"), TEXTS)
def test_what_is_escaped(text: str, escaped: str) -> None:
    assert escape_controls(text) == escaped


@given(st.text(st.sampled_from("[]/\\:@#=()'<>&* abred"), min_size=1, max_size=30).map(str.strip).filter(bool))
@example("[/]")
@example("[b]bold[/b] :bomb: [link=x]y[/link] \\[red]")
def test_what_rich_takes_for_markup_is_shown_as_it_is(text: str) -> None:
    """By everything that prints names, reasons and answers; wrapped at most."""
    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(printed):
        note(text)
        show(text, "bold")
        print_line(out(), text)
        print_table(table_of([text], [[text]]), out())
        line = ProgressLine(errors(), delay=0.0)
        line.show([started(Activity(text), 1.0)])
        line.print_due()
        line.close()
    assert "".join(printed.getvalue().split()).count("".join(text.split())) >= 6


# The line that shows slow steps: on a terminal, in a log, and for a program that shows nothing.


def started(step: Activity, seconds: float) -> Activity:
    """The step as if it had begun earlier."""
    step.started = step.renamed = now() - seconds
    return step


STEPS = [
    (1, 41, "", 2.0, "1 of 41, 0.5/s, 0:01:20 left"),
    (5000, 5000, "", 2.0, "5000 of 5000, 2500/s, 0:00:00 left"),
    (7, 5, "", 2.0, "7 of 5, 3.5/s, 0:00:00 left"),
    (0, 5, "", 60.0, "0 of 5"),
    (2.5e9, 8.6e9, "B", 50.0, "2.50 of 8.60 GB, 50.0 MB/s, 0:02:02 left"),
    (3, None, "", 9.0, ""),
]


@pytest.mark.parametrize(("done", "total", "unit", "seconds", "status"), STEPS)
def test_steps_tell_the_time_left(done: float, total: float | None, unit: str, seconds: float, status: str) -> None:
    step = started(Activity("counting", total, unit), seconds)
    step.update(done)
    assert step.status() == status


def test_a_log_has_a_line_for_a_slow_step_and_few_more() -> None:
    written = io.StringIO()
    line = ProgressLine(Console(file=written, width=20), delay=60.0, every=600.0)
    with displayed(line.show):
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
    with displayed(line.show), activity("loading") as step:
        line.print_due()
        started(step, 61.0)
        line.print_due()
    line.close()
    assert written.getvalue().splitlines()[:2] == ["loading ...", "loading: 61 s"]


def test_quick_steps_of_a_long_one_have_a_line_now_and_then() -> None:
    written = io.StringIO()
    line = ProgressLine(Console(file=written), delay=2.0, every=30.0)
    with displayed(line.show), activity("verifying") as outer:
        for seconds in (29.0, 31.0, 61.0):
            with activity(f"a step after {seconds:.0f} s"):
                started(outer, seconds)
                line.print_due()
        line.print_due()  # between two steps
    line.close()
    assert written.getvalue().splitlines() == ["a step after 31 s: 0 s"]


def test_tracked_items_are_one_step_that_ends_with_the_last_or_with_an_error() -> None:
    steps = RecordedSteps()
    with displayed(steps.show):
        assert list(track("copying", ["a", "b"])) == ["a", "b"]
        with pytest.raises(ZeroDivisionError):
            for item in track("dividing", [1, 0, 1]):
                1 / item
    assert steps.shown == [[("copying", 0, 2)], [], [("dividing", 0, 3)], []]


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
    with displayed(recorder.show), batch_progress(lambda: expected.pop(0)) as on_answer:
        for error in (None, "no such file"):
            on_answer(AnswerRecord(id="1", image=["1.png"], error=error))
            [step] = recorder.steps
            seen.append((step.text, step.done, step.total))
    assert seen == [("answering", 1, 3), ("answering (1 failed)", 2, 5)]
