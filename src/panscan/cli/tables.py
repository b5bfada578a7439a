"""Tables that the verbs print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from panscan.analysis.accuracy import MAX_LOSS, TYPICAL_CHANGE, questions_needed
from panscan.analysis.cells import display_settings, distinguishing_names
from panscan.analysis.setting_words import CROPS, shown
from panscan.bench.plan import SweepPlan
from panscan.bench.predict import predict
from panscan.cli.console import out, show
from panscan.core.foreign import JsonObject
from panscan.core.text import count
from panscan.images.views import ViewPlan
from panscan.report.table import Content, print_table, table_of


def print_plan(name: str, plan: ViewPlan, *, model: str, estimated: bool) -> None:
    """Views of one image: kind, box, size and tokens as a model counts them."""
    about = "about " if estimated else ""
    show(
        f"{name}: {plan.width} x {plan.height} px, {count(len(plan.views), 'view')};"
        f" as {model} counts: {plan.image_tokens} image tokens, {about}{plan.prompt_tokens} prompt tokens"
    )
    tokens = plan.image_tokens // len(plan.views)
    titles = ("view", "left", "top", "right", "bottom", "width", "height", "image tokens")
    names = ["whole" if view.kind == "whole" else f"crop {index}" for index, view in enumerate(plan.views)]
    rows = [(name, *view.box, *view.size, tokens) for name, view in zip(names, plan.views, strict=True)]
    print_table(table_of(titles, rows), out(), frame="full")


def print_predictions(plan: SweepPlan) -> None:
    """What each cell of a sweep will cost."""
    predictions = predict(plan)
    cells = [display_settings([asdict(form.settings) for form in (cell, *cell.aliases)]) for cell in plan.cells]
    varying = distinguishing_names(cells)
    repeats = count(plan.repeats, "repeat") + " or more" * (plan.most_repeats > plan.repeats)
    requests = count(len(plan.items), "request") + " each" * (len(predictions) > 1)
    show(f"{count(len(predictions), 'cell')}, {requests}, {repeats}")
    settings = [name.removeprefix(CROPS).replace("_", "\n") for name in varying]
    titles = ("cell", *settings, "batches", "views", "image tokens", "prompt tokens", "about")
    rows: list[Sequence[Content]] = []
    for cell, prediction in zip(cells, predictions, strict=True):
        costs: tuple[Content, ...] = ("", "", "", "", "skipped")
        if prediction.skipped is None:
            tokens = (prediction.image_tokens, f"~{prediction.prompt_tokens}")
            costs = (prediction.batches, prediction.views, *tokens, _duration(prediction.seconds))
        rows.append((prediction.cell, *(shown(cell[name]) for name in varying), *costs))
    print_table(table_of(titles, rows, 1 + len(varying)), out(), gap=0)
    for reason in dict.fromkeys(p.skipped for p in predictions if p.skipped is not None):
        show(f"skipped: {reason}", "yellow")
    known = [p.seconds for p in predictions if p.seconds is not None]
    if known:
        about = _duration(sum(known) * plan.repeats)
        show(f"all together about {about}, a rough figure: within a factor of two at best")
    if plan.quality_metric is not None and len(plan.cells) > 1:
        show(needed_questions(plan))


def predictions_document(plan: SweepPlan) -> JsonObject:
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
