"""Our text and vision layers on a model's weights, without the engine: its own forward, whatever its modules are."""

from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from tests.model.text_logits import text_logits
from tests.small_models import MODELS, model_of
from tests.triton_here import DEVICE, interpreted
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from panscan import GenerateRunner
from panscan.core import UnsupportedError
from panscan.model.bundled.random_weights import random_model
from panscan.model.gemma3.text_layers import TextLayers
from panscan.model.gemma3.vision_attention import attend, supported

# The vision tower's attention kernel for Hopper GPUs, against float64.


HOPPER = supported(DEVICE, torch.bfloat16)


def on_hopper(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")(test))


def packed_views(views: int, heads: int, patches: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key and value as views of one fused product ``[views, patches, 3, heads, size]``."""
    generator = torch.Generator("cuda").manual_seed(0)
    drawn = torch.randn(views, patches, 3, heads, size, generator=generator, device="cuda")
    return [part.transpose(1, 2) for part in drawn.to(dtype).unbind(2)]


def expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The same in float64, one head at a time, as ``[views, patches, heads, size]``."""
    parts = [
        torch.softmax(q.double() @ k.double().transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v.double()
        for q, k, v in zip(query.unbind(1), key.unbind(1), value.unbind(1), strict=True)
    ]
    return torch.stack(parts, 2)


def relative(actual: torch.Tensor, truth: torch.Tensor) -> float:
    return float((actual.double() - truth).norm() / truth.norm())


@on_hopper
@pytest.mark.parametrize(("views", "patches"), [(1, 4096), (3, 4096), (2, 1000), (1, 64), (5, 1)])
def test_true_shapes(views: int, patches: int) -> None:
    query, key, value = packed_views(views, 16, patches, 72, torch.bfloat16)
    output = attend(query, key, value)
    truth = expected(query, key, value)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], set_priority=True):
        usual = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    assert relative(output, truth) < 4e-3
    error, usual_error = ((part.double() - truth).abs().max() for part in (output, usual))
    # Both round weights to bfloat16. A running maximum makes the largest weight 1, which needs no rounding.
    assert error <= 1.5 * usual_error + 1e-6


@on_hopper
@pytest.mark.parametrize("size", [16, 40, 64, 72, 80, 96, 128])
def test_head_sizes_large_scores_and_any_strides(size: int) -> None:
    query, key, value = packed_views(2, 3, 500, size, torch.float16)
    assert relative(attend(query, key, value), expected(query, key, value)) < 1e-3
    query, key, value = (part.bfloat16() for part in (16 * query, 16 * key, value))
    assert relative(attend(query, key, value), expected(query, key, value)) < 4e-3
    unaligned = [part[..., 1 : size + 1] for part in packed_views(1, 2, 300, size + 7, torch.bfloat16)]
    assert relative(attend(*unaligned), expected(*unaligned)) < 4e-3


@on_hopper
@pytest.mark.parametrize("patches", [129, 300, 4096])
def test_scores_that_rise_after_the_first_keys(patches: int) -> None:
    """Weights relative to the highest score of the first 128 keys would overflow in one head of one view, or in all."""
    query, key, value = (part.clone() for part in packed_views(2, 3, patches, 72, torch.bfloat16))
    for heads in (slice(1, 2), slice(None)):
        query[1, heads] = query[1, heads].abs() * 8
        key[1, heads, :128] = -key[1, heads, :128].abs() * 8
        key[1, heads, 128:] = key[1, heads, 128:].abs() * 8
        assert relative(attend(query, key, value), expected(query, key, value)) < 4e-3


@on_hopper
def test_repeats_exactly_and_writes_everything() -> None:
    """A race or an element that is not written would show between runs over poisoned memory."""
    query, key, value = packed_views(4, 16, 4000, 72, torch.bfloat16)
    first = attend(query, key, value)
    for _ in range(5):
        poison = torch.full_like(first, float("nan"))
        del poison
        again = attend(query, key, value)
        assert torch.equal(again, first)
        del again


@on_hopper
def test_what_it_does_not_take_is_refused() -> None:
    query = torch.zeros(1, 1, 4, 72, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="head size 8"):
        attend(*[query[..., :8]] * 3)
    assert attend(query[:0], query[:0], query[:0]).shape == (0, 4, 1, 72)


def test_other_devices_and_precisions_are_refused() -> None:
    assert not supported(torch.device("cpu"), torch.bfloat16)
    assert not supported(DEVICE, torch.float32)
    with pytest.raises(ValueError, match="expected 16 bits on a Hopper GPU"):
        attend(*[torch.zeros(1, 1, 4, 72)] * 3)


# Our decoder on a model's weights, without the engine: the model's forward, whatever its modules are.


IDS = torch.tensor([30, 400, 5, 77, 21])
BOTH = pytest.mark.parametrize("name", ["window inside image blocks", "text only"])
KERNELS = pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=interpreted)], ids=["plain", "kernels"])


@torch.no_grad()
def expected_logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model(input_ids=ids[None]).logits[0].float()


@KERNELS
@BOTH
def test_layers_are_the_models_forward(name: str, kernels: bool) -> None:
    layers = TextLayers(model_of(name))
    if kernels:
        layers.use_kernels()
    assert layers.kernels == kernels
    torch.testing.assert_close(text_logits(layers, IDS), expected_logits(model_of(name)), rtol=1e-5, atol=1e-5)
    check_output_rows(layers)


def check_output_rows(layers: TextLayers) -> None:
    """Compare any output rows with those of a pass that returns all; keys and values of the other rows are written."""
    logits = text_logits(layers, IDS)
    for rows in ([4], [0, 3], []):
        selected = text_logits(layers, IDS, torch.tensor(rows, dtype=torch.long))
        torch.testing.assert_close(selected, logits[rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_output_rows_with_quantised_weights(kind: str) -> None:
    runner = GenerateRunner.from_pretrained("tiny", dtype="fp32", device="cpu", quantization=kind)
    check_output_rows(TextLayers(runner.loaded.model))


def test_the_last_layer_computes_output_rows_alone() -> None:
    layers = TextLayers(model_of("text only"))
    text = MODELS["text only"].text
    flops = []
    for rows in (None, torch.tensor([2, 4]), torch.tensor([], dtype=torch.long)):
        with FlopCounterMode(display=False) as counter:
            text_logits(layers, IDS, rows)
        flops.append(counter.get_total_flops())
    behind_attention = text.heads * text.head_size * text.hidden + 3 * text.hidden * text.intermediate
    row = 2 * (behind_attention + text.hidden * text.vocabulary)
    # Not every PyTorch counts the little that attention takes here.
    assert [flops[0] - count for count in flops] == pytest.approx([0, 3 * row, 5 * row], rel=0.01)


@BOTH
def test_logits_are_float32_and_rounded_as_the_model_rounds(name: str) -> None:
    model, _ = random_model(MODELS[name], dtype=torch.bfloat16, device="cpu")
    layers = TextLayers(model)
    logits = layers.logits(torch.randn(3, 64).bfloat16())
    assert logits.dtype == torch.float32
    assert torch.equal(logits, logits.bfloat16().float())
    assert layers.dtype == layers.layers[0].dtype == torch.bfloat16


class OtherNorm(nn.Module):
    """A norm that is not Gemma 3's."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden / (1 + hidden.abs().amax(-1, keepdim=True))


def offload(model: Any) -> None:
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert next(model.parameters()).is_meta


@pytest.mark.parametrize("change", ["norm", "layers.1.input_layernorm", "layers.0.self_attn.k_norm", offload])
@BOTH
def test_replaced_norms_and_offloaded_weights_run_and_kernels_do_not(name: str, change: Any) -> None:
    model, _ = random_model(MODELS[name], dtype=torch.float32, device="cpu")
    if isinstance(change, str):
        getattr(model.model, "language_model", model.model).set_submodule(change, OtherNorm())
    expected = expected_logits(model)
    if change is offload:
        offload(model)
    layers = TextLayers(model)
    layers.use_kernels()
    assert not layers.kernels
    assert {layer.device for layer in layers.layers} == {layers.device} == {torch.device("cpu")}
    torch.testing.assert_close(text_logits(layers, IDS), expected, rtol=1e-5, atol=1e-5)


def test_layers_on_several_devices_are_refused() -> None:
    model, _ = random_model(MODELS["text only"], dtype=torch.float32, device="cpu")
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1, "lm_head": "cpu"}
    with pytest.raises(UnsupportedError, match=r"--device-map spreads .* 2 devices.*--tensor-parallel-size 2"):
        TextLayers(model)
