"""Live checks of Transformers on the tiny model, and that they notice the faults that they are for."""

from __future__ import annotations

import torch
from tests.conftest import needs_images_in_chunks

from panscan.inspect.doctor import gemma
from panscan.runners.generate_check import FLASH_MASK, attention_response, chunked_prefill, tiny_model


def test_the_default_attention_is_right_and_causal_image_tokens_are_noticed() -> None:
    loaded = tiny_model(torch.device("cpu"))
    eager, sdpa, causal = (attention_response(loaded, name) for name in ("eager", "sdpa", FLASH_MASK))
    assert gemma.attention_finding("sdpa", sdpa, eager).status == "ok"
    wrong = gemma.attention_finding("sdpa", causal, eager)
    assert wrong.status == "problem"
    assert "image tokens are causal" in wrong.fact
    assert gemma.attention_finding("flash_attention_2", causal, eager).status == "warning"


def test_a_mask_that_lets_text_look_ahead_is_noticed() -> None:
    loaded = tiny_model(torch.device("cpu"))
    eager = attention_response(loaded, "eager")
    for layer in loaded.model.model.language_model.layers:
        layer.register_forward_pre_hook(_without_mask, with_kwargs=True)
    blind = attention_response(loaded, "eager")
    found = gemma.attention_finding("eager", blind, eager)
    assert found.status == "problem"
    assert "later tokens" in found.fact


def _without_mask(_module: object, arguments: tuple[object, ...], options: dict[str, object]) -> tuple[object, object]:
    return arguments, {**options, "attention_mask": None}


def test_each_live_check_reports_what_this_transformers_does() -> None:
    checks = (
        gemma.transformers,
        gemma.flash_masks,
        gemma.prefill_chunks,
        gemma.generate_batch,
        gemma.padding,
        gemma.image_processor,
    )
    for check in checks:
        found = list(check())
        assert found, check
        assert not [finding for finding in found if finding.status == "problem"], check


@needs_images_in_chunks
def test_chunks_of_the_whole_prompt_are_right_and_shorter_ones_are_not() -> None:
    loaded = tiny_model(torch.device("cpu"))
    assert chunked_prefill(loaded, 4096) == "right"
    assert chunked_prefill(loaded, 40) != "right"
