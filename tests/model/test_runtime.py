"""What a loaded model and its device do: ceilings that can be believed, switches that do not undo each other."""

from collections.abc import Iterator
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.small_models import TOKENIZER

from panscan import GenerateRunner
from panscan.core import PanscanWarning, UnsupportedError
from panscan.model import ceilings
from panscan.model.attention_masks import LayerKind, effective_mask, kernel_reason, measured_mask
from panscan.model.ceilings import measure_ceilings
from panscan.model.gemma3.config import gemma3_config
from panscan.model.shapes import SHAPES

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rates_are_finite_and_measured_once(dtype: torch.dtype) -> None:
    ceilings = measure_ceilings(CPU, dtype)
    assert all(0 < rate < float("inf") for rate in astuple(ceilings))
    assert measure_ceilings(CPU, dtype) is ceilings
    assert measure_ceilings(CPU, torch.float16 if dtype == torch.bfloat16 else torch.bfloat16) is not ceilings


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


# Effective attention masks against Gemma 3's definition, and what flash attention makes of it.


WINDOW, BLOCKS = 24, ((5, 37), (41, 57))
IMAGE = np.zeros(70, np.bool_)
for _start, _end in BLOCKS:
    IMAGE[_start:_end] = True
CONFIG = gemma3_config(replace(SHAPES["tiny"], text=replace(SHAPES["tiny"].text, window=WINDOW)), TOKENIZER)


def defined(*, causal: bool) -> dict[LayerKind, NDArray[np.bool_]]:
    """Gemma 3's masks: key intervals that end behind a query's image block, or behind the query if ``causal``."""
    at = np.arange(len(IMAGE))
    ends = at + 1
    for start, end in () if causal else BLOCKS:
        ends[start:end] = end
    attended = at < ends[:, None]
    return {"global": attended, "local": attended & (at > at[:, None] - WINDOW)}


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_measured_masks_are_those_that_gemma_3_defines(name: str) -> None:
    masks = effective_mask(IMAGE, name, CONFIG)
    for kind, mask in defined(causal=False).items():
        np.testing.assert_array_equal(masks[kind], mask)


def test_flash_attention_as_transformers_prepares_it_is_causal_at_image_tokens() -> None:
    masks = effective_mask(IMAGE, "flash_attention_2", CONFIG, kernel=False)
    for kind, mask in defined(causal=True).items():
        np.testing.assert_array_equal(masks[kind], mask)


def test_a_text_only_model_is_causal_and_has_no_image_blocks() -> None:
    shape = replace(SHAPES["tiny"], text=replace(SHAPES["tiny"].text, window=WINDOW), vision=None, image_tokens=0)
    masks = effective_mask(np.zeros(40, np.bool_), "sdpa", gemma3_config(shape, TOKENIZER))
    np.testing.assert_array_equal(masks["global"], defined(causal=True)["global"][:40, :40])


def test_a_missing_kernel_is_refused() -> None:
    assert kernel_reason("sdpa") is None
    assert "NVIDIA" in str(kernel_reason("flash_attention_2"))
    with pytest.raises(UnsupportedError, match=r"--attention: flash_attention_2 makes .* causal .* needs an NVIDIA"):
        effective_mask(IMAGE, "flash_attention_2", CONFIG)


def test_other_masks_are_measured_key_by_key() -> None:
    """Attention of a sort that is neither Gemma 3's nor causal."""
    at = np.arange(300)
    odd = {"global": (at[:, None] + at) % 3 == 0, "local": at <= at[:, None]}

    weights: dict[LayerKind, torch.Tensor] = {
        kind: torch.from_numpy(odd[kind] / odd[kind].sum(1, keepdims=True)).float() for kind in ("global", "local")
    }

    def attend(values: torch.Tensor) -> dict[LayerKind, torch.Tensor]:
        return {kind: matrix @ values for kind, matrix in weights.items()}

    masks = measured_mask(attend, np.zeros(300, np.bool_), WINDOW)
    np.testing.assert_array_equal(masks["global"], odd["global"])
    np.testing.assert_array_equal(masks["local"], odd["local"])
