"""Tables that the verbs print."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table

from panscan.analysis.cells import display_settings, distinguishing_names, short_name
from panscan.analysis.setting_words import shown
from panscan.bench.plan import SweepPlan
from panscan.bench.predict import predict
from panscan.core import Result
from panscan.images.views import ViewPlan

__all__ = ["print_plan", "print_predictions", "print_result"]


def print_plan(name: str, plan: ViewPlan, *, model: str, estimated: bool, console: Console) -> None:
    """Views of one image: kind, box, size and tokens as a model counts them."""
    about = "about " if estimated else ""
    console.print(
        f"{name}: {plan.width} x {plan.height} px, {_count(len(plan.views), 'view')};"
        f" as {model} counts: {plan.image_tokens} image tokens, {about}{plan.prompt_tokens} prompt tokens",
        soft_wrap=True,
    )
    table = Table()
    for heading in ("view", "left", "top", "right", "bottom", "width", "height", "image tokens"):
        table.add_column(heading, justify="left" if heading == "view" else "right")
    each = plan.image_tokens // len(plan.views)
    for index, view in enumerate(plan.views):
        label = "whole" if view.kind == "whole" else f"crop {index}"
        table.add_row(label, *map(str, view.box), *map(str, view.size), str(each))
    console.print(table)


def print_predictions(plan: SweepPlan, console: Console) -> None:
    """What each cell of a sweep will cost."""
    predictions = predict(plan)
    cells = [
        display_settings(asdict(cell.settings), [asdict(alias.settings) for alias in cell.aliases])
        for cell in plan.cells
    ]
    varying = distinguishing_names(cells)
    counts = (_count(len(predictions), "cell"), _count(len(plan.items), "request"), _count(plan.repeats, "repeat"))
    console.print("{}, {} each, {}".format(*counts))
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column("cell", no_wrap=True)
    for name in varying:
        table.add_column(short_name(name).replace("_", "\n"), overflow="fold")
    for heading in ("batches", "views", "image\ntokens", "prompt\ntokens", "about"):
        table.add_column(heading, justify="right", no_wrap=True)
    for p, cell in zip(predictions, cells, strict=True):
        values = [shown(cell[name]) for name in varying]
        costs = (
            [str(p.batches), str(p.views), str(p.image_tokens), f"~{p.prompt_tokens}", _duration(p.seconds)]
            if p.skipped is None
            else ["", "", "", "", "skipped"]
        )
        table.add_row(p.cell, *values, *costs)
    console.print(table)
    for reason in dict.fromkeys(p.skipped for p in predictions if p.skipped is not None):
        console.print(f"skipped: {reason}", style="yellow", soft_wrap=True)
    known = [p.seconds for p in predictions if p.seconds is not None]
    if known:
        about = _duration(sum(known) * plan.repeats)
        console.print(f"all together about {about}, a rough figure: within a factor of two at best")


def print_result(result: Result, startup: Mapping[str, float], runner: str, console: Console) -> None:
    """Print the size of one request, and where the time went.

    Args:
        result: result of the request.
        startup: seconds of each step before the request.
        runner: name of the runner.
        console: console to print on.
    """
    stages = result.stages_ms
    request = " + ".join(f"{name} {milliseconds:.0f}" for name, milliseconds in stages.items())
    before = " + ".join(f"{name} {seconds:.1f}" for name, seconds in startup.items())
    console.print(
        f"runner {runner}: {_count(result.views, 'view')}, {result.image_tokens} image tokens,"
        f" {result.prompt_tokens} prompt tokens, {result.output_tokens} output tokens ({result.finish_reason})\n"
        f"startup: {before} = {sum(startup.values()):.1f} s\n"
        f"request: {request} = {sum(stages.values()):.0f} ms",
        style="dim",
        soft_wrap=True,
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
