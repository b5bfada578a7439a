"""``panscan load``: measure an OpenAI-compatible endpoint under traffic."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
import msgspec

from panscan.cli.bench import document_source, print_results
from panscan.cli.console import json_text, note, show
from panscan.cli.values import given_values, print_skipped, public_words, utf8
from panscan.cli.verb import verb
from panscan.core import ModelError, SettingError
from panscan.core.activity import activity
from panscan.core.files import write_file
from panscan.core.foreign import JsonObject
from panscan.load.options import LoadOptions, parse_goodput, read_trace
from panscan.load.scenario import Scenario, load_scenario, scenario_names
from panscan.settings import Options, Settings, TrafficTable, fields_from

if TYPE_CHECKING:
    from panscan.load.chat import Endpoint
    from panscan.load.content import RequestMix
    from panscan.records.store import Run


_INTERRUPTED = 130

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


@verb("load", EPILOG)
@click.argument("url")
def command(options: Options, url: str) -> int:
    """Measure an OpenAI-compatible endpoint under traffic: panscan, vLLM, SGLang, TGI, Ollama, llama.cpp.

    URL is http://HOST:PORT, .../v1 or the chat completions URL. Every value of --request-rate and --max-concurrency is
    a level; each sends the same requests. Images are encoded before a level starts, and are all distinct unless
    --image-reuse says otherwise. Results go to a run directory, which panscan report and panscan compare read.
    """
    from panscan.bench.run import new_directory
    from panscan.images.fetch import conceal
    from panscan.load.probe import address, probe_endpoint
    from panscan.load.run import LoadPlan, run_load

    scenario = load_scenario(options.scenario) if options.scenario else None
    chosen = _load_options(options, scenario)
    endpoint = replace(_endpoint(url, options), adapt=chosen.adapted)
    mix, source = _request_mix(options, scenario)
    wait = options.ready_check_timeout_sec
    probe, server = probe_endpoint(endpoint, chosen.mm_processor_kwargs, ready_seconds=wait)
    plan = LoadPlan(
        endpoint=replace(endpoint, model=probe.model or ""),
        options=chosen,
        mix=mix,
        probe=probe,
        server=server,
        source=source,
        save_result=options.save_result,
        include_content=options.include_content,
    )
    reference = _reference_settings(options, chosen, probe.model or "") if options.verify_answers else None
    directory = new_directory(options.output_dir, f"load-{urlsplit(url).hostname or 'endpoint'}")
    for text in (*(f"warning: {warning}" for warning in probe.warnings), *probe.notes):
        note(text)
    levels = "search" if chosen.find_max_rate else f"{len(chosen.levels)}"
    owner = f" ({server})" if server else ""
    note(f"model: {probe.model}{owner}; levels: {levels}; records in {directory}")
    command_line = [address(word) if word == conceal(url) else word for word in public_words()]
    if reference is not None:  # PyTorch is imported for --verify only
        from panscan.cli.verify import exit_code_of, print_verdict
        from panscan.verify.run import as_json
        from panscan.verify.traffic import TrafficSample, verify_traffic

        sample = TrafficSample(options.verify_answers, options.seed or 0)
    with _stopped_by_signals() as cancelled:
        on_level = () if reference is None else (sample.add,)
        run = run_load(plan, directory, command_line, cancelled, note, *on_level)
    code = _print_results(run, directory, interrupted=cancelled.is_set(), as_json=options.json)
    if reference is None or cancelled.is_set():
        return code
    with activity("verifying"):
        served = plan.endpoint.model, server
        verification = verify_traffic(address(url), served, reference, sample, ignore_eos=chosen.ignore_eos)
    if options.json:
        note(verification.message)
    else:
        print_verdict(verification)
    write_file(directory / "verdict.json", f"{json_text(as_json(verification))}\n")
    return exit_code_of(verification) or code


def _reference_settings(options: Options, chosen: LoadOptions, served: str) -> Settings:
    """Return the settings of the checkpoint that measured answers are compared with, which can be read.

    Raises:
        ModelError: the checkpoint cannot be read.
        SettingError: the requests of the run are sampled, or change answers otherwise.
    """
    from panscan.model.checkpoint import load_reader
    from panscan.verify.traffic import check_plain_answers

    check_plain_answers(chosen.adapted({"temperature": 0.0}))
    settings = Settings(model=options.verify_model or served, **dict(chosen.mm_processor_kwargs or {}))
    try:
        load_reader(settings.model, settings.revision)
    except ModelError as error:
        hint = "" if options.verify_model else "; name the checkpoint with --verify-model"
        raise ModelError(f"--verify: {error}{hint}") from error
    return settings


def _load_options(options: Options, scenario: Scenario | None) -> LoadOptions:
    """Return the options of the run: the command line over the scenario.

    Raises:
        SettingError: a value is out of range, or options exclude each other.
    """
    trace = read_trace(Path(options.trace)) if options.trace else None
    settings = given_values(options)
    views = {name: value for name, value in settings.items() if "pan_and_scan" in name}
    Settings(**views)  # checks the ranges
    chosen: dict[str, Any] = {
        **fields_from(options, TrafficTable),
        "seed": options.seed,
        "trace": trace,
        "scenario": options.scenario,
        "goodput": parse_goodput(options.goodput) or (scenario.goodput if scenario else {}),
        "mm_processor_kwargs": views or None,
        "ignore_eos": settings.get("ignore_eos", bool(scenario and scenario.ignore_eos)),
    }
    if scenario is not None:
        chosen |= _scenario_traffic(options, scenario)
    if "max_new_tokens" in settings:
        chosen["max_tokens"] = settings["max_new_tokens"]
    share, longest = scenario.min_tokens_share if scenario else None, chosen.get("max_tokens")
    if share is not None and longest is not None and "min_tokens" not in options.given:
        chosen["min_tokens"] = max(1, int(longest * share))
    if trace is not None and "num_prompts" not in options.given:
        chosen["num_prompts"] = len(trace.times)
    return LoadOptions(**chosen)


def _scenario_traffic(options: Options, scenario: Scenario) -> dict[str, Any]:
    """Return what a scenario says and the command line does not; rates and limits only if the latter has none."""
    traffic = {name: getattr(scenario, name) for name in ("num_prompts", "image_reuse", "max_tokens")}
    if not {"rates", "max_concurrencies", "trace"} & options.given:
        rates = scenario.request_rate or (None,)
        traffic["rates"] = rates[:1] if options.find_max_rate else rates
        traffic["max_concurrencies"] = scenario.max_concurrency or (None,)
        traffic["burstiness"] = scenario.burstiness
    return {name: value for name, value in traffic.items() if value is not None and name not in options.given}


def _endpoint(url: str, options: Options) -> Endpoint:
    from panscan.load.chat import Endpoint

    headers = []
    for text in options.header:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise SettingError("--header: expected NAME:VALUE, such as 'X-Team: documents'")
        headers.append((name.strip(), value.strip()))
    model = utf8("--model", options.sent_model) or ""
    return Endpoint(url, model, options.api_key or None, tuple(headers), options.timeout)


def _request_mix(options: Options, scenario: Scenario | None) -> tuple[RequestMix, JsonObject]:
    """Return the documents with their prompts, and where they come from for the records.

    Raises:
        InputError: no document or prompt is usable.
        SettingError: options exclude each other.
    """
    from panscan.load.content import RequestMix, mix_of_scenario
    from panscan.workload.requests import Source, load_workload

    prompt = utf8("--prompt", options.prompt)
    if scenario is not None and scenario.documents:
        if options.images or options.dataset:
            raise SettingError(f"--scenario {scenario.name} draws its documents: remove --images and --dataset")
        questions = []
        if options.prompts is not None or prompt is not None:
            asked = Source(prompts=options.prompts, prompt=prompt, no_images=True)
            questions = [item.prompt for item in load_workload(asked, on_problem=print_skipped).items]
        with activity("drawing documents"):
            mix = mix_of_scenario(scenario, options.seed, questions)
        return mix, {"scenario": msgspec.to_builtins(scenario)}
    source = document_source(options)
    return RequestMix(load_workload(source, on_problem=print_skipped).items), asdict(source)


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C and SIGTERM set; a second signal raises KeyboardInterrupt."""
    cancelled = threading.Event()

    def stop(_signal: int, _frame: FrameType | None) -> None:
        if cancelled.is_set():
            raise KeyboardInterrupt
        cancelled.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield cancelled
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_results(run: Run, directory: Path, *, interrupted: bool, as_json: bool) -> int:
    """Print what the answered requests showed the model, and the results; return the exit code."""
    from panscan.cli.tables import inputs_text

    if interrupted:
        note("interrupted: showing the results so far", "yellow")
    seen = [
        ([f"{width}x{height}" for width, height in record.image_size], record.views, record.image_tokens)
        for records in run.requests.values()
        for record in records
        if record.error is None
    ]
    if seen and not as_json:
        show(f"per request: {inputs_text(seen)}", "dim")
    code = print_results(run, directory, as_json=as_json)
    for path in sorted(directory.glob("vllm-*.json")) if not as_json else ():
        show(f"result: {path}")
    return _INTERRUPTED if interrupted else code
