"""The two ceilings of a device. How high they are is the machine's; what is tested is that they can be believed."""

from dataclasses import astuple
from functools import partial
from typing import Any

import pytest
import torch

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
