"""``panscan crops``: a picture of the views that pan and scan takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import click

from panscan.cli.console import import_libraries, note, print_json
from panscan.cli.values import given_values, one_preset
from panscan.cli.verb import verb
from panscan.core import ImageError, InputError, SettingError
from panscan.core.files import file_identity, write_errors
from panscan.core.foreign import JsonObject
from panscan.images.views import PUBLISHED_COST, PromptCost, plan_views
from panscan.settings import Options, Settings

if TYPE_CHECKING:
    from panscan.images.files import Page


_RELEASED = "the released Gemma 3"

EPILOG = """\b
Examples
  panscan crops receipt.png
  panscan crops scan.pdf --max-num-crops 8 --min-crop-size 448 -o views/
  panscan crops chart.png --preset document --json
"""


@verb("crops", EPILOG)
@click.argument("images", nargs=-1, required=True, metavar="IMAGE...")
def command(options: Options, images: tuple[str, ...]) -> None:
    """Draw the views of each image over it, and print their tokens as a table.

    Tokens are those of the released Gemma 3; the text around crops is estimated. With --model, they are exact for that
    checkpoint ('mini', the default of panscan ask, has fewer tokens per view).
    """
    from panscan.images.files import find_pages

    settings = Settings(**{**one_preset(options, "crops"), **given_values(options)})
    cost = _prompt_cost(settings, given="model" in options.given or "model" in settings.changed())
    problems: list[InputError] = []
    pages = find_pages(images, on_problem=problems.append, max_pages=options.max_pages)
    shown = []
    for page, path in zip(pages, _output_paths(pages, options.output), strict=True):
        try:
            shown.append(_draw_page(page, path, settings, cost, options))
        except ImageError as error:
            problems.append(error)
    if options.json:
        print_json(shown)
    for problem in problems:
        note(f"left out: {problem}", "yellow")
    if not shown:
        raise ImageError("no readable image is left")


def _draw_page(page: Page, path: Path, settings: Settings, cost: PromptCost, options: Options) -> JsonObject:
    from panscan.images.draw import draw_views
    from panscan.images.files import open_image

    image = open_image(page)
    plan = plan_views(*image.size, settings.pan_and_scan, cost)
    if not options.json:
        from panscan.cli.tables import print_plan

        model = _RELEASED if cost is PUBLISHED_COST else settings.model
        print_plan(page.name, plan, model=model, estimated=cost.estimated)
    if not options.json or options.output:
        with write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            draw_views(image, plan, caption=page.name, estimated=cost.estimated).save(path)
        note(f"picture: {path}")
    return {
        "image": page.name,
        "width": plan.width,
        "height": plan.height,
        "views": [asdict(view) for view in plan.views],
        "crops": plan.crops,
        "image_tokens": plan.image_tokens,
        "prompt_tokens": plan.prompt_tokens,
        "prompt_tokens_estimated": cost.estimated,
    }


def _prompt_cost(settings: Settings, *, given: bool) -> PromptCost:
    if not given:
        return PUBLISHED_COST
    import_libraries()
    from panscan.model.checkpoint import load_reader

    reader = load_reader(settings.model, settings.revision)
    if not reader.reads_images:
        raise SettingError(f"--model {settings.model} reads text only: it takes no views")
    return reader.prompts.cost()


def _output_paths(pages: Sequence[Page], output: str | None) -> list[Path]:
    """A picture's file for each page: no two the same, and none of them one of the images."""
    images = {file_identity(page.source) for page in pages} - {None}
    folder = Path(output or "")
    if output and len(pages) == 1 and folder.suffix.lower() == ".png" and not folder.is_dir():
        if file_identity(folder) in images:
            raise SettingError(f"--output {output} is the image itself")
        return [folder]
    paths: dict[Path, None] = {}  # in order; thousands of pages are looked up
    for page in pages:
        source = Path(page.source)
        stem = source.stem if page.page is None else f"{source.name.replace('.', '-')}-page{page.page}"
        names = (f"{stem}-views.png" if turn == 1 else f"{stem}-{turn}-views.png" for turn in count(1))
        free = (p for name in names if (p := folder / name) not in paths and file_identity(p) not in images)
        paths[next(free)] = None
    return list(paths)
