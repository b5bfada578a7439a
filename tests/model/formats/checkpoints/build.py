"""Build the small checkpoints beside this file with the libraries of their formats.

Each file holds the quantised matrices of one decoder layer as a library stores them, the library's own dequantised
values under ``expected/``, and ``quantization_config`` in its metadata. Run it again when a format changes::

    python tests/model/formats/checkpoints/build.py

It needs compressed-tensors 0.20, gptqmodel 7.7 and torchao 0.18.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.model.formats.small import SMALL
from torch import nn

from panscan.model.bundled.random_weights import random_model

HERE = Path(__file__).parent
LAYER = "model.language_model.layers.0."
PUBLISHED = "language_model.model.layers.0."


def model() -> Any:
    """Return the small model in bfloat16."""
    return random_model(SMALL, dtype=torch.bfloat16, device="cpu")[0]


def linears(owner: Any) -> dict[str, nn.Linear]:
    """Return the matrices of the decoder's only layer."""
    named = owner.named_modules()
    return {name: part for name, part in named if name.startswith(LAYER) and isinstance(part, nn.Linear)}


def write(
    name: str,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    metadata: dict[str, str] | None = None,
    *,
    published: bool = True,
) -> None:
    """Write one file, with the names of most published checkpoints or of Transformers 5."""

    def named(key: str) -> str:
        if not published:
            return key
        return key.replace(LAYER, PUBLISHED).replace("model.vision_tower.", "vision_tower.vision_model.")

    stored = {named(key): value.detach().contiguous().clone() for key, value in tensors.items()}
    stored |= {f"expected/{key}": value.detach().contiguous().clone() for key, value in expected.items()}
    described = {named(key): value for key, value in (metadata or {}).items() if key != "tensor_names"}
    save_file(stored, HERE / f"{name}.safetensors", {**described, "quantization_config": json.dumps(config)})


def compressed(name: str, groups: dict[str, Any], ignore: list[str], overall: str, *, published: bool = True) -> None:
    """Write a compressed-tensors checkpoint, its scales chosen from the smallest and largest weights."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    owner = model()
    config = QuantizationConfig(config_groups=groups, ignore=ignore, format=overall, quantization_status="frozen")
    apply_quantization_config(owner, config)
    tensors, expected = {}, {}
    for path, part in owner.named_modules():
        if (scheme := getattr(part, "quantization_scheme", None)) is None:
            continue
        weights = scheme.weights
        if weights.strategy == "group":
            grouped = part.weight.detach().unflatten(1, (-1, weights.group_size))
            low, high = grouped.amin(-1), grouped.amax(-1)
        elif weights.strategy == "channel":
            low, high = part.weight.amin(1, keepdim=True), part.weight.amax(1, keepdim=True)
        else:
            low, high = part.weight.amin().reshape(1), part.weight.amax().reshape(1)
        scale, zero = calculate_qparams(low, high, weights)
        state = {"weight": part.weight.detach(), "weight_scale": scale, "weight_zero_point": zero}
        if not weights.symmetric:
            state["weight_zero_point"] = zero.to(torch.int8)
        else:
            del state["weight_zero_point"]
        compressor = BaseCompressor.get_value_from_registry(scheme.format or overall)
        packed = compressor.compress(state, scheme)
        if scheme.input_activations is not None and not scheme.input_activations.dynamic:
            packed["input_scale"] = torch.tensor([0.05], dtype=torch.bfloat16)
        tensors |= {f"{path}.{leaf}": value for leaf, value in packed.items()}
        expected[f"{path}.weight"] = compressor.decompress(packed, scheme)["weight"]
    stored = json.loads(config.model_dump_json()) | {"quantization_status": "compressed"}
    write(name, stored, tensors, expected, published=published)


def ranges(
    weight: torch.Tensor, groups: torch.Tensor, bits: int, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero point ``[outputs, groups]`` of weights whose input channels are in these groups."""
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    scales, zeros = [], []
    for group in range(int(groups.max()) + 1):
        values = weight[:, groups == group].float()
        low, high = values.amin(1).clamp(max=0), values.amax(1).clamp(min=0)
        if symmetric:
            scales.append(2 * values.abs().amax(1) / top)
            zeros.append(torch.full_like(low, middle))
        else:
            scales.append((high - low) / top)
            zeros.append((-low / scales[-1]).round().clamp(0, top))
    # Packing uses the rounded scales, as checkpoints store them in float16.
    return torch.stack(scales, 1).half().float(), torch.stack(zeros, 1)


def gptq(name: str, *, bits: int, size: int, symmetric: bool, act_order: bool, version: str) -> None:
    """Write a GPTQ checkpoint with GPTQModel's packing."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    tensors, expected = {}, {}
    for path, linear in linears(model()).items():
        outputs, inputs = linear.weight.shape
        width = inputs if size == -1 else size
        groups = torch.arange(inputs) // width
        if act_order:
            groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        scale, zero = ranges(linear.weight.detach(), groups, bits, symmetric=symmetric)
        packed = TorchLinear(
            bits=bits, group_size=width, sym=symmetric, desc_act=act_order, in_features=inputs, out_features=outputs
        ).eval()
        packed.pack_original(linear.float(), scale, zero, groups.int())
        packed.post_init()
        expected[f"{path}.weight"] = packed.dequantize_weight().T
        if version == "gptq":
            convert_gptq_v2_to_v1_format_module(packed, type("Config", (), {"bits": bits, "pack_dtype": torch.int32})())
        tensors |= {f"{path}.{leaf}": getattr(packed, leaf) for leaf in ("qweight", "qzeros", "scales", "g_idx")}
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric, "desc_act": act_order}
    config |= {"checkpoint_format": version, "lm_head": False}
    write(name, config, tensors, expected)


def awq() -> None:
    """Write an AWQ checkpoint with GPTQModel's packing, which is AutoAWQ's."""
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    tensors, expected = {}, {}
    for path, linear in linears(model()).items():
        outputs, inputs = linear.weight.shape
        scale, zero = ranges(linear.weight.detach(), torch.arange(inputs) // 32, 4, symmetric=False)
        packed = AwqTorchLinear(
            bits=4, group_size=32, sym=False, desc_act=False, in_features=inputs, out_features=outputs
        )
        clipped = nn.Linear(inputs, outputs, bias=False)
        wide = scale.repeat_interleave(32, 1), zero.repeat_interleave(32, 1)
        levels = (linear.weight.detach().float() / wide[0] + wide[1]).round().clamp(0, 15)
        clipped.weight.data = (levels - wide[1]) * wide[0]
        packed.pack(clipped, scale, zero)
        expected[f"{path}.weight"] = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, 32).T
        tensors |= {f"{path}.{leaf}": getattr(packed, leaf) for leaf in ("qweight", "qzeros", "scales")}
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    write("awq", config, tensors, expected)


def torchao(name: str, kind: Any, keep: Callable[[str], bool], skipped: list[str] | None) -> None:
    """Write a torchao checkpoint as Transformers saves it."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import quantize_

    owner = model()
    quantize_(owner, kind, filter_fn=lambda part, path: isinstance(part, nn.Linear) and keep(path))
    linear = [(path, part) for path, part in owner.named_modules() if isinstance(part, nn.Linear)]
    state = {f"{path}.weight": part.weight for path, part in linear if keep(path)}
    tensors, metadata = flatten_tensor_state_dict(state)
    expected = {key: value.dequantize() for key, value in state.items()}
    quant_type = {"default": {"_type": type(kind).__name__, "_version": 1, "_data": {}}}
    config = {"quant_method": "torchao", "quant_type": quant_type, "modules_to_not_convert": skipped}
    write(name, config, tensors, expected, metadata, published=False)


def torchao_int4() -> None:
    """Write a checkpoint of torchao's ``Int4Tensor``, quantised here: torchao needs a GPU for that."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Int4Tensor

    state, expected = {}, {}
    for path, linear in linears(model()).items():
        grouped = linear.weight.detach().float().unflatten(1, (-1, 32))
        low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
        scale = ((high - low) / 15).bfloat16()
        middle = (low + 8 * scale).bfloat16()  # the weight of level 0
        levels = ((grouped - middle.float()) / scale.float()).round().clamp(-8, 7).flatten(1).to(torch.int8)
        octets = (levels[:, ::2] & 0xF) | (levels[:, 1::2] << 4)
        state[f"{path}.weight"] = Int4Tensor(
            octets, scale[..., 0].T.contiguous(), middle[..., 0].T.contiguous(), [1, 32], linear.weight.shape
        )
        dense = levels.float().unflatten(1, (-1, 32)) * scale.float() + middle.float()
        expected[f"{path}.weight"] = dense.flatten(1)
    tensors, metadata = flatten_tensor_state_dict(state)
    config = {
        "quant_method": "torchao",
        "modules_to_not_convert": ["lm_head", "model.vision_tower"],
        "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": {"group_size": 32}}},
    }
    write("torchao-int4", config, tensors, expected, metadata, published=False)


def weights(bits: int, kind: str, strategy: str, **others: Any) -> dict[str, Any]:
    """Return quantisation arguments of compressed-tensors."""
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, **others}


def group(matrix: dict[str, Any], inputs: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    """Return a group of compressed-tensors: its weights, and its inputs where they are quantised."""
    activations = {} if inputs is None else {"input_activations": inputs}
    return {"targets": ["Linear"], "weights": matrix, **activations, **others}


def main() -> None:
    """Write all files."""
    from torchao.quantization import Float8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig

    dense = ["lm_head", "re:.*vision_tower.*", "re:.*multi_modal_projector.*"]
    per_token = weights(8, "int", "token", dynamic=True)
    compressed("w4a16", {"group_0": group(weights(4, "int", "group", group_size=32))}, dense, "pack-quantized")
    # Two groups by name, one matrix left out, zero points, and the layout of Transformers 5.
    asymmetric = weights(4, "int", "channel") | {"symmetric": False}
    attention = group(asymmetric, targets=["re:.*self_attn.*"], format="pack-quantized")
    mlp = group(weights(8, "int", "channel"), per_token, targets=["re:.*mlp.*"], format="int-quantized")
    ignored = [*dense, "model.language_model.layers.0.self_attn.o_proj"]
    mixed = {"group_0": attention, "group_1": mlp}
    compressed("w4a16-asym-w8a8", mixed, ignored, "mixed-precision", published=False)
    compressed("w8a16", {"group_0": group(weights(8, "int", "channel"))}, dense, "pack-quantized")
    dynamic = group(weights(8, "float", "channel"), weights(8, "float", "token", dynamic=True))
    compressed("fp8-dynamic", {"group_0": dynamic}, dense, "float-quantized")
    static = group(weights(8, "float", "tensor"), weights(8, "float", "tensor"))
    compressed("fp8-static-all", {"group_0": static}, ["lm_head"], "float-quantized")  # vision tower included
    gptq("gptq", bits=4, size=32, symmetric=True, act_order=False, version="gptq")
    gptq("gptq-v2-act-order", bits=4, size=32, symmetric=False, act_order=True, version="gptq_v2")
    gptq("gptq-asym", bits=4, size=-1, symmetric=False, act_order=False, version="gptq")
    gptq("gptq-8bit", bits=8, size=-1, symmetric=True, act_order=False, version="gptq")
    awq()
    torchao("torchao-int8", Int8WeightOnlyConfig(), lambda path: path != "lm_head", None)
    skipped = ["lm_head", "model.vision_tower"]
    both = {"int8-dynamic": Int8DynamicActivationInt8WeightConfig(), "float8": Float8WeightOnlyConfig()}
    for name, kind in both.items():
        torchao(f"torchao-{name}", kind, lambda path: path.startswith(LAYER), skipped)
    torchao_int4()


if __name__ == "__main__":
    main()
