"""``panscan attention``: a picture of which positions of a prompt attend to which."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from panscan.cli.console import echo, errors, import_libraries, out, show_warnings, warn_mini
from panscan.cli.options import (
    RAW_PROMPT,
    axis_options,
    common_options,
    given_values,
    max_pages_option,
    one_preset,
    preset_option,
    read_prompt,
    url_options,
    utf8,
)
from panscan.cli.verb import option, verb
from panscan.core import Request, SettingError
from panscan.core.activity import activity
from panscan.settings import Settings

if TYPE_CHECKING:
    from panscan.attention_map.measure import PromptAttention

__all__ = ["command"]

_SETTINGS = (
    "model",
    "revision",
    "random_weights",
    "model_shape",
    "device",
    "attention_backend",
    "prefill_chunk_size",
    "do_pan_and_scan",
    "pan_and_scan_min_crop_size",
    "pan_and_scan_max_num_crops",
    "pan_and_scan_min_ratio_to_activate",
)
_PICTURE = "attention.png"

EPILOG = """\b
Examples
  panscan attention receipt.png -p "What is the total?"
  panscan attention receipt.png -p "What is the total?" --attention flash_attention_2
  panscan attention scan.pdf -p "Summarise." --random-weights --model-shape 27b -o scan-attention.png
  panscan attention -p "Hello" --json
"""


@verb("attention", EPILOG)
@click.argument("images", nargs=-1, metavar="[IMAGE]...")
@option("Input", "-p", "--prompt", help="Prompt; '-' or none reads standard input.")
@option("Input", "--system", help="System message.")
@option("Input", "--raw-prompt", is_flag=True, help=RAW_PROMPT)
@option(
    "Runner",
    "--attention",
    "--attn-impl",
    "--attn-implementation",
    "implementations",
    default="sdpa,engine",
    show_default=True,
    shown="--attention NAMES",
    help="Implementations to compare with eager.",
)
@option("Output", "-o", "--output", metavar="FILE", help=f"Picture to write.  [default: {_PICTURE}]")
@preset_option
@option("Output", "--json", "as_json", is_flag=True, help="Print JSON; draws only with --output.")
@url_options
@max_pages_option
@axis_options(_SETTINGS, texts={"prefill_chunk_size": "Prompt tokens per pass of the engine."})
@common_options
def command(**options: Any) -> None:
    """Draw which positions attend to which: text, each view, global and local layers.

    Masks are measured on the attention code of each implementation; token pairs that differ from eager are
    marked. No weights are loaded: with --random-weights --model-shape 27b nothing is downloaded.
    """
    show_warnings(errors())
    prompt = read_prompt(options["prompt"])
    names = [name.strip() for name in options["implementations"].split(",")]
    settings = Settings(**{**one_preset(options["preset"], "attention", _SETTINGS), **given_values(options)})
    import_libraries()
    from panscan.attention_map.measure import check_names, measure
    from panscan.images.files import expand_images

    check_names(names)
    images = expand_images(options["images"], max_pages=options["max_pages"])
    place = _place(options["output"], options["images"], as_json=options["as_json"])
    request = Request(
        prompt=prompt,
        images=images,
        system=utf8("--system", options["system"]),
        raw=options["raw_prompt"],
        pan_and_scan=settings.pan_and_scan,
        max_pages=options["max_pages"],
    )
    if settings == Settings() and options["model"] is None:
        warn_mini()
    with activity("measuring attention"):
        shown = measure(request, settings, names)
    if place is not None:
        _save(shown, place)
    _show(shown, place, as_json=options["as_json"])


def _place(output: str | None, images: Sequence[str], *, as_json: bool) -> Path | None:
    """Return the picture's file; None if there is no picture.

    Raises:
        SettingError: the file is no PNG file, a folder, or one of the images.
    """
    if output is None and as_json:
        return None
    place = Path(_PICTURE if output is None else output)
    if place.suffix.lower() != ".png":
        raise SettingError(f"--output {output}: the picture is a PNG: give a name that ends in .png")
    if place.is_dir():
        raise SettingError(f"--output {place} is a folder: give the name of a file")
    if place.resolve() in {Path(image.partition("#")[0]).resolve() for image in images}:
        raise SettingError(f"--output {place} is one of the images: give another name")
    return place


def _save(shown: PromptAttention, place: Path) -> None:
    from panscan.attention_map.picture import draw_attention
    from panscan.core.files import write_file

    data = io.BytesIO()
    draw_attention(shown).save(data, "PNG", optimize=True)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"--output {place}: {error.strerror or error}") from error
    write_file(place, data.getvalue())


def _show(shown: PromptAttention, place: Path | None, *, as_json: bool) -> None:
    if as_json:
        echo(json.dumps(_facts(shown, place), indent=2, ensure_ascii=False))
        return
    from panscan.attention_map.terminal import attention_lines

    for line in attention_lines(shown, width=out().width):
        echo(line)
    errors().print(f"picture: {place}", soft_wrap=True)


def _facts(shown: PromptAttention, place: Path | None) -> dict[str, Any]:
    from panscan.attention_map.differences import cause, differences

    implementations = []
    for group in shown.groups:
        found = []
        for each in differences(shown, group):
            masks = shown.reference.by_kind[each.kind], group.by_kind[each.kind]
            why = cause(shown.segments, *masks) if each.missing or each.extra else None
            found.append(asdict(each) | {"cause": why})
        implementations.append({"names": group.names, "differences": found, "notes": group.notes})
    return {
        "model": shown.model,
        "tokens": len(shown.tokens),
        "segments": [{"label": each.label(images=shown.images), **asdict(each)} for each in shown.segments],
        "layers": shown.layers,
        "window": shown.window,
        "implementations": implementations,
        "picture": None if place is None else str(place),
    }
