"""Names of Transformers that panscan uses without importing them, and their lookup in the installed version."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers

from panscan.core.sampling import FILTERS
from panscan.model.bundled.random_weights import random_model

_LIBRARY = "transformers"
_MODEL = f"{_LIBRARY}.Gemma3ForConditionalGeneration"
METHODS: dict[str, tuple[str, ...]] = {
    _MODEL: (),
    f"{_MODEL}.forward": (
        "input_ids",
        "pixel_values",
        "attention_mask",
        "token_type_ids",
        "inputs_embeds",
        "use_cache",
    ),
    f"{_MODEL}.generate": ("generation_config", "stopping_criteria", "logits_processor"),
    f"{_MODEL}.generate_batch": (
        "inputs",
        "generation_config",
        "continuous_batching_config",
        "record_timestamps",
        "progress_bar",
    ),
    f"{_MODEL}.get_image_features": ("pixel_values",),
    f"{_MODEL}.set_attn_implementation": ("attn_implementation",),
    f"{_MODEL}.from_pretrained": ("revision",),
    f"{_LIBRARY}.GenerationConfig": (
        "max_new_tokens",
        "do_sample",
        "pad_token_id",
        "eos_token_id",
        "suppress_tokens",
        "prefill_chunk_size",
        "temperature",
        "repetition_penalty",
        *FILTERS,
        "cache_implementation",
    ),
    f"{_LIBRARY}.PreTrainedTokenizerBase.get_chat_template": (),
    f"{_LIBRARY}.Gemma3ImageProcessor": (),
    f"{_LIBRARY}.Gemma3ImageProcessorPil.pan_and_scan": (
        "pan_and_scan_min_crop_size",
        "pan_and_scan_max_num_crops",
        "pan_and_scan_min_ratio_to_activate",
    ),
}
"""Methods of objects, and names used through a variable only, with the keyword arguments that panscan gives."""
PARTS = (
    "config._attn_implementation",
    "generation_config",
    "model.vision_tower.encoder.layers",
    "model.vision_tower.post_layernorm",
    "model.multi_modal_projector.mm_input_projection_weight",
    "model.multi_modal_projector.mm_soft_emb_norm",
    "model.language_model.embed_tokens.embed_scale",
    "model.language_model.rotary_emb.full_attention_inv_freq",
    "model.language_model.rotary_emb.sliding_attention_inv_freq",
    "model.language_model.norm",
    "model.language_model.layers.0.self_attn.q_norm",
    "model.language_model.layers.0.self_attn.q_proj",
    "model.language_model.layers.0.mlp.gate_proj",
    "model.language_model.layers.0.pre_feedforward_layernorm",
    "lm_head",
)
"""Parts of a Gemma 3 model that panscan's own layers, quantisation and verdict read by name."""
_ROOT = Path(transformers.__file__).parent


@dataclass(frozen=True, slots=True)
class Resolution:
    """The location of a name in the installed Transformers, and whether it accepts certain arguments.

    Args:
        location: file and line, relative to the package; None: the name does not exist.
        missing: arguments that it does not accept.
        unverified: arguments that may be accepted through ``**kwargs``.
    """

    location: str | None
    missing: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()


def resolve(symbol: str, arguments: Collection[str] = ()) -> Resolution:
    """Look up a dotted name, such as ``transformers.GenerationConfig.from_pretrained``, and its keyword arguments."""
    found = _lookup(symbol)
    if found is None:
        return Resolution(None)
    value, module = found
    known, open_ended = _parameters(value)
    rest = sorted(set(arguments) - known)
    missing, unverified = ((), tuple(rest)) if open_ended else (tuple(rest), ())
    return Resolution(_location(value, module), missing, unverified)


def resolve_part(path: str) -> Resolution:
    """Look up a module, parameter or buffer of a Gemma 3 model, such as ``model.vision_tower``."""
    value: Any = _meta_model()
    for name in path.split("."):
        try:
            value = value[int(name)] if name.isdigit() else getattr(value, name)
        except (AttributeError, IndexError):
            return Resolution(None)
    return Resolution(type(value).__name__)


@cache
def _meta_model() -> Any:
    model, _ = random_model("tiny", dtype=torch.float32, device="meta")
    return model


def _lookup(symbol: str) -> tuple[Any, str] | None:
    """Return the value of a dotted name and the module that contains it."""
    parts = symbol.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: Any = import_module(".".join(parts[:length]))
        except ImportError:  # no such module, or a missing dependency
            continue
        module = ".".join(parts[:length])
        try:
            for name in parts[length:]:
                value = getattr(value, name)
        except (AttributeError, ImportError, RuntimeError, OSError):  # Transformers imports its modules on first use
            return None
        return value, module
    return None


def _parameters(value: Any) -> tuple[set[str], bool]:
    """Return the argument names that a callable accepts, and whether it has ``**kwargs``."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):  # not callable, or without a signature
        return set(), False
    known = {each.name for each in parameters}
    open_ended = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    if inspect.isclass(value) and issubclass(value, transformers.PreTrainedConfig):
        open_ended = True  # some versions hide **kwargs in the signature; unknown arguments become attributes
    if open_ended and inspect.isclass(value):  # configurations accept their fields as **kwargs
        fields = {name for base in value.__mro__ for name in getattr(base, "__annotations__", ())}
        with suppress(Exception):  # classes with required arguments have no default instance
            fields |= vars(value()).keys()
        return known | fields, True
    return known, open_ended


def _location(value: Any, module: str) -> str:
    target = inspect.unwrap(value) if callable(value) else value
    try:
        file, line = inspect.getsourcefile(target), inspect.getsourcelines(target)[1]
    except (TypeError, OSError):  # a constant
        return module
    if file is None:
        return module
    path = Path(file)
    return f"{path.relative_to(_ROOT.parent) if path.is_relative_to(_ROOT.parent) else path}:{max(1, line)}"
