"""The parts of a model, called one by one, are the model; and it is left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from tests.engine.pages import MODELS, decoder_of, model_of

from panscan.model.decoder import Decoder, LayerFacts
from panscan.model.random_weights import random_model

BOTH = pytest.mark.parametrize("name", ["window inside image blocks", "text only"])


def causal(
    _local: bool, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any
) -> torch.Tensor:  # fmt: skip
    """What both kinds of layer do with a text that is no longer than the window."""
    *_, scaling = others
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2)


def text_logits(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    caches = [torch.zeros(1)] * len(decoder.layers)
    hidden = decoder.run(decoder.embed(ids), torch.arange(len(ids)), caches, caches, causal)
    return decoder.logits(hidden[0])


@BOTH
def test_a_layer_is_told_its_kind_and_its_cache(name: str) -> None:
    decoder, seen = decoder_of(name), []

    def attend(local: bool, query: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.append((local, float(others[2]), float(others[3])))
        return query.transpose(1, 2)

    k_caches, v_caches = ([torch.tensor(start + at) for at in range(len(decoder.layers))] for start in (0, 10))
    decoder.run(decoder.embed(torch.tensor([3])), torch.tensor([0]), k_caches, v_caches, attend)
    assert seen == [(layer.local, at, 10 + at) for at, layer in enumerate(decoder.layers)]


def test_a_compiled_layer_serves_all_layers_and_lengths() -> None:
    name = "window inside image blocks"
    decoder = Decoder(model_of(name))
    decoder.compile()
    for ids in ([30, 400, 5], [7, 21], [30, 400, 5, 77, 21, 9]):
        torch._dynamo.utils.counters.clear()
        found = text_logits(decoder, torch.tensor(ids))
        torch.testing.assert_close(found, text_logits(decoder_of(name), torch.tensor(ids)), rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0, "compiled for the first length, and never again"


@BOTH
def test_layers_one_by_one_are_the_models_forward(name: str) -> None:
    ids = torch.tensor([30, 400, 5, 77, 21])
    expected = model_of(name)(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(text_logits(decoder_of(name), ids), expected, rtol=1e-5, atol=1e-5)


def test_logits_are_capped_by_the_class_that_caps_them() -> None:
    """Transformers caps in its causal class alone, whatever the configuration says."""
    hidden = 30 * torch.randn(4, 64)
    for name, capped in (("text only", True), ("window inside image blocks", False)):
        logits = decoder_of(name).logits(hidden)
        assert bool((logits.abs() <= 0.5).all()) == capped


@BOTH
def test_logits_are_float32_and_rounded_as_the_model_rounds(name: str) -> None:
    model, _ = random_model(MODELS[name], dtype=torch.bfloat16, device="cpu")
    decoder = Decoder(model)
    logits = decoder.logits(torch.randn(3, 64).bfloat16())
    assert logits.dtype == torch.float32
    assert torch.equal(logits, logits.bfloat16().float())
    assert decoder.dtype == decoder.layers[0].dtype == torch.bfloat16


@BOTH
def test_attention_is_by_name_only_while_layers_run(name: str) -> None:
    model, decoder = model_of(name), decoder_of(name)
    config = model.config.get_text_config()
    before = config._attn_implementation
    seen = []

    def attend(_local: bool, query: torch.Tensor, *_: Any) -> torch.Tensor:
        seen.append(config._attn_implementation)
        if len(seen) == 3:
            raise RuntimeError("in the third layer")
        return query.transpose(1, 2)

    with pytest.raises(RuntimeError, match="in the third layer"):
        caches = [torch.zeros(1)] * len(decoder.layers)
        decoder.run(decoder.embed(torch.tensor([3])), torch.tensor([0]), caches, caches, attend)
    assert seen == ["panscan_paged"] * 3
    assert config._attn_implementation == before != "panscan_paged"
    assert model(input_ids=torch.tensor([[3, 4]])).logits.isfinite().all()


def test_what_layers_are_is_seen_and_not_assumed() -> None:
    decoder = decoder_of("a head of its own")
    kinds = [layer.local for layer in decoder.layers]
    assert kinds == [True, True, False, True]
    assert decoder.layers[0] == LayerFacts(True, 2, 16, torch.float32, torch.device("cpu"))
    assert (decoder.window, decoder.hidden_size, decoder.vocab_size, decoder.image_tokens) == (30, 64, 1024, 4)
    assert decoder.view_bytes == 4 * 64 * 4
    assert (decoder_of("text only").image_tokens, decoder_of("text only").view_bytes) == (0, 0)
    assert decoder.max_positions == 32_768


def test_views_are_what_the_model_itself_puts_into_a_prompt() -> None:
    name = "window inside image blocks"
    model, pixels = model_of(name), torch.rand(3, 3, 48, 48, dtype=torch.float64)
    seen = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda _, __, options: seen.append(options["inputs_embeds"]), with_kwargs=True
    )
    ids = torch.tensor([[5, *[9] * 48, 6]])
    model(input_ids=ids, pixel_values=pixels.float(), token_type_ids=(ids == 9).long())
    hook.remove()
    decoder = decoder_of(name)
    torch.testing.assert_close(decoder.encode(pixels), seen[0][0, 1:-1].unflatten(0, (3, 16)))
    torch.testing.assert_close(decoder.embed(ids[0])[0, [0, -1]], seen[0][0, [0, -1]])


@BOTH
def test_a_model_whose_weights_are_elsewhere_computes_where_its_hooks_say(name: str) -> None:
    model, _ = random_model(MODELS[name], dtype=torch.float32, device="cpu")
    ids = torch.tensor([30, 400, 5, 77])
    expected = model(input_ids=ids[None]).logits[0]
    decoder = Decoder(cpu_offload(model, execution_device=torch.device("cpu")))
    assert next(model.parameters()).is_meta
    assert {layer.device for layer in decoder.layers} == {decoder.device} == {torch.device("cpu")}
    torch.testing.assert_close(text_logits(decoder, ids), expected, rtol=1e-5, atol=1e-5)
