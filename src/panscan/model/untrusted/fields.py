"""Fields of a Gemma 3's JSON files: types, ranges, and agreement with each other and with the stored weights.

What Transformers builds from a configuration is paid in memory and time, so each number is checked first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isqrt, prod
from typing import Annotated, Any

import msgspec

from panscan.core.model_names import IMAGE_TOKENS
from panscan.core.option import shorten
from panscan.model.untrusted.headers import StoredShape, key_of
from panscan.model.untrusted.reading import DamagedFileError, JsonObject, typed

_CONFIG = "config.json"
_INTEGER = 1 << 31
TEXT_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 131_072,
}
"""Defaults of Transformers' Gemma3TextConfig, which published configuration files leave out."""
VISION_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
}
"""Defaults of Transformers' SiglipVisionConfig."""
_LARGEST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 1 << 14,
    "image_size": 1 << 13,
    "patch_size": 1 << 13,
    "num_channels": 16,
    "mm_tokens_per_image": 1 << 16,
}
"""The largest value of each size; the 27B model has 62 layers, 262,208 tokens and images of 896 pixels."""
_MAX_ADDED = 1 << 16  # tokens; Gemma 3 has 6,415
_ACTIVATIONS = ("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu")
_MODEL_TYPES = {"text_config": "gemma3_text", "vision_config": "siglip_vision_model"}
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "boi_token_index", "eoi_token_index", "image_token_index")


@dataclass(frozen=True, slots=True)
class ConfigSizes:
    """Sizes of a Gemma 3 in its ``config.json``.

    Args:
        text: sizes of the decoder, by field.
        vision: sizes of the vision tower, by field; None for a text-only model.
        image_tokens: tokens of a view.
    """

    text: Mapping[str, int]
    vision: Mapping[str, int] | None
    image_tokens: int

    @classmethod
    def of(cls, config: JsonObject) -> ConfigSizes:
        """Return the sizes of a configuration.

        Raises:
            DamagedFileError: a field has the wrong type or range, or contradicts another one.
        """
        if config.get("model_type") != "gemma3":
            return cls(_text_sizes(config, ""), None, 0)
        parts = {name: _part(config, name) for name in _MODEL_TYPES}
        for name, expected in _MODEL_TYPES.items():
            kind = parts[name].get("model_type", expected)
            _require(kind == expected, f"{name}.model_type", kind, expected)
        text = _text_sizes(parts["text_config"], "text_config.")
        vision = _sizes(parts["vision_config"], VISION_DEFAULTS, "vision_config.")
        tokens = _sizes(config, {"mm_tokens_per_image": IMAGE_TOKENS}, "")["mm_tokens_per_image"]
        side = vision["image_size"] // vision["patch_size"]
        _require(
            vision["hidden_size"] % vision["num_attention_heads"] == 0,
            "vision_config.num_attention_heads",
            vision["num_attention_heads"],
            f"a divisor of hidden_size, {vision['hidden_size']}",
        )
        _require(
            0 < side <= 1024,
            "vision_config.patch_size",
            vision["patch_size"],
            f"1 to 1,024 patches in image_size, {vision['image_size']}",
        )
        _require(
            isqrt(tokens) ** 2 == tokens and isqrt(tokens) <= side,
            "mm_tokens_per_image",
            tokens,
            f"the square of at most {side} (patches in a row)",
        )
        _check_others(config, "", text["vocab_size"])
        _check_others(parts["vision_config"], "vision_config.", text["vocab_size"])
        return cls(text, vision, tokens)


def check_other_model(config: JsonObject) -> None:
    """Check the sizes in the configuration of another model than a Gemma 3, such as Gemma 3n.

    Raises:
        DamagedFileError: one is too large.
    """
    for part, prefix in ((config, ""), *((value, f"{name}.") for name, value in config.items())):
        if isinstance(part, dict):
            for name, largest in _LARGEST.items():
                sizes = part.get(name) if isinstance(part.get(name), list) else [part.get(name)]
                fits = all(size is None or _is_integer(size, 0, largest) for size in sizes or ())
                _require(fits, f"{prefix}{name}", part.get(name), f"an integer up to {largest:,}")


def check_quantization(config: JsonObject) -> None:
    """Check the type of ``quantization_config`` and its method.

    Raises:
        DamagedFileError: it is something else than an object that names a method.
    """
    text = config.get("text_config")
    for part, prefix in ((config, ""), (text if isinstance(text, dict) else {}, "text_config.")):
        for name in ("quantization_config", "compression_config"):
            method = _part(part, name, prefix).get("quant_method")
            _require(method is None or isinstance(method, str), f"{prefix}{name}.quant_method", method, "a name")


def _part(config: JsonObject, name: str, prefix: str = "") -> JsonObject:
    part = config.get(name)
    _require(part is None or isinstance(part, dict), f"{prefix}{name}", part, "an object")
    return part or {}


def _text_sizes(config: JsonObject, prefix: str) -> dict[str, int]:
    sizes = _sizes(config, TEXT_DEFAULTS, prefix)
    heads, kv_heads, layers = (
        sizes[name] for name in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    )
    _require(heads % kv_heads == 0, f"{prefix}num_key_value_heads", kv_heads, f"a divisor of the {heads} heads")
    kinds = config.get("layer_types")
    if kinds is not None:
        fits = isinstance(kinds, list) and len(kinds) == layers and all(kind in _LAYER_TYPES for kind in kinds)
        _require(fits, f"{prefix}layer_types", kinds, f"{' or '.join(_LAYER_TYPES)} for each of {layers} layers")
    for name in ("rope_parameters", "rope_scaling", "rope_theta"):
        _check_rope(config.get(name), f"{prefix}{name}")
    _check_others(config, prefix, sizes["vocab_size"])
    return sizes


def _sizes(config: JsonObject, defaults: Mapping[str, int], prefix: str) -> dict[str, int]:
    sizes = {}
    for name, default in defaults.items():
        size, largest = config.get(name, default), _LARGEST.get(name, _INTEGER - 1)
        if name == "query_pre_attn_scalar" and isinstance(size, float) and size.is_integer():
            size = int(size)
        _require(_is_integer(size, 1, largest), f"{prefix}{name}", size, f"a positive integer up to {largest:,}")
        sizes[name] = size
    return sizes


_ROPE_FACTORS = ("factor", "rope_theta")


def _check_rope(value: Any, field: str) -> None:
    """Check the rotary embedding: positive numbers, in an object per kind of layer or in one."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in ("rope_type", "type"):
                _check_rope(inner, f"{field}.{name}")
            else:
                _require(inner in _ROPE_TYPES, f"{field}.{name}", inner, " or ".join(_ROPE_TYPES))
        return
    least = 0 if field.endswith(_ROPE_FACTORS) else -1  # others are switches and bounds, which may be 0
    fits = value is None or isinstance(value, list) or (isinstance(value, int | float) and least < value < 1e12)
    _require(fits, field, value, "a positive number")


_Rule = tuple[Callable[[Any], bool], str]
_POSITIVE: _Rule = (lambda value: _is_number(value, 0, 1e12) and 0 < value < 1e12, "a positive number")
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(
        ("sliding_window_pattern", "_sliding_window_pattern"),
        (lambda value: _is_integer(value, 1, _INTEGER), "a positive integer"),
    ),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "rope_theta", "rope_local_base_freq"), _POSITIVE),
    **dict.fromkeys(("factor", "initializer_range"), _POSITIVE),
    **dict.fromkeys(
        ("attn_logit_softcapping", "final_logit_softcapping"),
        (lambda value: isinstance(value, int | float) and value > 0, "a number"),
    ),
    **dict.fromkeys(
        ("hidden_activation", "hidden_act"), (lambda value: value in _ACTIVATIONS, " or ".join(_ACTIVATIONS))
    ),
    **dict.fromkeys(
        ("tie_word_embeddings", "attention_bias", "use_bidirectional_attention", "vision_use_head"),
        (lambda value: isinstance(value, bool), "true or false"),
    ),
}
"""What the fields that are no sizes may be, unless they are missing or null."""


def _check_others(config: JsonObject, prefix: str, vocabulary: int) -> None:
    """Check the fields that are no sizes."""
    for name in _TOKENS:
        _check_tokens(_CONFIG, config.get(name), f"{prefix}{name}", max(vocabulary, TEXT_DEFAULTS["vocab_size"]))
    for name, (allows, expected) in _RULES.items():
        value = config.get(name)
        _require(value is None or allows(value), f"{prefix}{name}", value, expected)


def _check_tokens(file: str, value: Any, field: str, vocabulary: int) -> None:
    tokens = value if isinstance(value, list) else [value]
    fits = value is None or all(_is_integer(token, -1, vocabulary - 1) for token in tokens)
    _require(fits, field, value, f"ids of tokens below {vocabulary:,}", file)


def check_generation(generation: JsonObject, sizes: ConfigSizes) -> None:
    """Check the fields of ``generation_config.json`` that panscan uses.

    Raises:
        DamagedFileError: one is no token of the vocabulary.
    """
    vocabulary = max(sizes.text["vocab_size"], TEXT_DEFAULTS["vocab_size"])
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "suppress_tokens"):
        _check_tokens("generation_config.json", generation.get(name), name, vocabulary)


_Share = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
_Scale = Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)]
_Lengths = dict[str, int | None] | int | None


class _ImageProcessor(msgspec.Struct):
    """The settings of an image processor, as stored."""

    size: _Lengths = None
    crop_size: _Lengths = None
    image_mean: tuple[_Share, _Share, _Share] = (1, 1, 1)
    image_std: tuple[_Scale, _Scale, _Scale] = (1, 1, 1)
    do_resize: bool | None = None
    do_rescale: bool | None = None
    do_normalize: bool | None = None
    rescale_factor: _Scale = 1.0
    resample: Annotated[int, msgspec.Meta(ge=2, le=3)] = 2  # bilinear, bicubic
    pan_and_scan_max_num_crops: Annotated[float, msgspec.Meta(ge=0, le=4096)] | None = None
    pan_and_scan_min_crop_size: Annotated[float, msgspec.Meta(ge=0, le=1 << 20)] | None = None
    pan_and_scan_min_ratio_to_activate: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None


def check_processor(file: str, processor: JsonObject, sizes: ConfigSizes) -> None:
    """Compare ``processor_config.json`` or ``preprocessor_config.json`` with the configuration.

    Raises:
        DamagedFileError: a field has the wrong type, or contradicts the vision tower.
    """
    if sizes.vision is None:
        return
    tokens = processor.get("image_seq_length")
    expected = f"mm_tokens_per_image of config.json, {sizes.image_tokens}"
    _require(tokens in (None, sizes.image_tokens), "image_seq_length", tokens, expected, file)
    name = "image_processor"
    where = f"{file}: {name}" if name in processor else file
    images = typed(processor.get(name, processor), _ImageProcessor, where)
    _require(images.do_resize is not False, "do_resize", False, "true: all views have one size", file)
    side = sizes.vision["image_size"]
    for name, size in (("size", images.size), ("crop_size", images.crop_size)):
        lengths = list(size.values()) if isinstance(size, dict) else [size]
        fits = all(length in (None, side) for length in lengths)
        _require(fits, name, size, f"image_size of config.json, {side}", file)


def check_tokenizer_config(tokenizer: JsonObject) -> None:
    """Check the fields of ``tokenizer_config.json`` that are read with each prompt.

    Raises:
        DamagedFileError: one has the wrong type.
    """
    file, length = "tokenizer_config.json", tokenizer.get("model_max_length")
    _require(length is None or _is_number(length, 1, 1e40), "model_max_length", length, "a positive number", file)
    side = tokenizer.get("padding_side", "left")
    _require(side in ("left", "right"), "padding_side", side, "left or right", file)


def check_shapes(sizes: ConfigSizes, tensors: Mapping[str, StoredShape]) -> None:
    """Compare the configuration with the shapes of the stored tensors, before a module is built.

    Matrices in packed formats are compared when they are read.

    Raises:
        DamagedFileError: they disagree; the message names the tensor and the fields.
    """
    by_key = {key_of(name): (name, facts) for name, facts in tensors.items()}
    packed = {key.partition(".weight.")[0] + ".weight" for key in by_key if ".weight." in key}
    _check_layers(sizes.text["num_hidden_layers"], "num_hidden_layers", by_key, r"layers\.(\d+)\.")
    if sizes.vision is not None:
        count = sizes.vision["num_hidden_layers"]
        _check_layers(count, "vision_config.num_hidden_layers", by_key, r"vision_tower\.encoder\.layers\.(\d+)\.")
    known = _known_sizes(sizes)
    for pattern, fields in _SHAPES.items():
        if not known.keys() >= {*fields}:
            continue
        compiled, shape = re.compile(pattern), tuple(known[field] for field in fields)
        for key, (name, facts) in by_key.items():
            if not compiled.fullmatch(key) or key in packed or facts.dtype[0] not in "FB" or facts.dtype == "BOOL":
                continue
            if facts.shape != shape:
                names = " and ".join(dict.fromkeys(fields))
                raise DamagedFileError(
                    f"{_CONFIG}: {names} do not fit the weights: {name} in {facts.file} is {list(facts.shape)},"
                    f" not {list(shape)}"
                )


def _check_layers(count: int, field: str, keys: JsonObject, pattern: str) -> None:
    matches = (re.match(pattern, key) for key in keys)
    stored = {match[1] for match in matches if match is not None}
    if len(stored) != count:
        raise DamagedFileError(f"{_CONFIG}: {field} is {count:,}, but the weights have {len(stored)} layers")


_QUERIES, _KEYS = "num_attention_heads * head_dim", "num_key_value_heads * head_dim"
_SEEN, _INNER = "vision_config.hidden_size", "vision_config.intermediate_size"
_PATCH, _PATCHES = "vision_config.patch_size", "patches of vision_config.image_size"
_TOWER = r"vision_tower\.encoder\.layers\.\d+\."
_SHAPES: dict[str, tuple[str, ...]] = {
    r"(embed_tokens|lm_head)\.weight": ("vocab_size", "hidden_size"),
    r"layers\.\d+\.self_attn\.q_proj\.weight": (_QUERIES, "hidden_size"),
    r"layers\.\d+\.self_attn\.o_proj\.weight": ("hidden_size", _QUERIES),
    r"layers\.\d+\.self_attn\.[kv]_proj\.weight": (_KEYS, "hidden_size"),
    r"layers\.\d+\.self_attn\.[qk]_norm\.weight": ("head_dim",),
    r"layers\.\d+\.mlp\.(gate|up)_proj\.weight": ("intermediate_size", "hidden_size"),
    r"layers\.\d+\.mlp\.down_proj\.weight": ("hidden_size", "intermediate_size"),
    r"(layers\.\d+\.\w+_layernorm|norm)\.weight": ("hidden_size",),
    r"vision_tower\.embeddings\.patch_embedding\.weight": (_SEEN, "vision_config.num_channels", _PATCH, _PATCH),
    r"vision_tower\.embeddings\.position_embedding\.weight": (_PATCHES, _SEEN),
    rf"{_TOWER}self_attn\.\w+_proj\.weight": (_SEEN, _SEEN),
    rf"{_TOWER}mlp\.fc1\.weight": (_INNER, _SEEN),
    rf"{_TOWER}mlp\.fc2\.weight": (_SEEN, _INNER),
    r"multi_modal_projector\.mm_input_projection_weight": (_SEEN, "hidden_size"),
    r"multi_modal_projector\.mm_soft_emb_norm\.weight": (_SEEN,),
}
"""Patterns of tensor keys, and the fields that their shapes come from."""


def _known_sizes(sizes: ConfigSizes) -> dict[str, int]:
    """Return the sizes that :data:`_SHAPES` names; without vision, those of the decoder."""
    text, head = sizes.text, sizes.text["head_dim"]
    known = {**text, _QUERIES: text["num_attention_heads"] * head, _KEYS: text["num_key_value_heads"] * head}
    if sizes.vision is not None:
        known |= {f"vision_config.{name}": size for name, size in sizes.vision.items()}
        known[_PATCHES] = (sizes.vision["image_size"] // sizes.vision["patch_size"]) ** 2
    return known


def check_tokenizer(tokenizer: Any) -> None:
    """Check a loaded tokenizer: what it does to a text must be linear in its length, and not lengthen it much.

    Raises:
        DamagedFileError: it has too many added tokens, or steps that no Gemma 3 has.
    """
    if (count := len(tokenizer.added_tokens_decoder)) > _MAX_ADDED:
        raise DamagedFileError(f"tokenizer.json: {count:,} added tokens; at most {_MAX_ADDED:,} are supported")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        if (step := getattr(backend, name, None)) is not None and _growth(json.loads(step.__getstate__()), name) > 16:
            raise DamagedFileError(f"tokenizer.json: {name} makes texts more than 16 times as long")


def _growth(step: JsonObject, field: str) -> float:
    """Return how much longer a step of a tokenizer can make a text."""
    parts = next((step[name] for name in ("normalizers", "pretokenizers", "decoders") if name in step), ())
    if len(parts) > 16 or "Regex" in str(step.get("pattern"))[:8]:
        raise DamagedFileError(f"tokenizer.json: {field} has a regular expression or more than 16 steps")
    growth = prod(_growth(part, field) for part in parts)
    if step.get("type") == "Replace":
        growth = max(1, len(step["content"]) / max(1, len(step["pattern"]["String"])))
    return growth + len(step.get("prepend", ""))


def _is_integer(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _is_number(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _require(fits: bool, field: str, value: Any, expected: str, file: str = _CONFIG) -> None:
    if not fits:
        raise DamagedFileError(f"{file}: {field} is {shorten(value)}; expected {expected}")
