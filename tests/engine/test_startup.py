"""Engine startup: what a GPU gets (on a CPU, with interpreted kernels and padded passes), and starts that fail."""

import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from tests.engine.driving import Reference, requests
from tests.triton_here import interpreted

from panscan import GenerateRunner, Request
from panscan.core import UnsupportedError
from panscan.engine.engine import Engine
from panscan.engine.loop import Loop
from panscan.engine.model_runner import ModelRunner
from panscan.engine.options import EngineOptions


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the path of a GPU on a CPU: nothing is captured, and the same padded passes run kernel by kernel."""
    monkeypatch.setattr(ModelRunner, "_slow_reason", lambda _: None)


@interpreted
@pytest.mark.usefixtures("like_a_gpu")
def test_the_gpu_path_has_the_tokens_of_generate(tiny: GenerateRunner, reference: Reference) -> None:
    same_tokens(tiny, reference, [requests()[place] for place in (0, 2)])


def same_tokens(runner: GenerateRunner, reference: Reference, asked: list[Request]) -> None:
    """Interpreted kernels are slow, so answers are short."""
    options = EngineOptions(
        kv_cache_gb=0.05, attention_backend="triton", max_num_seqs=2, vision_batch_size=2, prefill_chunk_size=100
    )
    short = [replace(request, sampling=replace(request.sampling, max_new_tokens=3)) for request in asked]
    with Engine(runner.loaded, options) as engine:
        loop = engine._worker.loop
        assert isinstance(loop.runner, ModelRunner) and loop.runner.graphs is not None
        assert loop.facts.overlaps, "passes overlap as on a GPU"
        results = engine.generate(short)
        assert engine.stats().steps > 2
        assert len(loop.runner.pixels) == 0
    assert [result.token_ids for result in results] == [reference(request).token_ids[:3] for request in asked]


def test_a_start_that_fails_leaves_no_thread_and_the_model_usable(tiny: GenerateRunner, reference: Reference) -> None:
    before = set(threading.enumerate())
    with pytest.raises(UnsupportedError, match="kv-cache-gb"):
        Engine(tiny.loaded, EngineOptions(kv_cache_gb=1e-6))
    assert set(threading.enumerate()) <= before  # those of an earlier test may end meanwhile
    with Engine(tiny.loaded, EngineOptions(kv_cache_gb=0.05)) as engine:
        [result] = engine.generate([requests()[0]])
    assert result.token_ids == reference(requests()[0]).token_ids


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a bug"), torch.OutOfMemoryError("no memory")])
def test_a_failed_start_lifts_the_limit(
    tiny: GenerateRunner, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """However it fails. A CPU has no limit, so a function that is called on the way out stands for it."""
    lifted: list[str] = []

    def start(runner: ModelRunner, _vocab_size: int | None) -> None:
        runner._closing.callback(lifted.append, "limit")
        raise error

    monkeypatch.setattr(ModelRunner, "_start", start)
    expected = UnsupportedError if isinstance(error, torch.OutOfMemoryError) else type(error)
    before = set(threading.enumerate())
    with pytest.raises(expected) as caught:
        Engine(tiny.loaded, EngineOptions(kv_cache_gb=0.05))
    assert lifted == ["limit"]
    assert set(threading.enumerate()) <= before
    if expected is UnsupportedError:
        assert "out of memory at engine startup: lower --kv-cache-gb" in str(caught.value)


def test_closing_lifts_the_memory_limit_once(tiny: GenerateRunner) -> None:
    options = EngineOptions(kv_cache_gb=0.05)
    loop = Loop(tiny.loaded, options, ModelRunner(tiny.loaded, options))
    lifted: list[str] = []
    loop.runner._closing.callback(lifted.append, "limit")
    loop.close()
    loop.runner.close()
    assert lifted == ["limit"]


def test_a_cpu_launches_layers_one_by_one_and_overlaps_nothing(tiny: GenerateRunner) -> None:
    with Engine(tiny.loaded, EngineOptions(kv_cache_gb=0.05)) as engine:
        runner = engine._worker.loop.runner
        assert isinstance(runner, ModelRunner) and runner.graphs is None
        assert not runner.facts.overlaps
        attention, layers, resizing, cache = engine.decisions
    assert attention == "attention: sdpa (not on an NVIDIA GPU)"
    assert layers == "layers: launched one by one (not on an NVIDIA GPU)"
    assert resizing == "view resizing: Pillow on the host (not on an NVIDIA GPU)"
    assert cache.startswith("KV cache: ")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_kept_for_the_next_pass() -> None:
    code = """
import resource, numpy
from panscan.model.machine import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    numpy.ones(20 << 20, numpy.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
print(faults(), faults())
"""
    first, second = map(int, subprocess.check_output([sys.executable, "-c", code], text=True).split())
    assert second < first / 4
