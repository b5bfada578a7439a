"""``panscan plan``: which layout of a model fits on which GPUs, and how fast it would be, without the hardware."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from panscan.cli.console import echo, errors, show_warnings
from panscan.cli.options import SEED, InRange, axis_options, common_options, given_values, max_pages_option, url_options
from panscan.cli.verb import option, verb
from panscan.core import SettingError, UnsupportedError
from panscan.core.activity import activity
from panscan.core.ranges import Range, shorten
from panscan.load.options import GOODPUT_METRICS, LOAD_RANGES, RATE, parse_goodput
from panscan.settings import WEIGHT_KINDS, nearest

if TYPE_CHECKING:
    from panscan.plan.answer import PlanAnswer
    from panscan.plan.fleet import Traffic
    from panscan.plan.gpus import Gpu
    from panscan.plan.layouts import PlanInputs
    from panscan.plan.mix import WorkloadMix
    from panscan.plan.models import PlannedModel

__all__ = ["command"]

_SIZES = (
    "max_num_seqs",
    "prefill_chunk_size",
    "gpu_memory_utilization",
    "gpu_memory_gb",
    "kv_cache_gb",
    "kv_cache_dtype",
    "vision_cache_gb",
    "vision_batch_size",
)
_PAN_AND_SCAN = (
    "do_pan_and_scan",
    "pan_and_scan_min_crop_size",
    "pan_and_scan_max_num_crops",
    "pan_and_scan_min_ratio_to_activate",
)
_COUNT = Range(integer=True, ge=1, le=4096)
_TEXT_TOKENS = Range(integer=True, ge=1, le=1_000_000)
_DEFAULT_VIEWS = "4"
_DEFAULT_GOODPUT = ("ttft:2000", "tpot:50")

EPILOG = """\
GPU figures are GB (10^9 bytes), GB/s, TFLOP/s and TOP/s. See docs/plan.md.

\b
Examples
  panscan plan --model 27b --gpu a100-40gb --count 10
  panscan plan --model 27b --gpu a100-40gb --count 10 --images "scans/*.png" --output-tokens 64
  panscan plan --model 12b --gpu l4 --goal latency --quantization none,int8
  panscan plan --model 27b --gpu h200 --request-rate 20 --goodput ttft:2000,tpot:50 --view-mix 1:10,3:50,5:25
  panscan plan --model 4b --gpu memory=24,bandwidth=936,bf16=71,int8=142,link=32
"""

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _load_option(name: str, text: str, **extra: Any) -> Callable[[_Command], _Command]:
    """Return an option that means the same as in panscan load."""
    flag = f"--{name.replace('_', '-')}"
    return option("Traffic", flag, type=InRange(LOAD_RANGES[name]), metavar="NUMBER", help=text, **extra)


@verb("plan", EPILOG)
@click.argument("words", nargs=-1, metavar="")
@option("Model", "--model", required=True, metavar="NAME", help="Size (27b), hub id, or directory.")
@option("Model", "--gpu", metavar="NAME|SPEC", help="GPU name, or a specification (see below).")
@option("Model", "--count", type=InRange(_COUNT), metavar="INT", help="GPUs.  [default: 1; with --request-rate: any]")
@option("Model", "--measure", is_flag=True, help="Measure this machine's GPU or CPU (needs PyTorch).")
@option(
    "Measurement",
    "--goal",
    type=click.Choice(["throughput", "latency"]),
    default="throughput",
    show_default=True,
    help="Goal to optimise.",
)
@option("Model", "--quantization", metavar="KINDS", help="Weights: none, fp8, int8, int4.  [default: all]")
@option("Input", "--images", multiple=True, metavar="PATH", help="Glob, directory, file (PDF too) or URL; repeatable.")
@option("Input", "--view-mix", metavar="MIX", help="Views per page, with relative shares: 1:20,3:50.  [default: 4]")
@option(
    "Input",
    "--text-tokens",
    type=InRange(_TEXT_TOKENS),
    metavar="INT",
    default=42,
    show_default=True,
    help="Tokens of the question and the chat template.",
)
@option(
    "Generation", "--output-tokens", default="256", show_default=True, metavar="N|A-B", help="Answer length, tokens."
)
@option("Traffic", "--request-rate", type=InRange(RATE), metavar="RATE", help="Load to size a fleet for, requests/s.")
@option(
    "Traffic", "--goodput", multiple=True, metavar="METRIC:MS...", help="Limits in ms.  [default: ttft:2000 tpot:50]"
)
@_load_option("goodput_attainment", "Share of requests that must meet the limits.", default=0.95, show_default=True)
@_load_option("burstiness", "Gamma shape of arrivals; below 1 is burstier.", default=1.0, show_default=True)
@_load_option("image_reuse", "Share of requests that repeat an image.", default=0.0, show_default=True)
@option(
    "Traffic",
    "--seed",
    type=SEED,
    metavar="INT",
    default=0,
    show_default=True,
    help="Seed of arrivals, pages and lengths.",
)
@option("Output", "--json", "as_json", is_flag=True, help="Print one JSON object.")
@url_options
@max_pages_option
@axis_options((*_SIZES, *_PAN_AND_SCAN), texts={"prefill_chunk_size": "Prompt tokens per pass."})
@common_options
def command(**options: Any) -> int:
    """Predict which layouts of a model fit on GPUs, how fast they are, and which one to run.

    A layout is a number of replicas, GPUs per replica (tensor parallelism) and the data type of the weights. With
    --request-rate, a simulation of the engine's scheduler finds the number of replicas that meet --goodput.
    """
    from panscan.cli.plan_tables import no_fit_message, no_fleet_message, print_answer
    from panscan.plan.answer import PlanAnswer, answer_data
    from panscan.plan.layouts import find_layouts
    from panscan.plan.models import model_named

    show_warnings(errors())
    limits = _limits(options)
    model = model_named(options["model"])
    inputs = _inputs(model, options)
    found = PlanAnswer(model, inputs, find_layouts(inputs), options["count"])
    if options["request_rate"] is not None and found.fitting:
        found = _with_fleets(found, _traffic(options, limits))
    if options["as_json"]:
        echo(json.dumps(answer_data(found), indent=2))
    else:
        print_answer(found)
    if found.advice is None:
        raise UnsupportedError(no_fit_message(found))
    if found.unmet:
        raise UnsupportedError(no_fleet_message(found))
    return 0


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
    limits = parse_goodput([*options["goodput"], *words] or _DEFAULT_GOODPUT)
    if not limits:
        raise SettingError("--goodput has no limit: give one such as ttft:2000")
    return limits


def _inputs(model: PlannedModel, options: Mapping[str, Any]) -> PlanInputs:
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
    if gpu.capability is None and (options["count"] or 1) > 1:
        raise SettingError(f"--count {options['count']}: a plan for a CPU is for one machine: remove --count")
    return PlanInputs(
        shape=model.shape,
        gpu=gpu,
        mix=_mix(model, options, given),
        options=EngineOptions(**sizes),
        kinds=_kinds(options["quantization"]),
        goal=options["goal"],
        ceilings=ceilings,
        count=count or (1 if options["request_rate"] is None else GPUS_PER_HOST),
    )


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
            _page_sizes(options),
            model.shape,
            crops.pan_and_scan,
            text_tokens=options["text_tokens"],
            output_tokens=lengths,
        )
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
        SettingError: --gpu names a GPU, or this machine's is unknown and --gpu has no specification.
    """
    import psutil

    from panscan.model.ceilings import measure_ceilings
    from panscan.model.machine import gpu_facts, resolve_device, resolve_dtype
    from panscan.plan.gpus import gpu_named, reported_gpu

    if named is not None and "=" not in named:
        raise SettingError(f"--measure takes this machine's GPU: remove --gpu {shorten(named)}")
    facts = gpu_facts()
    name = facts[0]["name"] if facts else "cpu"
    memory = facts[0]["memory_bytes"] if facts else psutil.virtual_memory().total
    gpu = reported_gpu(name, memory) if facts and named is None else gpu_named(named or "cpu")
    if gpu is None:
        raise SettingError(f"--measure: {name} is not a known GPU; add --gpu with a specification")
    with activity("measuring this machine"):
        device = resolve_device("auto")
        found = measure_ceilings(device, resolve_dtype("auto", device))
    gpu = replace(gpu, memory_bytes=memory, label=name if facts else "this machine's CPU", note="")
    return gpu, (found.flops_per_s, found.bytes_per_s), max(1, len(facts))


def _traffic(options: Mapping[str, Any], limits: Mapping[str, float]) -> Traffic:
    from panscan.load.arrivals import GammaArrivals
    from panscan.plan.fleet import Traffic

    seed = options["seed"] % 2**63  # NumPy takes no negative seeds

    def arrivals(rate: float, count: int) -> list[float]:
        return GammaArrivals(rate, options["burstiness"], seed).times(count)

    return Traffic(
        rate=options["request_rate"],
        limits=limits,
        attainment=options["goodput_attainment"],
        arrivals=arrivals,
        seed=options["seed"],
    )


def _with_fleets(found: PlanAnswer, traffic: Traffic) -> PlanAnswer:
    """Return the answer with the fleets of the recommended kind of weights."""
    from panscan.plan.fleet import size_fleets

    with activity("simulating the scheduler") as step:
        fleets = size_fleets(found.inputs, found.simulated, traffic, on_progress=step.rename)
    return replace(found, traffic=traffic, fleets=tuple(fleets))
