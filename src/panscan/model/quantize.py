"""Names of quantisations become Transformers' own configurations."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["quantization_config"]


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
