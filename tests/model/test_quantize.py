"""Quantisation on load: what is converted, what stays, and which settings are refused."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from panscan import GenerateRunner
from panscan.core import ModelError, UnsupportedError
from panscan.model.bundled import bundled_directory
from panscan.model.formats.bitsandbytes import transformers_config
from panscan.model.linear.quantized import QuantizedLinear
from panscan.model.load import requested_format
from panscan.model.machine import is_out_of_memory, memory_advice
from panscan.model.quantization import unquantized_settings
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


GROUPED = [
    (Settings(quantization="int4"), 64),  # the mini model's MLP has 9 x 64 channels
    (Settings(quantization="int4", model="tiny"), 128),
    (Settings(quantization="int4", random_weights=True, model_shape="27b"), 128),
    (Settings(quantization="int4", quantization_group_size=32), 32),
]


@pytest.mark.parametrize(("settings", "size"), GROUPED)
def test_groups_divide_the_model(settings: Settings, size: int) -> None:
    chosen = requested_format(settings)
    assert chosen is not None and chosen.group_size == size


def test_a_kind_that_this_device_cannot_run_names_another() -> None:
    assert "use --device cpu, or the unquantised model" in str(quantization_reason("int4", MPS))
    assert quantization_reason("int8", CPU) is None and quantization_reason("int4", CPU) is None


def test_bitsandbytes_leaves_the_vision_tower_and_the_output_matrix() -> None:
    for name in ("bnb-8bit", "bnb-4bit"):
        config = transformers_config(name, torch.bfloat16)
        assert config.llm_int8_skip_modules == ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    assert transformers_config("int8", torch.bfloat16) is None


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A directory whose configuration is that of a quantised checkpoint."""
    source = bundled_directory("tiny")
    config = json.loads((source / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    return tmp_path


BASES = {"tiny": "base_model: tiny\nlicense: gemma", "mini": "base_model:\n- mini\n- tiny", "base": "base_model: base"}


@pytest.mark.parametrize(("expected", "card"), BASES.items())
def test_the_base_of_a_quantised_checkpoint_is_that_of_its_card(stored: Path, card: str, expected: str) -> None:
    """A bundled model, the first of several, or a directory beside the weights."""
    (stored / "README.md").write_text(f"---\n{card}\n---\n# Title\n", "utf-8")
    (stored / "base").mkdir()
    plain = {key: part for key, part in json.loads((stored / "config.json").read_text()).items() if "quant" not in key}
    (stored / "base" / "config.json").write_text(json.dumps(plain), "utf-8")
    settings = Settings(model=str(stored), dtype="bf16")
    base = str(stored / "base") if expected == "base" else expected
    assert unquantized_settings(settings) == Settings(model=base, dtype="bf16")


def test_a_directory_with_the_name_of_a_bundled_model_is_itself(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (stored / "README.md").write_text("---\nbase_model: ./tiny\n---\n", "utf-8")
    (stored / "work" / "tiny").mkdir(parents=True)
    source = bundled_directory("tiny")
    (stored / "work" / "tiny" / "config.json").write_bytes((source / "config.json").read_bytes())
    monkeypatch.chdir(stored / "work")
    assert unquantized_settings(Settings(model=str(stored))).model == "./tiny"


BASELESS = [
    (None, "README.md names no base_model"),
    ("base_model: tiny\n", "names no base_model"),
    ("---\nbase_model: [\n---\n", "names no base_model"),
    ("---\nbase_model: owner/absent-model\n---\n", "owner/absent-model is not on this machine; download it, or"),
    ("---\nbase_model: ../escape\n---\n", "../escape is not on this machine"),
    ("---\nbase_model: .\n---\n", "base_model . is also quantised; use --reference with a reference of the"),
]


@pytest.mark.parametrize(("card", "message"), BASELESS)
def test_a_base_that_cannot_be_had_is_refused_with_a_fix(stored: Path, card: str | None, message: str) -> None:
    if card is not None:
        (stored / "README.md").write_text(card, "utf-8")
    with pytest.raises(ModelError, match=re.escape(message)):
        unquantized_settings(Settings(model=str(stored)))


def test_settings_that_quantise_on_load_name_their_own_base() -> None:
    settings = Settings(model="tiny", quantization="int4", quantization_group_size=64, dtype="bf16")
    assert unquantized_settings(settings) == Settings(model="tiny", dtype="bf16")
    assert unquantized_settings(Settings(model="tiny")) == Settings(model="tiny")


MEMORY_ERRORS = [
    (torch.OutOfMemoryError("CUDA out of memory"), True),
    (MemoryError(), True),
    (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"), True),
    (RuntimeError("MPS backend out of memory"), True),
    (RuntimeError("shapes do not match"), False),
    (ValueError("out of memory"), False),
]


@pytest.mark.parametrize(("error", "expected"), MEMORY_ERRORS)
def test_running_out_of_memory_is_recognised_on_every_device(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
    with pytest.raises(UnsupportedError if expected else type(error)) as caught, memory_advice():
        raise error
    assert ("lower --batch-size" in str(caught.value)) is expected
