"""Measured tokens against the reference's: where they depart, what noise explains, and answers that are replayed."""

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.conftest import noise
from tests.mutations import broken

from panscan import GenerateRunner
from panscan.core import PanAndScan, Request, Result, Stamps
from panscan.images import pixels
from panscan.images.views import ViewPlan, plan_views
from panscan.model.checkpoint import load_reader
from panscan.records.verdict_records import InputCheck
from panscan.settings import Settings, settings_from
from panscan.verdict.inputs import check_inputs
from panscan.verdict.invariance import RunAnswers, compare, shared_axis, variants
from panscan.verdict.judgement import clear_margin
from panscan.verdict.replay import MeasuredAnswer, replay
from panscan.verdict.tokens import Judge, ReferenceRequest, ReferenceRows, compared_with_reference, first_difference

VOCABULARY, END, SUPPRESSED = 8, 7, 6
IDS = st.lists(st.integers(0, 5), max_size=8)


def judge(noise: float = 0.0, **settings: Any) -> Judge:
    """A model whose hidden states are its logits."""
    head = SimpleNamespace(weight=torch.eye(VOCABULARY))
    model = SimpleNamespace(
        generation_config=SimpleNamespace(suppress_tokens=[SUPPRESSED]), get_output_embeddings=lambda: head
    )
    reader = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: f"<{ids[0]}>"))
    loaded = SimpleNamespace(model=model, reader=reader, eos_ids=frozenset({END}))
    return Judge(cast("Any", loaded), settings_from({"runner": "engine", "max_new_tokens": 16, **settings}), noise)


def truth(tokens: list[int], margin: float = 5.0) -> dict[str, ReferenceRequest]:
    """A truth that prefers its tokens to all others by ``margin`` nats."""
    states = torch.zeros(len(tokens), VOCABULARY)
    states[range(len(tokens)), tokens] = margin
    return {"r": ReferenceRequest("r", tokens, [], states, torch.empty(0, VOCABULARY))}


def result(tokens: list[int], reason: str = "length") -> Result:
    return Result("r", "", tokens, cast("Any", reason), 1, 0, 0, 9, Stamps(accepted=0.0))


def checked(tokens: list[int], expected: list[int], at: Judge | None = None, margin: float = 5.0, **fields: Any) -> Any:
    return compared_with_reference(at or judge(), truth(expected, margin), [result(tokens, **fields)], None)


@given(IDS, IDS)
def test_the_first_difference_is_the_end_of_the_common_beginning(a: list[int], b: list[int]) -> None:
    at = first_difference(a, b)
    if at is None:
        assert a[: len(b)] == b
    else:
        assert a[:at] == b[:at]
        assert at == len(a) < len(b) or a[at] != b[at]


DEPARTURES = [
    ([1, 2, 3], [1, 2, 3], None),
    ([1, 2, 3, 4, 5], [1, 2, 3], None),  # the truth ends where its length does
    ([1, 2, 4], [1, 2, 3], (2, 4, 3)),
    ([1, 2], [1, 2, 3], (2, None, 3)),  # ends too early
    ([1, END, 4], [1, END], (2, 4, None)),  # does not end
    ([1, END], [1, END], None),
    ([1, SUPPRESSED], [1, 2], (1, SUPPRESSED, 2)),
]


@pytest.mark.parametrize(("tokens", "expected", "departs"), DEPARTURES)
def test_departures(tokens: list[int], expected: list[int], departs: tuple[Any, ...] | None) -> None:
    check = checked(tokens, expected)
    first = check.first and (check.first.position, check.first.token, check.first.expected)
    assert (first, check.equal, check.departed) == (departs, departs is None, int(departs is not None))


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_noise_explains_small_margins_only(noise: float) -> None:
    limit = clear_margin(noise)
    near, far = (checked([1, 3], [1, 2], judge(noise), margin) for margin in (0.99 * limit, 1.01 * limit))
    assert (near.first, near.equal) == (None, False)
    assert far.first.margin == pytest.approx(1.01 * limit)


def test_an_end_mark_that_is_ignored_on_purpose_is_no_departure() -> None:
    ignoring = judge(ignore_eos=True)
    assert checked([1, END, 4], [1, END], ignoring).first is None
    assert checked([1, END], [1, END], ignoring, reason="stop").first is not None


def test_an_answer_that_stops_without_a_mark_departs_in_any_request() -> None:
    check = compared_with_reference(judge(), {}, [result([1, 2], reason="stop")], None)
    assert check.departed == 1
    assert compared_with_reference(judge(), {}, [result([1, END], reason="stop")], None).departed == 0


def test_what_cannot_be_compared_says_so() -> None:
    assert "penalty" in checked([1], [2], judge(repetition_penalty=1.5)).note
    sampled = judge(temperature=1.0, runner="generate")
    assert "distributions" in compared_with_reference(sampled, truth([2]), [result([1])], 3).note


@pytest.mark.parametrize(("token", "departs"), [(2, False), (3, True)])
def test_draws_are_recomputed_from_the_truths_distributions(token: int, departs: bool) -> None:
    check = compared_with_reference(judge(temperature=1.0), truth([2], margin=60.0), [result([token])], 3)
    assert (check.first is not None) == departs
    unsure = compared_with_reference(judge(noise=100.0, temperature=1.0), truth([2]), [result([token])], 3)
    assert unsure.first is None


def test_the_reference_follows_the_measured_tokens() -> None:
    asked = []

    def compute(request: str, tokens: Any) -> torch.Tensor:
        asked.append(tuple(tokens))
        states = torch.zeros(len(tokens), VOCABULARY)
        states[:, 2] = 5.0  # it always prefers 2
        return states

    rows = ReferenceRows(compute)
    assert rows.check(judge(), "r", [2, 2, 2], 1).first is None
    wrong = rows.check(judge(), "r", [2, 2, 4], 1)
    assert (wrong.first.position, wrong.first.expected, wrong.departed) == (2, 2, 1)
    assert rows.check(judge(), "r", [4, 2, 2], 1).first is None, "what stands before the start is not its business"
    assert rows.check(judge(), "r", [2, 2, 4], 1) == wrong
    assert len(asked) == 3, "an answer is computed once"
    assert rows.check(judge(), "r", [2, END, 2], 0).first.position == 2
    assert rows.check(judge(), "r", [2, SUPPRESSED], 0).first.position == 1


@pytest.mark.parametrize("own_is_wrong", [True, False])
def test_the_reference_tells_which_of_two_answers_is_wrong(own_is_wrong: bool) -> None:
    states = torch.zeros(3, VOCABULARY)
    states[:, 2] = 5.0
    answer, other = ([2, 2, 4], [2, 2, 2]) if own_is_wrong else ([2, 2, 2], [2, 2, 4])
    rows = ReferenceRows(lambda _, tokens: states[: len(tokens)])
    comparison = compare(RunAnswers("order", "", {"r": other, "x": [1]}), {"r": answer}, judge(), rows, same_cell=False)
    assert (comparison.requests, comparison.differ, comparison.own, comparison.broken) == (1, 1, own_is_wrong, True)
    assert (comparison.first.token, comparison.first.expected) == (4, 2)


def test_without_states_of_the_reference_a_difference_is_not_judged() -> None:
    def compute(*_: object) -> torch.Tensor:
        raise MemoryError

    variant, answer = RunAnswers("order", "", {"r": [2, 2, 4]}), {"r": [2, 2, 2]}
    unknown = compare(variant, answer, judge(), ReferenceRows(compute), same_cell=True)
    assert (unknown.differ, unknown.broken, unknown.first.clear) == (1, False, None)


def test_cells_that_differ_in_one_axis_only_are_compared() -> None:
    base = Settings()
    assert shared_axis(base, replace(base, batch_size=4, equal_views=True)) == "batch"
    assert shared_axis(base, replace(base, tensor_parallel_size=2)) == "gpus"
    assert shared_axis(base, replace(base, gpu_memory_gb=8.0, kv_cache_gb=1.0)) == "cache"
    assert shared_axis(base, replace(base, batch_size=4, prefill_chunk_size=64)) is None
    assert shared_axis(base, replace(base, temperature=1.0)) is None
    assert shared_axis(base, base) is None


def test_an_answer_that_the_context_cut_off_is_no_departure() -> None:
    short = judge()
    short.loaded.model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=11))
    assert checked([1, 2], [1, 2, 3], short).departed == 0, "9 prompt tokens and 2 of the answer"
    assert checked([1], [1, 2, 3], short).departed == 1
    assert checked([1, 4], [1, 2, 3], short).departed == 1


def test_a_variant_that_fails_says_so() -> None:
    class Failing:
        settings = settings_from({"batch_size": 2})

        def run(self, batch: Any) -> Any:
            raise RuntimeError("CUDA out of memory")

    runs = list(variants(cast("Any", Failing()), [Request(prompt="x")] * 2, [1, 1], 9))
    assert {run.note for run in runs if run.axis in ("order", "batch")} == {"failed: RuntimeError: CUDA out of memory"}
    assert not any(run.answers for run in runs)


RIGHT = (1, 2, 3, 4)


def along(tokens: Sequence[int], margin: float = 5.0) -> torch.Tensor:
    """The hidden states of a model that prefers one token at each position, whatever came before."""
    states = torch.zeros(len(tokens), VOCABULARY)
    states[range(len(tokens)), RIGHT[: len(tokens)]] = margin
    return states


def replayed(answers: list[tuple[int, ...]], *, seconds: float = 60.0, margin: float = 5.0, noise: float = 0.0):
    rows = ReferenceRows(lambda _, tokens: along(tokens, margin))
    asked = [MeasuredAnswer(f"r{number}", tokens, 0) for number, tokens in enumerate(answers)]
    return replay(judge(noise), asked, lambda group: [along(a.tokens, margin) for a in group], rows, seconds)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("wrong", [(1, 2, 0, 4), (1, 2, 3, SUPPRESSED), (1, END, 3, 4)])
def test_a_fault_in_one_of_three_hundred_answers_is_found(seed: int, wrong: tuple[int, ...]) -> None:
    answers = [RIGHT] * 300
    number = random.Random(seed).randrange(300)
    answers[number] = wrong
    check = replayed(answers)
    assert (check.requests, check.answers, check.tokens, check.departed) == (300, 300, 1200, 1)
    assert check.first.request == f"r{number}"


def test_what_rounding_explains_is_no_fault() -> None:
    check = replayed([RIGHT, (1, 2, 0, 4)], margin=0.9, noise=0.5)
    assert (check.departed, check.first) == (0, None)
    assert replayed([RIGHT, (1, 2, 0, 4)], margin=1.1, noise=0.5).departed == 1


def test_without_time_one_answer_is_replayed_and_the_rest_is_counted() -> None:
    check = replayed([RIGHT] * 50, seconds=0.0)
    assert (check.requests, check.answers) == (1, 50)


def test_a_model_that_cannot_compute_leaves_a_note() -> None:
    def fail(_: object) -> list[torch.Tensor]:
        raise RuntimeError("the weights are quantised")

    check = replay(judge(), [MeasuredAnswer("r", RIGHT, 0)], fail, ReferenceRows(lambda *_: along(RIGHT)), 1.0)
    assert check.requests == 0
    assert "the weights are quantised" in check.note


@pytest.mark.parametrize(("sharpness", "departed"), [(1.0, 0), (100.0, 5), (0.2, 5)])
def test_drawn_tokens_are_as_probable_as_draws(sharpness: float, departed: int) -> None:
    """A sampler that ignores the temperature, or that applies another one, is found by its tokens alone."""
    draws = torch.Generator().manual_seed(3)
    states = torch.randn(400, VOCABULARY, generator=draws)
    states[:, SUPPRESSED] = -100.0
    tokens = (sharpness * states).softmax(-1).multinomial(1, generator=draws)[:, 0].tolist()
    parts = [slice(first, first + 80) for first in range(0, 400, 80)]
    hidden = {f"r{number}": states[part] for number, part in enumerate(parts)}
    asked = [MeasuredAnswer(f"r{number}", tuple(tokens[part]), 0) for number, part in enumerate(parts)]
    sampled = judge(temperature=1.0, ignore_eos=True)
    check = replay(sampled, asked, lambda group: [hidden[a.request] for a in group], ReferenceRows(None), 60.0)
    assert (check.requests, check.departed) == (5, departed)


# Inputs against Transformers' own processor: equal inputs, faults, and notes on what is not compared.


CROPS = PanAndScan(max_num_crops=3)


def asked(**fields: Any) -> Request:
    return Request(**{"prompt": "What?", "images": [noise(300, 900)], "pan_and_scan": CROPS, "id": "r", **fields})


def test_what_panscan_makes_is_what_the_processor_makes(tiny: GenerateRunner) -> None:
    requests = [
        asked(images=[noise(300, 900), noise(800, 260, 1)]),
        asked(images=[]),
        asked(system="Be brief."),
        asked(prompt="<start_of_image> raw", raw=True),
        asked(),
    ]
    check = check_inputs(tiny.loaded.reader, requests)
    assert check == InputCheck(5, 8 + 0 + 4 + 4 + 4, None, "")


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_pixels_of_a_device_are_close(tiny: GenerateRunner, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """With the filter of the checkpoint; another one is found."""
    monkeypatch.setitem(pixels._MODES, Image.Resampling.BILINEAR, mode)
    check = check_inputs(tiny.loaded.reader, [asked(images=[noise(300, 900), noise(200, 200, 2)])], "cpu")
    assert (check.difference is None) == (mode == "bilinear"), check
    assert check.difference is None or "of 255 levels" in check.difference


def test_text_checkpoints_have_their_ids_checked(text_checkpoint: Any) -> None:
    check = check_inputs(load_reader(str(text_checkpoint)), [asked(images=[])])
    assert (check.views, check.difference) == (0, None)


def test_special_tokens_in_a_prompt_differ_on_purpose(tiny: GenerateRunner) -> None:
    check = check_inputs(tiny.loaded.reader, [asked(prompt="an <end_of_turn> in it")])
    assert check.difference is None
    assert "on purpose" in check.note


def test_an_image_that_the_processor_refuses_is_named(tiny: GenerateRunner) -> None:
    tight = PanAndScan(max_num_crops=4, min_crop_size=1)
    check = check_inputs(tiny.loaded.reader, [asked(images=[noise(1, 1)], pan_and_scan=tight), asked()])
    assert check.difference is None
    assert check.requests == 2


def one_view_less(*given: Any, **options: Any) -> ViewPlan:
    plan = plan_views(*given, **options)
    return replace(plan, views=plan.views[:-1])


INPUT_FAULTS = [
    (broken.crops_swapped, "crop boxes"),
    (lambda patch: broken.for_planner(patch, one_view_less), "crop boxes"),
    (broken.prompt_ids(lambda ids: ids[:-1]), "token ids differ"),
]


@pytest.mark.parametrize(("fault", "says"), INPUT_FAULTS)
def test_input_faults(tiny: GenerateRunner, monkeypatch: pytest.MonkeyPatch, fault: broken.Break, says: str) -> None:
    fault(monkeypatch)
    assert says in check_inputs(tiny.loaded.reader, [asked()]).difference
