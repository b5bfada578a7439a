"""``panscan ask``: one answer, with where the time went."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import click
from rich.text import Text

from panscan.cli.options import (
    axis_options,
    chosen_settings,
    common_options,
    echo,
    errors,
    import_libraries,
    json_schema_option,
    max_pages_option,
    read_json_schema,
    read_prompt,
    say_mini,
    show_warnings,
    url_options,
    utf8,
)
from panscan.core import Request, Result, Sampling, SettingError, escape_controls
from panscan.settings import ENGINE_LIMITS, Settings, axes

__all__ = ["command"]

_NOT_HERE = ("batch_size", "equal_views", "max_concurrency", "max_num_seqs")
_DEFAULTS = {"runner": "engine; generate where the engine lacks a setting"}

EPILOG = """\b
Examples
  panscan ask receipt.png -p "What is the total?"
  panscan ask contract.pdf -p "Who signs?" --model google/gemma-3-4b-it
  panscan ask a.png b.png -p "What differs?" --system "Answer in French." --json
  panscan ask receipt.png -p "Extract the total." --json-schema total.json
  cat question.txt | panscan ask page.png
"""


@click.command("ask", epilog=EPILOG, short_help="Ask about images or PDF pages, and see where the time went.")
@click.argument("images", nargs=-1, metavar="[IMAGE]...")
@click.option("-p", "--prompt", help="The question; '-' or none reads it from standard input.")
@click.option("--system", help="A system message.")
@click.option("--raw-prompt", is_flag=True, help="The prompt as it is, with <start_of_image>: for base checkpoints.")
@click.option("--preset", help="A preset's name, or a YAML file (see panscan recommend).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@json_schema_option
@url_options
@max_pages_option
@axis_options(leave_out=_NOT_HERE, defaults=_DEFAULTS)
@common_options
def command(**options: Any) -> None:
    """Ask one question about images, all of them in one prompt; every page of a PDF or TIFF is an image."""
    show_warnings(errors())
    prompt = read_prompt(options["prompt"])
    settings = _settings(options)
    sampling = _sampling(options["json_schema"], settings)
    from panscan.images.files import expand_images

    request = Request(
        prompt=prompt,
        images=options["images"],
        system=utf8("--system", options["system"]),
        raw=options["raw_prompt"],
        pan_and_scan=settings.pan_and_scan,
        sampling=sampling,
        max_pages=options["max_pages"],
    )
    # A missing file is reported before a model loads.
    request = replace(request, images=expand_images(request.images, max_pages=request.max_pages))
    if settings.model == "mini" and not settings.random_weights and options["model"] is None:
        say_mini()
    _show(_answer(request, settings), settings.runner, as_json=options["as_json"])


def _answer(request: Request, settings: Settings) -> Result:
    """The result of one request.

    Raises:
        PanscanError: the model cannot be loaded, or the request failed.
    """
    import_libraries()
    loading = Text(escape_controls(f"loading {settings.model_name}"))
    if settings.runner == "engine":
        from panscan.engine.engine import Engine

        with errors().status(loading):
            engine = Engine.from_settings(settings)
        with engine, errors().status("reading"):
            [result] = engine.generate([request], progress=False)
    else:
        from panscan.runners.factory import ready_runner

        with errors().status(loading):
            runner = ready_runner(settings)
        with errors().status("reading"):
            [result] = runner.run([request])
    if result.error is not None:
        raise result.error
    return result


def _settings(options: dict[str, Any]) -> Settings:
    """Return the settings; the engine gets room for the one request."""
    chosen = chosen_settings(options, "ask", _NOT_HERE)
    if chosen["runner"] == "engine":
        chosen["max_num_seqs"] = 1
    return Settings(**chosen)


def _sampling(json_schema: str | None, settings: Settings) -> Sampling:
    """Return the sampling settings with the schema of ``--json-schema``.

    Raises:
        InputError: the file cannot be read.
        SettingError: the schema is invalid or unsupported, or the runner supports none.
    """
    if json_schema is None:
        return settings.sampling
    if settings.runner != "engine":
        used = [axes()[name].flag for name, only in ENGINE_LIMITS.items() if getattr(settings, name) != only]
        without = f" without --{', --'.join(used)}" if used else ""
        raise SettingError(f"--json-schema is not supported by runner {settings.runner}: use --runner engine{without}")
    return replace(settings.sampling, json_schema=read_json_schema(json_schema, ignore_eos=settings.ignore_eos))


def _show(result: Result, runner: str, *, as_json: bool) -> None:
    if as_json:
        fields = ("text", "finish_reason", "views", "crops", "image_tokens", "prompt_tokens", "output_tokens")
        shown = {name: getattr(result, name) for name in fields} | {"runner": runner}
        stamps = result.stamps
        seconds = {"ttft_ms": stamps.ttft, "e2el_ms": stamps.e2e}
        shown |= {name: None if value is None else round(1e3 * value, 3) for name, value in seconds.items()}
        shown["stages_ms"] = {name: round(value, 3) for name, value in result.stages_ms.items()}
        echo(json.dumps(shown, ensure_ascii=False))
        return
    from panscan.cli.tables import print_result

    echo(result.text)
    print_result(result, runner, errors())
