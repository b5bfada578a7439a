"""Quantisation: what is converted, what stays, and what is said when it cannot be."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import noise
from torch import nn

from panscan import GenerateRunner
from panscan.core import UnsupportedError
from panscan.model.load import quantization_config
from panscan.model.machine import is_out_of_memory
from panscan.model.support import quantization_reason

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def int8() -> GenerateRunner:
    return GenerateRunner.from_pretrained(
        "tiny", dtype="bf16", device="cpu", quantization="torchao-int8", max_new_tokens=8
    )


def test_text_layers_are_quantised_and_the_vision_tower_is_not(int8: GenerateRunner) -> None:
    plain = {
        name: type(module.weight.data) is torch.Tensor
        for name, module in int8.loaded.model.named_modules()
        if isinstance(module, nn.Linear)
    }
    vision = {name for name in plain if "vision_tower" in name}
    text = {name for name in plain if "language_model" in name}
    assert len(vision) > 5
    assert len(text) > 20
    assert all(plain[name] for name in vision | {"lm_head"})
    assert not any(plain[name] for name in text)


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


def test_what_cannot_be_quantised_here_is_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine may be able to")
    assert "compute capability 8.9" in str(quantization_reason("torchao-float8", CPU))
    assert "NVIDIA GPU" in str(quantization_reason("torchao-int4", CPU))
    assert quantization_reason("torchao-int8", CPU) is None
    assert quantization_config("gptq", torch.bfloat16) is None
    with pytest.raises(UnsupportedError, match="gptq"):
        GenerateRunner.from_pretrained("tiny", quantization="gptq")


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
