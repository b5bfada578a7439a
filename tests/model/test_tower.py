"""The vision tower run part by part: what ``get_image_features`` computes, by a model that is left as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode

from panscan.core import UnsupportedError
from panscan.model.fused import fuse_projections
from panscan.model.random_weights import random_model
from panscan.model.reference import float32_model, weights_digest
from panscan.model.shapes import SHAPES, Shape, TextShape, VisionShape
from panscan.model.tower import VisionTower, choose_vision_attention, fastest
from panscan.runners.generate import GenerateRunner

TEXT = TextShape(1024, 64, 96, 1, 2, 1, 32, 16, 32, 256)
EYES = VisionShape(hidden=48, intermediate=64, layers=3, heads=2, image_size=56)
SMALL = Shape("small", TEXT, EYES, image_tokens=4)
ODD = Shape("odd", TEXT, replace(EYES, heads=3, image_size=60, patch_size=4), image_tokens=9)


def model_of(shape: Shape, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    model, _ = random_model(shape, dtype=dtype, device=device)
    return model


def pixels_for(model: Any, views: int, seed: int = 0) -> torch.Tensor:
    size = model.config.vision_config.image_size
    drawn = torch.rand(views, 3, size, size, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return drawn.to(model.device)


@torch.no_grad()
def features(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model.get_image_features(pixels, return_dict=True).pooler_output
    return found


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The distance in terms of the length of what is expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


class Seen(TorchFunctionMode):
    """Notes which functions of PyTorch run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shape", [SMALL, ODD, SHAPES["tiny"], SHAPES["mini"]], ids=["small", "odd", "tiny", "mini"])
def test_views_are_those_of_the_model(shape: Shape, fused: bool) -> None:
    model = model_of(shape)
    tower = VisionTower(model)
    expected = features(model, pixels_for(model, 5))
    if fused:
        fuse_projections(model)
    for views in range(1, 6):
        found = tower(pixels_for(model, 5)[:views])
        assert found.shape == (views, shape.image_tokens, shape.text.hidden)
        torch.testing.assert_close(found, expected[:views], rtol=1e-4, atol=1e-6)
    other = pixels_for(model, 2, seed=1)
    torch.testing.assert_close(tower(other), features(model, other), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("attention", ["cudnn", "flash", "efficient", "math", "default"])
def test_every_kernel_computes_the_same_or_gives_way_to_one_that_does(attention: str) -> None:
    model = model_of(SMALL)
    tower = VisionTower(model)
    tower.attention = attention
    pixels = pixels_for(model, 2)
    torch.testing.assert_close(tower(pixels), features(model, pixels), rtol=1e-4, atol=1e-6)


def test_in_bfloat16_it_is_as_near_to_the_truth_as_the_model() -> None:
    """Both round at the same places but two (the sum of a patch, a head's attention): neither is the better one."""
    model = model_of(SHAPES["tiny"], torch.bfloat16)
    pixels = pixels_for(model, 4)
    with float32_model(model):
        truth = features(model, pixels)
    fuse_projections(model)
    found = VisionTower(model)(pixels)
    assert found.dtype == torch.bfloat16
    assert far(found, truth) <= 1.5 * far(features(model, pixels), truth) < 0.1


def test_the_model_is_untouched_between_calls_and_after_a_failure(
    tiny: GenerateRunner, two_asked: dict[str, torch.Tensor]
) -> None:
    model = tiny.loaded.model
    pixels = pixels_for(model, 3)
    classes = [type(module) for module in model.modules()]
    tokens, views, digest = (
        model.generate(**two_asked, max_new_tokens=6),
        features(model, pixels),
        weights_digest(model),
    )
    tower = VisionTower(model)
    tower(pixels)
    hook = model.model.vision_tower.encoder.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tower(pixels)
    hook.remove()
    assert [type(module) for module in model.modules()] == classes
    assert model.config.vision_config._attn_implementation == "sdpa"
    assert torch.equal(features(model, pixels), views)
    assert torch.equal(model.generate(**two_asked, max_new_tokens=6), tokens)
    assert weights_digest(model) == digest


def test_the_float32_truth_is_the_same_beside_a_tower() -> None:
    model = model_of(SMALL, torch.bfloat16)
    pixels = pixels_for(model, 2)
    with float32_model(model):
        expected = features(model, pixels)
    tower = VisionTower(model)
    before = tower(pixels)
    with float32_model(model):
        assert torch.equal(features(model, pixels), expected)
    assert torch.equal(tower(pixels), before)


@pytest.mark.parametrize("hooks", [False, True])
def test_values_of_a_token_lie_next_to_each_other_in_every_layer(hooks: bool) -> None:
    """Also where the patch convolution stays one; Transformers' own residuals run across the grain."""
    model = model_of(SMALL)
    model = hooked(model) if hooks else model
    seen: list[int] = []
    for layer in model.model.vision_tower.encoder.layers:
        layer.layer_norm2.register_forward_pre_hook(lambda _, given: seen.append(given[0].stride(-1)))
    VisionTower(model)(pixels_for(model, 2))
    assert seen == [1, 1, 1]


def test_views_go_in_few_different_numbers() -> None:
    """A kernel that is planned for each number of views is planned for few: powers of two."""
    model = model_of(SMALL)
    seen: list[int] = []
    model.model.vision_tower.encoder.layers[0].mlp.register_forward_pre_hook(
        lambda _, given: seen.append(len(given[0]))
    )
    tower = VisionTower(model)
    for views in (16, 13, 7, 6, 1):
        assert len(tower(pixels_for(model, views))) == views
    assert seen == [16, 8, 4, 1, 4, 2, 1, 4, 2, 1]


def hooked(model: Any) -> Any:
    add_hook_to_module(model.model.vision_tower.encoder.layers[1].mlp, ModelHook())
    return model


def offloaded(model: Any) -> Any:
    return cpu_offload(model, execution_device=torch.device("cpu"))


class Quantised(nn.Module):
    """A projection whose weights are no parameters, as GPTQ's."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.product = linear.requires_grad_(False)
        self.weight, self.bias = linear.weight.detach(), linear.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Packed(torch.Tensor):
    """As torchao's are: a parameter with values of another kind behind it."""


def packed(model: Any) -> Any:
    linear = model.model.vision_tower.encoder.layers[0].mlp.fc2
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Packed), requires_grad=False)
    return model


def quantised(model: Any) -> Any:
    mlp = model.model.vision_tower.encoder.layers[0].mlp
    mlp.fc2 = Quantised(mlp.fc2)
    return model


def watched(model: Any) -> Any:
    model.model.vision_tower.encoder.layers[2].register_forward_hook(lambda _, __, hidden: hidden * 1)
    return model


@pytest.mark.parametrize("change", [hooked, offloaded, packed, quantised, watched])
def test_a_tower_with_hooks_or_quantised_runs_as_it_is(change: Any) -> None:
    model = model_of(SMALL)
    pixels = pixels_for(model, 3)
    expected = features(model, pixels)
    model = change(model)
    tower = VisionTower(model)
    with Seen() as seen:
        found = tower(pixels)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert "conv2d" in seen.names


def test_the_patch_convolution_is_a_product() -> None:
    model = model_of(SMALL)
    with Seen() as seen:
        VisionTower(model)(pixels_for(model, 1))
    assert "conv2d" not in seen.names
    assert "_addmm_activation" not in seen.names  # which is another GELU on a CPU


def test_a_model_that_reads_text_only_has_no_tower() -> None:
    with pytest.raises(UnsupportedError, match="text only"):
        VisionTower(model_of(Shape("blind", TEXT)))


@given(st.dictionaries(st.sampled_from(["cudnn", "flash", "efficient"]), st.none() | st.floats(0.01, 50), min_size=1))
def test_the_fastest_kernel_that_takes_the_problem_is_chosen(times: dict[str, float | None]) -> None:
    name, reason = fastest(times)
    taken = {kernel: time for kernel, time in times.items() if time is not None}
    assert name == "math" if not taken else taken[name] == min(taken.values())
    for kernel, time in times.items():
        assert f"{kernel} refused" in reason if time is None else f"{kernel} {time:.2f} ms" in reason


def test_kernels_are_not_measured_on_a_cpu() -> None:
    assert choose_vision_attention(torch.device("cpu"), 72, torch.float32)[0] == "default"


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "among"), [(torch.bfloat16, {"cudnn", "flash", "efficient", "hopper"}),
                                              (torch.float32, {"efficient"})])  # fmt: skip
def test_a_kernel_is_chosen_by_time(dtype: torch.dtype, among: set[str]) -> None:
    name, reason = choose_vision_attention(torch.device("cuda"), 72, dtype)
    assert name in among
    assert reason.count(" ms") >= 1


@pytest.mark.gpu
def test_on_a_gpu_it_is_as_near_to_the_truth_as_the_model() -> None:
    """With every stand-in, in bfloat16, on SigLIP's widths: its head size, and an MLP that no power of two divides."""
    eyes = VisionShape(hidden=1152, intermediate=4304, layers=3, heads=16, image_size=224)
    model = model_of(Shape("wide", TEXT, eyes, image_tokens=16), torch.bfloat16, "cuda")
    pixels = pixels_for(model, 5).bfloat16()
    with float32_model(model):
        truth = features(model, pixels.float())
    own = far(features(model, pixels), truth)
    fuse_projections(model)
    tower = VisionTower(model)
    with Seen() as seen:
        found = tower(pixels)
    assert "_addmm_activation" in seen.names
    assert not {"gelu", "layer_norm", "conv2d"} & set(seen.names)
    for views in range(1, 6):
        assert far(tower(pixels[:views]), truth[:views]) <= 2 * own
    assert far(found, truth) <= 2 * own
