"""What ``panscan plan`` prints: the recommendation, its commands, a table of layouts or fleets, and warnings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from panscan.cli.console import out, show
from panscan.core.text import capitalised, count, listed, number_text, percent
from panscan.plan.advice import PlanAnswer, rejections, warnings_for, what_would_fit
from panscan.plan.fleet import with_replicas
from panscan.report.formatting import print_line
from panscan.report.table import Column, Medium, Table, print_table

if TYPE_CHECKING:
    from panscan.plan.efficiency import Interval
    from panscan.plan.fleet import Fleet, FleetLevel
    from panscan.plan.layouts import Layout


_WIDTH = 118  # characters of a table in a file or a pipe


def no_fit_message(answer: PlanAnswer) -> str:
    """Return why nothing fits, and what would."""
    inputs = answer.inputs
    what = f"no layout of {answer.model.id} fits on {inputs.count} x {inputs.gpu.label}"
    given = {"--kv-cache-gb": inputs.options.kv_cache_gb, "--gpu-memory-gb": inputs.options.gpu_memory_gb}
    if sizes := [f"{option} {size:g}" for option, size in given.items() if size is not None]:
        what += f" with {' and '.join(sizes)}"
    changes = what_would_fit(inputs)
    return f"{what}; {'this would fit: ' + ' or '.join(changes) if changes else 'no change of GPUs or weights fits'}"


def no_fleet_message(answer: PlanAnswer) -> str:
    """Return why no fleet serves the requests."""
    goal, best = _goal(answer), answer.fleets[0]
    if best.rate_of_one > 0:
        one = number_text(best.rate_of_one)
        return f"{goal} would take more than 256 replicas: one meets it at {one} requests/s"
    alone = f"a request alone has {_latencies(best.level)}"
    return f"no number of replicas meets {goal}: {alone}; relax the limits, or compare --quantization"


def print_answer(answer: PlanAnswer) -> None:
    """Print the recommendation with its commands, the table, what does not fit, and warnings."""
    mix = answer.inputs.mix
    least, most = mix.output_tokens
    lengths = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    requests = (
        f"Requests: {round(mix.mean_views, 2):,.10g} views, {mix.mean_prompt_tokens:,.0f} prompt tokens (means),"
        f" {lengths} output tokens. In parentheses: range of the prediction."
    )
    for line in (*_headline(answer), "", requests):
        if line.startswith("  "):  # a command
            show(line)
        else:
            print_line(out(), line)
    if answer.fleets:
        _print_rows(Table(_FLEETS, answer.fleets), [fleet.layout for fleet in answer.fleets])
        if missing := len(answer.simulated) - len(answer.fleets):
            of = f"{missing} of {len(answer.simulated)} layouts"
            print_line(out(), f"not simulated: {of}, which need as many GPUs or more")
    if answer.fitting and not answer.fleets:
        _print_rows(Table(_LAYOUTS, answer.fitting), answer.fitting)
    for rejection in rejections(answer.layouts):
        sizes = listed(rejection.tensor_parallel_sizes)
        noun = "GPU" if sizes == "1" else "GPUs"
        print_line(out(), f"not possible: {rejection.weights} on {sizes} {noun} per replica: {rejection.reason}")
    for caution in warnings_for(answer.inputs, answer.layouts):
        print_line(out(), f"note: {caution.text}", "yellow")
    if answer.advice is not None:
        print_line(out(), f"{answer.advice.layout.speed.basis}.", "dim")


def _headline(answer: PlanAnswer) -> list[str]:
    """Return the recommendation and its commands."""
    advice, inputs = answer.advice, answer.inputs
    if advice is None:
        return [f"No layout of {answer.model.id} fits on {inputs.count} x {inputs.gpu.label}."]
    if answer.unmet:
        return [f"{capitalised(no_fleet_message(answer))}."]
    rule = f"fewest GPUs; {advice.rule}" if answer.fleets else advice.rule
    recommended = f"Recommended: {_layout_words(answer, advice.layout)}: {_promise(answer, advice.layout)}."
    lines = [_fleet_sentence(answer) if answer.fleets else recommended, f"Rule: {rule}.", ""]
    lines += [f"  {answer.command(verb, advice.layout)}" for verb in answer.verbs]
    if advice.faster is not None and advice.gain is not None:
        better = "the requests/s" if inputs.goal == "throughput" else "the speed of one request"
        lines += [
            "",
            f"Faster, but not exact: {_layout_words(answer, advice.faster)}: {_promise(answer, advice.faster)},"
            f" {advice.gain:.1f}x {better}. {_INEXACT}",
            "",
            f"  {answer.command(answer.verbs[0], advice.faster)}",
        ]
    return lines


_INEXACT = (
    "Quantised weights and 8-bit KV caches may change answers: docs/quantization.md has accuracy figures; measure yours"
    " with panscan bench."
)


def _layout_words(answer: PlanAnswer, layout: Layout) -> str:
    """Return a layout in words: replicas, GPUs per replica, weights."""
    copies = "1 replica" if layout.replicas == 1 else f"{layout.replicas} replicas, each"
    idle = answer.inputs.count - layout.gpus
    rest = f"; {count(idle, 'GPU')} idle" if idle > 0 and not answer.fleets else ""
    weights = f"{layout.variant.weights_name} weights{_cache_words(layout, ', {} KV cache')}"
    gpus = f"{layout.variant.tensor_parallel_size} x {answer.inputs.gpu.label}"
    return f"{copies} on {gpus}, {weights} ({'exact' if layout.exact else 'not exact'}{rest})"


def _promise(answer: PlanAnswer, layout: Layout) -> str:
    """Return the figure that the goal is about."""
    if answer.inputs.goal == "latency":
        return f"about {_with_range(layout.speed.e2e, ' s')} for one request alone"
    return f"about {_with_range(layout.speed.requests_per_s)} requests/s"


def _fleet_sentence(answer: PlanAnswer) -> str:
    best = answer.fleets[0]
    low, high = best.replicas_range
    most = "more than 256" if high is None else high
    spread = "" if low == high else f" ({low} to {most} replicas within the range of the prediction)"
    holds = f"breaks at about {number_text(best.breaks_at)}"
    if best.breaks_at <= best.level.rate:
        holds = f"holds at least {best.level.rate:,.10g}"
    enough = f" That is more than --count {answer.limit}." if answer.within_limit is False else ""
    return (
        f"For {_goal(answer)}: {_layout_words(answer, with_replicas(best))}, {best.gpus} GPUs in all{spread}."
        f" Expected: {_latencies(best.level)}; {holds} requests/s.{enough}"
    )


def _goal(answer: PlanAnswer) -> str:
    """Return the requests and their limits in words."""
    traffic = answer.traffic
    assert traffic is not None  # there are fleets
    limits = ", ".join(f"{name.upper()} {limit:,.10g} ms" for name, limit in traffic.limits.items())
    return f"{traffic.rate:,.10g} requests/s with {percent(traffic.attainment)} within {limits}"


def _latencies(level: FleetLevel) -> str:
    percentiles = {name: level.percentiles_ms[key] for key, name in _TIMES.items()}
    return ", ".join(f"{name} p95 {times[95]:,.0f} ms" for name, times in percentiles.items() if times)


_TIMES = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E"}


def _cache_words(layout: Layout, words: str) -> str:
    """Return the type of an 8-bit KV cache in words; empty for that of the model's type."""
    cache = layout.variant.kv_cache_dtype
    return "" if cache == "auto" else words.format(cache)


def _marked_weights(layout: Layout) -> str:
    return layout.variant.weights_name + _cache_words(layout, ", {} KV") + ("" if layout.exact else " *")


_LAYOUTS: tuple[Column[Layout], ...] = (
    Column(
        "replicas\nx GPUs", lambda layout: f"{layout.replicas} x {layout.variant.tensor_parallel_size}", text=Medium.ALL
    ),
    Column("weights", _marked_weights, text=Medium.ALL),
    Column("weights\nGB/GPU", lambda layout: f"{layout.memory.weights / 1e9:.1f}", spare=3),
    Column("KV cache\nGB/GPU", lambda layout: f"{layout.memory.kv_bytes / 1e9:.1f}", spare=4),
    Column("requests\nat once", lambda layout: layout.replicas * layout.running, spare=2),
    Column("TTFT ms\nalone", lambda layout: _with_range(layout.speed.ttft, scale=1e3)),
    Column("TPOT ms\nalone", lambda layout: f"{1e3 * layout.speed.tpot_alone.value:.1f}"),
    Column("TPOT ms\nfull", lambda layout: f"{1e3 * layout.speed.tpot_full.value:.0f}"),
    Column("requests/s\nfull", lambda layout: _with_range(layout.speed.requests_per_s)),
    Column(
        "limits of\nprefill / decode",
        lambda layout: f"{layout.speed.prefill_bound} / {layout.speed.decode_bound}",
        spare=1,
    ),
)
_FLEETS: tuple[Column[Fleet], ...] = (
    Column("GPUs per\nreplica", lambda fleet: str(fleet.layout.variant.tensor_parallel_size), text=Medium.ALL),
    Column("weights", lambda fleet: _marked_weights(fleet.layout), text=Medium.ALL),
    Column("replicas", lambda fleet: "none" if fleet.replicas is None else fleet.replicas),
    Column("GPUs", lambda fleet: fleet.gpus),
    Column("one replica\nreq/s", lambda fleet: fleet.rate_of_one, spare=1),
    Column("holds\nreq/s", lambda fleet: fleet.breaks_at),
    Column("TTFT p95\nms", lambda fleet: _p95(fleet.level, "ttft")),
    Column("TPOT p95\nms", lambda fleet: _p95(fleet.level, "tpot")),
    Column("E2E p95\nms", lambda fleet: _p95(fleet.level, "e2el"), spare=2),
    Column("within\nlimits", lambda fleet: percent(fleet.level.goodput.attainment)),
)


def _p95(level: FleetLevel, time: str) -> str:
    percentiles = level.percentiles_ms[time]
    return f"{percentiles[95]:,.0f}" if percentiles else "-"


def _print_rows(table: Table[Any], layouts: Iterable[Layout]) -> None:
    """Print a table of layouts; * marks quantised weights and 8-bit KV caches."""
    console = out()
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    print_table(table, console, fit=True)
    if not all(layout.exact for layout in layouts):
        print_line(console, "* not exact: quantised weights and 8-bit KV caches may change answers")


def _with_range(interval: Interval, unit: str = "", scale: float = 1.0) -> str:
    value, low, high = (number_text(scale * number) for number in (interval.value, interval.low, interval.high))
    return f"{value}{unit} ({low}-{high})"
