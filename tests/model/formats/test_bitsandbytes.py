"""4-bit checkpoints of bitsandbytes, written here by its rules in numpy, and read without it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.model.formats.small import Checkpoint, dense_weights

from panscan.core import ModelError
from panscan.model.checkpoint import Placement, load_meta_model, load_model, load_shard_of, stored_format
from panscan.model.formats import bitsandbytes
from panscan.model.inventory import inventory
from panscan.model.linear.quantized import is_quantized
from panscan.model.quantization import weights_name

CPU = torch.device("cpu")
LAYER = "model.language_model.layers.0."
Q = f"{LAYER}self_attn.q_proj.weight"
QUANTILES = (
    "-1 -0.6961928 -0.52507305 -0.3949175 -0.28444138 -0.18477343 -0.091050036 0"
    " 0.0795803 0.1609302 0.2461123 0.33791524 0.44070983 0.562617 0.72295684 1"
)
NF4 = np.array(QUANTILES.split(), np.float32)
"""The quantiles of a normal distribution (Dettmers et al., QLoRA, appendix E)."""
STATE = "quant_state.bitsandbytes__nf4"
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
    parts[".quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    return parts, values.reshape(weight.shape)


def checkpoint(size: int = 64, *, nested: bool = True) -> Checkpoint:
    """Return a checkpoint whose decoder and vision tower are in NF4; one decoder matrix is dense."""
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    found = Checkpoint(config, {}, {}, {})
    for name, weight in dense_weights().items():
        if name.endswith(("proj.weight", "fc1.weight")) and "down_proj" not in name and "projector" not in name:
            parts, values = quantized(weight.float().numpy(), size, nested=nested)
            stored = name.replace(LAYER, "language_model.model.layers.0.").replace("model.vision", "vision")
            found.tensors |= {f"{stored}{end}": torch.from_numpy(part.copy()) for end, part in parts.items()}
            found.expected[name] = torch.from_numpy(values)
    return found


@pytest.mark.parametrize(("size", "nested"), [(64, True), (64, False), (48, True)])
@torch.inference_mode()
def test_values_are_those_of_the_definition(size: int, nested: bool, tmp_path: Path) -> None:
    """With the logits of a dense model; 48 does not divide the matrices."""
    written = checkpoint(size, nested=nested)
    directory = str(written.write(tmp_path))
    model = load_model(directory, Placement(CPU, torch.float32)).model
    assert len(written.expected) == 6 + 5
    for name, expected in written.expected.items():
        assert torch.equal(model.get_parameter(name), expected), name
    dense = type(model)(model.config).eval()
    dense.load_state_dict({**dense_weights(), **written.expected})
    ids = torch.tensor([[2, 10, 20, 30, 40]])
    assert torch.equal(model(input_ids=ids).logits, dense(input_ids=ids).logits)
    assert is_quantized(model) and weights_name(model) == f"nf4, blocks of {size}, dequantised"
    found = inventory(directory)
    assert found.format == stored_format(directory) == "bitsandbytes (nf4, 4 bits)"
    assert {fact.stored_as for fact in found.quantized("decoder")} == {f"nf4, blocks of {size}"}
    assert len(found.quantized("decoder")) == 6 and len(found.quantized("vision")) == 5


def test_every_loader_reads_it(tmp_path: Path) -> None:
    written = checkpoint()
    written.tensors = {
        name: part.flatten().view(torch.bfloat16)[:, None] if name.endswith("proj.weight") else part
        for name, part in written.tensors.items()
    }  # as FSDP needs them
    directory = str(written.write(tmp_path))
    whole = load_model(directory, Placement(CPU, torch.bfloat16)).model
    assert torch.equal(whole.get_parameter(Q), written.expected[Q].bfloat16())
    shards = [load_shard_of(directory, rank, 2, torch.bfloat16, CPU).model for rank in range(2)]
    for name, dimension in ((Q, 0), (f"{LAYER}self_attn.o_proj.weight", 1), (f"{LAYER}mlp.up_proj.weight", 0)):
        joined = torch.cat([shard.get_parameter(name) for shard in shards], dimension)
        assert torch.equal(joined, whole.get_parameter(name))
    meta = load_meta_model(directory, torch.bfloat16, CPU, revision=None, embedding=False).model
    assert meta.get_parameter(Q).is_meta


def test_transformers_loads_what_bitsandbytes_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = str(checkpoint().write(tmp_path))
    monkeypatch.setattr(bitsandbytes, "find_spec", lambda name: object())
    assert inventory(directory).format is None


def test_dense_parts_and_products_have_the_type_of_the_model(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")  # Transformers loads it then, and leaves both as stored
    written = checkpoint(32, nested=False)  # the kernel for CPUs wants whole blocks in each row
    written.config["llm_int8_skip_modules"] = ["down_proj", "lm_head", "multi_modal_projector"]
    directory = str(written.write(tmp_path))
    for dtype in (torch.float32, torch.bfloat16):
        loaded = load_model(directory, Placement(CPU, dtype))
        floating = {parameter.dtype for parameter in loaded.model.parameters() if parameter.is_floating_point()}
        assert floating == {dtype} and Q not in written.tensors
        ids = torch.tensor([[2, 10, 20, 30, 40]])
        logits = loaded.model(input_ids=ids).logits
        dense = type(loaded.model)(loaded.model.config).float().eval()
        dense.load_state_dict({**dense_weights(), **written.expected})
        assert logits.dtype == dtype
        torch.testing.assert_close(logits.float(), dense(input_ids=ids).logits, rtol=0, atol=0.05)


def _state(**fields: Any) -> Callable[[str, torch.Tensor], torch.Tensor]:
    def change(leaf: str, text: torch.Tensor) -> torch.Tensor:
        return torch.tensor([*json.dumps(json.loads(bytes(text.tolist())) | fields).encode()], dtype=torch.uint8)

    return change


DAMAGES: dict[str, tuple[str, Callable[[str, torch.Tensor], torch.Tensor], str]] = {
    "shape": (STATE, _state(shape=[32, 64]), r"has the shape \[32, 64\]; expected \[64, 32\]"),
    "no block": (STATE, _state(blocksize=0), "blocksize is 0; expected `int` >= 1"),
    "block of text": (STATE, _state(nested_blocksize="4"), "nested_blocksize is '4'; expected `int`"),
    "no offset": (STATE, _state(nested_offset=None), "nested_offset is None; expected `float`"),
    "other blocks": (STATE, _state(blocksize=32), "absmax has the shape"),
    "no JSON": (STATE, lambda _, text: text[1:], "not JSON"),
    "long state": (STATE, lambda _, text: text.repeat(1000), "bytes"),
    "few values": ("quant_map", lambda _, values: values[1:], "quant_map has the shape"),
    "infinite": ("nested_absmax", lambda _, scales: scales * torch.inf, "nested_absmax contains infinite or NaN"),
    "truncated": ("weight", lambda _, packed: packed[1:], "has 1,023 bytes; expected 1,024"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_matrix_is_one_line_that_names_it(damage: str, tmp_path: Path) -> None:
    leaf, change, message = DAMAGES[damage]
    written, name = checkpoint(), "language_model.model.layers.0.self_attn.q_proj.weight"
    key = name if leaf == "weight" else f"{name}.{leaf}"
    written.tensors[key] = change(leaf, written.tensors[key]).contiguous()
    with pytest.raises(ModelError, match=rf"\A.*q_proj.*{message}.*\Z"):
        load_model(str(written.write(tmp_path)), Placement(CPU, torch.float32))
