"""``panscan profile``: where the time of a warm request goes, on ``generate()`` and on the engine."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from panscan.cli.console import import_libraries, note, out, print_json, show
from panscan.cli.models import check_checkpoint, warn_mini
from panscan.cli.values import given_values, utf8
from panscan.cli.verb import verb
from panscan.core import SettingError
from panscan.core.activity import activity
from panscan.settings import ENGINE_LIMITS, Options, Settings, axes, default_of

if TYPE_CHECKING:
    from panscan.core import Request
    from panscan.inspect.profile.run import Mode, Profiled


_VIEWS = tuple(name for name in axes() if "pan_and_scan" in name)

EPILOG = """\b
Modes of generate()
  dynamic      dynamic cache (the default of Transformers)
  static       static cache, not compiled
  compiled     static cache, compiled decode step
  cuda-graphs  static cache, compiled decode step in CUDA graphs (NVIDIA GPUs)

Each mode's trace opens in https://ui.perfetto.dev and chrome://tracing. panscan trace
prints its summary again. See docs/profile.md.

\b
Examples
  panscan profile --model google/gemma-3-4b-it receipt.png -p "What is the total?"
  panscan profile --model google/gemma-3-4b-it --mode all
  panscan profile --model google/gemma-3n-e2b-it --mode all
  panscan profile --model google/gemma-3-4b-it --runner engine --batch-size 16 --stacks
"""


@verb("profile", EPILOG)
@click.argument("images", nargs=-1, metavar="[IMAGE]...")
def command(options: Options, images: tuple[str, ...]) -> None:
    """Profile one warm request, or a steady batch with --batch-size, and compare decode modes.

    Without images, panscan generates documents. The profile directory gets one trace per mode and summary.html.
    """
    given = given_values(options)
    defaults = {name: default_of(name, "profile") for name in ("max_new_tokens", "ignore_eos")}
    settings = Settings(**{**defaults, **given})
    prompt = utf8("--prompt", options.prompt)
    if prompt is not None and not prompt.strip():
        raise SettingError("--prompt is empty: give a question, or leave it out")
    check_checkpoint(settings)
    import_libraries()
    modes = _profiled_modes(options, settings, given)
    warn_mini(options, settings)
    from panscan.inspect.profile.run import checked_modes
    from panscan.workload.profiled import profiled_requests

    with tempfile.TemporaryDirectory() as drawn:
        requests = profiled_requests(prompt, images, settings, Path(drawn), max_pages=options.max_pages)
        if 0 < len(images) < settings.batch_size:
            note("requests share images: the engine encodes each view once", "dim")
            if "prefix_caching" not in given:
                settings = replace(settings, prefix_caching=False)
        _profile(requests, checked_modes(settings, modes), options)


def _profiled_modes(options: Options, settings: Settings, given: Collection[str]) -> list[Mode]:
    """Return the modes to profile.

    Raises:
        SettingError: an option that none of the modes has.
    """
    from panscan.inspect.profile.run import ENGINE, chosen_modes
    from panscan.model.machine import resolve_device
    from panscan.runners.factory import profile_only_family

    runners = options.profiled_runners
    family = profile_only_family(settings)
    if family is not None:
        lacks = f"{family.name} has no pan and scan and no panscan engine"
        if "engine" in runners:
            raise SettingError(f"--runner engine: {lacks}; use --runner generate")
        if views := [name for name in _VIEWS if name in given]:
            raise SettingError(f"--{axes()[views[0]].flag}: {family.name} has no pan and scan; leave it out")
        note(f"{lacks}: profiling Transformers' generate()", "dim")
    if options.memory and "engine" in runners:
        raise SettingError("--memory is for --runner generate: PyTorch records the allocations of one thread only")
    usual = ["generate"] if family is not None or options.memory else ["generate", "engine"]
    on_gpu = resolve_device(settings.device).type == "cuda"
    if "all" in options.mode and not on_gpu:
        note("--mode all: skipping cuda-graphs, which needs an NVIDIA GPU")
    modes = chosen_modes(runners or usual, options.mode, on_gpu=on_gpu)
    if modes == [ENGINE] and (idle := [name for name in ENGINE_LIMITS if name in given and name != "batch_size"]):
        raise SettingError(f"--{axes()[idle[0]].flag} is for --runner generate: leave it out")
    return modes


def _profile(requests: list[Request], modes: list[tuple[Mode, Settings]], options: Options) -> None:
    """Profile each mode; write and print the summaries, also those of the finished modes if a later one fails."""
    from panscan.bench.run import new_directory
    from panscan.inspect.profile.capture import CaptureOptions
    from panscan.inspect.profile.run import profile_modes

    wanted = CaptureOptions(options.record_shapes, options.memory, options.stacks)
    profiles: list[Profiled] = []
    folder = new_directory(options.output_dir, modes[0][1].model_name)
    try:
        for profiled in profile_modes(requests, modes, folder, wanted):
            profiles.append(profiled)
    finally:  # an error, of whatever kind, ends the command after the finished modes are shown
        if profiles:
            _print_profiles(profiles, folder, as_json=options.json)


def _print_profiles(profiles: list[Profiled], folder: Path, *, as_json: bool) -> None:
    """Summarise finished profiles: write the results into their folder, and print them."""
    from panscan.inspect.profile.results import printed, summary_of, to_document, write_results

    with activity("summarising the traces"):
        modes = [(profiled, summary_of(profiled, compared=len(profiles) > 1)) for profiled in profiles]
        page = write_results(folder, modes, title=f"Profile of {profiles[0].facts['model']}")
    if as_json:
        traces = {profiled.mode.name: str(profiled.trace) for profiled in profiles}
        print_json({"directory": str(folder), "traces": traces, "modes": to_document(modes)})
        return
    for line in printed(modes, width=out().width if out().is_terminal else 120):
        show(line)
    out().print("")
    for profiled in profiles:
        show(f"trace: {profiled.trace}")
    show(f"page: {page}")
