"""The vision tower without the engine: the features of Transformers, quantised weights, attention kernels."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForImageTextToText

from panscan.core import UnsupportedError
from panscan.model.bundled.random_weights import random_model
from panscan.model.gemma3 import vision_layers
from panscan.model.gemma3.vision_layers import VisionLayers, choose_vision_attention, fastest, quantize_vision_tower
from panscan.model.linear.quantized import QuantizedLinear
from panscan.model.load import load_for
from panscan.model.quantization import weight_bytes, weights_name
from panscan.model.shapes import SHAPES, Shape, TextShape, VisionShape
from panscan.settings import Settings
from panscan.verdict.float32 import converted_model, weights_digest

TEXT = TextShape(1024, 64, 96, 1, 2, 1, 32, 16, 32, 256)
EYES = VisionShape(hidden=48, intermediate=64, layers=3, heads=2, image_size=56)
SMALL = Shape("small", TEXT, EYES, image_tokens=4)
ODD = Shape("odd", TEXT, replace(EYES, heads=3, image_size=60, patch_size=4), image_tokens=9)
WIDE = Shape("wide", TEXT, VisionShape(1152, 4304, layers=3, heads=16, image_size=224), image_tokens=16)  # as SigLIP
RAGGED = Shape("ragged", TEXT, replace(EYES, image_size=60), image_tokens=4)  # pixels beyond the last whole patch


def random_of(shape: Shape, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    model, _ = random_model(shape, dtype=dtype, device=device)
    return model


def pixels_for(model: Any, views: int, seed: int = 0) -> torch.Tensor:
    size = model.config.vision_config.image_size
    drawn = torch.rand(views, 3, size, size, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return drawn.to(model.device)


@torch.no_grad()
def features(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    return model.get_image_features(pixels, return_dict=True).pooler_output


def far(states: torch.Tensor, expected: torch.Tensor) -> float:
    """The distance relative to the norm of the expected tensor."""
    return float((states.double() - expected.double()).norm() / expected.double().norm())


class Seen(TorchFunctionMode):
    """Records which functions of PyTorch run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))


ATTENTION = ("default", "cudnn", "flash", "efficient", "math")  # which takes over from a kernel that refuses
TOWERS = [(SMALL, name) for name in ATTENTION] + [(shape, "default") for shape in (ODD, RAGGED, SHAPES["mini"])]


@pytest.mark.parametrize(("shape", "attention"), TOWERS, ids=lambda value: getattr(value, "name", value))
def test_features_are_those_of_the_model(shape: Shape, attention: str) -> None:
    model = random_of(shape)
    layers = VisionLayers(model, attention)
    assert (layers.image_tokens, layers.attention) == (shape.image_tokens, attention)
    pixels = pixels_for(model, 5)
    expected = features(model, pixels)
    for views in range(1, 6):
        with Seen() as seen:
            states = layers(pixels[:views])
        assert ("conv2d" in seen.names) == (shape is RAGGED), "patches that fill the view are one product"
        assert "_addmm_activation" not in seen.names, "it is another GELU on a CPU"
        assert states.shape == (views, shape.image_tokens, shape.text.hidden)
        torch.testing.assert_close(states, expected[:views], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{"hidden_act": "gelu"}, {"hidden_act": "relu"}, {"vision_use_head": True}])
def test_other_activations_and_a_pooling_head(options: dict[str, Any]) -> None:
    config = deepcopy(random_of(SMALL).config)
    for name, value in options.items():
        setattr(config.vision_config, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config).eval()
        nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.02)
    pixels = pixels_for(model, 2)
    torch.testing.assert_close(VisionLayers(model)(pixels), features(model, pixels), rtol=1e-4, atol=1e-6)


def test_bfloat16_is_as_accurate_as_the_model() -> None:
    """Both round at the same points but two (the sum of a patch, the attention of a head)."""
    model = random_of(SHAPES["tiny"], torch.bfloat16)
    pixels = pixels_for(model, 4)
    with converted_model(model):
        truth = features(model, pixels)
    layers = VisionLayers(model)
    states = layers(pixels)
    assert states.dtype == torch.bfloat16
    assert far(states, truth) <= 1.5 * far(features(model, pixels), truth) < 0.1


def test_weights_are_shared_with_the_model_and_between_instances() -> None:
    """A change in place reaches all of them."""
    model = random_of(SMALL)
    pixels = pixels_for(model, 2)
    first, second = VisionLayers(model), VisionLayers(model)
    before = first(pixels)
    with torch.no_grad():
        for parameter in model.model.vision_tower.parameters():
            parameter.mul_(1.5)
    assert far(first(pixels), before) > 0.01
    assert torch.equal(first(pixels), second(pixels))
    torch.testing.assert_close(first(pixels), features(model, pixels), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("convolves", [False, True])
def test_hidden_states_are_contiguous_in_every_layer(convolves: bool) -> None:
    """Also behind a patch convolution that stays one; Transformers' own residuals have the strides of its output."""
    model = random_of(SMALL)
    if convolves:
        observe(model.model.vision_tower.embeddings.patch_embedding, lambda _: None)
    contiguous: list[bool] = []
    for layer in model.model.vision_tower.encoder.layers:
        observe(layer.layer_norm2, lambda hidden: contiguous.append(hidden.is_contiguous()))
    VisionLayers(model)(pixels_for(model, 2))
    assert contiguous == [True] * 3


def test_batches_are_cut_into_powers_of_two() -> None:
    model = random_of(SMALL)
    seen: list[int] = []
    observe(model.model.vision_tower.embeddings.patch_embedding, lambda pixels: seen.append(len(pixels)))
    layers = VisionLayers(model)
    for views in (16, 13, 7, 6, 1):
        assert len(layers(pixels_for(model, views))) == views
    assert seen == [16, 8, 4, 1, 4, 2, 1, 4, 2, 1]


def observe(module: nn.Module, see: Callable[[torch.Tensor], None]) -> None:
    """Call ``see`` with each input of a module."""
    module.register_forward_pre_hook(lambda _, given: see(given[0]))


def hooked(model: Any) -> Any:
    add_hook_to_module(model.model.vision_tower.encoder.layers[1].mlp, ModelHook())
    return model


def offloaded(model: Any) -> Any:
    return cpu_offload(model, execution_device=torch.device("cpu"))


class Quantised(nn.Module):
    """A projection whose weights are not parameters, as in GPTQ."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.product = linear.requires_grad_(False)
        self.weight, self.bias = linear.weight.detach(), linear.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def quantised(model: Any) -> Any:
    mlp = model.model.vision_tower.encoder.layers[0].mlp
    mlp.fc2 = Quantised(mlp.fc2)
    return model


def doubled(model: Any) -> Any:
    model.model.vision_tower.encoder.layers[2].register_forward_hook(lambda _, __, hidden: hidden * 2)
    return model


@pytest.mark.parametrize("change", [hooked, offloaded, quantised, doubled])
def test_hooked_offloaded_and_quantised_towers(change: Any) -> None:
    """Transformers' forward runs only if a larger module is hooked."""
    model = random_of(SMALL)
    pixels = pixels_for(model, 3)
    model = change(model)
    expected, layers = features(model, pixels), VisionLayers(model)
    torch.testing.assert_close(layers(pixels), expected, rtol=1e-4, atol=1e-6)
    assert ("own forward" in layers.reason) == (change in (hooked, doubled))


def test_a_text_only_model_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="text only"):
        VisionLayers(random_of(Shape("blind", TEXT)))


KINDS = {"int8": 0.03, "fp8": 0.1}
"""Relative error of a tower's features, at most. Three layers of SigLIP's widths in bfloat16 on a CPU have 0.016 and
0.045, the widths here in float32 less."""


def with_quantised_tower(model: Any, kind: str) -> tuple[Any, Any]:
    """Return a copy with a quantised tower, and a dense one with the same rounded weights."""
    quantised = deepcopy(model)
    quantize_vision_tower(quantised, kind)
    rounded = deepcopy(model)
    matrices = {name: part for name, part in quantised.named_modules() if isinstance(part, QuantizedLinear)}
    for name, part in rounded.named_modules():
        if name in matrices:
            part.weight.data = matrices[name].dequantized(part.weight.dtype)
    return quantised, rounded


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_tower_errs_by_the_rounding_of_its_weights_and_inputs(kind: str) -> None:
    model = random_of(SMALL)
    pixels, before = pixels_for(model, 3), weights_digest(model)
    quantised, rounded = with_quantised_tower(model, kind)
    states, exact = VisionLayers(quantised)(pixels), features(model, pixels)
    assert 0 < far(states, features(rounded, pixels)) <= KINDS[kind]
    assert 0 < far(states, exact) <= KINDS[kind]
    assert far(features(quantised, pixels), exact) <= KINDS[kind], "generate() runs the same modules"
    layer = EYES.layer_matrices()
    assert weight_bytes(model) - weight_bytes(quantised) == EYES.layers * (3 * layer - 4 * (5 * 48 + 64))
    assert weights_name(quantised) == f"{kind} vision tower"
    assert weights_name(model) is None
    assert weights_digest(model) == before


def test_kernels_quantise_rows_for_the_next_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the kernel of the layer norm and that of GELU quantise; here Triton's interpreter runs them."""
    from tests import triton_here  # noqa: F401 - skips where there is no Triton

    quantised, _ = with_quantised_tower(random_of(SMALL), "int8")
    pixels = pixels_for(quantised, 2)
    expected = VisionLayers(quantised)(pixels)
    monkeypatch.setattr(vision_layers, "has_kernels", lambda _: True)
    fused = VisionLayers(quantised)
    quantize = Seen()
    with quantize:
        states = fused(pixels)
    assert not {"layer_norm", "gelu"} & set(quantize.names)
    assert far(states, expected) < 2e-3  # a value that lies between two steps may round either way


def test_a_tower_that_cannot_be_quantised_is_refused() -> None:
    blind = Settings(random_weights=True, model_shape="1b", device="cpu", quantize_vision="int8")
    with pytest.raises(UnsupportedError, match=r"^--quantize-vision int8: the model reads"):
        load_for(blind)
    with pytest.raises(UnsupportedError, match="quantised or changed already"):
        quantize_vision_tower(quantised(random_of(SMALL)), "int8")


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "dtype"), [(None, torch.bfloat16), *product(KINDS, (torch.bfloat16, torch.float32))])
def test_towers_on_a_gpu(kind: str | None, dtype: torch.dtype) -> None:
    """SigLIP's widths, whose MLP width is far from a power of two, with fused kernels: against float32, and quantised
    ones against dense weights of the same values."""
    if kind == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 needs compute capability 8.9")
    model = random_of(WIDE, dtype, "cuda")
    pixels = pixels_for(model, 5).to(dtype)
    with converted_model(model):
        truth = features(model, pixels.float())
    close = KINDS[kind] if kind else 2 * far(features(model, pixels), truth)
    tower, rounded = with_quantised_tower(model, kind) if kind else (model, None)
    layers = VisionLayers(tower)
    with Seen() as seen:
        states = layers(pixels)
    assert kind is not None or "_addmm_activation" in seen.names
    assert not {"gelu", "layer_norm", "conv2d"} & set(seen.names)
    assert rounded is None or far(states, VisionLayers(rounded)(pixels)) <= close
    for views in range(1, 6):
        assert far(layers(pixels[:views]), truth[:views]) <= close


@given(st.dictionaries(st.sampled_from(["cudnn", "flash", "efficient"]), st.none() | st.floats(0.01, 50), min_size=1))
def test_the_fastest_kernel_is_chosen(times: dict[str, float | None]) -> None:
    name, reason = fastest(times)
    measured = {kernel: time for kernel, time in times.items() if time is not None}
    assert name == "math" if not measured else measured[name] == min(measured.values())
    for kernel, time in times.items():
        assert f"{kernel} refused" in reason if time is None else f"{kernel} {time:.2f} ms" in reason


def test_kernels_are_not_measured_on_a_cpu() -> None:
    assert choose_vision_attention(torch.device("cpu"), 72, torch.float32)[0] == "default"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "among"), [(torch.bfloat16, {"cudnn", "flash", "efficient", "hopper"}), (torch.float32, {"efficient"})]
)
def test_a_kernel_is_chosen_by_time(dtype: torch.dtype, among: set[str]) -> None:
    name, reason = choose_vision_attention(torch.device("cuda"), 72, dtype)
    assert name in among
    assert reason.count(" ms") >= 1
