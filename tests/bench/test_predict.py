"""Predictions against what a run then measures."""

from pathlib import Path
from typing import Any

import pytest
from tests.conftest import noise

from panscan.bench.grid import build_cells
from panscan.bench.plan import SweepPlan
from panscan.bench.predict import Prediction, predict, shape_of
from panscan.bench.run import start
from panscan.cli.progress import SweepProgress
from panscan.core import BUNDLED
from panscan.core.activity import activity
from panscan.model.shapes import SHAPES
from panscan.settings import Settings
from panscan.workload.requests import DocumentFile, Item, Source, build_workload

PAGE = Item("0", (DocumentFile("a.png", 1240, 1754, ""),), "What is the total?")


def one(**settings: Any) -> Prediction:
    """The prediction of one cell for a page."""
    axes = {"device": ["cpu"], "dtype": ["fp32"], **{name: [value] for name, value in settings.items()}}
    [found] = predict(SweepPlan(cells=build_cells(axes), items=[PAGE], source=Source(prompt="x", no_images=True)))
    return found


def test_views_batches_and_tokens_are_those_measured(tmp_path: Path) -> None:
    for name, size in {"a.png": (260, 800), "b.png": (700, 300), "c.png": (300, 300)}.items():
        noise(*size).save(tmp_path / name)
    source = Source(images=(str(tmp_path),), prompt="What is the total?")
    axes = {
        "model": ["tiny"],
        "do_pan_and_scan": ["true", "false"],
        "batch_size": ["2"],
        "equal_views": ["true"],
        "pan_and_scan_max_num_crops": ["2", "4"],
        "max_new_tokens": ["1"],
        "device": ["cpu"],
    }
    plan = SweepPlan(
        cells=build_cells(axes), items=build_workload(source, on_problem=pytest.fail), source=source, warmup=0
    )
    with activity("measuring") as step:
        progress = SweepProgress(plan, set(), step)
        measured = start(plan, tmp_path / "run", [], progress)
    predictions = predict(plan)
    assert [found.cell for found in predictions] == list(measured.cells)
    assert len({found.views for found in predictions}) == 3
    for found in predictions:
        records = measured.requests[found.cell, 0]
        assert found.skipped is None
        assert found.views == sum(record.views for record in records)
        assert found.image_tokens == sum(record.image_tokens for record in records)
        assert found.batches == len({record.batch for record in records})
        assert found.prompt_tokens == pytest.approx(sum(record.prompt_tokens for record in records), rel=0.15)


@pytest.mark.parametrize("size", ["4b", "27b"])
def test_seconds_grow_with_tokens_views_and_the_model(size: str) -> None:
    model = f"google/gemma-3-{size}-it"
    seconds = [one(model=model, max_new_tokens=count).seconds for count in (1, 2, 100, 1000)]
    assert 0 < seconds[0] < seconds[1] < seconds[2] < seconds[3]
    whole = one(model=model, max_new_tokens=1, do_pan_and_scan=False)
    cropped = one(model=model, max_new_tokens=1)
    assert (whole.views, cropped.views) == (1, 3)
    assert whole.seconds < cropped.seconds
    assert one(max_new_tokens=1).seconds < seconds[0]


def test_an_unknown_shape_has_counts_but_no_time() -> None:
    found = one(model="someone/finetune")
    assert (found.views, found.image_tokens, found.batches) == (3, 3 * 256, 1)
    assert (found.seconds, found.skipped) == (None, None)


def test_a_cell_that_cannot_run_costs_nothing() -> None:
    found = one(attention="flash_attention_2")
    assert (
        found.skipped
        == "flash_attention_2 makes Gemma 3's image tokens causal (sdpa does not), and needs an NVIDIA GPU"
    )
    assert (found.batches, found.views, found.image_tokens, found.seconds) == (0, 0, 0, None)


def test_a_checkpoints_name_tells_its_shape() -> None:
    for size, shape in SHAPES.items():
        published = (f"google/gemma-3-{size}-it", f"/models/Gemma-3-{size.upper()}-pt")
        for name in (size,) if size in BUNDLED else published:
            assert shape_of(Settings(model=name)) is shape
        assert shape_of(Settings(random_weights=True, model_shape=size)) is shape
    assert shape_of(Settings()) is SHAPES["mini"]
    assert shape_of(Settings(model="mistral-4b")) is None
