"""``panscan crops``: a picture of the views that pan and scan takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from panscan.cli.console import echo, errors, import_libraries, out
from panscan.cli.options import (
    axis_options,
    common_options,
    given_values,
    max_pages_option,
    one_preset,
    preset_option,
    url_options,
)
from panscan.cli.verb import option, verb
from panscan.core import ImageError, InputError, SettingError
from panscan.images.views import GEMMA3_COST, PromptCost, ViewPlan, plan_views
from panscan.settings import Settings

if TYPE_CHECKING:
    from panscan.images.files import Page

__all__ = ["command"]

_SETTINGS = (
    "do_pan_and_scan",
    "pan_and_scan_min_crop_size",
    "pan_and_scan_max_num_crops",
    "pan_and_scan_min_ratio_to_activate",
    "model",
    "revision",
)

_RELEASED = "the released Gemma 3"

EPILOG = """\b
Examples
  panscan crops receipt.png
  panscan crops scan.pdf --max-num-crops 8 --min-crop-size 448 -o views/
  panscan crops chart.png --preset document --json
"""


@verb("crops", EPILOG)
@click.argument("images", nargs=-1, required=True, metavar="IMAGE...")
@option("Output", "-o", "--output", metavar="PATH", help="PNG file or directory.  [default: NAME-views.png]")
@preset_option
@option("Output", "--json", "as_json", is_flag=True, help="Print plans as JSON; draws only with --output.")
@url_options
@max_pages_option
@axis_options(_SETTINGS, defaults={"model": _RELEASED})
@common_options
def command(**options: Any) -> None:
    """Draw the views of each image over it, and print their tokens as a table.

    Tokens are those of the released Gemma 3; the text around crops is estimated. With --model, they are exact for that
    checkpoint ('mini', the default of panscan ask, has fewer tokens per view).
    """
    from panscan.images.files import find_pages

    settings = _settings(options)
    cost = _cost(settings, given=options["model"] is not None or "model" in settings.changed())
    problems: list[ImageError] = []
    pages = find_pages(options["images"], on_problem=problems.append, max_pages=options["max_pages"])
    shown = []
    for page, path in zip(pages, _output_paths(pages, options["output"]), strict=True):
        try:
            shown.append(_one(page, path, settings, cost, options))
        except ImageError as error:
            problems.append(error)
    if options["as_json"]:
        echo(json.dumps(shown, indent=2, ensure_ascii=False))
    for problem in problems:
        errors().print(f"left out: {problem}", style="yellow", soft_wrap=True)
    if not shown:
        raise ImageError("no readable image is left")


def _one(page: Page, path: Path, settings: Settings, cost: PromptCost, options: dict[str, Any]) -> dict[str, Any]:
    from panscan.images.draw import draw_views
    from panscan.images.files import load_page

    image = load_page(page)
    plan = plan_views(*image.size, settings.pan_and_scan, cost)
    if not options["as_json"]:
        from panscan.cli.tables import print_plan

        model = _RELEASED if cost is GEMMA3_COST else settings.model
        print_plan(page.name, plan, model=model, estimated=cost.estimated, console=out())
    if not options["as_json"] or options["output"]:
        _save(draw_views(image, plan, caption=page.name, estimated=cost.estimated), path)
        errors().print(f"picture: {path}", soft_wrap=True)
    return _facts(page.name, plan, cost)


def _facts(name: str, plan: ViewPlan, cost: PromptCost) -> dict[str, Any]:
    return {
        "image": name,
        "width": plan.width,
        "height": plan.height,
        "views": [asdict(view) for view in plan.views],
        "crops": plan.crops,
        "image_tokens": plan.image_tokens,
        "prompt_tokens": plan.prompt_tokens,
        "prompt_tokens_estimated": cost.estimated,
    }


def _settings(options: dict[str, Any]) -> Settings:
    return Settings(**{**one_preset(options["preset"], "crops", _SETTINGS), **given_values(options)})


def _cost(settings: Settings, *, given: bool) -> PromptCost:
    if not given:
        return GEMMA3_COST
    import_libraries()
    from panscan.model.checkpoint import load_reader

    reader = load_reader(settings.model, settings.revision)
    if not reader.reads_images:
        raise SettingError(f"--model {settings.model} reads text only: it takes no views")
    return reader.prompts.cost()


def _output_paths(pages: Sequence[Page], output: str | None) -> list[Path]:
    """A picture's file for each page: no two the same, and none of them one of the images."""
    images = {Path(page.source).resolve() for page in pages}
    folder = Path(output or "")
    if output and len(pages) == 1 and folder.suffix.lower() == ".png" and not folder.is_dir():
        if folder.resolve() in images:
            raise SettingError(f"--output {output} is the image itself")
        return [folder]
    paths: dict[Path, None] = {}  # in order; thousands of pages are looked up
    for page in pages:
        source = Path(page.source)
        stem = source.stem if page.page is None else f"{source.name.replace('.', '-')}-page{page.page}"
        names = (f"{stem}-views.png" if turn == 1 else f"{stem}-{turn}-views.png" for turn in count(1))
        free = (p for name in names if (p := folder / name) not in paths and p.resolve() not in images)
        paths[next(free)] = None
    return list(paths)


def _save(picture: Any, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
    except OSError as error:
        raise InputError(f"--output {path}: {error.strerror or error}") from error
