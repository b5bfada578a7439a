"""Effective attention masks against Gemma 3's definition, and what flash attention makes of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.small_models import TOKENIZER

from panscan.core import UnsupportedError
from panscan.model.attention_masks import LayerKind, effective_mask, kernel_reason, measured_mask
from panscan.model.gemma3.config import gemma3_config
from panscan.model.shapes import SHAPES

WINDOW, BLOCKS = 24, ((5, 37), (41, 57))
IMAGE = np.zeros(70, np.bool_)
for _start, _end in BLOCKS:
    IMAGE[_start:_end] = True
CONFIG = gemma3_config(replace(SHAPES["tiny"], text=replace(SHAPES["tiny"].text, window=WINDOW)), TOKENIZER)


def defined(*, causal: bool) -> dict[LayerKind, NDArray[np.bool_]]:
    """Gemma 3's masks: key intervals that end behind a query's image block, or behind the query if ``causal``."""
    at = np.arange(len(IMAGE))
    ends = at + 1
    for start, end in () if causal else BLOCKS:
        ends[start:end] = end
    attended = at < ends[:, None]
    return {"global": attended, "local": attended & (at > at[:, None] - WINDOW)}


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_measured_masks_are_those_that_gemma_3_defines(name: str) -> None:
    masks = effective_mask(IMAGE, name, CONFIG)
    for kind, mask in defined(causal=False).items():
        np.testing.assert_array_equal(masks[kind], mask)


def test_flash_attention_as_transformers_prepares_it_is_causal_at_image_tokens() -> None:
    masks = effective_mask(IMAGE, "flash_attention_2", CONFIG, kernel=False)
    for kind, mask in defined(causal=True).items():
        np.testing.assert_array_equal(masks[kind], mask)


def test_a_text_only_model_is_causal_and_has_no_image_blocks() -> None:
    shape = replace(SHAPES["tiny"], text=replace(SHAPES["tiny"].text, window=WINDOW), vision=None, image_tokens=0)
    masks = effective_mask(np.zeros(40, np.bool_), "sdpa", gemma3_config(shape, TOKENIZER))
    np.testing.assert_array_equal(masks["global"], defined(causal=True)["global"][:40, :40])


def test_a_missing_kernel_is_refused() -> None:
    assert kernel_reason("sdpa") is None
    assert "NVIDIA" in str(kernel_reason("flash_attention_2"))
    with pytest.raises(UnsupportedError, match=r"--attention: flash_attention_2 makes .* causal .* needs an NVIDIA"):
        effective_mask(IMAGE, "flash_attention_2", CONFIG)


def test_other_masks_are_measured_key_by_key() -> None:
    """Attention of a sort that is neither Gemma 3's nor causal."""
    at = np.arange(300)
    odd = {"global": (at[:, None] + at) % 3 == 0, "local": at <= at[:, None]}

    weights: dict[LayerKind, torch.Tensor] = {
        kind: torch.from_numpy(odd[kind] / odd[kind].sum(1, keepdims=True)).float() for kind in ("global", "local")
    }

    def attend(values: torch.Tensor) -> dict[LayerKind, torch.Tensor]:
        return {kind: matrix @ values for kind, matrix in weights.items()}

    masks = measured_mask(attend, np.zeros(300, np.bool_), WINDOW)
    np.testing.assert_array_equal(masks["global"], odd["global"])
    np.testing.assert_array_equal(masks["local"], odd["local"])
