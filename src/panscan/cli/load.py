"""``panscan load``: measure an OpenAI-compatible endpoint under traffic."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click
import numpy as np

from panscan.cli.bench import exit_code, print_files, print_run
from panscan.cli.console import errors, out, show_warnings
from panscan.cli.options import (
    SEED,
    InRange,
    axis_options,
    command_words,
    common_options,
    external_images_option,
    given_values,
    max_pages_option,
    url_options,
    utf8,
)
from panscan.cli.verb import option, verb
from panscan.core import InputError, SettingError
from panscan.core.activity import activity
from panscan.core.ranges import Range
from panscan.load.options import GOODPUT_METRICS, LOAD_RANGES, RATE, LoadOptions, parse_goodput
from panscan.load.scenario import Scenario, load_scenario, scenario_names
from panscan.settings import Group

if TYPE_CHECKING:
    from panscan.load.chat import Endpoint, RequestOutcome
    from panscan.load.content import RequestMix
    from panscan.load.generator import LevelResult
    from panscan.load.options import LoadLevel, RampUp, Trace
    from panscan.load.run import LoadPlan

__all__ = ["command"]

_PAN_AND_SCAN = (
    "do_pan_and_scan",
    "pan_and_scan_min_crop_size",
    "pan_and_scan_max_num_crops",
    "pan_and_scan_min_ratio_to_activate",
)
_TIMEOUT = Range(gt=0, le=86_400)
_INTERRUPTED = 130
_EVERY_S = 10.0  # between two progress lines of a log

EPILOG = f"""\
Scenarios: {", ".join(scenario_names())}. Options follow vLLM's "bench serve":
--request-rate sends requests at that rate whether or not the server keeps up;
--max-concurrency alone sends the next request when one ends.

\b
Examples
  panscan load http://127.0.0.1:8000 --request-rate 2,4,8 --num-prompts 40
  panscan load http://127.0.0.1:8000 --max-concurrency 1,4,16 --images "docs/*.png" -p "What is the total?"
  panscan load http://127.0.0.1:8000 --goodput ttft:500 tpot:50 --find-max-rate
  panscan load http://127.0.0.1:8000 --scenario mixed-documents --image-reuse 0.3
"""


_Command = TypeVar("_Command", bound=Callable[..., Any])


def _number(group: Group, name: str, text: str, **extra: Any) -> Callable[[_Command], _Command]:
    """Return an option with the range that :class:`LoadOptions` defines."""
    flag = f"--{name.replace('_', '-')}"
    return option(group, flag, type=InRange(LOAD_RANGES[name]), metavar="NUMBER", help=text, **extra)


@verb("load", EPILOG)
@click.argument("words", nargs=-1, metavar="URL")
@option("Traffic", "--request-rate", metavar="RATES", help="Rates, requests/s, comma list.  [default: inf]")
@option("Traffic", "--max-concurrency", metavar="INTS", help="Maximum requests in flight, comma list.")
@option("Traffic", "--arrival", type=click.Choice(["poisson", "constant"]), help="Arrival process.  [default: poisson]")
@_number("Traffic", "burstiness", "Gamma shape; below 1 is burstier.  [default: 1]")
@option(
    "Traffic",
    "--ramp-up-strategy",
    type=click.Choice(["linear", "exponential"]),
    rare=True,
    help="Ramp of the rate per level.",
)
@option(
    "Traffic",
    "--ramp-up-start-rps",
    type=InRange(RATE),
    metavar="RATE",
    rare=True,
    help="First rate of the ramp, requests/s.",
)
@option(
    "Traffic",
    "--ramp-up-end-rps",
    type=InRange(RATE),
    metavar="RATE",
    rare=True,
    help="Last rate of the ramp, requests/s.",
)
@option("Traffic", "--trace", metavar="FILE", help="Arrivals to replay: JSON Lines with timestamp in ms.")
@_number("Traffic", "trace_speedup", "Speed-up of the replayed trace.", default=1.0, show_default=True, rare=True)
@_number("Traffic", "num_prompts", "Requests per level.  [default: 64]")
@_number("Traffic", "num_warmups", "Discarded requests before the first level.", default=1, show_default=True)
@option("Traffic", "--find-max-rate", is_flag=True, help="Search for the highest rate that meets --goodput.")
@_number("Traffic", "level_seconds", "Minimum seconds per search level.  [default: by the limits]", rare=True)
@option("Measurement", "--goodput", multiple=True, metavar="METRIC:MS...", help="Limits in ms: ttft:500 tpot:50.")
@_number(
    "Measurement", "goodput_attainment", "Share of requests that must meet the limits.", default=0.95, show_default=True
)
@option(
    "Measurement",
    "--percentile-metrics",
    metavar="NAMES",
    rare=True,
    help="Times to report.  [default: ttft,tpot,itl,e2el]",
)
@option(
    "Measurement",
    "--metric-percentiles",
    metavar="INTS",
    rare=True,
    help="Percentiles to report.  [default: 50,90,95,99]",
)
@_number("Generation", "max_tokens", "Maximum output tokens.  [default: 128]")
@_number("Generation", "min_tokens", "Minimum of output lengths drawn up to --max-tokens.")
@option("Generation", "--ignore-eos", is_flag=True, help="Ignore end tokens: always generate the full length.")
@option("Input", "--scenario", metavar="NAME|FILE", help="Built-in scenario (see below), or a YAML file.")
@option("Input", "--images", multiple=True, metavar="PATH", help="Glob, directory, file (PDF too) or URL; repeatable.")
@option("Input", "--prompts", metavar="FILE", help="Prompts for every document, one per line.")
@option("Input", "-p", "--prompt", help="Prompt for every document.")
@option("Input", "--dataset", metavar="PATH", help="Labelled questions: JSON Lines, DocVQA, ChartQA, ...")
@_number("Input", "image_reuse", "Share of requests that repeat an image.  [default: 0]")
@option(
    "Traffic", "--seed", type=SEED, metavar="INT", default=0, show_default=True, help="Seed of arrivals and content."
)
@option("Model", "--model", metavar="NAME", help="Model name to send.  [default: the server's only model]")
@option(
    "Server",
    "--api-key",
    envvar=["PANSCAN_API_KEY", "OPENAI_API_KEY"],
    metavar="KEY",
    help="Bearer token; or set PANSCAN_API_KEY.",
)
@option("Server", "--header", "headers", multiple=True, metavar="NAME:VALUE", help="Request header; repeatable.")
@option(
    "Server",
    "--timeout",
    type=InRange(_TIMEOUT),
    metavar="SECONDS",
    default=600.0,
    show_default=True,
    help="Timeout of a request, seconds.",
)
@option(
    "Server",
    "--ready-check-timeout-sec",
    type=InRange(Range(ge=0, le=86_400)),
    metavar="SECONDS",
    default=60.0,
    show_default=True,
    rare=True,
    help="Time for the server to start, seconds.",
)
@_number("Traffic", "processes", "Client processes.  [default: by the rate]", rare=True)
@option("Output", "--save-result", is_flag=True, help="Write each level as vLLM's result JSON, too.")
@option("Output", "--include-content", is_flag=True, help="Keep prompts and answers in the records.")
@option("Output", "--output-dir", metavar="DIR", default="runs", show_default=True, help="Parent of run directories.")
@external_images_option
@url_options
@max_pages_option
@axis_options(_PAN_AND_SCAN, defaults=dict.fromkeys(_PAN_AND_SCAN, "the server's"))
@common_options
def command(**options: Any) -> int:
    """Measure an OpenAI-compatible endpoint under traffic: panscan, vLLM, SGLang, TGI, Ollama, llama.cpp.

    URL is http://HOST:PORT, .../v1 or the chat completions URL. Every value of --request-rate and --max-concurrency is
    a level; each sends the same requests. Images are encoded before a level starts, and are all distinct unless
    --image-reuse says otherwise. Results go to a run directory, which panscan report and panscan compare read.
    """
    from panscan.bench.run import new_directory
    from panscan.load.probe import probe_endpoint
    from panscan.load.run import run_load

    show_warnings(errors())
    url, limits = _words(options)
    scenario = load_scenario(options["scenario"]) if options["scenario"] else None
    chosen = _load_options(options, limits, scenario)
    endpoint = _endpoint(url, options)
    mix, source = _request_mix(options, scenario)
    with activity("probing the endpoint") as step:
        probe = probe_endpoint(
            endpoint,
            chosen.mm_processor_kwargs,
            ready_seconds=options["ready_check_timeout_sec"],
            on_wait=lambda reason: step.rename(f"waiting for the endpoint: {reason}"),
        )
    plan = _plan(endpoint, probe, chosen, mix, source, options)
    directory = new_directory(Path(options["output_dir"]), f"load-{_host(url)}")
    with _stopped_by_signals() as cancelled, LoadProgress(plan) as progress:
        progress.begin(directory)
        run = run_load(plan, directory, _command_line(url, limits), progress, cancelled)
    return _show(run, directory, interrupted=cancelled.is_set())


def _words(options: Mapping[str, Any]) -> tuple[str, dict[str, float]]:
    """Return the URL and the limits of ``--goodput``; click parses its second and later values as arguments.

    Raises:
        SettingError: there is no URL, more than one, or a value that is not a limit.
    """
    words = list(options["words"])
    urls = [word for word in words if "//" in word] or [word for word in words if not _is_limit(word)][:1]
    if len(urls) != 1:
        problem = "is missing" if not urls else f"is given {len(urls)} times"
        raise SettingError(f"URL {problem}: give one endpoint, such as http://127.0.0.1:8000")
    words.remove(urls[0])
    if words and not options["goodput"]:
        raise SettingError(f"unexpected argument {words[0]!r}: one URL is expected; limits follow --goodput")
    return urls[0], parse_goodput([*options["goodput"], *words])


def _is_limit(word: str) -> bool:
    return word.partition(":")[0] in GOODPUT_METRICS


def _load_options(options: Mapping[str, Any], limits: Mapping[str, float], scenario: Scenario | None) -> LoadOptions:
    """Return the options of the run: the command line over the scenario.

    Raises:
        SettingError: a value is out of range, or options exclude each other.
    """
    from panscan.load.options import parse_latency_metrics, parse_percentiles, read_trace

    trace = read_trace(Path(options["trace"])) if options["trace"] else None
    given: dict[str, Any] = {
        **_arrivals(options, scenario, trace, _ramp_up(options)),
        **_lengths(options, scenario),
        "num_prompts": options["num_prompts"] or _num_prompts(scenario, trace),
        "goodput": limits or (scenario.goodput if scenario else {}),
        "mm_processor_kwargs": _pan_and_scan(options),
    }
    if options["percentile_metrics"] is not None:
        given["percentile_metrics"] = parse_latency_metrics(options["percentile_metrics"])
    if options["metric_percentiles"] is not None:
        given["metric_percentiles"] = parse_percentiles(options["metric_percentiles"])
    for name in ("num_warmups", "seed", "goodput_attainment", "find_max_rate", "level_seconds", "processes"):
        given[name] = options[name]
    reuse = options["image_reuse"]
    if reuse is None:
        reuse = scenario.image_reuse if scenario else None
    given["image_reuse"] = 0.0 if reuse is None else reuse
    return LoadOptions(**given, trace=trace, trace_speedup=options["trace_speedup"], scenario=options["scenario"])


def _arrivals(
    options: Mapping[str, Any], scenario: Scenario | None, trace: Trace | None, ramp_up: RampUp | None
) -> dict[str, Any]:
    """Return rates and limits: those of the scenario only if the command line has none."""
    from panscan.load.options import parse_concurrencies, parse_rates

    found: dict[str, Any] = {"ramp_up": ramp_up}
    own = [options["request_rate"], options["max_concurrency"], trace, ramp_up]
    if scenario is not None and all(each is None for each in own):
        rates = scenario.request_rate or (None,)
        found["rates"] = rates[:1] if options["find_max_rate"] else rates
        found["max_concurrencies"] = scenario.max_concurrency or (None,)
        if scenario.burstiness is not None:
            found["burstiness"] = scenario.burstiness
    if options["request_rate"] is not None:
        found["rates"] = parse_rates(options["request_rate"])
    if options["max_concurrency"] is not None:
        found["max_concurrencies"] = parse_concurrencies(options["max_concurrency"])
    return found | {name: options[name] for name in ("burstiness", "arrival") if options[name] is not None}


def _ramp_up(options: Mapping[str, Any]) -> RampUp | None:
    from panscan.load.options import RampUp

    names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
    given = [name for name in names if options[name] is not None]
    if not given:
        return None
    if missing := [name for name in names if name not in given]:
        flags = [f"--{name.replace('_', '-')}" for name in (missing[0], given[0])]
        raise SettingError(f"{flags[0]} is missing: {flags[1]} needs it")
    return RampUp(*(options[name] for name in names))


def _lengths(options: Mapping[str, Any], scenario: Scenario | None) -> dict[str, Any]:
    found: dict[str, Any] = {"ignore_eos": options["ignore_eos"] or bool(scenario and scenario.ignore_eos)}
    most = options["max_tokens"] or (scenario.max_tokens if scenario else None)
    if most is not None:
        found["max_tokens"] = most
    if options["min_tokens"] is not None:
        found["min_tokens"] = options["min_tokens"]
    elif scenario is not None and scenario.min_tokens_share is not None and most is not None:
        found["min_tokens"] = max(1, int(most * scenario.min_tokens_share))
    return found


def _num_prompts(scenario: Scenario | None, trace: Trace | None) -> int:
    if trace is not None:
        return len(trace.times)
    return (scenario.num_prompts if scenario else None) or LoadOptions().num_prompts


def _pan_and_scan(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the pan-and-scan settings that the user gave; None if there are none.

    Raises:
        SettingError: a value is out of range.
    """
    from panscan.settings import Settings

    found = given_values({name: options[name] for name in _PAN_AND_SCAN})
    Settings(**found)  # checks the ranges
    return found or None


def _endpoint(url: str, options: Mapping[str, Any]) -> Endpoint:
    from panscan.load.chat import Endpoint

    headers = []
    for text in options["headers"]:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise SettingError("--header: expected NAME:VALUE, such as 'X-Team: documents'")
        headers.append((name.strip(), value.strip()))
    model = utf8("--model", options["model"]) or ""
    return Endpoint(url, model, options["api_key"] or None, tuple(headers), options["timeout"])


def _request_mix(options: Mapping[str, Any], scenario: Scenario | None) -> tuple[RequestMix, dict[str, Any]]:
    """Return the documents with their prompts, and where they come from for the records.

    Raises:
        InputError: no document or prompt is usable.
        SettingError: options exclude each other.
    """
    from dataclasses import asdict

    from panscan.bench.workload import Source, load_workload, source_or_samples
    from panscan.load.content import mix_of_items, mix_of_scenario

    prompt = utf8("--prompt", options["prompt"])
    given = {
        "images": options["images"],
        "prompts": options["prompts"],
        "prompt": prompt,
        "dataset": options["dataset"],
    }
    if scenario is not None and scenario.documents:
        if options["images"] or options["dataset"]:
            raise SettingError(f"--scenario {scenario.name} draws its documents: remove --images and --dataset")
        questions = []
        if options["prompts"] is not None or prompt is not None:
            asked = Source(prompts=options["prompts"], prompt=prompt, no_images=True)
            questions = [item.prompt for item in load_workload(asked, on_problem=_report_problem).items]
        with activity("drawing documents"):
            mix = mix_of_scenario(scenario, options["seed"], questions)
        return mix, {"scenario": asdict(scenario)}
    source = source_or_samples(
        **given,
        external_images=options["allow_external_images"],
        max_pages=options["max_pages"],
        seed=options["seed"],
        on_default=lambda remark: errors().print(remark, soft_wrap=True),
    )
    with activity("reading documents") as step:
        workload = load_workload(source, on_problem=_report_problem, on_document=step.update)
    return mix_of_items(workload.items), asdict(source)


def _report_problem(problem: InputError) -> None:
    errors().print(f"skipped: {problem}", style="yellow", soft_wrap=True)


def _plan(
    endpoint: Endpoint,
    probe: Any,
    chosen: LoadOptions,
    mix: RequestMix,
    source: dict[str, Any],
    options: Mapping[str, Any],
) -> LoadPlan:
    from dataclasses import replace

    from panscan.load.run import LoadPlan, new_salt

    return LoadPlan(
        endpoint=replace(endpoint, model=probe.model),
        options=chosen,
        mix=mix,
        probe=probe,
        source=source,
        save_result=options["save_result"],
        include_content=options["include_content"],
        salt=new_salt(),
    )


def _host(url: str) -> str:
    from urllib.parse import urlsplit

    return urlsplit(url).hostname or "endpoint"


def _command_line(url: str, limits: Mapping[str, float]) -> list[str]:
    """Return the command line for the records, without keys."""
    from panscan.images.fetch import conceal
    from panscan.load.probe import address

    context = click.get_current_context()
    typed = command_words(context, without=("words", "goodput", "api_key", "headers"))
    words = [word for name, limit in limits.items() for word in ("--goodput", f"{name}:{limit:g}")]
    return ["panscan", "load", address(url), *map(conceal, typed), *words]


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C and SIGTERM set; a second signal raises KeyboardInterrupt."""
    cancelled = threading.Event()

    def stop(_signal: int, _frame: FrameType | None) -> None:
        if cancelled.is_set():
            raise KeyboardInterrupt
        cancelled.set()

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield cancelled
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class LoadProgress:
    """Shows the progress of a load run, level by level. A :class:`panscan.load.run.LoadObserver`."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan, self._console = plan, errors()
        self._activity = activity("starting")
        self._title, self._count = "", 0
        self._failed = 0

    def __enter__(self) -> Self:
        self._step = self._activity.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._activity.__exit__(kind, error, trace)

    def begin(self, directory: Path) -> None:
        """Report what the endpoint answered, and where the records go."""
        probe, options = self._plan.probe, self._plan.options
        server = f" ({probe.server})" if probe.server else ""
        for warning in probe.warnings:
            self.remark(warning, warning=True)
        for note in probe.notes:
            self.remark(note)
        levels = "search" if options.find_max_rate else f"{len(options.levels)}"
        self.remark(f"model: {probe.model}{server}; levels: {levels}; records in {directory}")

    def preparing(self, level: LoadLevel | None) -> None:
        """See :class:`panscan.load.run.LoadObserver`."""
        what = "warm-up" if level is None else level.cell
        self._step.restart(f"{what}: encoding requests")

    def warming_up(self, count: int) -> None:
        """See :class:`panscan.load.run.LoadObserver`."""
        self._step.restart(f"warm-up: {count} requests")

    def measuring(self, level: LoadLevel, count: int) -> None:
        """See :class:`panscan.load.run.LoadObserver`."""
        self._title, self._count, self._failed = level.cell, count, 0
        self._step.restart(level.cell, total=count)
        if not self._console.is_terminal:
            self.remark(f"{level.cell}: sending {count} requests")

    def done(self, exchange: RequestOutcome) -> None:
        """See :class:`panscan.load.run.LoadObserver`."""
        if exchange.error is not None:
            self._failed += 1
            self._step.rename(f"{self._title} ({self._failed} failed)")
        self._step.advance()

    def measured(self, level: LoadLevel, result: LevelResult) -> None:
        """See :class:`panscan.load.run.LoadObserver`."""
        done = [each for each in result.exchanges if each.error is None]
        timed = [each for each in done if each.tokens]
        rate = len(done) / max(result.ended - result.started, 1e-9)
        parts = [f"{len(done)} of {self._count} requests answered", f"{rate:.3g} req/s"]
        if timed:
            parts.append(f"median TTFT {_median_ms([each.tokens[0] - each.accepted for each in timed])} ms")
            parts.append(f"median E2E {_median_ms([each.tokens[-1] - each.accepted for each in timed])} ms")
        self.remark(f"{level.cell}: {', '.join(parts)}")

    def remark(self, text: str, *, warning: bool = False) -> None:
        """See :class:`panscan.load.run.LoadObserver`."""
        self._console.print(
            f"warning: {text}" if warning else text, style="yellow" if warning else None, soft_wrap=True
        )


def _median_ms(seconds: Sequence[float]) -> str:
    return f"{1e3 * float(np.median(seconds)):.1f}"


def _show(run: Any, directory: Path, *, interrupted: bool) -> int:
    """Print the results, write the report, and return the exit code."""
    from panscan.report import HTML_NAME, write_report

    if interrupted:
        errors().print("interrupted: showing the results so far", style="yellow", soft_wrap=True)
    if run.repeats:
        print_run(run)
    with activity("writing the report"):
        write_report(run, directory / HTML_NAME)
    print_files(directory)
    for path in sorted(directory.glob("vllm-*.json")):
        out().print(f"result: {path}", soft_wrap=True)
    return _INTERRUPTED if interrupted else exit_code(run)
