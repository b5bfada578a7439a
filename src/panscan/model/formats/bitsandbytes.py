"""Quantisations of bitsandbytes: those that Transformers makes on load."""

from __future__ import annotations

from typing import Any

import torch

_UNTOUCHED = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
"""Starts of the paths of modules that stay unquantised: the vision tower and its projector, because their inputs have a
wide range and they are a small part of the weights, and the output matrix."""
ON_LOAD: dict[str, dict[str, Any]] = {
    "bnb-8bit": {"load_in_8bit": True},
    "bnb-4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}
"""Arguments of Transformers' configuration by the value of ``--quantization``."""


def transformers_config(name: str | None, dtype: torch.dtype) -> Any:
    """Return the Transformers configuration of a quantisation on load; None for names that are not in ``ON_LOAD``."""
    if name not in ON_LOAD:
        return None
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**ON_LOAD[name], bnb_4bit_compute_dtype=dtype, llm_int8_skip_modules=_UNTOUCHED)
