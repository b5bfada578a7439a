"""Our decoder on a model's weights, without the engine: the model's forward, whatever its modules are."""

from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from tests.model.text_logits import text_logits
from tests.small_models import MODELS, model_of
from tests.triton_here import interpreted
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from panscan import GenerateRunner
from panscan.core import UnsupportedError
from panscan.model.bundled.random_weights import random_model
from panscan.model.gemma3.text_layers import TextLayers

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
    whole = text_logits(layers, IDS)
    for rows in ([4], [0, 3], []):
        found = text_logits(layers, IDS, torch.tensor(rows, dtype=torch.long))
        torch.testing.assert_close(found, whole[rows], rtol=1e-5, atol=1e-5)


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
    assert [flops[0] - each for each in flops] == pytest.approx([0, 3 * row, 5 * row], rel=0.01)


@BOTH
def test_logits_are_float32_and_rounded_as_the_model_rounds(name: str) -> None:
    model, _ = random_model(MODELS[name], dtype=torch.bfloat16, device="cpu")
    layers = TextLayers(model)
    logits = layers.logits(torch.randn(3, 64).bfloat16())
    assert logits.dtype == torch.float32
    assert torch.equal(logits, logits.bfloat16().float())
    assert layers.dtype == layers.layers[0].dtype == torch.bfloat16


@BOTH
def test_offloaded_weights_run_on_their_execution_device(name: str) -> None:
    model, _ = random_model(MODELS[name], dtype=torch.float32, device="cpu")
    expected = expected_logits(model)
    layers = TextLayers(cpu_offload(model, execution_device=torch.device("cpu")))
    assert next(model.parameters()).is_meta
    assert {layer.device for layer in layers.layers} == {layers.device} == {torch.device("cpu")}
    layers.use_kernels()
    assert not layers.kernels, "they would read weights that are not there"
    torch.testing.assert_close(text_logits(layers, IDS), expected, rtol=1e-5, atol=1e-5)


class OtherNorm(nn.Module):
    """A norm that is not Gemma 3's."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden / (1 + hidden.abs().amax(-1, keepdim=True))


@pytest.mark.parametrize("place", ["norm", "layers.1.input_layernorm", "layers.0.self_attn.k_norm"])
def test_replaced_norms_run_and_kernels_do_not(place: str) -> None:
    model, _ = random_model(MODELS["text only"], dtype=torch.float32, device="cpu")
    model.model.set_submodule(place, OtherNorm())
    layers = TextLayers(model)
    layers.use_kernels()
    assert not layers.kernels
    torch.testing.assert_close(text_logits(layers, IDS), expected_logits(model), rtol=1e-5, atol=1e-5)


def test_layers_on_several_devices_are_refused() -> None:
    model, _ = random_model(MODELS["text only"], dtype=torch.float32, device="cpu")
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1, "lm_head": "cpu"}
    with pytest.raises(UnsupportedError, match=r"--device-map spreads .* 2 devices.*--tensor-parallel-size 2"):
        TextLayers(model)
