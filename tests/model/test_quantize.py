"""Quantisation on load: what is converted, what stays, and which settings are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.conftest import noise
from torch import nn

from panscan import GenerateRunner
from panscan.core import ModelError
from panscan.model.bundled import bundled_directory
from panscan.model.load import load_for, quantization_config, weight_format
from panscan.model.machine import is_out_of_memory
from panscan.model.quantized.weights import QuantizedLinear
from panscan.model.support import quantization_reason
from panscan.settings import Settings

CPU, MPS = torch.device("cpu"), torch.device("mps")


@pytest.fixture(scope="module")
def int8() -> GenerateRunner:
    return GenerateRunner.from_pretrained("tiny", dtype="bf16", device="cpu", quantization="int8", max_new_tokens=8)


def test_text_layers_are_quantised_and_the_vision_tower_is_not(int8: GenerateRunner) -> None:
    modules = dict(int8.loaded.model.named_modules())
    quantized = {name for name, module in modules.items() if isinstance(module, QuantizedLinear)}
    dense = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
    assert len(quantized) == 7 * 7
    assert all("language_model.layers" in name for name in quantized)
    assert "lm_head" in dense and sum("vision_tower" in name for name in dense) > 5


def test_a_quantised_model_answers_otherwise(int8: GenerateRunner) -> None:
    """Eight bits are close, not equal: the first token's distribution has moved, and only a little."""
    plain = GenerateRunner.from_pretrained("tiny", dtype="bf16", device="cpu", max_new_tokens=8)
    [ours] = int8.generate([int8.request("What is it?", [noise(300, 900)])])
    [theirs] = plain.generate([plain.request("What is it?", [noise(300, 900)])])
    assert (ours.views, ours.prompt_tokens) == (theirs.views, theirs.prompt_tokens)
    ids = torch.tensor([[2, 10, 20, 30]])
    with torch.no_grad():
        moved = int8.loaded.model(input_ids=ids).logits - plain.loaded.model(input_ids=ids).logits
    assert 0 < moved.abs().max() < 3


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        (Settings(quantization="int4"), 64),  # the mini model's MLP has 9 x 64 channels
        (Settings(quantization="int4", model="tiny"), 128),
        (Settings(quantization="int4", random_weights=True, model_shape="27b"), 128),
        (Settings(quantization="int4", quantization_group_size=32), 32),
    ],
)
def test_groups_divide_the_model(settings: Settings, size: int) -> None:
    chosen = weight_format(settings)
    assert chosen is not None and chosen.group_size == size


def test_a_kind_that_this_device_cannot_run_names_another() -> None:
    assert "8.9 or later; on a CPU use int8 or int4" in str(quantization_reason("fp8", CPU))
    assert "--device cpu with int8 or int4" in str(quantization_reason("int4", MPS))
    assert quantization_reason("int8", CPU) is None and quantization_reason("int4", CPU) is None


def test_bitsandbytes_leaves_the_vision_tower_and_the_output_matrix() -> None:
    for name in ("bnb-8bit", "bnb-4bit"):
        config = quantization_config(name, torch.bfloat16)
        assert config.llm_int8_skip_modules == ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    assert quantization_config("int8", torch.bfloat16) is None


@pytest.mark.parametrize("kind", ["int8", "bnb-4bit"])
def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path: Path, kind: str) -> None:
    source = bundled_directory("tiny")
    assert source is not None
    config = json.loads((source / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(ModelError, match=rf"^--quantization {kind}: .* is quantised already \(gptq\); leave out"):
        load_for(Settings(model=str(tmp_path), quantization=kind, device="cpu"))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("MPS backend out of memory"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_running_out_of_memory_is_recognised_on_every_device(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
