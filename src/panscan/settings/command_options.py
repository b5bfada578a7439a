"""The options of the commands that are not settings: measurement, output, and each command's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from panscan.core.option import SECONDS, Range, integers, option
from panscan.core.weight_formats import WEIGHT_KINDS
from panscan.settings.declaration import Option, declared_options, rare_option
from panscan.settings.endpoint_options import RateTable, Repeated, ServerTable, TrafficTable, VerifyTable
from panscan.settings.input_options import InputTable
from panscan.settings.sweep_settings import Settings

_VERIFIED = integers(1, 4096)
_PROCESSES = integers(1, 1024)
_RUN_METRIC = {"help": "Quality metric.  [default: the run's]", "rare": False}


@dataclass(frozen=True, kw_only=True, init=False, eq=False, repr=False)
class Options(InputTable, ServerTable, TrafficTable, RateTable, VerifyTable):
    """The options of a command line. Those that the command does not have are at their defaults.

    Args:
        settings: settings that the user gave (:func:`panscan.settings.axes`), as text.
        given: names of all options that the user gave.
    """

    settings: Mapping[str, str]
    given: frozenset[str]

    @classmethod
    def parsed(cls, values: Mapping[str, Any], settings: Mapping[str, str], given: frozenset[str]) -> Options:
        """Return the options of a command line; ``values`` are those that are not settings."""
        options = cls.__new__(cls)
        options.__dict__.update(values, settings=settings, given=given)
        return options

    # Model, GPUs and replicas
    preset: str | None = option(
        None,
        "Model",
        "Preset (baseline, balanced, ...) or YAML file.",
        "ask attention batch bench crops serve",
        metavar="NAME|FILE",
        by_verb={
            "bench": {
                "group": "Measurement",
                "help": "Presets (baseline, balanced, ...) or YAML files.",
                "metavar": "NAMES",
            }
        },
    )
    adapter: Repeated = option(
        (),
        "Model",
        "LoRA adapter to merge (hub id, directory); repeatable.",
        "ask batch bench profile quantize serve verify",
        metavar="ADAPTER",
        by_verb={
            "bench": {"help": "LoRA adapters to compare, comma list; repeat to sum."},
            "serve": {
                "metavar": "[NAME=]ADAPTER",
                "help": "LoRA adapter to merge, or serve by name; repeatable.",
            },
        },
    )
    planned_model: str = option(
        "", "Model", "Size (27b), hub id, or directory.", "plan", flag="model", metavar="NAME", required=True
    )
    gpu: str | None = option(
        None,
        "Model",
        "GPU name, or a specification (see below).",
        "plan",
        metavar="NAME|SPEC",
    )
    gpu_count: int | None = option(
        None,
        "Model",
        "GPUs.",
        "plan",
        flag="count",
        range=_VERIFIED,
        shown_default="1; with --request-rate: any",
    )
    measure: bool = option(False, "Model", "Measure this machine's GPU or CPU (needs PyTorch).", "plan")
    weight_kinds: tuple[str | None, ...] = option(
        (None, *WEIGHT_KINDS),
        "Model",
        f"Weights: {', '.join(('none', *WEIGHT_KINDS))}.",
        "plan",
        flag="quantization",
        comma=True,
        choices=WEIGHT_KINDS,
        metavar="KINDS",
        shown_default="all",
    )
    weight_format: str | None = option(
        None,
        "Model",
        "Format of the decoder's weights.",
        "quantize",
        flag="quantization",
        choices=WEIGHT_KINDS,
        metavar="|".join(reversed(WEIGHT_KINDS)),
    )
    group_size: int | None = option(
        None,
        "Model",
        "Input channels per int4 scale; none: 128 if it fits.",
        "quantize",
        flag="quantization-group-size",
        range=integers(1, 65_536),
    )
    audit: str | None = option(
        None, "Model", "Quantised checkpoint to describe and judge.", "quantize", metavar="CHECKPOINT"
    )
    reference_model: str | None = option(
        None,
        "Model",
        "Dense checkpoint to compare with, for --audit.",
        "quantize",
        flag="model",
        metavar="BASE",
    )
    sent_model: str | None = option(
        None,
        "Model",
        "Model name to send.",
        "load",
        flag="model",
        metavar="NAME",
        shown_default="the server's only model",
    )
    profiled_runners: Repeated = option(
        (),
        "Runner",
        "Runners: generate, engine.",
        "profile",
        flag="runner",
        comma=True,
        choices=("generate", "engine"),
        metavar="NAMES",
        shown_default="both",
    )
    mode: Repeated = option(
        (),
        "Runner",
        "Modes of generate(), or all.",
        "profile",
        comma=True,
        choices=("dynamic", "static", "compiled", "cuda-graphs", "all"),
        metavar="NAMES",
        shown_default="dynamic",
    )
    implementations: str = option(
        "sdpa,engine",
        "Runner",
        "Implementations to compare with eager.",
        "attention",
        flag="attention",
        aliases=("attn_impl", "attn_implementation"),
        metavar="NAMES",
    )
    replicas: int | None = option(
        None,
        "Engine",
        "Engine replicas on Ray; none: this process.",
        "batch serve",
        range=_PROCESSES,
        by_verb={
            "serve": {
                "group": "Server",
                "help": "Replicas on Ray Serve; none: this process.",
                "range": integers(1, 10_000),
            }
        },
    )
    max_replicas: int | None = rare_option(
        None,
        "Server",
        "Maximum replicas under load.",
        "serve",
        range=integers(1, 10_000),
    )
    ray_address: str | None = rare_option(
        None,
        "Engine",
        "Ray cluster to join instead of starting one.",
        "batch serve",
        metavar="URL",
        by_verb={"serve": {"group": "Server"}},
    )
    json_schema: str | None = option(
        None, "Generation", "Constrain answers to a JSON schema.", "ask batch", metavar="FILE"
    )
    regex: str | None = rare_option(None, "Generation", "Constrain answers to a regular expression.", "batch")
    choice: Repeated = rare_option((), "Generation", "Allow only this answer; repeatable.", "batch", metavar="TEXT")
    grammar: str | None = rare_option(
        None, "Generation", "Constrain answers to a grammar (Lark, GBNF).", "batch", metavar="FILE"
    )
    tools: str | None = rare_option(
        None, "Generation", "Functions to call, JSON as in OpenAI's API.", "batch", metavar="FILE"
    )
    tool_choice: str = rare_option(
        "required", "Generation", "Function to call, or auto or required.", "batch", metavar="NAME"
    )
    answer_lengths: str = option(
        "256", "Generation", "Answer length, tokens.", "plan", flag="max-new-tokens", metavar="N|A-B"
    )

    # Servers and endpoints
    api_keys: Repeated = option((), "Server", "API key to require; repeatable.", "serve", flag="api-key", metavar="KEY")
    api_key_file: Path | None = option(None, "Server", "File with API keys to require.", "serve", metavar="FILE")
    served_model: str | None = option(
        None, "Server", "Model name in the API, if the endpoint has several.", "verify", metavar="NAME"
    )
    api_key: str | None = option(
        None,
        "Server",
        "Bearer token; or set PANSCAN_API_KEY.",
        "load verify",
        metavar="KEY",
        environment=("PANSCAN_API_KEY", "OPENAI_API_KEY"),
        by_verb={
            "verify": {"help": "API key; or set PANSCAN_API_KEY.", "environment": ("PANSCAN_API_KEY",)},
        },
    )
    header: Repeated = option((), "Server", "Request header; repeatable.", "load", metavar="NAME:VALUE")
    timeout: float = option(
        600.0,
        "Server",
        "Timeout of a request, seconds.",
        "doctor load verify",
        range=SECONDS,
        metavar="SECONDS",
        by_verb={
            "doctor": {
                "group": "Measurement",
                "help": "Timeout of all checks, seconds.",
                "default": 120.0,
                "range": Range(le=3600, ge=1),
            },
            "verify": {"default": 120.0},
        },
    )
    ready_check_timeout_sec: float = rare_option(
        60.0,
        "Server",
        "Time for the server to start, seconds.",
        "load",
        range=Range(ge=0, le=86_400),
        metavar="SECONDS",
    )

    # Measurement
    grid: str | None = option(None, "Measurement", "YAML file of 'setting: [values]'.", "bench", metavar="FILE")
    repeats: int = option(5, "Measurement", "Measurements per cell.", "bench", range=integers(1, 10_000))
    repeat_until: float = option(
        2.0,
        "Measurement",
        "Repeat until throughput is known to ± percent.",
        "bench",
        range=Range(gt=0, le=100),
        metavar="PERCENT",
    )
    warmup: int = option(1, "Measurement", "Warm-up batches to discard.", "bench", range=integers(0, 10_000))
    verify: bool = option(
        True,
        "Measurement",
        "Compare the result with the dense model.",
        "bench quantize",
        by_verb={"bench": {"help": "Compare the answers with the reference."}},
    )
    verify_answers: int = option(
        0,
        "Measurement",
        "Compute N measured answers again; 0: none.",
        "load",
        flag="verify",
        range=integers(0, 1024),
        metavar="N",
    )
    verify_model: str | None = option(
        None,
        "Measurement",
        "Checkpoint for --verify.",
        "load",
        metavar="NAME",
        shown_default="the served model's name",
    )
    verify_requests: int = rare_option(16, "Measurement", "Requests to verify per cell.", "bench", range=_VERIFIED)
    verify_tokens: int = rare_option(
        32, "Measurement", "Reference output tokens per request.", "bench", range=_VERIFIED
    )
    verify_budget: float = rare_option(
        15.0,
        "Measurement",
        "Replay answers within % of the measured time.",
        "bench",
        range=Range(ge=0, le=10_000),
        metavar="PERCENT",
    )
    check_invariance: bool = rare_option(False, "Measurement", "Repeat requests alone, reordered, chunked.", "bench")
    reference: str | None = rare_option(
        None, "Measurement", "Run or file with a reference to reuse.", "bench", metavar="PATH"
    )
    max_p95_ms: float | None = option(
        None,
        "Measurement",
        "Maximum p95 of end-to-end latency, ms.",
        "recommend",
        range=Range(gt=0, le=1_000_000_000),
        metavar="MS",
    )
    min_quality: float | None = option(
        None, "Measurement", "Accuracy to be shown, 0 to 1.", "recommend", range=Range(ge=0, le=1), metavar="SHARE"
    )
    quality_metric: str | None = rare_option(
        None,
        "Measurement",
        "Quality metric; the dataset's by default.",
        "bench recommend report",
        metavar="NAME",
        by_verb={"recommend report": _RUN_METRIC},
    )
    max_accuracy_loss: float | None = rare_option(
        None,
        "Measurement",
        "Accuracy loss to rule out, points (default 2).",
        "bench recommend report",
        range=Range(gt=0, le=50),
        metavar="POINTS",
    )
    allow_different: Repeated = option(
        (), "Measurement", "Id of a cell to allow whatever its verdict; repeatable.", "recommend", metavar="CELL"
    )
    model_replicas: int = option(
        1,
        "Measurement",
        "Model replicas that run in parallel, without Ray.",
        "bench",
        flag="replicas",
        range=_PROCESSES,
    )
    gpus_per_replica: int = rare_option(1, "Measurement", "GPUs per replica.", "bench", range=_PROCESSES)
    goal: Literal["throughput", "latency"] = option("throughput", "Measurement", "Goal to optimise.", "plan")
    goodput: Repeated = option(
        (),
        "Measurement",
        "Limits in ms: ttft:500 tpot:50.",
        "load plan",
        metavar="METRIC:MS...",
        by_verb={"plan": {"help": "Limits in ms.", "shown_default": "ttft:2000 tpot:50"}},
    )
    fail_on: Repeated = option(
        (), "Measurement", "Exit with 5 if it holds; repeatable.", "compare", metavar="CONDITION"
    )
    strict: bool = option(False, "Measurement", "Exit with 5 for undecided conditions, too.", "compare")
    only: str | None = option(
        None,
        "Measurement",
        "Groups (gpu, packages, gemma, host) or checks.",
        "doctor",
        metavar="NAMES",
    )
    record_shapes: bool = option(False, "Measurement", "Record tensor shapes: a larger trace.", "profile")
    memory: bool = option(False, "Measurement", "Record allocations of generate(): a larger trace.", "profile")
    stacks: bool = option(False, "Measurement", "Record Python calls: a larger, slower trace.", "profile")

    # Output
    output: str | None = option(
        None,
        "Output",
        "Picture to write.",
        "attention crops",
        short="o",
        metavar="FILE",
        shown_default="attention.png",
        by_verb={
            "crops": {
                "help": "PNG file or directory.",
                "metavar": "PATH",
                "shown_default": "NAME-views.png",
            }
        },
    )
    answers_path: str = option(
        "answers.jsonl",
        "Output",
        "Answers: JSON Lines, or .parquet.",
        "batch",
        flag="output",
        short="o",
        metavar="PATH",
    )
    preset_path: Path = option(
        Path("preset.yaml"), "Output", "Preset to write.", "recommend", flag="output", short="o", metavar="FILE"
    )
    report_format: Literal["html", "md", "csv", "json", "png", "gallery"] = option(
        "html", "Output", "Format of the report.", "report", flag="format"
    )
    comparison_format: Literal["text", "md", "json"] = option(
        "text", "Output", "Format of the output.", "compare", flag="format"
    )
    request_set: Literal["aiperf", "guidellm", "vllm"] | None = option(
        None, "Output", "Load generator to write a request set for.", "samples", flag="format"
    )
    output_file: Path | None = option(
        None,
        "Output",
        "File; for png, directory.",
        "report verify",
        flag="output",
        short="o",
        metavar="PATH",
        by_verb={"verify": {"help": "Verdict file to write, JSON.", "metavar": "FILE"}},
    )
    export_kit: Path | None = option(None, "Output", "Test kit for other servers to write.", "verify", metavar="DIR")
    output_dir: Path = option(
        Path("runs"),
        "Output",
        "Parent of run directories.",
        "bench load profile",
        metavar="DIR",
        by_verb={"profile": {"help": "Parent of profile directories.", "default": Path("profiles")}},
    )
    resume: bool = option(False, "Output", "Continue the output: skip answered documents.", "batch")
    resume_run: str | None = option(
        None, "Output", "Continue this run directory with its own settings.", "bench", flag="resume", metavar="RUN"
    )
    retry_failed: bool = option(False, "Output", "Retry failed documents, with --resume.", "batch")
    force: bool = option(
        False,
        "Output",
        "Replace an existing output.",
        "batch demo quantize recommend samples",
        by_verb={
            "demo": {"help": "Replace documents and preset; keep earlier runs."},
            "quantize": {"help": "Replace OUT if this command wrote all of it."},
            "recommend": {"help": "Replace a file that panscan did not write."},
            "samples": {"help": "Replace documents of another count or seed."},
        },
    )
    cost_per_hour: float | None = option(
        None,
        "Output",
        "Machine cost per hour, for page prices.",
        "batch",
        range=Range(gt=0, le=1_000_000),
        metavar="PRICE",
    )
    save_result: bool = option(False, "Output", "Write each level as vLLM's result JSON, too.", "load")
    dry_run: bool = option(False, "Output", "Show cells, views, tokens and a rough time only.", "bench")
    include_content: bool = option(False, "Output", "Keep prompts and answers in the records.", "bench load")
    print_config: bool = rare_option(False, "Output", "Print a Ray Serve config file and exit.", "serve")
    top: int = option(12, "Output", "Rows per table.", "trace", range=integers(1, 1_000))
    html: Path | None = option(None, "Output", "Web page to write, too.", "trace", metavar="FILE")
    json: bool = option(
        False,
        "Output",
        "Print one JSON object.",
        "ask attention batch bench compare crops doctor load plan profile recommend trace",
        by_verb={"attention crops": {"help": "Print JSON; draws only with --output."}},
    )
    debug: bool = option(False, "Output", "Show tracebacks of errors.", "")
    help_all: bool = option(False, "Output", "Show all options and exit.", "")


@cache
def options_of(verb: str) -> dict[str, Option]:
    """Return the options of a command by name, in the order of ``--help`` within a group."""
    tables = {**declared_options(Options), **declared_options(Settings)}
    return {name: item.of_verb(verb) for name, item in tables.items() if not item.verbs or verb in item.verbs.split()}


def default_of(name: str, verb: str) -> Any:
    """Return the default of an option of a command."""
    return options_of(verb)[name].default


def range_of(name: str, verb: str) -> Range:
    """Return the numbers that an option of a command accepts."""
    allowed = options_of(verb)[name].range
    assert allowed is not None, name
    return allowed


def check_options(values: object, verb: str) -> None:
    """Raise a SettingError unless the fields of an object that are options of a command have accepted values."""
    for name, item in options_of(verb).items():
        if item.choices or item.range is not None:
            item.check(getattr(values, name, item.default))


def fields_from(options: Options, table: type) -> dict[str, Any]:
    """Return the values of the options that a table declares, as keyword arguments of a class that extends it."""
    return {item.name: getattr(options, item.name) for item in fields(table)}
