"""Tables that the verbs print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from panscan.analysis.accuracy import MAX_LOSS, TYPICAL_CHANGE, questions_needed
from panscan.analysis.cells import display_settings, distinguishing_names
from panscan.analysis.setting_words import CROPS, shown
from panscan.bench.plan import SweepPlan
from panscan.bench.predict import Prediction, predict
from panscan.cli.console import out, show
from panscan.core import View
from panscan.core.text import count
from panscan.images.views import ViewPlan
from panscan.report.table import Column, Medium, Table, print_table


def print_plan(name: str, plan: ViewPlan, *, model: str, estimated: bool) -> None:
    """Views of one image: kind, box, size and tokens as a model counts them."""
    about = "about " if estimated else ""
    show(
        f"{name}: {plan.width} x {plan.height} px, {count(len(plan.views), 'view')};"
        f" as {model} counts: {plan.image_tokens} image tokens, {about}{plan.prompt_tokens} prompt tokens"
    )
    tokens = plan.image_tokens // len(plan.views)
    columns: list[Column[tuple[int, View]]] = [
        Column("view", lambda row: "whole" if row[1].kind == "whole" else f"crop {row[0]}", text=Medium.ALL),
        Column("left", lambda row: row[1].box[0]),
        Column("top", lambda row: row[1].box[1]),
        Column("right", lambda row: row[1].box[2]),
        Column("bottom", lambda row: row[1].box[3]),
        Column("width", lambda row: row[1].size[0]),
        Column("height", lambda row: row[1].size[1]),
        Column("image tokens", lambda row: tokens),
    ]
    print_table(Table(columns, list(enumerate(plan.views))), out(), frame="full")


def print_predictions(plan: SweepPlan) -> None:
    """What each cell of a sweep will cost."""
    predictions = predict(plan)
    cells = [
        display_settings(asdict(cell.settings), [asdict(alias.settings) for alias in cell.aliases])
        for cell in plan.cells
    ]
    varying = distinguishing_names(cells)
    repeats = count(plan.repeats, "repeat") + " or more" * (plan.most_repeats > plan.repeats)
    show(f"{count(len(predictions), 'cell')}, {count(len(plan.items), 'request')} each, {repeats}")
    columns: list[Column[_PredictedCell]] = [
        Column("cell", lambda row: row[0].cell, text=Medium.ALL),
        *(_setting_column(name) for name in varying),
        Column("batches", lambda row: row[0].batches or ""),
        Column("views", lambda row: "" if row[0].skipped else row[0].views),
        Column("image tokens", lambda row: "" if row[0].skipped else row[0].image_tokens),
        Column("prompt tokens", lambda row: "" if row[0].skipped else f"~{row[0].prompt_tokens}"),
        Column("about", lambda row: "skipped" if row[0].skipped is not None else _duration(row[0].seconds)),
    ]
    print_table(Table(columns, list(zip(predictions, cells, strict=True))), out(), gap=0)
    for reason in dict.fromkeys(p.skipped for p in predictions if p.skipped is not None):
        show(f"skipped: {reason}", "yellow")
    known = [p.seconds for p in predictions if p.seconds is not None]
    if known:
        about = _duration(sum(known) * plan.repeats)
        show(f"all together about {about}, a rough figure: within a factor of two at best")
    if plan.quality_metric is not None and len(plan.cells) > 1:
        show(needed_questions(plan))


def predictions_document(plan: SweepPlan) -> dict[str, Any]:
    """Return what :func:`print_predictions` prints, as plain data."""
    return {"requests": len(plan.items), "repeats": plan.repeats, "cells": list(map(asdict, predict(plan)))}


def needed_questions(plan: SweepPlan) -> str:
    """Return how many questions it probably takes to compare the accuracy of cells with different inputs or weights."""
    points = 100 * MAX_LOSS if plan.max_accuracy_loss is None else plan.max_accuracy_loss
    asked = len(
        {(item.prompt_sha256, *(file.sha256 for file in item.documents)) for item in plan.items if item.answers}
    )
    return (
        f"accuracy: {count(asked, 'question')}; it takes about {questions_needed(points / 100):,} to exclude a loss of"
        f" {points:g} points between different views or weights, if {TYPICAL_CHANGE:.0%} of the scores change"
    )


_PredictedCell: TypeAlias = tuple[Prediction, Mapping[str, Any]]
"""A cell's prediction and its settings for display."""


def _setting_column(name: str) -> Column[_PredictedCell]:
    return Column(name.removeprefix(CROPS).replace("_", "\n"), lambda row: shown(row[1][name]), text=Medium.ALL)


def inputs_text(requests: Sequence[tuple[Sequence[str], int | None, int | None]]) -> str:
    """Return what a model saw, such as ``1 page of 600x1800 pixels, 2 to 4 views, 128 to 256 image tokens``.

    Args:
        requests: page sizes, views and image tokens of each; None: not reported. Not empty.
    """
    pages, views, tokens = zip(*requests, strict=True)
    sizes = list(dict.fromkeys(size for request in pages for size in request))
    shown = ", ".join([*sizes[:3], *(["..."] if len(sizes) > 3 else [])])
    read = f"{_span(map(len, pages), 'page')} of {shown} pixels, " if sizes else ""
    return f"{read}{_span(views, 'view')}, {_span(tokens, 'image token')}"


def _span(numbers: Iterable[int | None], noun: str) -> str:
    """Return the range of what is counted per request, such as ``1 view`` or ``2 to 4 views``."""
    counted = [number for number in numbers if number is not None]
    if not counted:
        return f"{noun}s not reported"
    least, most = min(counted), max(counted)
    return count(most, noun) if least == most else f"{least} to {most} {noun}s"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
