"""Published quantised checkpoints: values and logits against the formats' own libraries, and damaged ones refused."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.model.formats.small import CHECKPOINTS, TEXT_ONLY, Checkpoint, dense_weights

from panscan.core import ModelError, PanscanError, UnsupportedError
from panscan.core.weight_formats import QUANTIZATION, STORED_FORMATS, WEIGHT_KINDS
from panscan.model.checkpoint import Loaded, Placement, load_meta_model, load_model, load_shard_of, stored_format
from panscan.model.formats import bitsandbytes
from panscan.model.formats.bitsandbytes import ON_LOAD
from panscan.model.formats.layouts import gptq_zeros, int4_linear, order_of
from panscan.model.formats.load import SCHEMES, stored_scheme
from panscan.model.inventory import inventory
from panscan.model.linear.quantized import LINEARS, QuantizedLinear, WeightFormat, is_quantized, quantized_linear
from panscan.model.load import load_for
from panscan.model.quantization import weights_name
from panscan.settings import Settings

CPU = torch.device("cpu")
NAMES = sorted(path.stem for path in CHECKPOINTS.glob("*.safetensors"))
INT4, INT4_ZEROS = WeightFormat("int4", 32), WeightFormat("int4", 32, zero_points=True)
INT8, FP8 = WeightFormat("int8", quantizes_inputs=False), WeightFormat("fp8", quantizes_inputs=False)
STORED_AS = (  # q_proj, whose 32 inputs are one group
    (INT4, "w4a16 gptq"),
    (INT4_ZEROS, "w4a16-asym-w8a8 gptq-asym gptq-v2-act-order awq torchao-int4"),
    (INT8, "w8a16 gptq-8bit torchao-int8"),
    (WeightFormat("int8"), "torchao-int8-dynamic"),
    (WeightFormat("fp8"), "fp8-dynamic fp8-static-all"),
    (FP8, "torchao-float8"),
)
FORMATS = {name: weight_format for weight_format, names in STORED_AS for name in names.split()}
LAYER = "model.language_model.layers.0."
STORED = "language_model.model.layers.0."


def load(directory: Path, dtype: torch.dtype = torch.bfloat16) -> Loaded:
    return load_model(str(directory), Placement(CPU, dtype))


STORED_KINDS = {
    "w4a16-asym-w8a8": {"int4, per channel, zero points", "int8, per channel"},
    "gptq": {"int4, groups of 32"},
    "awq": {"int4, groups of 32, zero points"},
    "torchao-int8": {"Int8Tensor"},
}


def check_values(model: Any, checkpoint: Checkpoint, atol: float = 0.0) -> None:
    """Compare weights with those of the format's library."""
    for key, expected in checkpoint.expected.items():
        module = model.get_submodule(key.removesuffix(".weight"))
        weight = module.dequantized(expected.dtype) if isinstance(module, QuantizedLinear) else module.weight
        torch.testing.assert_close(weight.to(expected.dtype), expected, rtol=0.0, atol=atol, msg=key)


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_weights_and_logits_are_those_of_the_formats_library(name: str, tmp_path: Path) -> None:
    """Logits are compared with a dense model, with a wider tolerance for formats that quantise inputs."""
    checkpoint = Checkpoint.read(name)
    model = load(checkpoint.write(tmp_path), torch.float32).model
    contents = inventory(str(tmp_path))
    kinds = {fact.stored_as for fact in contents.quantized("decoder")}
    assert kinds == STORED_KINDS.get(name, kinds)
    assert not any(fact.quantized for fact in contents.tensors if "norm" in fact.name)
    assert len(checkpoint.expected) >= 6
    quantized = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert quantized == {key for key in checkpoint.expected if key.startswith(LAYER)}
    check_values(model, checkpoint, 1e-7 if name == "torchao-int4" else 0.0)  # its zero points are weights, ours levels
    assert model.get_submodule(f"{LAYER}self_attn.q_proj").weight_format == FORMATS[name]
    for key, value in dense_weights().items():
        if key not in checkpoint.expected:
            assert torch.equal(model.get_parameter(key).bfloat16(), value), key
    dense = type(model)(model.config).eval()
    dense.load_state_dict({**dense_weights(), **checkpoint.expected}, strict=True)
    ids = torch.tensor([[2, 10, 20, 30, 40]])
    got, logits = (network(input_ids=ids).logits for network in (model, dense))
    exact = all(part.weight_format.input_dtype is None for part in model.modules() if isinstance(part, QuantizedLinear))
    assert torch.allclose(got, logits, rtol=0.0, atol=float(logits.std()) * (0.05 if exact else 0.3))


@pytest.mark.parametrize("name", ["w4a16", "torchao-int8"])
def test_both_layouts_of_tensor_names_load(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.read(name)
    swapped = {
        key.replace(STORED, LAYER)
        if STORED in key
        else key.replace(LAYER, STORED).replace("model.vision_tower.", "vision_tower.vision_model."): value
        for key, value in {**checkpoint.tensors, **checkpoint.metadata}.items()
    }
    checkpoint.tensors = {key: value for key, value in swapped.items() if isinstance(value, torch.Tensor)}
    checkpoint.metadata = {key: value for key, value in swapped.items() if isinstance(value, str)}
    check_values(load(checkpoint.write(tmp_path)).model, checkpoint)


def test_zeros_that_autogptq_writes_as_biases_are_ignored(tmp_path: Path) -> None:
    checkpoint = Checkpoint.read("gptq")
    scales = {key: value for key, value in checkpoint.tensors.items() if key.endswith("scales")}
    checkpoint.tensors |= {key.replace("scales", "bias"): torch.zeros(len(value[0])) for key, value in scales.items()}
    model = load(checkpoint.write(tmp_path)).model
    assert model.get_submodule(f"{LAYER}mlp.up_proj").bias is None


def test_compressed_tensors_have_eight_bits_unless_the_configuration_says_otherwise(tmp_path: Path) -> None:
    checkpoint = Checkpoint.read("w8a16")
    del checkpoint.config["config_groups"]["group_0"]["weights"]["num_bits"]
    weight = load(checkpoint.write(tmp_path)).model.get_submodule(f"{LAYER}mlp.up_proj").dequantized(torch.bfloat16)
    assert torch.equal(weight, checkpoint.expected[f"{LAYER}mlp.up_proj.weight"])
    checkpoint = Checkpoint.read("fp8-dynamic")  # and so have quantised inputs
    del checkpoint.config["config_groups"]["group_0"]["input_activations"]["num_bits"]
    assert load(checkpoint.write(tmp_path)).model.get_submodule(f"{LAYER}mlp.up_proj").weight_format.quantizes_inputs


def test_checkpoints_without_vision_load(tmp_path: Path) -> None:
    checkpoint = Checkpoint.read("w4a16")
    checkpoint.tensors = {key.replace(STORED, "model.layers.0."): value for key, value in checkpoint.tensors.items()}
    checkpoint.expected = {key.replace(LAYER, "model.layers.0."): value for key, value in checkpoint.expected.items()}
    check_values(load(checkpoint.write(tmp_path, TEXT_ONLY)).model, checkpoint)


@pytest.mark.parametrize("name", ["w4a16-asym-w8a8", "gptq", "fp8-dynamic"])
def test_shards_together_are_the_whole_model(name: str, tmp_path: Path) -> None:
    directory = str(Checkpoint.read(name).write(tmp_path))
    full = load_shard_of(directory, 0, 1, torch.bfloat16, CPU).model
    shards = [load_shard_of(directory, rank, 2, torch.bfloat16, CPU) for rank in range(2)]
    assert [shard.vocab_size for shard in shards] == [1024, 1024]
    for path, linear in full.named_modules():
        if isinstance(linear, QuantizedLinear):
            parts = [shard.model.get_submodule(path).dequantized() for shard in shards]
            split_inputs = path.endswith(("o_proj", "down_proj"))
            assert torch.equal(torch.cat(parts, 1 if split_inputs else 0), linear.dequantized()), path
    for shard in shards:
        assert torch.isfinite(shard.model(input_ids=torch.tensor([[2, 10]])).logits).all()
    meta_model = load_meta_model(directory, torch.bfloat16, CPU, revision=None, embedding=False)
    assert getattr(meta_model.model.config, "quantization_config", None) is None


def test_reordered_channels_cannot_be_split_over_ranks(tmp_path: Path) -> None:
    directory = str(Checkpoint.read("gptq-v2-act-order").write(tmp_path))
    with pytest.raises(UnsupportedError, match="act-order"):
        load_shard_of(directory, 0, 2, torch.bfloat16, CPU)


def test_act_order_of_compressed_tensors_assigns_channels_to_groups(tmp_path: Path) -> None:
    """As versions before 0.20 of the library wrote it."""
    checkpoint = Checkpoint.read("w4a16")
    checkpoint.config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    directory = checkpoint.write(tmp_path)
    with pytest.raises(ModelError, match=r"q_proj\.weight_g_idx is missing"):
        load(directory)
    path = f"{LAYER}self_attn.o_proj"
    stored = path.replace(LAYER, STORED)
    for key in [key for key in checkpoint.tensors if key.endswith("weight_shape")]:
        inputs = int(checkpoint.tensors[key][1])
        checkpoint.tensors[key.replace("weight_shape", "weight_g_idx")] = torch.arange(inputs).flip(0) // 32
    before, scale = checkpoint.expected[f"{path}.weight"], checkpoint.tensors[f"{stored}.weight_scale"]
    levels = (before.float() / scale.float().repeat_interleave(32, 1)).round()
    expected = levels * scale.float().flip(1).repeat_interleave(32, 1)
    linear = load(checkpoint.write(tmp_path)).model.get_submodule(path)
    assert linear.weight_format.ordered
    assert torch.equal(linear.dequantized(), expected)


def test_inventory_says_what_is_quantised(tmp_path: Path) -> None:
    checkpoint = Checkpoint.read("fp8-static-all")
    listing = inventory(str(checkpoint.write(tmp_path)))
    assert listing.format == "compressed-tensors float-quantized"
    assert "static" in listing.notes[0]
    assert len(listing.quantized("decoder")) == 7
    assert len(listing.quantized("vision")) == 6
    assert not listing.quantized("projector") and not listing.quantized("embedding")
    weight = next(fact for fact in listing.tensors if fact.name == f"{STORED}self_attn.q_proj.weight")
    assert weight.stored_as == "fp8, per tensor"
    assert weight.bytes == 64 * 32 + 2 + 2  # with the scales of weights and inputs
    assert listing.bytes_of("embedding") == 1024 * 32 * 2
    checkpoint.config["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    ignored = "the scales of the checkpoint's quantised KV cache are ignored"
    assert inventory(str(checkpoint.write(tmp_path))).notes == (*listing.notes, ignored)


def test_dequantised_matrices_and_ignored_scales_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = Checkpoint.read("fp8-static-all").write(tmp_path)
    with caplog.at_level(logging.INFO, logger="panscan"):
        load(directory)
    assert "static scales are ignored" in caplog.text
    assert "6 quantised matrices outside the decoder were converted to bfloat16" in caplog.text


def test_other_quantisation_and_placement_are_refused(tmp_path: Path) -> None:
    directory = str(Checkpoint.read("awq").write(tmp_path))
    assert load_for(Settings(model=directory, device="cpu", dtype="bf16")).model
    for kind in ("int8", "bnb-4bit"):
        with pytest.raises(ModelError, match=rf"^--quantization {kind}: .* is quantised already: AWQ \(gemm, 4 bits\)"):
            load_for(Settings(model=directory, device="cpu", dtype="bf16", quantization=kind))
    with pytest.raises(ModelError, match=r"is quantised already: AWQ \(gemm, 4 bits\)"):
        load_shard_of(directory, 0, 1, torch.bfloat16, CPU, weight_format=WeightFormat("int8"))
    with pytest.raises(UnsupportedError, match="--device-map: not supported"):
        load_for(Settings(model=directory, dtype="bf16", device_map="auto"))


Q = f"{STORED}self_attn.q_proj."


def _drop(leaf: str) -> Callable[[Checkpoint], Any]:
    return lambda checkpoint: checkpoint.tensors.pop(Q + leaf)


def _replace(leaf: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Checkpoint], Any]:
    return lambda checkpoint: checkpoint.tensors.update({Q + leaf: change(checkpoint.tensors[Q + leaf])})


def _add(name: str, *shape: int) -> Callable[[Checkpoint], Any]:
    return lambda checkpoint: checkpoint.tensors.update({name: torch.ones(shape)})


def _configure(**fields: Any) -> Callable[[Checkpoint], Any]:
    return lambda checkpoint: checkpoint.config.update(fields)


def _weights(**fields: Any) -> Callable[[Checkpoint], Any]:
    return lambda checkpoint: checkpoint.config["config_groups"]["group_0"]["weights"].update(fields)


STATE = ".quant_state.bitsandbytes__nf4"


def _state(**fields: Any) -> Callable[[Checkpoint], Any]:
    def change(text: torch.Tensor) -> torch.Tensor:
        return torch.tensor([*json.dumps(json.loads(bytes(text.tolist())) | fields).encode()], dtype=torch.uint8)

    return _replace(f"weight{STATE}", change)


def _infinite(scale: torch.Tensor) -> torch.Tensor:
    return scale.index_fill(0, torch.tensor([1]), float("inf"))


DAMAGES: dict[str, tuple[str, Callable[[Checkpoint], Any], str]] = {
    "missing scales": ("w4a16", _drop("weight_scale"), "q_proj.weight_scale is missing"),
    "missing values": ("gptq", _drop("qweight"), "q_proj.*qweight is missing"),
    "missing zero points": ("awq", _drop("qzeros"), "q_proj.qzeros is missing"),
    "wrong shape": ("w4a16", _replace("weight_packed", lambda words: words[:-1]), "q_proj.weight_packed has the shape"),
    "wrong type": ("gptq", _replace("scales", lambda scale: scale.int()), "q_proj.scales has the type int32"),
    "infinite scales": ("w8a16", _replace("weight_scale", _infinite), "q_proj.weight_scale contains infinite or NaN"),
    "NaN weights": ("fp8-dynamic", _replace("weight", torch.Tensor.clone), "q_proj.weight contains NaN"),
    "other stored shape": ("w4a16", _replace("weight_shape", lambda shape: shape + 1), "weight_shape .*q_proj"),
    "groups that do not divide": ("gptq", _configure(group_size=48), "groups of 48 do not divide 32"),
    "other group size": ("w4a16", _weights(group_size=16), "q_proj.weight_scale has the shape"),
    "group of no channel": ("gptq-v2-act-order", _replace("g_idx", lambda g_idx: g_idx + 1), "g_idx names groups"),
    "no group indices": ("gptq-v2-act-order", _drop("g_idx"), "q_proj.g_idx is missing"),
    "quantised though ignored": ("w4a16", _configure(ignore=["re:.*q_proj"]), "weight is quantised, but config.json"),
    "extra tensor": ("w4a16", _add(f"{STORED}mlp.gate.qweight", 2), "unexpected tensor .*mlp.gate.qweight"),
    "a bias": ("gptq", _add(f"{Q}bias", 64), "q_proj.bias is not zero"),
    "the same tensor twice": ("w4a16", _add(f"{LAYER}mlp.up_proj.weight_scale", 2), "refer to the same parameter"),
    "other class": (
        "torchao-int8-dynamic",
        _configure(quant_type={"default": {"_type": "Float8WeightOnlyConfig"}}),
        "has the class Int8Tensor; config.json implies Float8Tensor",
    ),
    "NF4 shape": ("nf4", _state(shape=[32, 64]), r"q_proj.* has the shape \[32, 64\]; expected \[64, 32\]"),
    "no block": ("nf4", _state(blocksize=0), "q_proj.*blocksize is 0; expected `int` >= 1"),
    "block of text": ("nf4", _state(nested_blocksize="4"), "q_proj.*nested_blocksize is '4'; expected `int`"),
    "no offset": ("nf4", _state(nested_offset=None), "q_proj.*nested_offset is None; expected `float`"),
    "other blocks": ("nf4", _state(blocksize=32), "q_proj.*absmax has the shape"),
    "no JSON": ("nf4", _replace(f"weight{STATE}", lambda text: text[1:]), "q_proj.*not JSON"),
    "long state": ("nf4", _replace(f"weight{STATE}", lambda text: text.repeat(1000)), "q_proj.*bytes"),
    "few values": ("nf4", _replace("weight.quant_map", lambda part: part[1:]), "q_proj.*quant_map has the shape"),
    "infinite": ("nf4", _replace("weight.nested_absmax", lambda part: part * torch.inf), "q_proj.*nested_absmax conta"),
    "truncated": ("nf4", _replace("weight", lambda packed: packed[1:]), "q_proj.*has 1,023 bytes; expected 1,024"),
    "no metadata": ("torchao-int8-dynamic", lambda stored: stored.metadata.clear(), "metadata does not describe"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_config_and_tensors_that_disagree_are_refused(damage: str, tmp_path: Path) -> None:
    name, change, message = DAMAGES[damage]
    checkpoint = nf4_checkpoint() if name == "nf4" else Checkpoint.read(name)
    change(checkpoint)
    if damage == "NaN weights":
        checkpoint.tensors[f"{Q}weight"].view(torch.uint8)[0, 0] = 0x7F
    with pytest.raises(ModelError, match=rf"\A--model {tmp_path}: .*{message}.*\Z"):  # one line
        load(checkpoint.write(tmp_path))


WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


def _compressed(weights: dict[str, Any], layout: str = "pack-quantized", **fields: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**WEIGHTS, **weights}, **fields}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


UNREADABLE = [
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, r"block fp8 \(blocks of \[128, 128\]\)"),
    ({"quant_method": "mxfp4"}, "mxfp4"),
    ({"quant_method": "hqq"}, "hqq"),
    ({"quant_method": "fp_quant"}, "fp_quant"),
    ({}, "quant_method"),
    (_compressed({}, "nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
    (_compressed({}, "marlin-24"), "marlin-24"),
    (_compressed({"num_bits": 3}), "3-bit int weights"),
    (_compressed({"num_bits": 8, "strategy": "block", "type": "float"}, "float-quantized"), "per block"),
    (_compressed({}, input_activations={"num_bits": 8, "strategy": "token", "dynamic": True}), "quantised inputs"),
    (_compressed({}) | {"transform_config": {"config_groups": {"R1": {}}}}, "rotated"),
    ({"quant_method": "gptq", "bits": 3}, "3 bits"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:lm_head": {}, "+:.*q_proj": {"bits": 8}}}, "q_proj"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
    ({"quant_method": "torchao", "quant_type": {"default": {"_type": "IntxWeightOnlyConfig"}}}, "IntxWeightOnly"),
]


@pytest.mark.parametrize(("config", "message"), UNREADABLE)
def test_unreadable_formats_are_named_with_what_works(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        stored_scheme({"quantization_config": config}, "owner/gemma")
    assert str(caught.value).startswith("--model owner/gemma: ")
    assert "use compressed-tensors (W4A16" in str(caught.value)


def test_unquantised_checkpoints_and_those_of_bitsandbytes_in_8_bits_go_through_transformers() -> None:
    assert stored_scheme({}, "m") is None
    assert stored_scheme({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "m") is None


def test_the_table_of_formats_names_those_that_can_be_read_multiplied_and_made() -> None:
    assert tuple(scheme.method for scheme in SCHEMES) == STORED_FORMATS
    assert {*LINEARS} == {*WEIGHT_KINDS}
    assert {*LINEARS, *ON_LOAD} == {*QUANTIZATION}


DAMAGED_CONFIGURATIONS = [
    "x",
    1,
    [],
    {"config_groups": 3},
    {"config_groups": {"a": {"format": "pack-quantized"}}},
    _compressed({}) | {"ignore": ["re:("]},
    _compressed({"num_bits": "4"}),
    {"quant_method": "awq", "group_size": True},
]


@pytest.mark.parametrize("value", DAMAGED_CONFIGURATIONS)
def test_a_damaged_configuration_is_one_line(value: Any) -> None:
    config = {"quant_method": "compressed-tensors", **value} if isinstance(value, dict) else value
    with pytest.raises(PanscanError, match=r"\A.*\Z"):
        stored_scheme({"quantization_config": config}, "m")


# Layouts of packed values: unpacking inverts packing, written here as each format defines it.


SEEDS = st.integers(0, 2**32 - 1)


def draw(seed: int, *shape: int, bits: int = 4) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def packed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack the last dimension into int32 words, the first value in the lowest bits."""
    count = 32 // bits
    words = values.long().unflatten(-1, (-1, count))
    return (words << bits * torch.arange(count)).sum(-1).to(torch.uint32).view(torch.int32)


def int4_values(seed: int, outputs: int, groups: int, *, size: int = 32, zeros: bool = True) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(groups, outputs, generator=generator).to(torch.float16) + 0.1
    zero = draw(seed + 1, groups, outputs) if zeros else None
    return {"levels": draw(seed, outputs, groups * size), "scale": scale, "zero": zero}


def dense(values: dict[str, Any], group_of: torch.Tensor) -> torch.Tensor:
    """Return the weights by definition, given the group of each input channel."""
    zero = torch.full_like(values["scale"], 8) if values["zero"] is None else values["zero"]
    return (values["levels"].float() - zero.float()[group_of].T) * values["scale"].float()[group_of].T


@given(SEEDS, st.integers(1, 3), st.sampled_from([4, 8]))
def test_gptq_zero_points_of_both_versions_are_the_same(seed: int, groups: int, bits: int) -> None:
    """Version 1 subtracts 1 from whole words, so zero points of 0 borrow from their neighbours."""
    zeros = draw(seed, groups, 16, bits=bits)
    zeros[:, :3] = 0
    second = packed(zeros, bits)
    first = second - sum(1 << shift for shift in range(0, 32, bits))
    assert torch.equal(gptq_zeros(second, bits, minus_one=False), zeros)
    assert torch.equal(gptq_zeros(first, bits, minus_one=True), zeros)


@settings(max_examples=30)
@given(SEEDS, st.integers(1, 40), st.integers(1, 17), st.booleans(), st.booleans())
def test_int4_matrices_have_their_values(seed: int, outputs: int, groups: int, zeros: bool, ordered: bool) -> None:
    """Up to 544 input channels: more than two blocks of the packed weights."""
    values = int4_values(seed, outputs, groups, zeros=zeros)
    group_of = torch.arange(groups * 32) // 32
    if ordered:
        group_of = group_of[torch.randperm(groups * 32, generator=torch.Generator().manual_seed(seed))]
        values["order"] = order_of(group_of, groups)
    assert torch.equal(int4_linear(**values).dequantized(), dense(values, group_of))


@given(SEEDS, st.integers(2, 5))
def test_groups_of_several_sizes_are_refused(seed: int, groups: int) -> None:
    group_of = torch.arange(groups * 32) // 32
    assert order_of(group_of, groups) is None
    group_of[seed % 32] = 1
    with pytest.raises(ValueError, match="expected one size"):
        order_of(group_of, groups)


@settings(max_examples=30)
@given(SEEDS, st.sampled_from([1, 2, 4]), st.sampled_from([32, 64, 128, 512]), st.sampled_from(["rows", "columns"]))
def test_parts_of_a_matrix_are_the_matrix(seed: int, size: int, group: int, by: Literal["rows", "columns"]) -> None:
    """Groups that the split cuts keep their scale; each of four parts of 512 channels is half a block."""
    linear = int4_linear(**int4_values(seed, 8, 512 // group, size=group))
    linear.bias = torch.nn.Parameter(torch.rand(8), requires_grad=False)
    parts = [linear.shard(rank, size, by) for rank in range(size)]
    joined = torch.cat([part.dequantized() for part in parts], 0 if by == "rows" else 1)
    assert torch.equal(joined, linear.dequantized())
    inputs = torch.rand(3, 512)
    expected = linear(inputs)
    shares = inputs.chunk(size, 1) if by == "columns" else [inputs] * size
    outputs = [part(share) for part, share in zip(parts, shares, strict=True)]
    together = torch.cat(outputs, -1) if by == "rows" else torch.stack(outputs).sum(0)
    assert torch.allclose(together, expected, rtol=1e-4, atol=1e-3)


def test_matrices_that_cannot_be_split_are_refused() -> None:
    linear = int4_linear(**int4_values(0, 6, 3))
    with pytest.raises(UnsupportedError, match="cuts groups of 32 input channels into 16"):
        linear.shard(0, 2, "columns")
    with pytest.raises(UnsupportedError, match="does not divide 6 channels"):
        linear.shard(0, 4, "rows")
    eight = quantized_linear(64, 8, WeightFormat("int8"))
    eight.quantize(torch.rand(8, 64))
    assert torch.equal(torch.cat([eight.shard(rank, 4, "columns").weight for rank in range(4)], 1), eight.weight)


# 4-bit checkpoints of bitsandbytes, written here by its rules in numpy, and read without it.


WEIGHT = f"{LAYER}self_attn.q_proj.weight"
QUANTILES = (
    "-1 -0.6961928 -0.52507305 -0.3949175 -0.28444138 -0.18477343 -0.091050036 0"
    " 0.0795803 0.1609302 0.2461123 0.33791524 0.44070983 0.562617 0.72295684 1"
)
NF4 = np.array(QUANTILES.split(), np.float32)
"""The quantiles of a normal distribution (Dettmers et al., QLoRA, appendix E)."""
NESTED_VALUES = np.linspace(-1, 1, 256, dtype=np.float32)


def quantized(weight: NDArray[np.float32], size: int, *, nested: bool) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """Return what bitsandbytes stores for a matrix, by the end of the name, and the values that it stands for."""
    flat = weight.reshape(-1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": size, "dtype": "bfloat16", "shape": [*weight.shape]}
    scales = np.array([np.abs(flat[at : at + size]).max() for at in range(0, len(flat), size)], np.float32)
    parts: dict[str, Any] = {".absmax": scales, ".quant_map": NF4}
    if nested:
        offset, largest = float(scales.mean()), []
        indices = np.empty(len(scales), np.uint8)
        for at in range(0, len(scales), 4):
            block = scales[at : at + 4] - np.float32(offset)
            largest.append(np.abs(block).max())
            indices[at : at + 4] = [np.abs(NESTED_VALUES - value / largest[-1]).argmin() for value in block]
            scales[at : at + 4] = NESTED_VALUES[indices[at : at + 4]] * largest[-1] + np.float32(offset)
        parts |= {".absmax": indices, ".nested_absmax": np.array(largest), ".nested_quant_map": NESTED_VALUES}
        state |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": offset}
    levels = [int(np.abs(NF4 - value / scales[at // size]).argmin()) for at, value in enumerate(flat)]
    values = np.array([NF4[level] * scales[at // size] for at, level in enumerate(levels)], np.float32)
    parts[""] = np.array([[high << 4 | low] for high, low in zip(levels[::2], levels[1::2], strict=True)], np.uint8)
    parts[STATE] = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    return parts, values.reshape(weight.shape)


def nf4_checkpoint(size: int = 64, *, nested: bool = True) -> Checkpoint:
    """Return a checkpoint whose decoder and vision tower are in NF4; one decoder matrix is dense."""
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    checkpoint = Checkpoint(config, {}, {}, {})
    for name, weight in dense_weights().items():
        if name.endswith(("proj.weight", "fc1.weight")) and "down_proj" not in name and "projector" not in name:
            parts, values = quantized(weight.float().numpy(), size, nested=nested)
            stored = name.replace(LAYER, "language_model.model.layers.0.").replace("model.vision", "vision")
            checkpoint.tensors |= {f"{stored}{end}": torch.from_numpy(part.copy()) for end, part in parts.items()}
            checkpoint.expected[name] = torch.from_numpy(values)
    return checkpoint


@pytest.mark.parametrize(("size", "nested"), [(64, True), (64, False), (48, True)])
@torch.inference_mode()
def test_values_are_those_of_the_definition(size: int, nested: bool, tmp_path: Path) -> None:
    """With the logits of a dense model; 48 does not divide the matrices."""
    written = nf4_checkpoint(size, nested=nested)
    directory = written.write(tmp_path)
    model = load(directory, torch.float32).model
    assert len(written.expected) == 6 + 5
    for name, expected in written.expected.items():
        assert torch.equal(model.get_parameter(name), expected), name
    dense = type(model)(model.config).eval()
    dense.load_state_dict({**dense_weights(), **written.expected})
    ids = torch.tensor([[2, 10, 20, 30, 40]])
    assert torch.equal(model(input_ids=ids).logits, dense(input_ids=ids).logits)
    assert is_quantized(model) and weights_name(model) == f"nf4, blocks of {size}, dequantised"
    contents = inventory(str(directory))
    assert contents.format == stored_format(str(directory)) == "bitsandbytes (nf4, 4 bits)"
    assert {fact.stored_as for fact in contents.quantized("decoder")} == {f"nf4, blocks of {size}"}
    assert len(contents.quantized("decoder")) == 6 and len(contents.quantized("vision")) == 5


def test_every_loader_reads_it(tmp_path: Path) -> None:
    written = nf4_checkpoint()
    written.tensors = {
        name: part.flatten().view(torch.bfloat16)[:, None] if name.endswith("proj.weight") else part
        for name, part in written.tensors.items()
    }  # as FSDP needs them
    directory = str(written.write(tmp_path))
    model = load(directory).model
    assert torch.equal(model.get_parameter(WEIGHT), written.expected[WEIGHT].bfloat16())
    shards = [load_shard_of(directory, rank, 2, torch.bfloat16, CPU).model for rank in range(2)]
    for name, dimension in ((WEIGHT, 0), (f"{LAYER}self_attn.o_proj.weight", 1), (f"{LAYER}mlp.up_proj.weight", 0)):
        joined = torch.cat([shard.get_parameter(name) for shard in shards], dimension)
        assert torch.equal(joined, model.get_parameter(name))
    meta = load_meta_model(directory, torch.bfloat16, CPU, revision=None, embedding=False).model
    assert meta.get_parameter(WEIGHT).is_meta


def test_transformers_loads_what_bitsandbytes_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = str(nf4_checkpoint().write(tmp_path))
    monkeypatch.setattr(bitsandbytes, "find_spec", lambda name: object())
    assert inventory(directory).format is None


def test_dense_parts_and_products_have_the_type_of_the_model(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")  # Transformers loads it then, and leaves both as stored
    written = nf4_checkpoint(32, nested=False)  # the kernel for CPUs wants whole blocks in each row
    written.config["llm_int8_skip_modules"] = ["down_proj", "lm_head", "multi_modal_projector"]
    directory = str(written.write(tmp_path))
    for dtype in (torch.float32, torch.bfloat16):
        loaded = load(directory, dtype)
        floating = {parameter.dtype for parameter in loaded.model.parameters() if parameter.is_floating_point()}
        assert floating == {dtype} and WEIGHT not in written.tensors
        ids = torch.tensor([[2, 10, 20, 30, 40]])
        logits = loaded.model(input_ids=ids).logits
        dense = type(loaded.model)(loaded.model.config).float().eval()
        dense.load_state_dict({**dense_weights(), **written.expected})
        assert logits.dtype == dtype
        torch.testing.assert_close(logits.float(), dense(input_ids=ids).logits, rtol=0, atol=0.05)
