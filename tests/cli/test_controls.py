"""Control characters of answers and names: escaped on a terminal, which would obey them, and exact everywhere else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import noise

from panscan.core import escape_controls

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
    ours, theirs = os.openpty()
    line = [sys.executable, *command]
    with subprocess.Popen(line, stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL) as process:
        os.close(theirs)
        printed = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # on Linux: the other end is closed
                break
            if not piece:
                break
            printed += piece
        process.wait(timeout=60)
    os.close(ours)
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


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("a\tb\nc\r\nd", "a\tb\nc\r\nd"),
        ("100\r200", r"100\u000d200"),
        ("\u200f\u05d0\u200d\u00a0\U0001f469\u200d\U0001f52c", "\u200f\u05d0\u200d\u00a0\U0001f469\u200d\U0001f52c"),
        ("\u2066x\u2069", r"\u2066x\u2069"),
        ("\0\x08\x1b[2J", r"\u0000\u0008\u001b[2J"),
    ],
)
def test_what_is_escaped(text: str, escaped: str) -> None:
    assert escape_controls(text) == escaped
