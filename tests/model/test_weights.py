"""Weights on load: what is quantised and what stays, which settings are refused, and fused matrices."""

import json
import re
from collections.abc import Callable
from pathlib import Path
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

from panscan.core import ModelError, UnsupportedError
from panscan.engine.engine import Engine
from panscan.engine.options import EngineOptions
from panscan.model.bundled import bundled_directory
from panscan.model.bundled.random_weights import random_model
from panscan.model.checkpoint import Placement, load_model
from panscan.model.formats.bitsandbytes import transformers_config
from panscan.model.gemma3.text_layers import TextLayers
from panscan.model.gemma3.vision_layers import VisionLayers
from panscan.model.linear.products import ModuleLinear, PlainLinear, is_plain, linear_of, runs_own_forward
from panscan.model.linear.quantized import QuantizedLinear
from panscan.model.load import requested_format
from panscan.model.machine import is_out_of_memory, memory_advice
from panscan.model.quantization import unquantized_settings
from panscan.model.shapes import Shape, TextShape, VisionShape
from panscan.model.support import quantization_reason
from panscan.runners.generate import GenerateRunner
from panscan.settings import Settings, settings_from
from panscan.verdict.float32 import converted_model, weights_digest

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


# The seam of matrix products: fused weights keep a model's names, values and memory; other modules are called.


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
    linear = linear_of(*parts)
    assert isinstance(linear, PlainLinear)
    short = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]  # some ulp of a sum in another order
    torch.testing.assert_close(linear(x), expected, rtol=short, atol=short / 8)
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
    overriding = NOT_PLAIN["values of another kind"], NOT_PLAIN["values elsewhere"], *UNLIKE_THE_OTHERS.values()
    assert runs_own_forward(changed, nn.Linear) == (change in overriding)


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
        results = engine.generate(requests)
    assert [(result.error, result.token_ids) for result in results] == [(None, tokens) for tokens in expected]
