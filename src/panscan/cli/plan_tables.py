"""What ``panscan plan`` prints: the recommendation, its commands, a table of layouts or fleets, and warnings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from panscan.analysis.cells import number_text
from panscan.cli.console import out
from panscan.plan.advice import PlanAnswer, rejections, warnings_for, what_would_fit
from panscan.plan.fleet import with_replicas
from panscan.report.formatting import percent

if TYPE_CHECKING:
    from panscan.plan.advice import Rejection
    from panscan.plan.efficiency import Interval
    from panscan.plan.fleet import Fleet, FleetLevel
    from panscan.plan.layouts import Layout

__all__ = ["no_fit_message", "no_fleet_message", "print_answer"]

_WIDTH = 118  # characters of a table: a narrower terminal wraps its lines, because cut figures would mislead


def no_fit_message(found: PlanAnswer) -> str:
    """Return why nothing fits, and what would."""
    inputs = found.inputs
    what = f"no layout of {found.model.id} fits on {inputs.count} x {inputs.gpu.label}"
    given = {"--kv-cache-gb": inputs.options.kv_cache_gb, "--gpu-memory-gb": inputs.options.gpu_memory_gb}
    if sizes := [f"{option} {size:g}" for option, size in given.items() if size is not None]:
        what += f" with {' and '.join(sizes)}"
    changes = what_would_fit(inputs)
    return f"{what}; {'this would fit: ' + ' or '.join(changes) if changes else 'no change of GPUs or weights fits'}"


def no_fleet_message(found: PlanAnswer) -> str:
    """Return why no fleet serves the requests."""
    goal, best = _goal(found), found.fleets[0]
    if best.rate_of_one > 0:
        one = number_text(best.rate_of_one)
        return f"{goal} would take more than 256 replicas: one meets it at {one} requests/s"
    alone = f"a request alone has {_latencies(best.level)}"
    return f"no number of replicas meets {goal}: {alone}; relax the limits, or compare --quantization"


def print_answer(found: PlanAnswer) -> None:
    """Print the recommendation with its commands, the table, what does not fit, and warnings."""
    lines = [*_headline(found), "", *_requests_lines(found)]
    for line in lines:
        out().print(line, soft_wrap=True)
    if found.fleets:
        _table_of(_FLEET_HEADINGS, [_fleet_row(each) for each in found.fleets])
        if missing := len(found.simulated) - len(found.fleets):
            out().print(f"not simulated: {missing} of {len(found.simulated)} layouts, which need as many GPUs or more")
    if found.fitting and not found.fleets:
        _table_of(_HEADINGS, [_layout_row(each) for each in found.fitting])
    for each in rejections(found.layouts):
        out().print(f"not possible: {_where(each)}: {each.reason}", soft_wrap=True)
    for caution in warnings_for(found.inputs, found.layouts):
        out().print(f"note: {caution.text}", style="yellow", soft_wrap=True)
    if found.fitting:
        out().print(f"basis: {_basis(found)}", style="dim", soft_wrap=True)


def _where(rejection: Rejection) -> str:
    """Return which layouts are meant, in words."""
    *sizes, last = map(str, rejection.tensor_parallel_sizes)
    listed = f"{', '.join(sizes)} or {last}" if sizes else last
    return f"{rejection.weights} on {listed} GPU{'s' if listed != '1' else ''} per replica"


def _headline(found: PlanAnswer) -> list[str]:
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
        if found.unmet:
            return lines[:1]
    lines += ["", *(f"  {found.command(verb, advice.layout)}" for verb in found.verbs)]
    if advice.faster is not None and advice.gain is not None:
        better = "the requests/s" if inputs.goal == "throughput" else "the speed of one request"
        lines += [
            "",
            f"Faster, but not exact: {_named(found, advice.faster)}: {_promise(found, advice.faster)},"
            f" {advice.gain:.1f}x {better}. {_INEXACT}",
            "",
            f"  {found.command(found.verbs[0], advice.faster)}",
        ]
    return lines


_INEXACT = (
    "Quantised weights may change answers: docs/quantization.md has accuracy figures; measure yours with panscan bench."
)


def _named(found: PlanAnswer, layout: Layout) -> str:
    """Return a layout in words: replicas, GPUs per replica, weights."""
    copies = "1 replica" if layout.replicas == 1 else f"{layout.replicas} replicas, each"
    exact = "exact" if layout.exact else "not exact"
    idle = found.inputs.count - layout.gpus
    rest = f"; {idle} GPU{'s stay' if idle > 1 else ' stays'} idle" if idle > 0 and not found.fleets else ""
    size, label = layout.variant.tensor_parallel_size, found.inputs.gpu.label
    return f"{copies} on {size} x {label}, {layout.variant.weights_name} weights ({exact}{rest})"


def _promise(found: PlanAnswer, layout: Layout) -> str:
    """Return the figure that the goal is about."""
    if found.inputs.goal == "latency":
        return f"about {_seconds(layout.speed.e2e)} for one request alone"
    return f"about {_rate(layout.speed.requests_per_s)} requests/s"


def _fleet_sentence(found: PlanAnswer) -> str:
    best = found.fleets[0]
    if best.replicas is None:
        message = no_fleet_message(found)
        return f"{message[0].upper()}{message[1:]}."
    low, high = best.replicas_range
    most = "more than 256" if high is None else high
    spread = "" if low == high else f" ({low} to {most} replicas within the range of the prediction)"
    layout = with_replicas(best)
    gpus, enough = f"{best.gpus} GPU{'s' if best.gpus != 1 else ''}", ""
    if found.within_limit is False:
        enough = f" That is more than --count {found.limit}."
    return (
        f"For {_goal(found)}: {_named(found, layout)}, {gpus} in all{spread}. Expected: {_latencies(best.level)};"
        f" {_holds(best)} requests/s.{enough}"
    )


def _goal(found: PlanAnswer) -> str:
    """Return the requests and their limits in words."""
    traffic = found.traffic
    assert traffic is not None  # there are fleets
    limits = ", ".join(f"{name.upper()} {limit:,.10g} ms" for name, limit in traffic.limits.items())
    return f"{traffic.rate:,.10g} requests/s with {percent(traffic.attainment)} within {limits}"


def _holds(fleet: Fleet) -> str:
    """Return the highest rate of a fleet, or that none above the offered one is known."""
    if fleet.breaks_at > fleet.level.rate:
        return f"breaks at about {number_text(fleet.breaks_at)}"
    return f"holds at least {fleet.level.rate:,.10g}"


def _latencies(level: FleetLevel) -> str:
    found = {name: level.percentiles_ms[key] for key, name in _TIMES.items()}
    return ", ".join(f"{name} p95 {times[95]:,.0f} ms" for name, times in found.items() if times)


_TIMES = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E"}


def _requests_lines(found: PlanAnswer) -> list[str]:
    """Return what the requests are, in one line."""
    mix = found.inputs.mix
    least, most = mix.output_tokens
    lengths = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    return [
        f"Requests: {round(mix.mean_views, 2):,.10g} views, {mix.mean_prompt_tokens:,.0f} prompt tokens (means),"
        f" {lengths} output tokens. In parentheses: range of the prediction."
    ]


_HEADINGS = (
    "replicas\nx GPUs",
    "weights",
    "weights\nGB/GPU",
    "KV cache\nGB/GPU",
    "requests\nat once",
    "TTFT ms\nalone",
    "TPOT ms\nalone",
    "TPOT ms\nfull",
    "requests/s\nfull",
    "limits of\nprefill / decode",
)
_FLEET_HEADINGS = (
    "GPUs per\nreplica",
    "weights",
    "replicas",
    "GPUs",
    "one replica\nreq/s",
    "holds\nreq/s",
    "TTFT p95\nms",
    "TPOT p95\nms",
    "E2E p95\nms",
    "within\nlimits",
)


def _layout_row(layout: Layout) -> tuple[str, ...]:
    speed, memory = layout.speed, layout.memory
    return (
        f"{layout.replicas} x {layout.variant.tensor_parallel_size}",
        layout.variant.weights_name if layout.exact else f"{layout.variant.weights_name} *",
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
        fleet.layout.variant.weights_name if fleet.layout.exact else f"{fleet.layout.variant.weights_name} *",
        "none" if fleet.replicas is None else str(fleet.replicas),
        "-" if fleet.gpus is None else str(fleet.gpus),
        number_text(fleet.rate_of_one),
        number_text(fleet.breaks_at),
        *times,
        percent(level.goodput.attainment),
    )


def _table_of(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print a table; * marks quantised weights."""
    console = out()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < 2 else "right", no_wrap=number + 1 < len(headings))
    for row in rows:
        table.add_row(*row)
    console.width = max(console.width, _WIDTH)
    console.print(table)
    if any("*" in row[1] for row in rows):
        console.print("* not exact: quantised weights may change answers (docs/quantization.md)")


def _basis(found: PlanAnswer) -> str:
    """Return what the predictions rest on, in one sentence; layouts of one GPU and of several differ in a figure."""
    sentences = {each.speed.basis: each.speed.basis.split(" ") for each in found.fitting}
    return " ".join(" or ".join(dict.fromkeys(words)) for words in zip(*sentences.values(), strict=True))


def _milliseconds(interval: Interval) -> str:
    low, value, high = (f"{1e3 * each:,.0f}" for each in (interval.low, interval.value, interval.high))
    return f"{value} ({low}-{high})"


def _seconds(interval: Interval) -> str:
    return f"{number_text(interval.value)} s ({number_text(interval.low)}-{number_text(interval.high)})"


def _rate(interval: Interval) -> str:
    return f"{number_text(interval.value)} ({number_text(interval.low)}-{number_text(interval.high)})"
