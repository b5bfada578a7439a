"""The seam of matrix products: fused weights keep a model's names, values and memory; other modules are called."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import noise
from torch import nn
from transformers import TorchAoConfig

from panscan.engine.engine import Engine
from panscan.engine.options import EngineOptions
from panscan.model.bundled.random_weights import random_model
from panscan.model.checkpoint import Placement, load_model
from panscan.model.gemma3.text_layers import TextLayers
from panscan.model.gemma3.vision_layers import VisionLayers
from panscan.model.linear.products import ModuleLinear, PlainLinear, is_plain, linear_of, runs_own_forward
from panscan.model.shapes import Shape, TextShape, VisionShape
from panscan.runners.generate import GenerateRunner
from panscan.settings import settings_from
from panscan.verdict.float32 import converted_model, weights_digest

TEXT = TextShape(1024, 64, 96, 3, 2, 1, 32, 16, 32, 256)
SEES = Shape("sees", TEXT, VisionShape(hidden=48, intermediate=64, layers=2, heads=2, image_size=56), image_tokens=4)
READS = Shape("reads", TEXT)
SAVED = {"sees": 3 * (2 + 1) + 2 * (2 + 2), "reads": 3 * (2 + 1)}
"""Storages fewer, of so many layers: query, key and value become one, gate and up too; the tower's have biases."""

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
both_shapes = pytest.mark.parametrize("shape", [SEES, READS], ids=["sees", "reads"])


def model_of(shape: Shape, dtype: torch.dtype = torch.float32) -> Any:
    model, _ = random_model(shape, dtype=dtype, device="cpu")
    return model


def fuse(model: Any) -> None:
    """Build our layers on a model, as an engine does."""
    TextLayers(model)
    if hasattr(model.model, "vision_tower"):
        VisionLayers(model)


def inputs_for(shape: Shape, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A prompt of seven tokens, or with a view."""
    ids = torch.tensor([[30, 400, 5, 77, 21, 600, 7]])
    if shape.vision is None:
        return {"input_ids": ids}
    ids[0, 2:6] = 9
    pixels = torch.rand(1, 3, 56, 56, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return {"input_ids": ids, "pixel_values": pixels.to(dtype), "token_type_ids": (ids == 9).long()}


@torch.no_grad()
def logits_of(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**inputs).logits


def storages(model: Any) -> dict[int, int]:
    """Bytes of all memory behind the parameters, by address."""
    return {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}


@both_shapes
def test_weights_move_and_keep_names_shapes_values_and_size(shape: Shape) -> None:
    model, inputs = model_of(shape, torch.bfloat16), inputs_for(shape, torch.bfloat16)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    buffers = [name for name, _ in model.named_buffers()]
    modules = [(name, type(module), frozenset(vars(module))) for name, module in model.named_modules()]
    held, digest, expected = storages(model), weights_digest(model), logits_of(model, inputs)
    fuse(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) and after[name].is_contiguous() for name in before)
    assert [name for name, _ in model.named_buffers()] == buffers
    assert [(name, type(module), frozenset(vars(module))) for name, module in model.named_modules()] == modules
    moved = storages(model)
    assert sum(moved.values()) == sum(held.values())
    assert len(held) - len(moved) == SAVED[shape.name]
    assert weights_digest(model) == digest
    assert torch.equal(logits_of(model, inputs), expected)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    fuse(model)  # a second engine finds the same storage
    assert [parameter.data_ptr() for parameter in model.parameters()] == places and storages(model) == moved


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.booleans(), DTYPES, st.integers(1, 5))
@settings(max_examples=40)
@torch.no_grad()
def test_one_product_is_the_modules_in_their_order(sizes: list[int], bias: bool, dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)  # products of other shapes round otherwise: some draws differ by more than others
    parts = [nn.Linear(12, size, bias, dtype=dtype) for size in sizes]
    x = torch.randn(2, rows, 12).to(dtype)
    expected = torch.cat([part(x) for part in parts], -1)
    found = linear_of(*parts)
    assert isinstance(found, PlainLinear)
    short = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]  # some ulp of a sum in another order
    torch.testing.assert_close(found(x), expected, rtol=short, atol=short / 8)
    torch.testing.assert_close(torch.cat([part(x) for part in parts], -1), expected, rtol=short, atol=short / 8)


@both_shapes
def test_the_float32_truth_is_the_same_and_leaves_the_fused_weights(shape: Shape) -> None:
    model, inputs = model_of(shape, torch.bfloat16), inputs_for(shape)
    with converted_model(model):
        expected = logits_of(model, inputs)
    fuse(model)
    held = storages(model)
    with converted_model(model):
        assert torch.equal(logits_of(model, inputs), expected)
    assert storages(model) == held


class LinearSubclass(nn.Linear):
    """A subclass of ``nn.Linear``, whose forward may be different."""


class TensorSubclass(torch.Tensor):
    """A tensor subclass, like those of DTensor and torchao."""


def hooked(linear: nn.Linear) -> nn.Linear:
    linear.register_forward_hook(lambda *_: None)
    return linear


def by_accelerate(linear: nn.Linear) -> nn.Module:
    return add_hook_to_module(linear, ModelHook())


def of_a_subclass(linear: nn.Linear) -> nn.Linear:
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(TensorSubclass))
    return linear


NOT_PLAIN: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "a hook": hooked,
    "accelerate's hook": by_accelerate,
    "another class": lambda _: LinearSubclass(12, 5),
    "values of another kind": of_a_subclass,
    "values elsewhere": lambda linear: linear.to("meta"),
}
UNLIKE_THE_OTHERS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "another type": lambda linear: linear.double(),
    "no bias": lambda _: nn.Linear(12, 5, bias=False),
    "other inputs": lambda _: nn.Linear(13, 5),
}
REASONS = {**NOT_PLAIN, **UNLIKE_THE_OTHERS}


@pytest.mark.parametrize("change", REASONS.values(), ids=REASONS)
@pytest.mark.parametrize("place", [0, 2])
def test_a_group_that_is_no_product_calls_its_modules(change: Callable[[nn.Linear], nn.Module], place: int) -> None:
    parts: list[nn.Module] = [nn.Linear(12, 5) for _ in range(3)]
    changed = change(parts[place])  # type: ignore[arg-type]  # a Linear, a line above
    parts[place] = changed
    before = [parameter.data_ptr() for part in parts for parameter in part.parameters()]
    assert isinstance(linear_of(*parts), ModuleLinear)
    assert [parameter.data_ptr() for part in parts for parameter in part.parameters()] == before
    assert is_plain(changed, nn.Linear) == (change in UNLIKE_THE_OTHERS.values())


def test_a_forward_is_a_modules_own_whatever_its_weights_are() -> None:
    assert runs_own_forward(of_a_subclass(nn.Linear(12, 5)), nn.Linear)
    for change in (hooked, by_accelerate):
        assert not runs_own_forward(change(nn.Linear(12, 5)), nn.Linear)
    assert not runs_own_forward(LinearSubclass(12, 5), nn.Linear)


def quantized_by_torchao() -> GenerateRunner:
    """Return the tiny model with torchao's int8 weights, loaded by Transformers."""
    kinds = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    kind = TorchAoConfig(kinds.Int8WeightOnlyConfig(), modules_to_not_convert=["model.vision_tower", "lm_head"])
    loaded = load_model("tiny", Placement(torch.device("cpu"), torch.float32, quantization=kind))
    return GenerateRunner(loaded, settings_from(SMALL))


SMALL: dict[str, Any] = {"model": "tiny", "dtype": "fp32", "device": "cpu", "max_new_tokens": 6}


@pytest.mark.parametrize("kind", ["quantised", "offloaded"])
def test_an_engine_on_weights_that_are_not_dense_has_the_tokens_of_generate(kind: str) -> None:
    """Greedy tokens of a model that computes in other precision or through hooks, all of it one pass at a time."""
    runner = quantized_by_torchao() if kind == "quantised" else GenerateRunner.from_pretrained(**SMALL)
    requests = [runner.request("What is it?", [noise(300, 900)]), runner.request("Hello")]
    expected = [result.token_ids for result in runner.generate(requests)]
    if kind == "offloaded":
        runner.loaded.model = cpu_offload(runner.loaded.model, execution_device=torch.device("cpu"))
    with Engine(runner.loaded, EngineOptions(kv_cache_gb=0.05)) as engine:
        found = engine.generate(requests)
    assert [(result.error, result.token_ids) for result in found] == [(None, tokens) for tokens in expected]
