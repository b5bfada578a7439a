"""Live checks of Transformers on the tiny model, and that they notice the faults that they are for."""

from dataclasses import replace

import numpy as np
import torch
from tests.conftest import needs_images_in_chunks

from panscan.inspect.doctor import gemma
from panscan.model.attention_masks import LayerKind, measured_mask
from panscan.runners.generate_check import AttentionFacts, attention_facts, chunked_prefill, tiny_model


def test_the_default_attention_is_right_and_causal_image_tokens_are_noticed() -> None:
    loaded = tiny_model(torch.device("cpu"))
    eager, sdpa = (attention_facts(loaded, name) for name in ("eager", "sdpa"))
    causal = attention_facts(loaded, "flash_attention_2", kernel=False)
    assert gemma.attention_finding("sdpa", sdpa, eager).status == "ok"
    wrong = gemma.attention_finding("sdpa", causal, eager)
    assert wrong.status == "problem"
    assert "image tokens are causal" in wrong.fact
    assert gemma.attention_finding("flash_attention_2", causal, eager).status == "warning"


def test_a_mask_that_lets_text_look_ahead_is_noticed() -> None:
    eager = attention_facts(tiny_model(torch.device("cpu")), "eager")
    image = np.arange(40) % 20 > 9  # text before and after each of two images

    def everything(values: torch.Tensor) -> dict[LayerKind, torch.Tensor]:
        mean = values.mean(0, keepdim=True).expand(values.shape)
        return {"global": mean, "local": mean}

    blind = AttentionFacts.of(measured_mask(everything, image, 128), image, eager.last)
    found = gemma.attention_finding("eager", blind, eager)
    assert found.status == "problem"
    assert "later tokens" in found.fact


def test_final_states_that_differ_from_those_of_eager_attention_are_noticed() -> None:
    eager = attention_facts(tiny_model(torch.device("cpu")), "eager")
    found = gemma.attention_finding("sdpa", replace(eager, last=eager.last.roll(1)), eager)
    assert found.status == "problem"
    assert "final states differ" in found.fact


def test_each_live_check_reports_what_this_transformers_does() -> None:
    checks = [gemma.transformers, gemma.flash_masks, gemma.prefill_chunks]
    checks += [gemma.generate_batch, gemma.padding, gemma.image_processor]
    for check in checks:
        found = list(check())
        assert found, check
        assert not [finding for finding in found if finding.status == "problem"], check


@needs_images_in_chunks
def test_chunks_of_the_whole_prompt_are_right_and_shorter_ones_are_not() -> None:
    loaded = tiny_model(torch.device("cpu"))
    assert chunked_prefill(loaded, 4096) == "right"
    assert chunked_prefill(loaded, 40) != "right"
