"""Float32 truth from lower-precision weights, which leaves the model as it was, and divergences from it."""

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from scipy.special import log_softmax, rel_entr
from tests.conftest import noise
from torch.overrides import TorchFunctionMode

from panscan.core import PanAndScan, Request, UnsupportedError
from panscan.engine.engine import Engine
from panscan.model.inputs import collate, prepare, read_images
from panscan.model.observation import Observation
from panscan.model.runtime import forbid_tf32
from panscan.runners.generate import GenerateRunner
from panscan.verdict.divergence import DivergenceTally, Noise, PositionComparison, compare_logits
from panscan.verdict.float32 import converted_model, head_logits, one_view_at_a_time, weights_digest


@pytest.fixture(scope="module")
def half() -> GenerateRunner:
    """The tiny model in bfloat16."""
    return GenerateRunner.from_pretrained("tiny", dtype="bf16", device="cpu", attention="eager")


@pytest.fixture(scope="module")
def inputs(half: GenerateRunner) -> dict[str, Any]:
    """Two requests of three and one views, pixels in float32."""
    batch = [
        Request(prompt="What is it?", images=[noise(300, 900)], pan_and_scan=PanAndScan(max_num_crops=2)),
        Request(prompt="And this, the second one?", images=[noise(200, 200, 1)]),
    ]
    reader, cpu = half.loaded.reader, torch.device("cpu")
    ready = [prepare(read_images(item), reader, cpu, torch.float32, on_device=False) for item in batch]
    return collate(ready, half.loaded)


@pytest.fixture
def twin(half: GenerateRunner) -> Iterator[Any]:
    """The same checkpoint loaded in float32, with the scale of embeddings that the bfloat16 model has rounded."""
    full = GenerateRunner.from_pretrained("tiny", dtype="fp32", device="cpu", attention="eager").loaded.model
    scale = half.loaded.model.model.language_model.embed_tokens.embed_scale
    full.model.language_model.embed_tokens.embed_scale = scale.float()
    yield full


@torch.no_grad()
def logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    return model(**inputs).logits


def test_upcast_weights_compute_as_a_float32_model(half: GenerateRunner, twin: Any, inputs: dict[str, Any]) -> None:
    with converted_model(half.loaded.model):
        seen = logits(half.loaded.model, inputs)
    assert seen.dtype == torch.float32
    torch.testing.assert_close(seen, logits(twin, inputs), rtol=1e-5, atol=1e-4)


def test_the_model_is_left_as_it_was_also_after_a_failure(half: GenerateRunner, inputs: dict[str, Any]) -> None:
    model = half.loaded.model
    before = {name: (p.dtype, p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    with converted_model(model):
        logits(model, inputs)
    with pytest.raises(ValueError), converted_model(model):
        model(**{**inputs, "pixel_values": inputs["pixel_values"][:1]})  # fewer views than the prompt has
    for name, parameter in model.named_parameters():
        dtype, place, values = before[name]
        assert (parameter.dtype, parameter.data_ptr()) == (dtype, place), name
        assert torch.equal(parameter, values), name
    assert logits(model, {**inputs, "pixel_values": inputs["pixel_values"].bfloat16()}).dtype == torch.bfloat16


def test_views_one_by_one_are_the_views_together(tiny: GenerateRunner, inputs: dict[str, Any]) -> None:
    model, sizes = tiny.loaded.model, []
    handle = model.model.vision_tower.encoder.register_forward_pre_hook(
        lambda _module, _args, options: sizes.append(options["inputs_embeds"].shape[0]), with_kwargs=True
    )
    together = logits(model, inputs)
    with one_view_at_a_time(model):
        apart = logits(model, inputs)
    handle.remove()
    assert sizes == [4, 1, 1, 1, 1]
    torch.testing.assert_close(apart, together, rtol=1e-5, atol=1e-4)
    assert "forward" not in vars(model.model.vision_tower)


def test_the_forward_that_accelerate_gives_a_tower_comes_back(tiny: GenerateRunner) -> None:
    """As it does when layers are spread over devices."""
    tower = tiny.loaded.model.model.vision_tower
    add_hook_to_module(tower, ModelHook())
    try:
        forward = vars(tower)["forward"]
        with one_view_at_a_time(tiny.loaded.model):
            assert tower.forward is not forward
        assert vars(tower)["forward"] is forward
    finally:
        remove_hook_from_module(tower)
        vars(tower).pop("forward", None)  # accelerate leaves the class's own behind, as an attribute


def test_the_output_matrix_is_the_models(tiny: GenerateRunner, inputs: dict[str, Any]) -> None:
    with torch.no_grad():
        hidden = tiny.loaded.model.model(**inputs)[0][0, -5:]
    expected = logits(tiny.loaded.model, inputs)[0, -5:]
    torch.testing.assert_close(head_logits(tiny.loaded.model, hidden), expected, rtol=1e-5, atol=1e-5)


def test_the_truths_logits_are_never_in_tf32(tiny: GenerateRunner) -> None:
    seen = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.nn.functional.linear:
                seen.append(torch.get_float32_matmul_precision())
            return function(*args, **(kwargs or {}))

    torch.set_float32_matmul_precision("high")
    try:
        with Watching():
            head_logits(tiny.loaded.model, torch.zeros(1, tiny.loaded.model.config.text_config.hidden_size))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        forbid_tf32()
    assert seen
    assert set(seen) == {"highest"}


def test_an_engine_forbids_tf32(tiny: GenerateRunner) -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    try:
        Engine(tiny.loaded).close()
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32
    finally:
        forbid_tf32()


def test_the_digest_knows_weights_and_buffers(half: GenerateRunner, tiny: GenerateRunner) -> None:
    model = half.loaded.model
    digest = weights_digest(model)
    assert digest == weights_digest(GenerateRunner.from_pretrained("tiny", dtype="bf16", device="cpu").loaded.model)
    assert digest != weights_digest(tiny.loaded.model)  # whose scale of embeddings is not rounded
    weight = model.model.language_model.layers[3].mlp.up_proj.weight
    before = weight[0, 0].clone()
    with torch.no_grad():
        weight[0, 0] += 1
        changed = weights_digest(model)
        weight[0, 0] = before
    assert digest != changed
    assert digest == weights_digest(model)
    rotary = model.model.language_model.rotary_emb.full_attention_inv_freq
    original = rotary.clone()
    rotary.copy_(torch.nextafter(rotary, torch.zeros(())))  # as another machine's power function may give it
    assert digest == weights_digest(model)
    rotary.copy_(original / 8)  # as a longer context has it
    assert digest != weights_digest(model)
    rotary.copy_(original)


def test_offloaded_weights_have_no_truth(half: GenerateRunner) -> None:
    offloaded = cpu_offload(deepcopy(half.loaded.model), execution_device="cpu")
    with pytest.raises(UnsupportedError, match="offloaded"), converted_model(offloaded):
        pass
    with pytest.raises(UnsupportedError, match="offloaded"):
        weights_digest(offloaded)


CPU = torch.device("cpu")
SHAPES = st.tuples(st.just(2), st.integers(1, 40), st.integers(3, 12))
LOGITS = arrays(np.float32, SHAPES, elements=st.floats(-30, 30, width=32))  # of a truth, and of another computation


@settings(max_examples=60)
@given(LOGITS)
def test_every_position_is_scipys_relative_entropy(pair: NDArray[np.float32]) -> None:
    truth, seen = torch.from_numpy(pair)
    divergence = compare_logits(truth, seen, [], CPU)
    p, q = (log_softmax(logits.double().numpy(), axis=-1) for logits in (truth, seen))
    expected = rel_entr(np.exp(p), np.exp(q)).sum(-1)
    np.testing.assert_allclose(divergence.kl, np.maximum(expected, 0), rtol=1e-6, atol=1e-10)
    ordered = np.sort(p, axis=-1)
    np.testing.assert_allclose(divergence.margin, ordered[:, -1] - ordered[:, -2], rtol=1e-9, atol=1e-12)


@settings(max_examples=30)
@given(LOGITS, st.floats(-5, 5))
def test_a_shift_of_all_logits_changes_nothing(pair: NDArray[np.float32], shift: float) -> None:
    truth = torch.from_numpy(pair[0]).double()
    divergence = compare_logits(truth, truth + shift, [], CPU)
    assert float(divergence.kl.max()) < 1e-12
    assert float(divergence.moved.max()) < 1e-9


def test_suppressed_tokens_are_nobodys_choice() -> None:
    truth = torch.tensor([[9.0, 5.0, 1.0]])
    assert compare_logits(truth, torch.tensor([[0.0, 7.0, 1.0]]), [0], CPU).agree.tolist() == [True]
    divergence = compare_logits(truth, torch.tensor([[9.0, 5.0, 6.0]]), [0], CPU)
    assert divergence.agree.tolist() == [False]
    assert divergence.margin.item() == pytest.approx(4.0)
    assert divergence.moved.item() == pytest.approx(5.0)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_are_infinitely_far(broken: float) -> None:
    truth = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    seen = truth.clone()
    seen[1, 0] = broken
    assert compare_logits(truth, seen, [], CPU).kl.tolist() == [0.0, math.inf]


@pytest.mark.parametrize(("margin", "word"), [(1e-4, "close"), (1e-2, "different")])
def test_a_tie_that_tips_costs_an_exact_word_but_is_not_different(margin: float, word: str) -> None:
    """In float32, where the yardstick has no noise of its own."""
    margins = torch.tensor([margin, 3.0], dtype=torch.float64)
    seen = PositionComparison(torch.zeros(2).double(), margins, torch.zeros(2).double(), torch.tensor([False, True]))
    record = DivergenceTally([seen]).verdict("c", Noise([[0.0, 0.0]], None, 0.0), 2, float32=True)
    assert record.verdict == word
    assert not record.equal_tokens


def test_noise_is_the_mean_over_the_tokens_that_a_cell_may_write() -> None:
    noise = Noise([[1.0, 3.0, 8.0], [2.0]], None, 0.0)
    assert [noise.answer_mean(steps) for steps in (1, 2, 128)] == [1.5, 2.0, 3.5]


@pytest.mark.parametrize("times", [1, 30, 700])
def test_reported_tokens_are_compared_with_the_noise_of_reported_tokens(tiny: GenerateRunner, times: float) -> None:
    """A deviation so many times the noise is called so from 20 tokens, too, at both kinds of position.

    Over the noise of the whole vocabulary, 30 times the noise would look like less than once.
    """
    draws = torch.Generator().manual_seed(4)
    hidden = torch.randn(24, 128, generator=draws)
    exact = head_logits(tiny.loaded.model, hidden)
    seen, other = (
        Observation(list(range(24)), list(range(24)), logits, logits)
        for logits in (exact + 0.02 * scale * torch.randn(exact.shape, generator=draws) for scale in (1, times**0.5))
    )
    tallies = [DivergenceTally() for _ in range(4)]
    for tally, observation in zip(tallies, (seen, seen.reported(), other, other.reported()), strict=True):
        tally.add(tiny.loaded, hidden, hidden, observation)
    noise = replace(tallies[0].noise(), reported=tallies[1].noise())
    full, coarse = (tally.verdict("c", noise, 24, float32=False) for tally in tallies[2:])
    for kind in ("answer", "image"):
        assert getattr(full, kind).ratio == pytest.approx(times, rel=0.3)
        assert times / 2 <= getattr(coarse, kind).ratio <= times * 5, "the choice of reported tokens deviates, too"
    assert (full.verdict, coarse.verdict) == (("exact",) * 2 if times == 1 else ("different",) * 2)
    assert tallies[3].verdict("c", tallies[0].noise(), 24, float32=False).verdict == "unverified"
