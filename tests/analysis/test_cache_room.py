"""When a recommendation names an int8 KV cache."""

from dataclasses import asdict
from typing import Any

import pytest
from tests.records.synthetic import load, outcome, record_of, repeat, request, run_of

from panscan.analysis.cache_room import cache_advice
from panscan.analysis.recommend import recommend
from panscan.model.shapes import SHAPES
from panscan.records.store import Run

A100 = {"name": "NVIDIA A100-SXM4-40GB", "memory_bytes": 42_298_834_944}


def run_with(gpu: dict[str, Any], requests: int, loaded: dict[str, Any], cached: int = 0, **settings: Any) -> Run:
    times = [0.1 * (token + 1) for token in range(128)]
    lines = [
        request("c", f"q{number}", 0.0, times, prompt_tokens=1102, cached_tokens=cached) for number in range(requests)
    ]
    cells = {"c": {"model": "27b", "runner": "engine", **settings}}
    run = run_of(*lines, repeat("c", 0, 0.0, 20.0), outcome("c", "done"), cells=cells)
    run.header.environment["gpus"] = [gpu]
    run.loads["c"] = record_of(load(["c"], asdict(SHAPES["27b"]), **loaded))
    return run


def test_a_card_whose_cache_holds_fewer_requests_than_were_sent() -> None:
    run = run_with(A100, 32, {"weights": "int8"}, quantization="int8")
    text = cache_advice(run, "c")
    assert "of 1,230 tokens at once, and 32 were sent: --kv-cache-dtype int8 (not exact: " in text
    held, held_by_int8 = (int(part.split()[0]) for part in text.split("holds about ")[1:])
    assert 1.8 * held < held_by_int8 < 2.2 * held
    assert f"holds about {held} requests" in " ".join(recommend(run).cost)


def test_requests_share_the_tokens_of_their_page() -> None:
    alone = cache_advice(run_with(A100, 64, {"weights": "int8"}, quantization="int8"), "c")
    shared = cache_advice(run_with(A100, 64, {"weights": "int8"}, cached=800, quantization="int8"), "c")
    assert "of 430 uncached tokens at once, and 64 were sent" in shared
    held_alone, held_shared = (int(text.split("holds about ")[1].split()[0]) for text in (alone, shared))
    assert held_shared > 2 * held_alone


INT8 = {"weights": "int8"}
H200 = {"name": "NVIDIA H200", "memory_bytes": 150_109_880_320}
NO_ADVICE: dict[str, tuple[dict[str, Any], int, dict[str, Any], dict[str, Any]]] = {
    "large card": (H200, 32, INT8, {"quantization": "int8"}),
    "few requests": (A100, 4, INT8, {"quantization": "int8"}),
    "8-bit": (A100, 32, INT8, {"quantization": "int8", "kv_cache_dtype": "int8"}),
    "stored format": (A100, 32, {"weights": "int4, groups of 128"}, {}),
    "version": (A100, 32, INT8, {"quantization": "int8", "of_another_version": 1}),
    "unknown card": ({"name": "NVIDIA Unheard-Of"}, 32, {}, {}),
    "cpu": (A100, 32, {"device": "cpu"}, {}),
    "generate": (A100, 32, {}, {"runner": "generate"}),
    "few in flight": (A100, 32, INT8, {"quantization": "int8", "max_concurrency": 8}),
    "not a request fits": (A100, 32, INT8, {"quantization": "int8", "kv_cache_gb": 0.5}),
    "three ranks": (A100, 32, INT8, {"quantization": "int8", "tensor_parallel_size": 3}),
}


@pytest.mark.parametrize("case", NO_ADVICE)
def test_no_advice(case: str) -> None:
    gpu, requests, loaded, settings = NO_ADVICE[case]
    assert cache_advice(run_with(gpu, requests, loaded, **settings), "c") == ""
