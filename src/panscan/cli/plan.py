"""``panscan plan``: which layout of a model fits on which GPUs, and how fast it would be, without the hardware."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from panscan.cli.options import (
    SEED,
    InRange,
    axis_options,
    common_options,
    echo,
    errors,
    given_values,
    max_pages_option,
    out,
    show_warnings,
    url_options,
)
from panscan.core import SettingError, UnsupportedError
from panscan.core.ranges import Range, shorten
from panscan.load.options import GOODPUT_METRICS, LOAD_RANGES, RATE, parse_goodput
from panscan.settings import WEIGHT_KINDS, nearest

if TYPE_CHECKING:
    from panscan.plan.advice import Caution, LayoutAdvice, Rejection
    from panscan.plan.efficiency import Interval
    from panscan.plan.fleet import Fleet, FleetLevel, Traffic
    from panscan.plan.gpus import Gpu
    from panscan.plan.layouts import Layout, PlanInputs
    from panscan.plan.mix import WorkloadMix
    from panscan.plan.models import PlannedModel

__all__ = ["command"]

_SIZES = (
    "max_num_seqs", "prefill_chunk_size", "gpu_memory_utilization", "gpu_memory_gb", "kv_cache_gb", "kv_cache_dtype",
    "vision_cache_gb", "vision_batch_size",
)  # fmt: skip
_PAN_AND_SCAN = (
    "do_pan_and_scan", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate",
)  # fmt: skip
_COUNT = Range(whole=True, least=1, most=4096)
_TEXT_TOKENS = Range(whole=True, least=1, most=1_000_000)
_DEFAULT_VIEWS = "4"
_DEFAULT_GOODPUT = ("ttft:2000", "tpot:50")
_WIDTH = 118  # characters of a table that does not go to a terminal

EPILOG = """\b
Examples
  panscan plan --model 27b --gpu a100-40gb --count 10
  panscan plan --model 27b --gpu a100-40gb --count 10 --images "scans/*.png" --output-tokens 64
  panscan plan --model 12b --gpu l4 --goal latency --quantization none,int8
  panscan plan --model 27b --gpu h200 --request-rate 20 --goodput ttft:2000,tpot:50 --view-mix 1:10,3:50,5:25
  panscan plan --model 4b --gpu memory=24,bandwidth=936,bf16=71,int8=142,link=32

GPU figures are GB (10^9 bytes), GB/s, TFLOP/s and TOP/s. docs/plan.md explains the figures and their limits.
"""

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _load_option(name: str, text: str, **extra: Any) -> Callable[[_Command], _Command]:
    """Return an option that means the same as in panscan load."""
    return click.option(f"--{name.replace('_', '-')}", type=InRange(LOAD_RANGES[name]), help=text, **extra)


@click.command("plan", epilog=EPILOG, short_help="Predict which layouts fit and how fast they are.")
@click.argument("words", nargs=-1, metavar="")
@click.option("--model", required=True, help="Size (27b), hub id, or directory with a config.json.")
@click.option("--gpu", help="GPU name, or a specification (see below).")
@click.option("--count", type=InRange(_COUNT), help="Number of GPUs.  [default: 1; with --request-rate: any]")
@click.option("--measure", is_flag=True, help="Use this machine's measured ceilings (imports torch).")
@click.option("--goal", type=click.Choice(["throughput", "latency"]), default="throughput", show_default=True,
              help="Maximise requests/s, or minimise the time of one request.")  # fmt: skip
@click.option("--quantization", metavar="KINDS", help="Weights to consider: none, fp8, int8, int4.  [default: all]")
@click.option("--images", multiple=True, help="Glob, directory, file (PDF too) or URL; may be repeated.")
@click.option("--view-mix", metavar="MIX", help="Views per page, with shares: 1:20,3:50,5:30.  [default: 4]")
@click.option("--text-tokens", type=InRange(_TEXT_TOKENS), default=42, show_default=True,
              help="Prompt tokens besides the image's.")  # fmt: skip
@click.option("--output-tokens", default="256", show_default=True, metavar="N|A-B", help="Answer length, or a range.")
@click.option("--request-rate", type=InRange(RATE), help="Requests/s: size a fleet for this load.")
@click.option("--goodput", multiple=True, metavar="METRIC:MS...", help="Limits in ms.  [default: ttft:2000 tpot:50]")
@_load_option("goodput_attainment", "Share of requests that must meet the limits.", default=0.95, show_default=True)
@_load_option("burstiness", "Gamma shape of arrivals; below 1 is burstier.", default=1.0, show_default=True)
@_load_option("image_reuse", "Share of requests that repeat an image.", default=0.0, show_default=True)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Seed for arrivals, pages and lengths.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@url_options
@max_pages_option
@axis_options((*_SIZES, *_PAN_AND_SCAN))
@common_options
def command(**options: Any) -> int:
    """Predict which layouts of a model fit on GPUs, how fast they are, and which one to run.

    A layout is a number of replicas, GPUs per replica (tensor parallelism) and the data type of the weights. With
    --request-rate, a simulation of the engine's scheduler finds the number of replicas that meet --goodput.
    """
    from panscan.plan.layouts import find_layouts
    from panscan.plan.models import model_named

    show_warnings(errors())
    limits = _limits(options)
    model = model_named(options["model"])
    inputs = _question(model, options)
    found = _Answer(model, inputs, find_layouts(inputs))
    if options["request_rate"] is not None and found.fitting:
        found = _with_fleets(found, _traffic(options, limits))
    if options["as_json"]:
        echo(json.dumps(_as_data(found), indent=2))
    else:
        _print(found)
    if found.advice is None:
        raise UnsupportedError(_no_fit(found))
    return 0


@dataclass(frozen=True, slots=True)
class _Answer:
    """A inputs with its layouts; with traffic, also with fleets, best first."""

    model: PlannedModel
    inputs: PlanInputs
    layouts: list[Layout]
    traffic: Traffic | None = None
    fleets: tuple[Fleet, ...] = ()

    @property
    def fitting(self) -> list[Layout]:
        return [each for each in self.layouts if each.speed is not None]

    @property
    def advice(self) -> LayoutAdvice | None:
        """The recommendation; with fleets, the one with the fewest GPUs."""
        from panscan.plan.advice import advise
        from panscan.plan.fleet import with_replicas

        found = advise(self.layouts, self.inputs.goal)
        if found is None or not self.fleets:
            return found
        return replace(found, layout=with_replicas(self.fleets[0]), faster=None, gain=None)

    @property
    def rejections(self) -> list[Rejection]:
        from panscan.plan.advice import rejections

        return rejections(self.layouts)

    @property
    def cautions(self) -> list[Caution]:
        from panscan.plan.advice import warnings_for

        return warnings_for(self.inputs, self.layouts)

    def command(self, verb: str, layout: Layout) -> str:
        """The command line that runs a layout."""
        from panscan.plan.advice import command_words

        inputs = self.inputs
        reads = inputs.shape.vision is not None
        words = command_words(verb, layout, self.model.id, inputs.options, inputs.gpu, reads_images=reads)
        return shlex.join(words)


def _limits(options: Mapping[str, Any]) -> dict[str, float]:
    """Return the limits of --goodput; click parses its second and later values as arguments.

    Raises:
        SettingError: another argument, or limits without --request-rate.
    """
    words = list(options["words"])
    for word in words:
        if word.partition(":")[0] not in GOODPUT_METRICS or not options["goodput"]:
            raise SettingError(f"unexpected argument {shorten(word)}: panscan plan takes options only")
    if options["request_rate"] is None and options["goodput"]:
        raise SettingError("--goodput needs --request-rate")
    return parse_goodput([*options["goodput"], *words] or _DEFAULT_GOODPUT)


def _question(model: PlannedModel, options: Mapping[str, Any]) -> PlanInputs:
    from panscan.engine.options import EngineOptions
    from panscan.plan.gpus import all_gpus, gpu_named
    from panscan.plan.layouts import GPUS_PER_HOST, PlanInputs

    given = given_values(options)
    sizes = {name: value for name, value in given.items() if name in _SIZES and value is not None}
    ceilings, count = None, options["count"]
    if options["measure"]:
        gpu, ceilings, here = _this_machine(options["gpu"])
        count = count or here
    elif options["gpu"] is None:
        known = ", ".join(all_gpus())
        raise SettingError(f"--gpu is missing: give a GPU, or --measure for this machine's; known: {known}")
    else:
        gpu = gpu_named(options["gpu"])
    return PlanInputs(
        shape=model.shape, gpu=gpu, mix=_mix(model, options, given), options=EngineOptions(**sizes),
        kinds=_kinds(options["quantization"]), goal=options["goal"], ceilings=ceilings,
        count=count or (1 if options["request_rate"] is None else GPUS_PER_HOST),
    )  # fmt: skip


def _mix(model: PlannedModel, options: Mapping[str, Any], given: Mapping[str, Any]) -> WorkloadMix:
    """Return the requests: pages of --images, or views of --view-mix."""
    from panscan.plan.mix import mix_of_sizes, mix_of_views, parse_output_tokens
    from panscan.settings import Settings

    crops = Settings(**{name: value for name, value in given.items() if name in _PAN_AND_SCAN})
    if options["images"] and options["view_mix"] is not None:
        raise SettingError("--images and --view-mix exclude each other: views are counted on the images")
    if crops.changed() and not options["images"]:
        raise SettingError(f"--{next(iter(crops.changed())).replace('_', '-')} needs --images; --view-mix counts views")
    lengths = parse_output_tokens(options["output_tokens"])
    if options["images"]:
        found = mix_of_sizes(
            _page_sizes(options), model.shape, crops.pan_and_scan, text_tokens=options["text_tokens"],
            output_tokens=lengths,
        )  # fmt: skip
    else:
        default = _DEFAULT_VIEWS if model.shape.vision is not None else "0"
        views = default if options["view_mix"] is None else options["view_mix"]
        found = mix_of_views(views, model.shape, text_tokens=options["text_tokens"], output_tokens=lengths)
    return replace(found, image_reuse=options["image_reuse"])


def _page_sizes(options: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return width and height of each readable page, in pixels."""
    from panscan.core import ImageError
    from panscan.images.files import find_pages, image_size

    def report(problem: ImageError) -> None:
        errors().print(f"skipped: {problem}", style="yellow", soft_wrap=True)

    sizes = []
    for page in find_pages(options["images"], on_problem=report, max_pages=options["max_pages"]):
        try:
            sizes.append(image_size(page))
        except ImageError as problem:
            report(problem)
    return sizes


def _kinds(text: str | None) -> tuple[str | None, ...]:
    """Return the kinds of weights of --quantization; None stands for unquantised ones.

    Raises:
        SettingError: an unknown kind, or one that is given twice.
    """
    if text is None:
        return (None, *WEIGHT_KINDS)
    known = ("none", *WEIGHT_KINDS)
    words = [word.strip().lower() for word in text.split(",")]
    for word in words:
        if word not in known:
            raise SettingError(
                f"--quantization: unknown kind {shorten(word)}{nearest(word, known)}; expected {', '.join(known)}"
            )
    if len(set(words)) < len(words):
        raise SettingError(f"--quantization {shorten(text)}: a kind is given twice")
    return tuple(None if word == "none" else word for word in words)


def _this_machine(named: str | None) -> tuple[Gpu, tuple[float, float], int]:
    """Return this machine's GPU (or CPU), its measured FLOP/s and bytes/s, and the number of GPUs.

    Raises:
        SettingError: --gpu names another GPU, or this one is unknown and --gpu is missing.
    """
    from panscan.model.ceilings import measure_ceilings
    from panscan.model.machine import gpu_facts, resolve_device, resolve_dtype
    from panscan.plan.gpus import gpu_named

    with errors().status("measuring this machine"):
        device = resolve_device("auto")
        found = measure_ceilings(device, resolve_dtype("bf16", device))
    facts = gpu_facts()
    name = facts[0]["name"] if facts else "cpu"
    try:
        gpu = gpu_named(named or name)
    except SettingError as error:
        if named is not None:
            raise
        raise SettingError(f"--measure: {name} is not a known GPU; add --gpu with a specification ({error})") from error
    if facts:
        gpu = replace(gpu, memory_bytes=facts[0]["memory_bytes"])
    return gpu, (found.flops_per_s, found.bytes_per_s), max(1, len(facts))


def _traffic(options: Mapping[str, Any], limits: Mapping[str, float]) -> Traffic:
    from panscan.load.arrivals import GammaArrivals
    from panscan.plan.fleet import Traffic

    def arrivals(rate: float, count: int) -> list[float]:
        return GammaArrivals(rate, options["burstiness"], options["seed"]).times(count)

    return Traffic(
        rate=options["request_rate"], limits=limits, attainment=options["goodput_attainment"], arrivals=arrivals,
        seed=options["seed"],
    )  # fmt: skip


def _with_fleets(found: _Answer, traffic: Traffic) -> _Answer:
    """Return the answer with the fleets of the recommended kind of weights."""
    from panscan.plan.fleet import size_fleets

    kind = found.advice.layout.variant.weights if found.advice is not None else None
    layouts = [each for each in found.fitting if each.variant.weights == kind]
    with errors().status("simulating the scheduler") as status:
        fleets = size_fleets(found.inputs, layouts, traffic, on_progress=status.update)
    return replace(found, traffic=traffic, fleets=tuple(fleets))


def _no_fit(found: _Answer) -> str:
    """Return why nothing fits, and what would."""
    from panscan.plan.advice import what_would_fit

    inputs = found.inputs
    what = f"{found.model.id} fits on {inputs.count} x {inputs.gpu.label} in no layout"
    changes = what_would_fit(inputs)
    return f"{what}; {'this would fit: ' + ' or '.join(changes) if changes else 'no change of GPUs or weights fits'}"


def _print(found: _Answer) -> None:
    """Print the recommendation with its commands, the table, what does not fit, and warnings."""
    lines = [*_headline(found), "", *_requests_lines(found)]
    for line in lines:
        out().print(line, soft_wrap=True)
    if found.fleets:
        _print_table(_FLEET_HEADINGS, [_fleet_row(each) for each in found.fleets])
    if found.fitting and not found.fleets:
        _print_table(_HEADINGS, [_layout_row(each) for each in found.fitting])
    for each in found.rejections:
        sizes = " or ".join(map(str, each.tensor_parallel_sizes))
        plural = "s" if each.tensor_parallel_sizes != (1,) else ""
        out().print(f"not possible: {each.weights} on {sizes} GPU{plural} per replica: {each.reason}", soft_wrap=True)
    for caution in found.cautions:
        out().print(f"note: {caution.text}", style="yellow", soft_wrap=True)
    if found.fitting:
        out().print(f"basis: {_basis(found)}", style="dim", soft_wrap=True)


def _headline(found: _Answer) -> list[str]:
    """Return the recommendation and its commands."""
    advice, inputs = found.advice, found.inputs
    if advice is None:
        return [f"No layout of {found.model.id} fits on {inputs.count} x {inputs.gpu.label}."]
    if not found.fleets:
        lines = [
            f"Recommended: {_named(found, advice.layout)}: {_promise(found, advice.layout)}.",
            f"Rule: {advice.rule}.",
        ]
    else:
        lines = [_fleet_sentence(found), f"Rule: fewest GPUs; {advice.rule}."]
        if found.fleets[0].replicas is None:
            return lines[:1]
    lines += ["", *(f"  {found.command(verb, advice.layout)}" for verb in _verbs(found))]
    if advice.faster is not None and advice.gain is not None:
        better = "the requests/s" if inputs.goal == "throughput" else "the speed of one request"
        lines += [
            "",
            f"Faster, but not exact: {_named(found, advice.faster)}: {_promise(found, advice.faster)}, {advice.gain:.1f}x"
            f" {better}. {_INEXACT}",
            "",
            f"  {found.command(_verbs(found)[0], advice.faster)}",
        ]
    return lines


_INEXACT = (
    "Quantised weights may change answers: docs/quantization.md has accuracy figures; measure yours with panscan bench."
)


def _verbs(found: _Answer) -> tuple[str, ...]:
    return ("serve", "batch") if found.inputs.shape.vision is not None else ("serve",)


def _named(found: _Answer, layout: Layout) -> str:
    """Return a layout in words: replicas, GPUs per replica, weights."""
    copies = "1 replica" if layout.replicas == 1 else f"{layout.replicas} replicas, each"
    exact = "exact" if layout.exact else "not exact"
    idle = found.inputs.count - layout.gpus
    rest = f"; {idle} GPU{'s stay' if idle > 1 else ' stays'} idle" if idle > 0 and not found.fleets else ""
    size, label = layout.variant.tensor_parallel_size, found.inputs.gpu.label
    return f"{copies} on {size} x {label}, {_weights(layout)} weights ({exact}{rest})"


def _weights(layout: Layout) -> str:
    return layout.variant.weights or layout.variant.dtype


def _promise(found: _Answer, layout: Layout) -> str:
    """Return the figure that the goal is about."""
    assert layout.speed is not None  # it fits
    if found.inputs.goal == "latency":
        return f"about {_seconds(layout.speed.e2e)} for one request alone"
    return f"about {_rate(layout.speed.requests_per_s)} requests/s"


def _fleet_sentence(found: _Answer) -> str:
    from panscan.plan.fleet import with_replicas

    best, traffic = found.fleets[0], found.traffic
    assert traffic is not None  # there are fleets
    limits = ", ".join(f"{name.upper()} {limit:g} ms" for name, limit in traffic.limits.items())
    goal = f"{traffic.rate:g} requests/s with {traffic.attainment:.0%} within {limits}"
    if best.replicas is None:
        alone = f"a request alone has {_latencies(best.level)}"
        return f"No number of replicas meets {goal}: {alone}. Relax the limits, or compare --quantization."
    low, high = best.replicas_range
    most = "more than 256" if high is None else high
    spread = "" if low == high else f" ({low} to {most} replicas within the range of the prediction)"
    layout = with_replicas(best)
    return (
        f"For {goal}: {_named(found, layout)}, {best.gpus} GPUs in all{spread}. Expected: {_latencies(best.level)};"
        f" breaks at about {best.breaks_at:.3g} requests/s."
    )


def _latencies(level: FleetLevel) -> str:
    found = {name: level.percentiles_ms[key] for key, name in _TIMES.items()}
    return ", ".join(f"{name} p95 {times[95]:,.0f} ms" for name, times in found.items() if times)


_TIMES = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E"}


def _requests_lines(found: _Answer) -> list[str]:
    """Return what the requests are, in one line."""
    mix = found.inputs.mix
    least, most = mix.output_tokens
    lengths = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    return [
        f"Requests: {mix.mean_views:.3g} views, {mix.mean_prompt_tokens:,.0f} prompt tokens (means), {lengths} output"
        " tokens. In parentheses: range of the prediction."
    ]


_HEADINGS = (
    "replicas\nx GPUs", "weights", "weights\nGB/GPU", "KV cache\nGB/GPU", "requests\nat once", "TTFT ms\nalone",
    "TPOT ms\nalone", "TPOT ms\nfull", "requests/s\nfull", "limits of\nprefill / decode",
)  # fmt: skip
_FLEET_HEADINGS = (
    "GPUs per\nreplica", "weights", "replicas", "GPUs", "one replica\nreq/s", "breaks at\nreq/s", "TTFT p95\nms",
    "TPOT p95\nms", "E2E p95\nms", "within\nlimits",
)  # fmt: skip


def _layout_row(layout: Layout) -> tuple[str, ...]:
    speed, memory = layout.speed, layout.memory
    assert speed is not None  # it fits
    return (
        f"{layout.replicas} x {layout.variant.tensor_parallel_size}",
        _weights(layout) if layout.exact else f"{_weights(layout)} *",
        f"{memory.weights / 1e9:.1f}",
        f"{memory.kv_bytes / 1e9:.1f}",
        f"{layout.replicas * layout.running}",
        _milliseconds(speed.ttft),
        f"{1e3 * speed.tpot_alone.value:.1f}",
        f"{1e3 * speed.tpot_full.value:.0f}",
        _rate(speed.requests_per_s),
        f"{speed.prefill_bound} / {speed.decode_bound}",
    )


def _fleet_row(fleet: Fleet) -> tuple[str, ...]:
    level = fleet.level
    times = [f"{level.percentiles_ms[key][95]:,.0f}" if level.percentiles_ms[key] else "-" for key in _TIMES]
    return (
        str(fleet.layout.variant.tensor_parallel_size),
        _weights(fleet.layout) if fleet.layout.exact else f"{_weights(fleet.layout)} *",
        "none" if fleet.replicas is None else str(fleet.replicas),
        "-" if fleet.gpus is None else str(fleet.gpus),
        f"{fleet.rate_of_one:.3g}",
        f"{fleet.breaks_at:.3g}",
        *times,
        f"{level.goodput.attainment:.0%}",
    )


def _print_table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print a table; * marks quantised weights."""
    from rich import box
    from rich.table import Table

    console = out()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < 2 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    console.print(table)
    if any("*" in row[1] for row in rows):
        console.print("* not exact: quantised weights may change answers (docs/quantization.md)")


def _basis(found: _Answer) -> str:
    return "; ".join(dict.fromkeys(each.speed.basis for each in found.fitting if each.speed is not None))


def _milliseconds(interval: Interval) -> str:
    low, value, high = (f"{1e3 * each:,.0f}" for each in (interval.low, interval.value, interval.high))
    return f"{value} ({low}-{high})"


def _seconds(interval: Interval) -> str:
    return f"{interval.value:.2g} s ({interval.low:.2g}-{interval.high:.2g})"


def _rate(interval: Interval) -> str:
    return f"{interval.value:.3g} ({interval.low:.3g}-{interval.high:.3g})"


def _as_data(found: _Answer) -> dict[str, Any]:
    """Return everything as plain data, times in milliseconds."""
    inputs, advice = found.inputs, found.advice
    data: dict[str, Any] = {
        "model": found.model.id,
        "gpu": {"name": inputs.gpu.name, "label": inputs.gpu.label, "sources": list(inputs.gpu.sources)},
        "count": inputs.count,
        "goal": inputs.goal,
        "mix": asdict(inputs.mix),
        "recommended": None,
        "layouts": [_layout_data(each) for each in found.fitting],
        "does_not_fit": [asdict(each) for each in found.rejections],
        "warnings": [asdict(each) for each in found.cautions],
        "fleets": [_fleet_data(each) for each in found.fleets],
    }
    if advice is not None:
        data["recommended"] = {
            **_layout_data(advice.layout),
            "rule": advice.rule,
            "commands": {verb: found.command(verb, advice.layout) for verb in _verbs(found)},
        }
        if advice.faster is not None:
            data["faster_not_exact"] = {**_layout_data(advice.faster), "gain": advice.gain}
    return data


def _layout_data(layout: Layout) -> dict[str, Any]:
    speed, variant = layout.speed, layout.variant
    assert speed is not None  # it fits
    times = ("ttft", "tpot_alone", "tpot_full", "e2e")
    return {
        "replicas": layout.replicas,
        "tensor_parallel_size": variant.tensor_parallel_size,
        "weights": _weights(layout),
        "exact": layout.exact,
        "memory": asdict(layout.memory),
        "requests_at_once_per_replica": layout.running,
        "requests_per_s": asdict(speed.requests_per_s),
        **{
            f"{name}_ms": {part: 1e3 * seconds for part, seconds in asdict(getattr(speed, name)).items()}
            for name in times
        },
        "prefill_bound": speed.prefill_bound,
        "decode_bound": speed.decode_bound,
        "prefill_share": speed.prefill_share,
        "basis": speed.basis,
        "measured": speed.measured,
    }


def _fleet_data(fleet: Fleet) -> dict[str, Any]:
    return {
        "tensor_parallel_size": fleet.layout.variant.tensor_parallel_size,
        "weights": _weights(fleet.layout),
        "exact": fleet.layout.exact,
        "replicas": fleet.replicas,
        "replicas_range": list(fleet.replicas_range),
        "gpus": fleet.gpus,
        "rate_of_one": fleet.rate_of_one,
        "breaks_at": fleet.breaks_at,
        "level": asdict(fleet.level),
    }
