"""Fields of a Gemma 3's JSON files: types, ranges, and agreement with each other and with the stored weights.

What Transformers builds from a configuration is paid in memory and time, so each number is checked first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt, prod
from typing import Annotated, Any

import msgspec
from msgspec import Meta, structs

from panscan.core.model_names import IMAGE_TOKENS
from panscan.core.option import shorten
from panscan.model.untrusted.headers import StoredShape, key_of
from panscan.model.untrusted.reading import DamagedFileError, JsonObject, typed

_CONFIG = "config.json"
_LARGEST = 1 << 24
"""The largest size of any model; the 27B model has 62 layers, 262,208 tokens and images of 896 pixels."""
_SIZES = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "image_size",
    "patch_size",
    "num_channels",
    "mm_tokens_per_image",
}
"""Fields of any model on which its memory depends."""
_MAX_ADDED = 1 << 16  # tokens; Gemma 3 has 6,415

_Positive = Annotated[int, Meta(ge=1, lt=1 << 31)]
_Vocabulary = Annotated[int, Meta(ge=1, le=_LARGEST)]
_Width = Annotated[int, Meta(ge=1, le=1 << 17)]
_Inner = Annotated[int, Meta(ge=1, le=1 << 20)]
_Layers = Annotated[int, Meta(ge=1, le=1024)]
_Heads = Annotated[int, Meta(ge=1, le=4096)]
_Pixels = Annotated[int, Meta(ge=1, le=1 << 13)]
_Number = Annotated[float, Meta(gt=0, lt=1e12)] | None
_Tokens = int | list[int] | None
_Switch = bool | None
# Patterns rather than literals: the error names all values.
_Activation = Annotated[str, Meta(pattern="^(gelu|gelu_fast|gelu_new|gelu_pytorch_tanh|quick_gelu|relu|silu)$")] | None
_RopeType = Annotated[str, Meta(pattern="^(default|linear|dynamic|yarn|longrope|llama3|proportional)$")] | None
_LayerType = Annotated[str, Meta(pattern="^(full_attention|sliding_attention)$")]


class _Rope(msgspec.Struct):
    """A rotary embedding, or that of each kind of layer."""

    rope_type: _RopeType = None
    type: _RopeType = None
    factor: _Number = None
    rope_theta: _Number = None
    full_attention: _Rope | None = None
    sliding_attention: _Rope | None = None


class _Part(msgspec.Struct):
    """Fields of any part of a configuration that are no sizes; each may be missing or null."""

    bos_token_id: _Tokens = None
    eos_token_id: _Tokens = None
    pad_token_id: _Tokens = None
    boi_token_index: _Tokens = None
    eoi_token_index: _Tokens = None
    image_token_index: _Tokens = None
    rms_norm_eps: _Number = None
    layer_norm_eps: _Number = None
    rope_theta: _Number = None
    rope_local_base_freq: _Number = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    attn_logit_softcapping: _Number = None
    final_logit_softcapping: _Number = None
    hidden_activation: _Activation = None
    hidden_act: _Activation = None
    tie_word_embeddings: _Switch = None
    attention_bias: _Switch = None
    use_bidirectional_attention: _Switch = None
    vision_use_head: _Switch = None


class TextFields(_Part):
    """The decoder's fields, with the defaults of Gemma3TextConfig, which published configuration files leave out."""

    model_type: Annotated[str, Meta(pattern="^gemma3_text$")] = "gemma3_text"
    vocab_size: _Vocabulary = 262_208
    hidden_size: _Width = 2304
    intermediate_size: _Inner = 9216
    num_hidden_layers: _Layers = 26
    num_attention_heads: _Heads = 8
    num_key_value_heads: _Heads = 4
    head_dim: Annotated[int, Meta(ge=1, le=1 << 14)] = 256
    sliding_window: _Positive = 4096
    query_pre_attn_scalar: _Positive | float = 256
    max_position_embeddings: _Positive = 131_072
    layer_types: list[_LayerType] | None = None
    sliding_window_pattern: _Positive | None = None
    internal_pattern: _Positive | None = msgspec.field(name="_sliding_window_pattern", default=None)


class VisionFields(_Part):
    """The vision tower's fields, with the defaults of SiglipVisionConfig."""

    model_type: Annotated[str, Meta(pattern="^siglip_vision_model$")] = "siglip_vision_model"
    hidden_size: _Width = 768
    intermediate_size: _Inner = 3072
    num_hidden_layers: _Layers = 12
    num_attention_heads: _Heads = 12
    num_channels: Annotated[int, Meta(ge=1, le=16)] = 3
    image_size: _Pixels = 224
    patch_size: _Pixels = 16


class _Gemma3Fields(_Part):
    """The fields of a model that reads images."""

    text_config: TextFields | None = None
    vision_config: VisionFields | None = None
    mm_tokens_per_image: Annotated[int, Meta(ge=1, le=1 << 16)] = IMAGE_TOKENS


@dataclass(frozen=True, slots=True)
class ConfigSizes:
    """Sizes of a Gemma 3 in its ``config.json``.

    Args:
        text: fields of the decoder.
        vision: fields of the vision tower; None for a text-only model.
        image_tokens: tokens of a view.
    """

    text: TextFields
    vision: VisionFields | None
    image_tokens: int

    @classmethod
    def of(cls, config: JsonObject) -> ConfigSizes:
        """Return the sizes of a configuration.

        Raises:
            DamagedFileError: a field has the wrong type or range, or contradicts another one.
        """
        if config.get("model_type") != "gemma3":
            text = typed(config, TextFields, _CONFIG)
            _check_text(text, "")
            return cls(text, None, IMAGE_TOKENS)
        checked = typed(config, _Gemma3Fields, _CONFIG)
        text, vision = checked.text_config or TextFields(), checked.vision_config or VisionFields()
        _check_text(text, "text_config.")
        width, heads = vision.hidden_size, vision.num_attention_heads
        _require(width % heads == 0, "vision_config.num_attention_heads", heads, f"a divisor of hidden_size, {width}")
        side, tokens = vision.image_size // vision.patch_size, checked.mm_tokens_per_image
        fits = 0 < side <= 1024
        expected = f"1 to 1,024 patches in image_size, {vision.image_size}"
        _require(fits, "vision_config.patch_size", vision.patch_size, expected)
        fits = isqrt(tokens) ** 2 == tokens and isqrt(tokens) <= side
        _require(fits, "mm_tokens_per_image", tokens, f"the square of at most {side} (patches in a row)")
        for part, prefix in ((checked, ""), (vision, "vision_config.")):
            _check_tokens(_CONFIG, part, text.vocab_size, prefix)
        return cls(text, vision, tokens)


def _check_text(text: TextFields, prefix: str) -> None:
    """Check that the decoder's fields fit each other."""
    heads, kv_heads, layers = text.num_attention_heads, text.num_key_value_heads, text.num_hidden_layers
    _require(heads % kv_heads == 0, f"{prefix}num_key_value_heads", kv_heads, f"a divisor of the {heads} heads")
    kinds, scalar = text.layer_types, text.query_pre_attn_scalar
    _require(kinds is None or len(kinds) == layers, f"{prefix}layer_types", kinds, f"one for each of {layers} layers")
    _require(0 < int(scalar) == scalar, f"{prefix}query_pre_attn_scalar", scalar, "a positive integer")
    text.query_pre_attn_scalar = int(scalar)
    _check_tokens(_CONFIG, text, text.vocab_size, prefix)


def check_other_model(config: JsonObject) -> None:
    """Check the sizes in the configuration of another model than a Gemma 3, such as Gemma 3n.

    Raises:
        DamagedFileError: one is too large.
    """
    for part, prefix in ((config, ""), *((value, f"{name}.") for name, value in config.items())):
        for name in _SIZES & part.keys() if isinstance(part, dict) else ():
            sizes = part[name] if isinstance(part[name], list) else [part[name]]
            fits = all(size is None or (type(size) is int and 0 <= size <= _LARGEST) for size in sizes)
            _require(fits, f"{prefix}{name}", part[name], f"an integer up to {_LARGEST:,}")


class _Method(msgspec.Struct):
    quant_method: str | None = None


class _Quantization(msgspec.Struct):
    quantization_config: _Method | None = None
    compression_config: _Method | None = None


def check_quantization(config: JsonObject) -> None:
    """Check the type of ``quantization_config`` and its method.

    Raises:
        DamagedFileError: it is something else than an object that names a method.
    """
    typed(config, _Quantization, _CONFIG)
    if isinstance(text := config.get("text_config"), dict):
        typed(text, _Quantization, f"{_CONFIG}: text_config")


class _Generation(msgspec.Struct):
    bos_token_id: _Tokens = None
    eos_token_id: _Tokens = None
    pad_token_id: _Tokens = None
    suppress_tokens: _Tokens = None


def check_generation(generation: JsonObject, sizes: ConfigSizes) -> None:
    """Check the fields of ``generation_config.json`` that panscan uses.

    Raises:
        DamagedFileError: one is no token of the vocabulary.
    """
    file = "generation_config.json"
    _check_tokens(file, typed(generation, _Generation, file), sizes.text.vocab_size)


def _check_tokens(file: str, fields: _Part | _Generation, vocabulary: int, prefix: str = "") -> None:
    """Check the fields that name tokens."""
    most = max(vocabulary, TextFields().vocab_size)
    for name in fields.__struct_fields__:
        if "_token" in name and (value := getattr(fields, name)) is not None:
            fits = all(-1 <= token < most for token in (value if isinstance(value, list) else [value]))
            _require(fits, f"{prefix}{name}", value, f"ids of tokens below {most:,}", file)


_Share = Annotated[float, Meta(ge=-1e6, le=1e6)]
_Scale = Annotated[float, Meta(ge=1e-6, le=1e6)]
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
    resample: Annotated[int, Meta(ge=2, le=3)] = 2  # bilinear, bicubic
    pan_and_scan_max_num_crops: Annotated[float, Meta(ge=0, le=4096)] | None = None
    pan_and_scan_min_crop_size: Annotated[float, Meta(ge=0, le=1 << 20)] | None = None
    pan_and_scan_min_ratio_to_activate: Annotated[float, Meta(ge=0, le=1e6)] | None = None


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
    side = sizes.vision.image_size
    for name, size in (("size", images.size), ("crop_size", images.crop_size)):
        lengths = list(size.values()) if isinstance(size, dict) else [size]
        fits = all(length in (None, side) for length in lengths)
        _require(fits, name, size, f"image_size of config.json, {side}", file)


class TokenizerFields(msgspec.Struct):
    """The fields of ``tokenizer_config.json`` that are read with each prompt."""

    model_max_length: Annotated[float, Meta(ge=1, le=1e40)] | None = None
    padding_side: Annotated[str, Meta(pattern="^(left|right)$")] = "left"


def check_shapes(sizes: ConfigSizes, tensors: Mapping[str, StoredShape]) -> None:
    """Compare the configuration with the shapes of the stored tensors, before a module is built.

    Matrices in packed formats are compared when they are read.

    Raises:
        DamagedFileError: they disagree; the message names the tensor and the fields.
    """
    by_key = {key_of(name): (name, facts) for name, facts in tensors.items()}
    packed = {key.partition(".weight.")[0] + ".weight" for key in by_key if ".weight." in key}
    if not any(key.startswith("layers.") for key in by_key):  # saved inside torch.compile, DDP or a trainer
        raise DamagedFileError(
            f"no layer has a name of Gemma 3 (a tensor is {shorten(min(tensors))}): save the model without its wrapper"
        )
    _check_layers(sizes.text.num_hidden_layers, "num_hidden_layers", by_key, r"layers\.(\d+)\.")
    if sizes.vision is not None:
        count = sizes.vision.num_hidden_layers
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


def _known_sizes(sizes: ConfigSizes) -> dict[str, Any]:
    """Return the sizes that :data:`_SHAPES` names; without vision, those of the decoder."""
    text, vision = sizes.text, sizes.vision
    queries, keys = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    known = structs.asdict(text) | {_QUERIES: queries, _KEYS: keys}
    if vision is not None:
        known |= {f"vision_config.{name}": size for name, size in structs.asdict(vision).items()}
        known[_PATCHES] = (vision.image_size // vision.patch_size) ** 2
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


def _require(fits: bool, field: str, value: Any, expected: str, file: str = _CONFIG) -> None:
    if not fits:
        raise DamagedFileError(f"{file}: {field} is {shorten(value)}; expected {expected}")
