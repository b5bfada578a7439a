"""``panscan ask``: one answer, with where the time went."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import click
from rich.text import Text

from panscan.cli.options import (
    axis_options,
    common_options,
    errors,
    given_axes,
    one_preset,
    read_prompt,
    say_left_out,
    say_mini,
    show_warnings,
    utf8,
)
from panscan.core import Request, Result
from panscan.settings import ENGINE_LIMITS, Settings, axes, foreign_settings, parse_value, settings_from

__all__ = ["command"]

_NOT_HERE = ("batch_size", "equal_views", "max_concurrency", "max_num_seqs")
_DEFAULTS = {
    "runner": "engine; generate where the engine lacks a setting",
    "fast_start": "true: compiling takes longer than one answer",
}

EPILOG = """\b
Examples
  panscan ask receipt.png -p "What is the total?"
  panscan ask contract.pdf -p "Who signs?" --model google/gemma-3-4b-it
  panscan ask a.png b.png -p "What differs?" --system "Answer in French." --json
  cat question.txt | panscan ask page.png
"""


@click.command("ask", epilog=EPILOG, short_help="Ask about images or PDF pages, and see where the time went.")
@click.argument("images", nargs=-1, metavar="[IMAGE]...")
@click.option("-p", "--prompt", help="The question; '-' or none reads it from standard input.")
@click.option("--system", help="A system message.")
@click.option("--raw-prompt", is_flag=True, help="The prompt as it is, with <start_of_image>: for base checkpoints.")
@click.option("--preset", help="A preset's name, or a YAML file (see panscan recommend).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@axis_options(leave_out=_NOT_HERE, defaults=_DEFAULTS)
@common_options
def command(**options: Any) -> None:
    """Ask one question about images, all of them in one prompt; every page of a PDF or TIFF is an image."""
    show_warnings(errors())
    prompt = read_prompt(options["prompt"])
    settings = _settings(options)
    request = Request(
        prompt=prompt,
        images=options["images"],
        system=utf8("--system", options["system"]),
        raw=options["raw_prompt"],
        pan_and_scan=settings.pan_and_scan,
        sampling=settings.sampling,
    )
    from panscan.images.files import expand_images

    expand_images(request.images)  # a file that is not there is said before minutes of loading
    runner = _runner(settings, named=options["model"] is not None)
    with errors().status("reading"):
        [result] = runner.run([request])
    _show(result, settings.runner, as_json=options["as_json"])


def _runner(settings: Settings, *, named: bool) -> Any:
    from panscan.model.runtime import quiet_libraries
    from panscan.runners.base import ready_runner

    quiet_libraries()
    if settings.model == "mini" and not settings.random_weights and not named:
        say_mini()
    with errors().status(Text(f"loading {settings.model_name}")):
        return ready_runner(settings)


def _settings(options: dict[str, Any]) -> Settings:
    """What was asked for; settings of the preset that the runner does not have are left out, with a note."""
    preset = one_preset(options["preset"], "ask", [name for name in axes() if name not in _NOT_HERE])
    given = {name: parse_value(name, values[0]) for name, values in given_axes(options, lists=False).items()}
    runner = _runner_for(preset, given)
    idle = [
        name
        for name in foreign_settings(runner)
        if name in preset and name not in given and preset[name] != axes()[name].default
    ]
    if idle:
        say_left_out(options["preset"], f"runner {runner}", idle)
    kept = {name: value for name, value in preset.items() if name not in idle}
    settings = settings_from({**kept, **given, "runner": runner})
    if runner != "engine":
        return settings
    return replace(settings, max_num_seqs=1, fast_start={"fast_start": True, **kept, **given}["fast_start"])


def _runner_for(preset: dict[str, Any], given: dict[str, Any]) -> str:
    """The runner that a flag names, or the preset. ``generate`` in place of an engine that lacks what a flag sets, or
    what the preset sets and does not name a runner for."""
    if "runner" in given:
        return str(given["runner"])
    named = str(preset.get("runner", "engine"))
    asked = given if "runner" in preset else {**preset, **given}
    lacks = any(asked.get(name, only) != only for name, only in ENGINE_LIMITS.items())
    return "generate" if named == "engine" and lacks else named


def _show(result: Result, runner: str, *, as_json: bool) -> None:
    if as_json:
        fields = ("text", "finish_reason", "views", "crops", "image_tokens", "prompt_tokens", "output_tokens")
        shown = {name: getattr(result, name) for name in fields} | {"runner": runner}
        stamps = result.stamps
        seconds = {"ttft_ms": stamps.ttft, "e2el_ms": stamps.e2e}
        shown |= {name: None if value is None else round(1e3 * value, 3) for name, value in seconds.items()}
        shown["stages_ms"] = {name: round(value, 3) for name, value in result.stages_ms.items()}
        click.echo(json.dumps(shown, ensure_ascii=False))
        return
    from panscan.cli.tables import print_result

    click.echo(result.text)
    print_result(result, runner, errors())
