"""``panscan ask``: one answer, with where the time went."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from panscan.cli.console import echo, import_libraries, note, print_json
from panscan.cli.models import check_checkpoint, warn_demonstration, warn_mini
from panscan.cli.values import (
    chosen_settings,
    print_runner,
    read_prompt,
    read_structures,
    request_of,
)
from panscan.cli.verb import verb
from panscan.core import Request, Result, Sampling, SettingError, now
from panscan.core.activity import activity
from panscan.core.option import shorten
from panscan.model.bundled import is_demonstration
from panscan.settings import ENGINE_LIMITS, Options, Settings, axes

StepSeconds = dict[str, float]

EPILOG = """\b
Examples
  panscan ask receipt.png -p "What is the total?"
  panscan ask contract.pdf -p "Who signs?" --model google/gemma-3-4b-it
  panscan ask a.png b.png -p "What differs?" --system "Answer in French." --json
  panscan ask receipt.png -p "Extract the total." --json-schema total.json
  cat question.txt | panscan ask page.png
"""


@verb("ask", EPILOG)
@click.argument("images", nargs=-1, metavar="[IMAGE]...")
def command(options: Options, images: tuple[str, ...]) -> None:
    """Answer one question about images. Each page of a PDF or TIFF is an image; all go into one prompt."""
    if options.prompt is None and images and " " in images[-1].strip() and not Path(images[-1]).exists():
        raise SettingError(f"-p: {shorten(images[-1])} was taken as an image; give the question with -p")
    prompt = read_prompt(options.prompt)
    chosen, choice = chosen_settings(options, "ask")
    if chosen["runner"] == "engine":
        chosen["max_num_seqs"] = 1  # room for the one request
    settings = Settings(**chosen)
    sampling = _sampling(options, settings)
    from panscan.images.files import Page, expand_images

    # A missing file is reported before a model loads.
    pages = expand_images(images, max_pages=options.max_pages)
    request = request_of(options, prompt, pages, settings, sampling)
    warn_mini(options, settings)
    print_runner(choice)
    warn_demonstration(settings, (image.name if isinstance(image, Page) else "" for image in request.images))
    result, startup = _ask_once(request, settings)
    _print_answer(result, startup, settings, as_json=options.json)


def _ask_once(request: Request, settings: Settings) -> tuple[Result, StepSeconds]:
    """Return the result of one request, and the seconds of each startup step.

    Raises:
        PanscanError: the model cannot be loaded, or the request failed.
    """
    check_checkpoint(settings)
    startup: StepSeconds = {}
    with ExitStack() as stack:
        with _timed(startup, "import"), activity("importing PyTorch and Transformers"):
            import_libraries()
            from panscan.bench.sweep import compiles
            from panscan.engine.engine import Engine
            from panscan.model.machine import memory_advice
            from panscan.runners.factory import ready_runner
        with _timed(startup, "model"), activity(f"loading {settings.model_name}"):
            answer: Callable[[list[Request]], list[Result]]
            if settings.runner == "engine":
                answer = partial(stack.enter_context(Engine.from_settings(settings)).generate, progress=False)
            else:
                answer = stack.enter_context(closing(ready_runner(settings))).run
        if compiles(settings):
            with _timed(startup, "compile"), activity("compiling"), memory_advice():
                answer([request])  # the length decides the size of the static cache, for which the code is compiled
        with activity("answering"), memory_advice():
            [result] = answer([request])
    if result.error is not None:
        raise result.error
    return result, startup


@contextmanager
def _timed(seconds: StepSeconds, name: str) -> Iterator[None]:
    started = now()
    yield
    seconds[name] = now() - started


def _sampling(options: Options, settings: Settings) -> Sampling:
    """Return the sampling settings with the constraints on the answer.

    Raises:
        InputError: the file cannot be read.
        SettingError: the schema is invalid or unsupported, or the runner supports none.
    """
    if options.json_schema is not None and settings.runner != "engine":
        used = [axes()[name].flag for name, only in ENGINE_LIMITS.items() if getattr(settings, name) != only]
        without = f" without --{', --'.join(used)}" if used else ""
        raise SettingError(f"--json-schema is not supported by runner {settings.runner}: use --runner engine{without}")
    return replace(settings.sampling, **read_structures(options, ignore_eos=settings.ignore_eos))


def _print_answer(result: Result, startup: StepSeconds, settings: Settings, *, as_json: bool) -> None:
    if as_json:
        fields = ("text", "finish_reason", "views", "crops", "image_tokens", "prompt_tokens", "output_tokens")
        shown = {name: getattr(result, name) for name in fields} | {"runner": settings.runner}
        shown |= {"demonstration": is_demonstration(settings), "pixels": result.page_sizes}
        stamps = result.stamps
        seconds = {"ttft_ms": stamps.ttft, "e2el_ms": stamps.e2e}
        shown |= {name: None if value is None else round(1e3 * value, 3) for name, value in seconds.items()}
        shown["stages_ms"] = {name: round(value, 3) for name, value in result.stages_ms.items()}
        shown["startup_ms"] = {name: round(1e3 * value, 3) for name, value in startup.items()}
        print_json(shown, indent=None)
        return
    from panscan.cli.tables import inputs_text

    echo(result.text)
    request = " + ".join(f"{name} {milliseconds:.0f}" for name, milliseconds in result.stages_ms.items())
    before = " + ".join(f"{name} {seconds:.1f}" for name, seconds in startup.items())
    note(
        f"runner {settings.runner}: {inputs_text([(result.page_sizes, result.views, result.image_tokens)])},"
        f" {result.prompt_tokens} prompt tokens, {result.output_tokens} output tokens ({result.finish_reason})\n"
        f"startup: {before} = {sum(startup.values()):.1f} s\n"
        f"request: {request} = {sum(result.stages_ms.values()):.0f} ms",
        "dim",
    )
