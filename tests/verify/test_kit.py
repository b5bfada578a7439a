"""The script of a test kit on answers of broken servers."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.verify.replying import replying

from panscan.verify import kit_script

_ROW = {"a": math.log(0.6), "b": math.log(0.4)}
_ANSWER = {"tokens": ["a", "a", ""], "clear": [True] * 3, "log_probabilities": {"reference": [_ROW] * 3}}
_QUESTION = {"name": "plain", "prompt": "?", "mm_processor_kwargs": {}, "prompt_tokens": 9, "noise": 1e-3, **_ANSWER}
_KIT = {
    "fields": {},
    "noise": 1e-3,
    "limits": {"exact": 3, "close": 10},
    "end_tokens": ["<end>"],
    "correct": ["reference"],
    "computations": {
        name: {"deviation": 500.0, "title": "", "cause": ""}
        for name in ("reference", "causal-image-tokens", "no-pan-and-scan")
    },
    "pages": [{"file": "page.png", "questions": [_QUESTION] * 2}] * 4,
}


def _steps(count: int, row: dict[str, float]) -> list[dict[str, Any]]:
    top = [{"token": token, "logprob": value} for token, value in row.items()]
    return [{"token": token, "logprob": 0, "top_logprobs": top} for token in ("a", "a", "<end>")[:count]]


def _reply(steps: object, **fields: object) -> dict[str, Any]:
    return {"choices": [{"logprobs": {"content": steps}}], **fields}


def _check(reply: object, kit: Path, *options: str) -> tuple[int, str]:
    """Run the script as its user does; return its exit code and output."""
    (kit / "kit.json").write_text(json.dumps(_KIT))
    (kit / "page.png").write_bytes(b"")
    script = shutil.copy(kit_script.__file__, kit / "check.py")
    with replying(lambda *_: (200, reply)) as url:
        command = [sys.executable, "-I", "-S", script, url, *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert not done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize("count", [3, 2])
def test_a_right_answer_passes_with_and_without_its_end_token(count: int, tmp_path: Path) -> None:
    code, shown = _check(_reply(_steps(count, _ROW)), tmp_path)
    assert code == 0 and "missing crops 500x" in shown
    code, shown = _check(_reply(_steps(count, _ROW)), tmp_path, "--no-pan-and-scan")
    assert code == 0 and "crops" not in shown


def test_an_answer_that_ends_too_early_fails(tmp_path: Path) -> None:
    code, shown = _check(_reply(_steps(1, _ROW)), tmp_path)
    assert code == 1 and "wrong token" in shown and "8 questions wrong" in shown


@pytest.mark.parametrize(
    "reply",
    [
        _reply(_steps(3, {})),
        _reply(_steps(3, {"a": math.nan, "b": math.nan})),
        _reply(_steps(3, {"a": 0.0, "b": 0.0})),
        _reply(["a"]),
        _reply(_steps(3, _ROW), usage=[9]),
        {"choices": [{"logprobs": None}]},
        b"garbage\r\n\r\n",
        b"HTTP/1.0 200 OK\r\ncontent-length: 99\r\n\r\n{",
        b"",
    ],
    ids=["none", "NaN", "no probabilities", "strings", "usage", "no log-probabilities", "not HTTP", "cut", "closed"],
)
def test_a_server_without_usable_answers_fails_early(reply: object, tmp_path: Path) -> None:
    code, shown = _check(reply, tmp_path)
    assert code == 1 and shown.count("page.png") == 2, "later pages are not asked"
    assert shown.endswith("FAIL: the first questions have no answer with log-probabilities.\n")
