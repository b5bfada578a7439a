"""Runners without continuous batching behind callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue

import pytest

from panscan import GenerateRunner, Request, Result, Sampling
from panscan.serve.loaded_model import _RunnerModel


class Panic(BaseException):
    """As a library in Rust raises: not even an ``Exception``."""


def test_a_panic_ends_its_request_alone(tiny: GenerateRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny.run

    def panicking(batch: Sequence[Request]) -> list[Result]:
        if any(request.prompt == "panic" for request in batch):
            raise Panic("in Rust")
        return run(batch)

    monkeypatch.setattr(tiny, "run", panicking)
    monkeypatch.setattr(tiny, "close", lambda: None)  # later tests use this runner
    model = _RunnerModel(tiny)
    results: SimpleQueue[Result] = SimpleQueue()
    for prompt in ("panic", "Hi"):
        model.start(Request(prompt, sampling=Sampling(max_new_tokens=2), id=prompt), None, results.put)
    ended = {result.id: result for result in (results.get(timeout=60), results.get(timeout=60))}
    assert "Panic: in Rust" in str(ended["panic"].error)
    assert ended["Hi"].error is None
    model.close()
