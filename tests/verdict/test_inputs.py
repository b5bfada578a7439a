"""Inputs against Transformers' own processor: equal inputs, faults, and notes on what is not compared."""

from dataclasses import replace
from typing import Any

import pytest
from PIL import Image
from tests.conftest import noise
from tests.mutations import broken

from panscan import GenerateRunner, PanAndScan, Request
from panscan.images import pixels
from panscan.images.views import ViewPlan, plan_views
from panscan.model.checkpoint import load_reader
from panscan.records.verdict_records import InputCheck
from panscan.verdict.inputs import check_inputs

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
    found = check_inputs(tiny.loaded.reader, requests)
    assert found == InputCheck(5, 8 + 0 + 4 + 4 + 4, None, "")


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_pixels_of_a_device_are_close(tiny: GenerateRunner, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """With the filter of the checkpoint; another one is found."""
    monkeypatch.setitem(pixels._MODES, Image.Resampling.BILINEAR, mode)
    found = check_inputs(tiny.loaded.reader, [asked(images=[noise(300, 900), noise(200, 200, 2)])], "cpu")
    assert (found.difference is None) == (mode == "bilinear"), found
    assert found.difference is None or "of 255 levels" in found.difference


def test_text_checkpoints_have_their_ids_checked(text_checkpoint: Any) -> None:
    found = check_inputs(load_reader(str(text_checkpoint)), [asked(images=[])])
    assert (found.views, found.difference) == (0, None)


def test_special_tokens_in_a_prompt_differ_on_purpose(tiny: GenerateRunner) -> None:
    found = check_inputs(tiny.loaded.reader, [asked(prompt="an <end_of_turn> in it")])
    assert found.difference is None
    assert "on purpose" in found.note


def test_an_image_that_the_processor_refuses_is_named(tiny: GenerateRunner) -> None:
    tight = PanAndScan(max_num_crops=4, min_crop_size=1)
    found = check_inputs(tiny.loaded.reader, [asked(images=[noise(1, 1)], pan_and_scan=tight), asked()])
    assert found.difference is None
    assert found.requests == 2


def one_view_less(*given: Any, **options: Any) -> ViewPlan:
    plan = plan_views(*given, **options)
    return replace(plan, views=plan.views[:-1])


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (broken.crops_swapped, "crop boxes"),
        (lambda patch: broken.for_planner(patch, one_view_less), "crop boxes"),
        (broken.prompt_ids(lambda ids: ids[:-1]), "token ids differ"),
    ],
)
def test_faults_are_found(
    tiny: GenerateRunner, monkeypatch: pytest.MonkeyPatch, fault: broken.Break, says: str
) -> None:
    fault(monkeypatch)
    assert says in check_inputs(tiny.loaded.reader, [asked()]).difference
