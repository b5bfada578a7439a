"""The script of a test kit on answers of broken servers."""

from __future__ import annotations

import json
import math
from http.client import BadStatusLine
from pathlib import Path
from typing import Any

import pytest

from panscan.verify import kit_script

_ROW = {"a": math.log(0.6), "b": math.log(0.4)}
_QUESTION = {
    "name": "plain",
    "prompt": "?",
    "mm_processor_kwargs": {},
    "prompt_tokens": 9,
    "noise": 1e-3,
    "tokens": ["a", "a", ""],
    "clear": [True, True, True],
    "log_probabilities": {"reference": [_ROW] * 3},
}
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


def _check(
    reply: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, str]:
    def fetch(_: Any, path: str, body: Any = None) -> Any:
        if body is None:
            return {"data": [{"id": "model"}]}
        if isinstance(reply, Exception):
            raise reply
        return reply

    (tmp_path / "kit.json").write_text(json.dumps(_KIT))
    (tmp_path / "page.png").write_bytes(b"")
    monkeypatch.setattr(kit_script, "HERE", tmp_path)
    monkeypatch.setattr(kit_script, "fetch", fetch)
    monkeypatch.setattr("sys.argv", ["check.py", "http://server", *options])
    return kit_script.main(), capsys.readouterr().out


@pytest.mark.parametrize("count", [3, 2])
def test_a_right_answer_passes_with_and_without_its_end_token(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown = _check(_reply(_steps(count, _ROW)), tmp_path, monkeypatch, capsys)
    assert code == 0 and "missing crops 500x" in shown
    code, shown = _check(_reply(_steps(count, _ROW)), tmp_path, monkeypatch, capsys, "--no-pan-and-scan")
    assert code == 0 and "crops" not in shown


def test_an_answer_that_ends_too_early_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown = _check(_reply(_steps(1, _ROW)), tmp_path, monkeypatch, capsys)
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
        BadStatusLine("garbage"),
        TimeoutError("timed out"),
    ],
    ids=["none", "NaN", "no probabilities", "strings", "usage", "no log-probabilities", "not HTTP", "timeout"],
)
def test_a_server_without_usable_answers_fails_early(
    reply: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown = _check(reply, tmp_path, monkeypatch, capsys)
    assert code == 1 and shown.count("page.png") == 2, "later pages are not asked"
    assert shown.endswith("FAIL: the first questions have no answer with log-probabilities.\n")
