"""Tables that the verbs print."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from panscan.bench.predict import predict
from panscan.bench.sweep import Plan
from panscan.core import Result
from panscan.images.views import ViewPlan
from panscan.runners.settings import axes

__all__ = ["print_plan", "print_predictions", "print_result"]


def print_plan(name: str, plan: ViewPlan, *, estimated: bool, console: Console) -> None:
    """Views of one image: kind, box, size and tokens."""
    about = "about " if estimated else ""
    title = (
        f"{name}: {plan.width} x {plan.height} px, {len(plan.views)} views, {plan.image_tokens} image tokens,"
        f" {about}{plan.prompt_tokens} prompt tokens"
    )
    table = Table(title=title, title_justify="left")
    for heading in ("view", "left", "top", "right", "bottom", "width", "height", "image tokens"):
        table.add_column(heading, justify="left" if heading == "view" else "right")
    each = plan.image_tokens // len(plan.views)
    for index, view in enumerate(plan.views):
        label = "whole" if view.kind == "whole" else f"crop {index}"
        table.add_row(label, *map(str, view.box), *map(str, view.size), str(each))
    console.print(table)


def print_predictions(plan: Plan, console: Console) -> None:
    """What each cell of a sweep will cost."""
    predictions = predict(plan)
    varying = [name for name in axes() if len({getattr(p.settings, name) for p in predictions}) > 1]
    table = Table(title=f"{len(predictions)} cells, {len(plan.items)} requests each, {plan.repeats} repeat(s)")
    for heading in ("cell", *varying, "batches", "views", "image tokens", "prompt tokens", "about"):
        table.add_column(heading, justify="right" if heading in ("batches", "views", "about") else "left")
    for p in predictions:
        values = [str(getattr(p.settings, name)) for name in varying]
        costs = (
            [str(p.batches), str(p.views), str(p.image_tokens), f"~{p.prompt_tokens}", _duration(p.seconds)]
            if p.skipped is None
            else ["", "", "", "", "skipped"]
        )
        table.add_row(p.cell, *values, *costs)
    console.print(table)
    for reason in dict.fromkeys(p.skipped for p in predictions if p.skipped is not None):
        console.print(f"skipped: {reason}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    known = [p.seconds for p in predictions if p.seconds is not None]
    if known:
        console.print(f"all together about {_duration(sum(known) * plan.repeats)}, a rough figure", highlight=False)


def print_result(result: Result, console: Console) -> None:
    """Where the time of one answer went, and what it read."""
    stages = result.stages_ms
    parts = " + ".join(f"{name} {milliseconds:.0f}" for name, milliseconds in stages.items())
    console.print(
        f"{result.views} views, {result.image_tokens} image tokens, {result.prompt_tokens} prompt tokens,"
        f" {result.output_tokens} output tokens ({result.finish_reason})\n"
        f"{parts} = {sum(stages.values()):.0f} ms",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
