"""All that is done at the start to be fast on a GPU, on a CPU: compiled modules, interpreted kernels, padded passes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tests.engine.driving import Reference, questions, requests
from tests.triton_here import interpreted

from panscan import GenerateRunner, Request
from panscan.core import UnsupportedError
from panscan.engine.engine import Engine
from panscan.engine.options import EngineOptions
from panscan.engine.startup import Startup


@pytest.fixture
def fast_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU is all that is missing; without one nothing is recorded, and the same passes run launch by launch."""

    def slow_reason(started: Startup, _: object) -> str | None:
        return None if started.options.attention_backend == "triton" else "not asked for"

    monkeypatch.setattr(Startup, "_slow_reason", slow_reason)
    yield


@interpreted
@pytest.mark.parametrize("fast_start", [True, False])
@pytest.mark.usefixtures("fast_on_a_cpu")
def test_the_fast_path_has_the_tokens_of_generate(tiny: GenerateRunner, reference: Reference, fast_start: bool) -> None:
    same_tokens(tiny, reference, [requests()[place] for place in (0, 2)], fast_start)


@interpreted
@pytest.mark.usefixtures("fast_on_a_cpu")
def test_the_fast_path_has_the_answers_of_the_trained_model(mini: GenerateRunner, mini_reference: Reference) -> None:
    same_tokens(mini, mini_reference, [questions()[place] for place in (0, 1)], True)


def same_tokens(runner: GenerateRunner, reference: Reference, asked: list[Request], fast_start: bool) -> None:
    options = EngineOptions(
        kv_cache_gb=0.05, attention_backend="triton", fast_start=fast_start, max_num_seqs=2, vision_batch_size=2
    )
    query = runner.loaded.model.model.language_model.layers[0].self_attn.q_proj
    own = type(query)
    with Engine(runner.loaded, options) as engine:
        assert type(query) is not own
        assert any("compiled" in line for line in engine.decisions) == (not fast_start)
        assert engine._loop.started.graphs is not None
        results = engine.generate(asked)
        assert engine.stats().steps > 2
    assert [result.token_ids for result in results] == [reference(request).token_ids for request in asked]
    assert type(query) is own


@interpreted
@pytest.mark.usefixtures("fast_on_a_cpu")
def test_a_start_that_fails_leaves_the_model_as_it_was(tiny: GenerateRunner) -> None:
    query = tiny.loaded.model.model.language_model.layers[0].self_attn.q_proj
    own = type(query)
    options = EngineOptions(kv_cache_gb=1e-6, attention_backend="triton", fast_start=True, vision_batch_size=1)
    before = set(threading.enumerate())
    with pytest.raises(UnsupportedError, match="kv-cache-gb"):
        Engine(tiny.loaded, options)
    assert type(query) is own
    assert set(threading.enumerate()) <= before  # those of a test before may end meanwhile


def test_an_interrupted_start_leaves_no_thread(tiny: GenerateRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Startup) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Startup, "_start", interrupted)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        Engine(tiny.loaded, EngineOptions(kv_cache_gb=0.05))
    assert set(threading.enumerate()) <= before  # those of a test before may end meanwhile


def test_a_cpu_does_none_of_it(tiny: GenerateRunner) -> None:
    with Engine(tiny.loaded, EngineOptions(kv_cache_gb=0.05)) as engine:
        assert engine._loop.started.graphs is None
        attention, layers = engine.decisions
    assert attention.startswith("attention: sdpa (")
    assert layers == "layers: eager, launched one by one (not on an NVIDIA GPU)"
