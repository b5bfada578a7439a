"""Settings become a loaded model: placed, quantised and in the precision that they name."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from panscan.core import ModelError, PanscanWarning
from panscan.model.checkpoint import Loaded, Placement, load_model, load_random
from panscan.model.machine import resolve_device, resolve_dtype
from panscan.settings import Settings

__all__ = ["load_for", "quantization_config"]


def load_for(settings: Settings) -> Loaded:
    """Load the model that settings name, placed and quantised as they say."""
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, device)
    if dtype == torch.float16:
        message = "--dtype fp16: Gemma 3 is known to overflow in it; bf16 has the same size and speed"
        warnings.warn(message, PanscanWarning, stacklevel=2)
    if settings.random_weights:
        assert settings.model_shape is not None  # Settings holds this
        return load_random(settings.model_name, settings.model_shape, dtype, device)
    placement = Placement(
        device, dtype, settings.device_map, settings.max_memory, settings.tp_plan,
        quantization_config(settings.quantization, dtype),
    )  # fmt: skip
    loaded = load_model(settings.model, placement, revision=settings.revision)
    if settings.quantization == "gptq" and getattr(loaded.model.config, "quantization_config", None) is None:
        raise ModelError(f"--quantization gptq: --model {settings.model} is not a GPTQ checkpoint")
    return loaded


def quantization_config(name: str | None, dtype: torch.dtype) -> Any:
    """The Transformers configuration of a quantisation; None for none, and for ``gptq`` (the checkpoint holds it).

    The vision tower and its projector stay as they are: their inputs are wide-ranged and they are a small part of the
    weights. torchao's string configurations are refused by Transformers 5, so its classes are used.
    """
    if name is None or name == "gptq":
        return None
    from transformers import BitsAndBytesConfig, TorchAoConfig

    # Names are matched from the start of a module's path.
    untouched = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    if name == "bnb-8bit":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=untouched)
    if name == "bnb-4bit":
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=untouched,
        )
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Int4WeightOnlyConfig,
        Int8WeightOnlyConfig,
    )

    kinds = {
        "torchao-int8": Int8WeightOnlyConfig,
        "torchao-int4": Int4WeightOnlyConfig,
        "torchao-float8": Float8DynamicActivationFloat8WeightConfig,
    }
    return TorchAoConfig(kinds[name](), modules_to_not_convert=untouched)
