"""The engine on a GPU: ``generate()``'s tokens in float32, an exact verdict in bf16, repeatable, within its memory."""

import gc
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.driving import Reference, questions, requests
from tests.engine.test_conformance import HOW, MINI_OPTIONS, OPTIONS, Arrival, arrivals, check
from tests.verdict.test_cells import STEPS
from tests.verdict.test_cells import Bench as VerdictBench

from panscan import GenerateRunner
from panscan.core import UnsupportedError
from panscan.engine.engine import Engine
from panscan.engine.options import EngineOptions
from panscan.model.observation import ForcedTokens
from panscan.model.support import require_supported, unsupported_reason
from panscan.runners.factory import ready_runner
from panscan.settings import settings_from

pytestmark = pytest.mark.gpu


@cache
def on_gpu(model: str) -> tuple[GenerateRunner, Reference]:
    """A model in float32 and its answers, kept for all tests of this file."""
    runner = GenerateRunner.from_pretrained(model, dtype="fp32", device="cuda")
    return runner, Reference(runner, questions() if model == "mini" else None)


@pytest.mark.parametrize("model", ["tiny", "mini"])
@settings(max_examples=10, **HOW)
@given(st.data())
def test_any_history_has_the_tokens_of_generate(model: str, data: st.DataObject) -> None:
    runner, due = on_gpu(model)
    options = data.draw(MINI_OPTIONS if model == "mini" else OPTIONS)
    backend = {"attention_backend": data.draw(st.sampled_from(["triton", "triton", "sdpa"]))}
    check(runner, due, options | backend, data.draw(arrivals(8, len(due.requests))))


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
@pytest.mark.parametrize("model", ["tiny", "mini"])
def test_every_answer_is_that_of_the_cpu(request: pytest.FixtureRequest, model: str, backend: str) -> None:
    due: Reference = request.getfixturevalue("reference" if model == "tiny" else "mini_reference")
    with Engine(on_gpu(model)[0].loaded, EngineOptions(kv_cache_gb=0.2, attention_backend=backend)) as engine:
        results = engine.generate(due.requests)
    assert [result.token_ids for result in results] == due.tokens(due.requests)


def test_a_replayed_pass_has_the_bits_of_one_that_is_launched() -> None:
    """The same padding, so the same kernels in the same order; what a graph forgot to read or write would differ."""
    options = EngineOptions(kv_cache_gb=0.05, attention_backend="triton", prefix_caching=False, max_num_seqs=3)
    seen = []
    for captured in (True, False):
        with Engine(on_gpu("tiny")[0].loaded, options) as engine:
            runner = engine._worker.loop.runner
            graphs = runner.graphs
            graphs.recorder.capture = captured
            graphs.prepare()
            assert len(graphs.sizes) > 5
            observed = [engine.observe([request], [ForcedTokens(None, [], 4)])[0] for request in requests()[2:6]]
            seen.append(torch.stack([observation.answer for observation in observed]))
    assert torch.equal(*seen)


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
@pytest.mark.parametrize("chunk", [65, 129, 193])
def test_one_row_more_than_a_tile(chunk: int, backend: str) -> None:
    """PyTorch's memory-efficient attention is wrong there for keys that heads share without copies."""
    history = [Arrival(place, 40 * place, None) for place in range(len(requests()))]
    options = {"prefill_chunk_size": chunk, "kv_cache_gb": 0.05, "prefix_caching": False}
    check(*on_gpu("tiny"), options | {"attention_backend": backend}, history)


CHANGES = [{}, {"prefill_chunk_size": 100}, {"preprocess": "device"}, {"attention_backend": "sdpa"}]
CHANGES += [{"attention_backend": "triton", "prefill_chunk_size": 100, "max_num_seqs": 5}]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_bf16_is_exact(tmp_path: Path, changes: dict[str, object]) -> None:
    given = {"model": "tiny", "runner": "engine", "dtype": "bf16", "device": "cuda", "max_new_tokens": STEPS, **changes}
    chosen = settings_from(given)
    runner = ready_runner(chosen)
    verdict = VerdictBench(tmp_path).verifier().verdict(runner, chosen)
    assert (verdict.verdict, verdict.reason) == ("exact", None)
    runner.close()


@settings(max_examples=3, **HOW)
@given(st.sampled_from([64, 5000]), st.sampled_from(["triton", "sdpa"]))
def test_the_same_work_gives_the_same_bits(chunk: int, backend: str) -> None:
    """One after the other: what is computed together does not depend on when threads are done."""
    sizes = {"kv_cache_gb": 0.05, "max_num_seqs": 1, "prefix_caching": False}
    options = EngineOptions(**sizes, prefill_chunk_size=chunk, attention_backend=backend)
    seen = []
    for _ in range(2):
        with Engine(on_gpu("tiny")[0].loaded, options) as engine:
            results = engine.generate(requests())
            seen.append([result.token_ids for result in results])
    assert seen[0] == seen[1]


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_too_few_gpus_are_counted(device: str) -> None:
    count = torch.cuda.device_count()
    split = settings_from({"runner": "engine", "device": device, "tensor_parallel_size": 64})
    with pytest.raises(UnsupportedError, match=rf"size 64 needs 64 GPUs; visible: {count}$"):
        require_supported(split)
    assert unsupported_reason(replace(split, tensor_parallel_size=count)) is None


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@two_gpus
def test_layers_on_two_gpus_are_refused() -> None:
    runner = ready_runner(settings_from({"model": "tiny", "runner": "generate", "device_map": "balanced"}))
    assert len(set(runner.loaded.model.hf_device_map.values())) == 2
    with pytest.raises(UnsupportedError, match=r"--device-map spreads .* use --tensor-parallel-size 2"):
        Engine(runner.loaded, EngineOptions(kv_cache_gb=0.05))
    runner.close()


@two_gpus
@pytest.mark.parametrize("backend", ["triton", "sdpa"])
@pytest.mark.parametrize("model", ["tiny", "mini"])
def test_two_ranks_have_the_tokens_of_the_cpu(request: pytest.FixtureRequest, model: str, backend: str) -> None:
    """With views on both ranks, prefixes from the cache, and short passes from graphs."""
    due: Reference = request.getfixturevalue("reference" if model == "tiny" else "mini_reference")
    given = {"dtype": "fp32", "kv_cache_gb": 0.2, "attention_backend": backend, "max_num_seqs": 8}
    with Engine.from_pretrained(model, tensor_parallel_size=2, **given) as engine:
        for _ in range(2):
            results = engine.generate(due.requests)
            assert [result.token_ids for result in results] == due.tokens(due.requests)
        assert engine.stats().cached_tokens > 0


@pytest.mark.parametrize("model", ["tiny", "mini"])
def test_the_allocator_never_reserves_more_than_the_limit(model: str) -> None:
    """Nor does any request fail for lack of memory."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_reserved()  # by models of other tests
    limit = 2.0 + held / 1e9
    given = {"dtype": "bf16", "device": "cuda", "gpu_memory_gb": limit, "vision_batch_size": 4, "max_num_seqs": 64}
    with Engine.from_pretrained(model, **given, max_new_tokens=4) as engine:
        results = engine.generate([*requests(), *questions()] * 2)
        assert [result.error for result in results] == [None] * len(results)
        peak = torch.cuda.max_memory_reserved()
    assert held < peak <= limit * 1e9


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
def test_memory_comes_back(backend: str) -> None:
    """What the first engine leaves is PyTorch's: workspaces of products, one for a thread's handle and a stream."""
    left = []
    for _ in range(3):
        how = {"model": "tiny", "runner": "engine", "device": "cuda", "max_new_tokens": 4, "attention_backend": backend}
        runner = ready_runner(settings_from(how))
        runner.run(requests()[:3])
        held = torch.cuda.memory_allocated()
        runner.close()
        del runner
        gc.collect()
        left.append(torch.cuda.memory_allocated())
        assert held > left[-1] + 10**8
    assert left[0] == left[1] == left[2]
