"""Fused projections: fewer products of the same values, whoever calls the modules and whatever happens to them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from panscan.model.fused import fuse_projections
from panscan.model.random_weights import random_model
from panscan.model.reference import float32_model, weights_digest
from panscan.model.shapes import Shape, TextShape, VisionShape
from panscan.runners.generate import GenerateRunner

TEXT = TextShape(1024, 64, 96, 3, 2, 1, 32, 16, 32, 256)
SEES = Shape("sees", TEXT, VisionShape(hidden=48, intermediate=64, layers=2, heads=2, image_size=56), image_tokens=4)
READS = Shape("reads", TEXT)
SAVED = {"sees": 3 * (2 + 1) + 2 * 2, "reads": 3 * (2 + 1)}  # products of one forward that fusing makes needless
SHORT = {torch.float32: 1e-6, torch.bfloat16: 2**-7}
"""A sum in another order: some ulp in float32, and in bfloat16, which is rounded to once, the next value."""

both_shapes = pytest.mark.parametrize("shape", [SEES, READS], ids=["sees", "reads"])


def model_of(shape: Shape, dtype: torch.dtype = torch.float32) -> Any:
    model, _ = random_model(shape, dtype=dtype, device="cpu")
    return model


def inputs_for(shape: Shape) -> dict[str, torch.Tensor]:
    """A prompt of seven tokens, or with a view."""
    ids = torch.tensor([[30, 400, 5, 77, 21, 600, 7]])
    if shape.vision is None:
        return {"input_ids": ids}
    ids[0, 2:6] = 9
    pixels = torch.rand(1, 3, 56, 56, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return {"input_ids": ids, "pixel_values": pixels, "token_type_ids": (ids == 9).long()}


@torch.no_grad()
def logits_of(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    found: torch.Tensor = model(**inputs).logits
    return found


class Products(TorchFunctionMode):
    """Counts linear products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is linear
        return function(*args, **(kwargs or {}))


def products(model: Any, shape: Shape) -> int:
    with Products() as seen:
        logits_of(model, inputs_for(shape))
    return seen.count


@contextmanager
def fused(model: Any) -> Iterator[None]:
    undo = fuse_projections(model)
    try:
        yield
    finally:
        undo()


def bytes_of(model: Any) -> int:
    """Of all memory behind the parameters, and behind anything that their storage is shared with."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(storages.values())


@both_shapes
def test_weights_move_and_keep_names_shapes_values_and_size(shape: Shape) -> None:
    model = model_of(shape, torch.bfloat16)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    buffers = [name for name, _ in model.named_buffers()]
    held, digest = bytes_of(model), weights_digest(model)
    fuse_projections(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) and after[name].is_contiguous() for name in before)
    assert [name for name, _ in model.named_buffers()] == buffers
    assert bytes_of(model) == held
    assert weights_digest(model) == digest


@both_shapes
def test_fused_layers_compute_the_same_with_fewer_products(shape: Shape) -> None:
    model, inputs = model_of(shape), inputs_for(shape)
    expected, apart = logits_of(model, inputs), products(model, shape)
    undo = fuse_projections(model)
    assert products(model, shape) == apart - SAVED[shape.name]
    torch.testing.assert_close(logits_of(model, inputs), expected, rtol=1e-5, atol=1e-6)
    undo()
    undo()
    assert products(model, shape) == apart
    assert torch.equal(logits_of(model, inputs), expected)
    fuse_projections(model)
    assert products(model, shape) == apart - SAVED[shape.name]


def test_a_group_that_is_fused_is_not_fused_again() -> None:
    model = model_of(READS)
    undo = fuse_projections(model)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    fuse_projections(model)()
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    count = products(model, READS)
    undo()
    assert products(model, READS) == count + SAVED["reads"]


class Attention(nn.Module):
    """Three projections as a layer has them, of odd sizes."""

    def __init__(self, bias: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(12, size, bias, dtype=dtype) for size in (7, 3, 5))

    def parts(self) -> list[nn.Linear]:
        return [self.q_proj, self.k_proj, self.v_proj]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts()], dim=-1)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=12), st.booleans(), st.sampled_from([*SHORT]))
@settings(deadline=None, max_examples=60)
@torch.no_grad()
def test_projections_called_in_any_order_on_any_input_compute_their_own(
    calls: list[tuple[int, int]], bias: bool, dtype: torch.dtype
) -> None:
    """Also after a forward that failed between them, which is an order that stops short."""
    torch.manual_seed(0)  # products of other shapes round otherwise: some draws differ by more than others
    owner = Attention(bias, dtype)
    given = [torch.randn(2, rows, 12).to(dtype) for rows in (4, 4, 1)]
    expected = {(part, at): owner.parts()[part](given[at]) for part, at in itertools.product(range(3), range(3))}
    with fused(owner):
        for part, at in calls:
            torch.testing.assert_close(
                owner.parts()[part](given[at]), expected[part, at], rtol=SHORT[dtype], atol=SHORT[dtype] / 8
            )


def test_a_forward_that_fails_in_between_leaves_nothing_for_the_next() -> None:
    model, inputs = model_of(SEES), inputs_for(SEES)
    expected = logits_of(model, inputs)
    fuse_projections(model)

    def fail(*_: Any) -> None:
        raise ValueError("in between")

    layers = [model.model.language_model.layers[1], model.model.vision_tower.encoder.layers[0]]
    for failing in [module for layer in layers for module in (layer.self_attn.k_proj, layer.self_attn.v_proj)]:
        hook = failing.register_forward_pre_hook(fail)
        other = {**inputs, "pixel_values": -inputs["pixel_values"], "input_ids": inputs["input_ids"].clone()}
        other["input_ids"][0, 0] = 31
        with pytest.raises(ValueError, match="in between"):
            logits_of(model, other)
        hook.remove()
        torch.testing.assert_close(logits_of(model, inputs), expected, rtol=1e-5, atol=1e-6)


def test_what_a_failed_forward_held_is_given_back_before_the_next_product() -> None:
    owner, x = Attention(), torch.randn(2, 12)
    fuse_projections(owner)
    owner.q_proj(x)
    left = weakref.ref(x)
    del x

    class Watching(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert function is not linear or left() is None
            return function(*args, **(kwargs or {}))

    assert left() is not None
    other = torch.randn(2, 12)
    with Watching():
        owner(other)
    left = weakref.ref(other)
    del other
    assert left() is None


@pytest.mark.parametrize("place", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize("name", ["weight", "bias"])
@torch.no_grad()
def test_other_values_are_computed_with_wherever_they_are_put(place: str, name: str) -> None:
    owner, x = Attention(), torch.randn(2, 12)
    fuse_projections(owner)
    parameter = getattr(getattr(owner, place), name)

    def check() -> None:
        expected = torch.cat([linear(x, part.weight, part.bias) for part in owner.parts()], dim=-1)
        torch.testing.assert_close(owner(x), expected)

    parameter.mul_(2)
    check()
    kept = parameter.data
    parameter.data = torch.randn_like(parameter)
    check()
    parameter.data = kept
    check()
    x = x.double()
    owner.double()
    check()


@both_shapes
def test_the_float32_truth_is_the_same(shape: Shape) -> None:
    model, inputs = model_of(shape, torch.bfloat16), inputs_for(shape)
    with float32_model(model):
        expected = logits_of(model, inputs)
    inputs_short = {name: value.bfloat16() if value.is_floating_point() else value for name, value in inputs.items()}
    short = logits_of(model, inputs_short)
    fuse_projections(model)
    count = products(model, shape)
    with float32_model(model):
        assert torch.equal(logits_of(model, inputs), expected)
        assert products(model, shape) == count + SAVED[shape.name]
    assert products(model, shape) == count
    # Rounding differs from layer to layer where a sum was in another order: as far as from the truth, at most.
    difference = (logits_of(model, inputs_short) - short).norm()
    assert difference <= (short - expected).norm()


def test_generate_gives_the_same_tokens(tiny: GenerateRunner, two_asked: dict[str, torch.Tensor]) -> None:
    model = tiny.loaded.model
    expected = model.generate(**two_asked, max_new_tokens=8)
    with fused(model), Products() as seen:
        assert torch.equal(model.generate(**two_asked, max_new_tokens=8), expected)
    with Products() as apart:
        model.generate(**two_asked, max_new_tokens=8)
    assert seen.count < apart.count


class Special(nn.Linear):
    """Not what ``nn.Linear`` computes, for all that anyone knows."""


class Split(torch.Tensor):
    """As DTensor and torchao's are: a tensor with values of another kind behind it."""


def hooked(linear: nn.Linear) -> nn.Linear:
    linear.register_forward_hook(lambda *_: None)
    return linear


def by_accelerate(linear: nn.Linear) -> nn.Module:
    placed: nn.Module = add_hook_to_module(linear, ModelHook())
    return placed


def of_a_subclass(linear: nn.Linear) -> nn.Linear:
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Split))
    return linear


REASONS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "a hook": hooked,
    "accelerate's hook": by_accelerate,
    "another class": lambda _: Special(12, 5),
    "values elsewhere": lambda linear: linear.to("meta"),
    "another type": lambda linear: linear.double(),
    "no bias": lambda _: nn.Linear(12, 5, bias=False),
    "other inputs": lambda _: nn.Linear(13, 5),
    "values of another kind": of_a_subclass,
    "no projection": lambda _: nn.Identity(),
}


@pytest.mark.parametrize("change", REASONS.values(), ids=REASONS)
@pytest.mark.parametrize("place", ["q_proj", "v_proj"])
def test_a_group_that_cannot_be_one_product_is_left_alone(change: Callable[[nn.Linear], nn.Module], place: str) -> None:
    owner, other = Attention(), Attention()
    setattr(owner, place, change(getattr(owner, place)))
    parts = [getattr(owner, name) for name in ("q_proj", "k_proj", "v_proj")]
    before = [(type(part), [parameter.data_ptr() for parameter in part.parameters()]) for part in parts]
    fuse_projections(nn.ModuleList([owner, other]))
    assert [(type(part), [parameter.data_ptr() for parameter in part.parameters()]) for part in parts] == before
    assert type(other.q_proj) is not nn.Linear


def sizes_of(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The integers that a compiled graph takes instead of knowing them."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return [node for node in inputs if isinstance(node.meta["example_value"], torch.SymInt)]


def test_a_model_without_values_is_left_alone() -> None:
    owner = Attention().to("meta")
    fuse_projections(owner)
    assert {type(part) for part in owner.parts()} == {nn.Linear}


@torch.no_grad()
def test_compiled_layers_share_a_graph_that_has_one_product() -> None:
    """Whatever the length, whichever layer, and after a forward that failed; another type is another graph."""
    model = model_of(READS)
    text = model.model
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def call(layer: Any, hidden: torch.Tensor, rotary: Any) -> Any:
        return layer(hidden, position_embeddings=rotary)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)

    def graphs() -> list[torch.fx.GraphModule]:
        return [graph for graph in counter.graphs if len(graph.graph.nodes)]  # Transformers' layer adds an empty one

    def check(length: int, layer: Any, dtype: torch.dtype = torch.float32) -> None:
        hidden = torch.randn(1, length, 64, dtype=dtype)
        rotary = text.rotary_emb(hidden, torch.arange(length)[None], "sliding_attention")
        found, expected = compiled(layer, hidden, rotary), call(layer, hidden, rotary)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    fuse_projections(model)
    check(5, text.layers[0])
    [graph] = graphs()
    assert sum(node.target is linear for node in graph.graph.nodes) == 7 - 3
    assert len(sizes_of(graph)) == 1  # the length: no size of a weight
    text.layers[1].mlp.gate_proj(torch.ones(1, 2, 64))  # and nothing after it
    for length, layer in ((9, text.layers[0]), (6, text.layers[1]), (3, text.layers[2])):
        check(length, layer)
    assert len(graphs()) == 1
    check(4, text.layers[0].double(), torch.float64)
    assert len(graphs()) == 2
