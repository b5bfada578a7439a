"""``panscan attention``: a picture of which positions of a prompt attend to which."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from panscan.cli.console import echo, import_libraries, note, out, print_json
from panscan.cli.models import check_checkpoint, warn_mini
from panscan.cli.values import given_values, one_preset, read_prompt, request_of
from panscan.cli.verb import verb
from panscan.core import SettingError
from panscan.core.activity import activity
from panscan.core.files import replaced_source, write_errors, write_file
from panscan.core.foreign import JsonObject
from panscan.settings import Options, Settings

if TYPE_CHECKING:
    from panscan.inspect.attention.measure import PromptAttention


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
def command(options: Options, images: tuple[str, ...]) -> None:
    """Draw which positions attend to which: text, each view, global and local layers.

    Masks are measured on the attention code of each implementation; token pairs that differ from eager are
    marked. No weights are loaded: with --random-weights --model-shape 27b nothing is downloaded.
    """
    prompt = read_prompt(options.prompt)
    names = [name.strip() for name in options.implementations.split(",")]
    settings = Settings(**{**one_preset(options, "attention"), **given_values(options)})
    check_checkpoint(settings)
    import_libraries()
    from panscan.images.files import expand_images
    from panscan.inspect.attention.measure import check_names, measure
    from panscan.inspect.attention.picture import attention_lines, draw_attention

    check_names(names)
    pages = expand_images(images, max_pages=options.max_pages)
    request = request_of(options, prompt, pages, settings)
    path = _picture_path(options.output, images, as_json=options.json)
    warn_mini(options, settings)
    with activity("measuring attention"):
        shown = measure(request, settings, names)
    if path is not None:
        data = io.BytesIO()
        draw_attention(shown).save(data, "PNG", optimize=True)
        with write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data.getvalue())
    if options.json:
        print_json(_attention_json(shown, path))
        return
    for line in attention_lines(shown, width=out().width):
        echo(line)
    note(f"picture: {path}")


def _picture_path(output: str | None, images: Sequence[str], *, as_json: bool) -> Path | None:
    """Return the picture's file; None if there is no picture.

    Raises:
        SettingError: the file is no PNG file, a folder, or one of the images.
    """
    if output is None and as_json:
        return None
    from panscan.images.files import split_page

    path = Path(_PICTURE if output is None else output)
    if path.suffix.lower() != ".png":
        raise SettingError(f"--output {output}: the picture is a PNG: give a name that ends in .png")
    if path.is_dir():
        raise SettingError(f"--output {path} is a folder: give the name of a file")
    if replaced_source([path], [split_page(image)[0] for image in images]) is not None:
        raise SettingError(f"--output {path} is one of the images: give another name")
    return path


def _attention_json(shown: PromptAttention, path: Path | None) -> JsonObject:
    from panscan.inspect.attention.measure import differences

    implementations = [
        {"names": group.names, "differences": list(map(asdict, differences(shown, group))), "notes": group.notes}
        for group in shown.groups
    ]
    return {
        "model": shown.model,
        "tokens": len(shown.tokens),
        "segments": [{"label": segment.label(images=shown.images), **asdict(segment)} for segment in shown.segments],
        "layers": shown.layers,
        "window": shown.window,
        "implementations": implementations,
        "picture": None if path is None else str(path),
    }
