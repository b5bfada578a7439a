"""What only a GPU can show: the same tokens in every mode, events as time stamps, memory that comes back."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.conftest import noise
from tests.runners.test_generate import check_stamps
from tests.verdict.test_cells import Bench as VerdictBench

from panscan import GenerateRunner
from panscan.bench.grid import Cell
from panscan.core import now
from panscan.model.runtime import apply_attention
from panscan.runners.clock import DeviceClock
from panscan.runners.pipeline import PipelineRunner

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def on_gpu() -> GenerateRunner:
    return GenerateRunner.from_pretrained("tiny", dtype="fp32", device="cuda", max_new_tokens=12)


def requests_of(runner: GenerateRunner) -> list[Any]:
    return [runner.request("What is it?", [noise(300, height, height)]) for height in (300, 700, 900)]


def test_tokens_equal_the_cpus(on_gpu: GenerateRunner, tiny: GenerateRunner) -> None:
    expected = [result.token_ids for result in tiny.generate(requests_of(tiny))]
    assert [result.token_ids for result in on_gpu.generate(requests_of(on_gpu))] == expected


@pytest.mark.parametrize(
    "changes", [{"attention": "eager"}, {"cache": "static"}, {"compile": "default"}, {"batch_size": 3}], ids=str
)
def test_every_exact_mode_gives_the_same_tokens(on_gpu: GenerateRunner, changes: dict[str, Any]) -> None:
    before = on_gpu.settings
    expected = [result.token_ids for result in on_gpu.generate(requests_of(on_gpu))]
    try:
        on_gpu.configure(replace(before, **changes))
        for _ in range(2):  # the second pass runs what the first compiled
            results = on_gpu.generate(requests_of(on_gpu))
            assert [result.token_ids for result in results] == expected
            for result in results:
                check_stamps(result)
    finally:
        on_gpu.configure(before)


def test_flex_attention_runs_in_bf16() -> None:
    """PyTorch 2.11 has no kernel for it in float32, nor for prompts below 128 tokens, so tokens are not compared."""
    runner = GenerateRunner.from_pretrained(
        "tiny", dtype="bf16", device="cuda", attention="flex_attention", max_new_tokens=12, ignore_eos=True
    )
    for result in runner.generate(requests_of(runner)[1:]):
        assert result.output_tokens == 12
        check_stamps(result)


def test_the_pipeline_runs_on_the_gpu(on_gpu: GenerateRunner) -> None:
    expected = [result.token_ids for result in on_gpu.generate(requests_of(on_gpu))]
    pipeline = PipelineRunner(on_gpu.loaded, replace(on_gpu.settings, runner="pipeline"))
    # Where torchvision is installed the processor resizes with it, so pixels may differ by a level.
    results = pipeline.generate(requests_of(on_gpu))
    assert [len(result.token_ids) for result in results] == [len(ids) for ids in expected]


def test_event_stamps_lie_on_the_hosts_time_line() -> None:
    device = torch.device("cuda")
    square = torch.randn(4096, 4096, device=device)
    clock = DeviceClock(SimpleNamespace(device=device, model=None))  # type: ignore[arg-type]
    before = now()
    clock.mark()
    for _ in range(20):
        square @ square
    clock.mark()
    queued = now()
    first, last = clock.read()
    assert before - 1e-3 <= first < last <= now() + 1e-3
    assert last > queued, "the mark must tell when the device got there, not when it was asked"


STEPS = 8


@pytest.mark.parametrize(
    ("dtype", "modes"),
    [
        ("fp32", [{}, {"attention": "eager"}, {"preprocess": "device"}]),
        ("bf16", [{}, {"cache": "static"}, {"compile": "default"}]),
    ],
)
def test_verdicts(tmp_path: Path, causal: str, dtype: str, modes: list[dict[str, Any]]) -> None:
    """Compiled and captured modes run in one precision only: their tokens in float32 are compared above. Device pixels
    have a truth of their own; causal images are caught."""
    bench = VerdictBench(tmp_path)
    runner = GenerateRunner.from_pretrained("tiny", dtype=dtype, device="cuda", max_new_tokens=STEPS)
    plain = runner.settings
    for changes in modes:
        record = bench.verifier().verdict(runner, replace(plain, **changes))
        assert record.verdict == "exact", (changes, record)
        assert record.equal_tokens or dtype == "bf16"
    verifier = bench.verifier()
    verifier.verdict(runner, plain)
    apply_attention(runner.loaded.model, causal)
    record = verifier.verify(runner, Cell.of(plain))
    assert record.verdict == "different", record
    assert record.image.kl > 10 * max(record.image.noise, 1e-6)
