"""``panscan plan``: which layout of a model fits on which GPUs, and how fast it would be, without the hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from panscan.cli.console import print_json
from panscan.cli.values import given_values, print_skipped
from panscan.cli.verb import verb
from panscan.core import SettingError, UnsupportedError
from panscan.core.activity import activity
from panscan.core.option import shorten
from panscan.load.options import parse_goodput
from panscan.settings import Options, Settings, axes

if TYPE_CHECKING:
    from panscan.plan.fleet import Traffic
    from panscan.plan.gpus import Gpu
    from panscan.plan.layouts import PlanInputs
    from panscan.plan.mix import WorkloadMix
    from panscan.plan.models import PlannedModel


_DEFAULT_VIEWS = "4"
_DEFAULT_GOODPUT = ("ttft:2000", "tpot:50")

EPILOG = """\
GPU figures are GB (10^9 bytes), GB/s, TFLOP/s and TOP/s. See docs/plan.md.

\b
Examples
  panscan plan --model 27b --gpu a100-40gb --count 10
  panscan plan --model 27b --gpu a100-40gb --count 10 --images "scans/*.png" --max-new-tokens 64
  panscan plan --model 12b --gpu l4 --goal latency --quantization none,int8
  panscan plan --model 27b --gpu h200 --request-rate 20 --goodput ttft:2000,tpot:50 --view-mix 1:10,3:50,5:25
  panscan plan --model 4b --gpu memory=24,bandwidth=936,bf16=71,int8=142,link=32
"""


@verb("plan", EPILOG)
def command(options: Options) -> int:
    """Predict which layouts of a model fit on GPUs, how fast they are, and which one to run.

    A layout is a number of replicas, GPUs per replica (tensor parallelism) and the data type of the weights. With
    --request-rate, a simulation of the engine's scheduler finds the number of replicas that meet --goodput.
    """
    from panscan.cli.plan_tables import no_fit_message, no_fleet_message, print_answer
    from panscan.plan.advice import PlanAnswer, answer_data
    from panscan.plan.layouts import find_layouts
    from panscan.plan.models import model_named

    if options.request_rate is None and options.goodput:
        raise SettingError("--goodput needs --request-rate")
    limits = parse_goodput(options.goodput or _DEFAULT_GOODPUT)
    if not limits:
        raise SettingError("--goodput has no limit: give one such as ttft:2000")
    model = model_named(options.planned_model)
    inputs = _plan_inputs(model, options)
    answer = PlanAnswer(model, inputs, find_layouts(inputs), options.gpu_count)
    if options.request_rate is not None and answer.fitting:
        traffic = _traffic(options, options.request_rate, limits)
        from panscan.plan.fleet import size_fleets

        fleets = size_fleets(answer.inputs, answer.simulated, traffic)
        answer = replace(answer, traffic=traffic, fleets=tuple(fleets))
    if options.json:
        print_json(answer_data(answer))
    else:
        print_answer(answer)
    if answer.advice is None:
        raise UnsupportedError(no_fit_message(answer))
    if answer.unmet:
        raise UnsupportedError(no_fleet_message(answer))
    return 0


def _plan_inputs(model: PlannedModel, options: Options) -> PlanInputs:
    from panscan.engine.options import EngineOptions
    from panscan.plan.gpus import all_gpus, gpu_named
    from panscan.plan.layouts import GPUS_PER_HOST, PlanInputs

    given = given_values(options)
    sizes = {name: value for name, value in given.items() if "pan_and_scan" not in name and value is not None}
    head, tower = sizes.pop("quantize_head", None), sizes.pop("quantize_vision", None)
    if tower is not None and model.shape.vision is None:
        raise SettingError(f"--quantize-vision {tower}: the model reads text only; leave it out")
    ceilings, count = None, options.gpu_count
    if options.measure:
        gpu, ceilings, here = _this_machine(options.gpu)
        count = count or here
    elif options.gpu is None:
        known = ", ".join(all_gpus())
        raise SettingError(f"--gpu is missing: give a GPU, or --measure for this machine's; known: {known}")
    else:
        gpu = gpu_named(options.gpu)
    if gpu.capability is None and (options.gpu_count or 1) > 1:
        raise SettingError(f"--count {options.gpu_count}: a plan for a CPU is for one machine: remove --count")
    return PlanInputs(
        shape=model.shape,
        gpu=gpu,
        mix=_request_mix(model, options, given),
        options=EngineOptions(**sizes),
        kinds=options.weight_kinds,
        quantize_head=head,
        quantize_vision=tower,
        goal=options.goal,
        ceilings=ceilings,
        count=count or (1 if options.request_rate is None else GPUS_PER_HOST),
    )


def _request_mix(model: PlannedModel, options: Options, given: Mapping[str, Any]) -> WorkloadMix:
    """Return the requests: pages of --images, or views of --view-mix."""
    from panscan.plan.mix import mix_of_sizes, mix_of_views, parse_output_tokens

    crops = Settings(**{name: value for name, value in given.items() if "pan_and_scan" in name})
    if options.images and options.view_mix is not None:
        raise SettingError("--images and --view-mix exclude each other: views are counted on the images")
    if crops.changed() and not options.images:
        raise SettingError(f"--{axes()[next(iter(crops.changed()))].flag} needs --images; --view-mix counts views")
    lengths = parse_output_tokens(options.answer_lengths)
    if options.images:
        from panscan.core import ImageError
        from panscan.images.files import find_pages, image_size

        sizes = []
        for page in find_pages(options.images, on_problem=print_skipped, max_pages=options.max_pages):
            try:
                sizes.append(image_size(page))
            except ImageError as problem:
                print_skipped(problem)
        mix = mix_of_sizes(
            sizes,
            model.shape,
            crops.pan_and_scan,
            text_tokens=options.text_tokens,
            output_tokens=lengths,
        )
    else:
        default = _DEFAULT_VIEWS if model.shape.vision is not None else "0"
        views = default if options.view_mix is None else options.view_mix
        mix = mix_of_views(views, model.shape, text_tokens=options.text_tokens, output_tokens=lengths)
    return replace(mix, image_reuse=options.image_reuse)


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
        measured = measure_ceilings(device, resolve_dtype("auto", device))
    gpu = replace(gpu, memory_bytes=memory, label=name if facts else "this machine's CPU", note="")
    return gpu, (measured.flops_per_s, measured.bytes_per_s), max(1, len(facts))


def _traffic(options: Options, rate: float, limits: Mapping[str, float]) -> Traffic:
    from panscan.load.options import gamma_arrivals
    from panscan.plan.fleet import Traffic

    seed = options.seed % 2**63  # NumPy takes no negative seeds

    def arrivals(rate: float, count: int) -> list[float]:
        return gamma_arrivals(rate, count, options.burstiness, seed)

    return Traffic(
        rate=rate,
        limits=limits,
        attainment=options.goodput_attainment,
        arrivals=arrivals,
        seed=options.seed,
    )
