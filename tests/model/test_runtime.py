"""What a loaded model and its device do: ceilings that can be believed, switches that do not undo each other."""

from collections.abc import Iterator
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import pytest
import torch

from panscan import GenerateRunner
from panscan.core import PanscanWarning
from panscan.model import ceilings
from panscan.model.ceilings import measure_ceilings

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rates_are_finite_and_measured_once(dtype: torch.dtype) -> None:
    found = measure_ceilings(CPU, dtype)
    assert all(0 < rate < float("inf") for rate in astuple(found))
    assert measure_ceilings(CPU, dtype) is found
    assert measure_ceilings(CPU, torch.float16 if dtype == torch.bfloat16 else torch.bfloat16) is not found


def test_the_products_precision_is_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        measure_ceilings.cache_clear()
        measure_ceilings(CPU, torch.float32)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("rate", "wait", "largest", "least"),
    [(1e11, 0.0, 1024, 0.99), (1e11, 0.03, 4096, 0.95), (1e9, 0.0, 512, 0.99)],
    ids=["idle", "busy with other processes", "slow"],
)
def test_waits_for_threads_are_no_work(rate: float, wait: float, largest: int, least: float, monkeypatch: Any) -> None:
    sides = []

    def seconds(work: partial[torch.Tensor], _device: torch.device) -> float:
        sides.append(len(work.args[0]))
        return wait + 2 * sides[-1] ** 3 / rate

    monkeypatch.setattr(ceilings, "_best_seconds", seconds)
    assert least * rate <= ceilings._product_rate(CPU, torch.float32) <= rate
    assert sides[-1] == largest


@pytest.mark.gpu
def test_an_nvidia_gpus_rates_are_those_of_its_kind() -> None:
    """bf16 products on tensor cores are several times faster than float32's, and memory is faster than any CPU's."""
    gpu = torch.device("cuda")
    narrow, wide = measure_ceilings(gpu, torch.bfloat16), measure_ceilings(gpu, torch.float32)
    assert narrow.flops_per_s > 2 * wide.flops_per_s
    assert narrow.bytes_per_s > 1e11


# Switches of a loaded model: none of them undoes what another one needs.


@pytest.fixture(autouse=True)
def dynamo_as_before(runner: GenerateRunner) -> Iterator[None]:
    config = torch._dynamo.config
    names = ("automatic_dynamic_shapes", "fail_on_recompile_limit_hit", "recompile_limit")
    before = {name: getattr(config, name) for name in names}
    yield
    for name, value in before.items():
        setattr(config, name, value)


def strict() -> bool:
    config = torch._dynamo.config
    return bool(config.automatic_dynamic_shapes and config.fail_on_recompile_limit_hit and config.recompile_limit > 8)


def test_flex_attention_on_a_cpu_keeps_its_exception_whatever_else_is_switched(runner: GenerateRunner) -> None:
    """Compiling is switched on and off without running: it is lazy, so this costs nothing."""
    plain = runner.settings
    with pytest.warns(PanscanWarning, match="do not apply to GPUs"):
        runner.configure(replace(plain, attention="flex_attention", compile="default"))
    assert not strict(), "symbols for lengths do not compile here"
    runner.configure(replace(plain, attention="flex_attention"))
    assert not strict()
    runner.configure(replace(plain, compile="default"))
    assert strict(), "a compiled cell must not fall back to eager unnoticed"
