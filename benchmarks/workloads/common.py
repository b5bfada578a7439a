"""What the workloads share: their command line, runners on one loaded model, the verdict, and the record."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import to_builtins

from benchmarks.workloads.device import gpu_uuids
from benchmarks.workloads.floors import Floors
from benchmarks.workloads.pages import PAGE, page, question
from panscan.bench.grid import Cell
from panscan.core import InputError, Request, Result, SettingError
from panscan.core.files import write_file
from panscan.images.views import plan_views
from panscan.model.ceilings import measure_ceilings
from panscan.model.checkpoint import Loaded
from panscan.model.machine import resolve_device
from panscan.model.support import require_supported
from panscan.plan.cost import RequestCounts, Roofline, Variant
from panscan.records.environment import environment
from panscan.runners.base import Runner
from panscan.runners.engine import EngineRunner
from panscan.runners.factory import ready_runner
from panscan.runners.generate import GenerateRunner
from panscan.runners.vllm import VllmRunner
from panscan.settings import ENGINE_AXES, Settings, axes, axis_name, foreign_settings, settings_from
from panscan.verdict.cells import Verifier
from panscan.verdict.reference import TOKENS, load_reference
from panscan.verdict.references import References
from panscan.workload.requests import Source, load_workload

TEXT_TOKENS = 78
"""Of each prompt, beside its image tokens: 1,102 prompt tokens of a page of four views in the published models."""

_RUNNERS = ("engine", "generate", "vllm")
_VLLM_LONGEST = 4096  # tokens of a request
_ON_A_GPU = {"preprocess": "device"}


@dataclass(frozen=True, slots=True)
class Work:
    """The options of a workload's command line.

    Args:
        name: of the workload.
        settings: of the engine.
        runners: that are measured.
        num_requests: asked at once.
        repeats: measured, after a first one that is discarded.
        compared: requests of the verdict; 0 for none.
        output: the record's file.
        command: as it was typed.
        brief: measure throughput and latency only, after a short warm-up.
        vllm_options: keyword arguments of ``vllm.LLM`` for runner vllm.
        references: folder of references: unquantised runs store theirs, quantised ones read them; None for neither.
        batch_size: documents per call of ``generate()``.
        cache: of ``generate()``: ``dynamic`` or ``static``.
    """

    name: str
    settings: Settings
    runners: tuple[str, ...]
    num_requests: int
    repeats: int
    compared: int
    output: Path
    command: str
    brief: bool = False
    vllm_options: Mapping[str, Any] = field(default_factory=dict)
    references: Path | None = None
    batch_size: int = 8
    cache: str = "dynamic"


def parse(name: str, about: str, argv: Sequence[str] | None, *, requests: int, **defaults: Any) -> Work:
    """Parse the command line of a workload: its own options, then any setting of ``panscan bench`` with one value.

    Args:
        name: of the workload.
        about: for ``--help``.
        argv: arguments; None: those of the process.
        requests: default of ``--num-requests``.
        defaults: default settings of the workload.

    Raises:
        SettingError: an unknown setting or value.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.workloads.{name}",
        description=about,
        epilog="Settings of panscan bench follow as --name value.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runner", default="engine", help="engine; or engine,generate on one loaded model; or vllm")
    parser.add_argument("--num-requests", type=int, default=requests, help="requests at once; default %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="turns measured after a warm-up; default %(default)s")
    parser.add_argument("--compared", type=int, default=4, help="requests of the verdict, 0 for none")
    parser.add_argument(
        "--brief", action="store_true", help="throughput and latency only, with a short warm-up; always so with vllm"
    )
    parser.add_argument("--batch-size", type=int, default=8, help="documents per call of generate(); default 8")
    parser.add_argument("--cache", choices=("dynamic", "static"), default="dynamic", help="KV cache of generate()")
    parser.add_argument("--vllm-options", default="{}", help="arguments of vllm.LLM, a JSON object")
    parser.add_argument(
        "--references",
        type=Path,
        help="folder: runs without quantisation store their references,"
        " others read them, as unquantised weights may not fit beside theirs",
    )
    parser.add_argument("--output", type=Path, required=True, help="the record, a JSON file")
    options, rest = parser.parse_known_args(argv)
    runners = tuple(options.runner.split(","))
    if unknown := set(runners) - set(_RUNNERS):
        raise SettingError(f"--runner takes {', '.join(_RUNNERS)}; got {', '.join(sorted(unknown))}")
    if "vllm" in runners and len(runners) > 1:
        raise SettingError("--runner vllm takes the GPU's memory: run it in a process of its own")
    if options.num_requests < 2 or options.repeats < 1:
        raise SettingError("a workload needs two requests (one warms up) and one repeat at least")
    settings = {axis_name(spelling): value for spelling, value in _named(rest).items()}
    command = shlex.join(["python", "-m", f"benchmarks.workloads.{name}", *(sys.argv[1:] if argv is None else argv)])
    return Work(
        name,
        settings_from(_chosen(runners, defaults, settings)),
        runners,
        options.num_requests,
        options.repeats,
        options.compared,
        options.output,
        command,
        options.brief or "vllm" in runners,
        vllm_options(defaults, options.vllm_options),
        options.references,
        min(options.batch_size, options.num_requests),
        options.cache,
    )


def _chosen(runners: Sequence[str], defaults: Mapping[str, Any], settings: Mapping[str, str]) -> dict[str, Any]:
    """Return all settings by name: those of the command line, else the workload's defaults for its runner."""
    if runners == ("vllm",):
        foreign = foreign_settings("vllm")
        kept = {name: value for name, value in defaults.items() if name not in foreign}
        return {"runner": "vllm", "ignore_eos": True, **kept, **settings}
    on_gpu = resolve_device(settings.get("device", "auto")).type == "cuda"
    return {"runner": "engine", "ignore_eos": True, **(_ON_A_GPU if on_gpu else {}), **defaults, **settings}


def vllm_options(defaults: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` for a workload.

    Its limits are those of the work, and its CUDA graphs cover all requests; all else is the default of the ``vllm``
    runner. (At the engine's share of the memory, 92%, vLLM 0.24 ran out of memory on W1 with 27B shapes.)

    Args:
        defaults: settings of the workload; without prefix caching, vLLM caches neither prefixes nor pixels.
        text: further arguments, a JSON object.

    Raises:
        SettingError: not a JSON object.
    """
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise SettingError(f"--vllm-options takes a JSON object; got {text!r}")
    uncached = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
    limits = {
        "max_model_len": _VLLM_LONGEST,
        "limit_mm_per_prompt": {"image": 1},
        "compilation_config": {"max_cudagraph_capture_size": axes()["max_num_seqs"].default},
    }
    return {**limits, **({} if defaults.get("prefix_caching", True) else uncached), **arguments}


def _named(words: Sequence[str]) -> dict[str, str]:
    """Return the settings that ``--name value`` and ``--flag`` stand for."""
    settings: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            settings[name] = value or "true"
        elif name and settings[name] == "true":
            settings[name] = word
        else:
            raise SettingError(f"{word!r} belongs to no setting")
    return settings


def shown(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` for a record: all but the folder of the checkpoint's configuration."""
    return {name: value for name, value in arguments.items() if name != "model"}


def open_runners(work: Work) -> dict[str, Runner]:
    """Return the runners by name, all on one loaded model."""
    if "vllm" in work.runners:
        require_supported(work.settings)
        vllm = VllmRunner(work.settings, work.vllm_options)
        vllm.configure(work.settings)
        return {"vllm": vllm}
    plain = {name: axes()[name].default for name in ENGINE_AXES}
    batch = {"batch_size": work.batch_size, "cache": work.cache}
    settings = {
        "engine": work.settings,
        "generate": replace(work.settings, runner="generate", prefill_chunk_size=None, **(plain | batch)),
    }
    say(f"loading {work.settings.model_name}")
    engine = ready_runner(work.settings)
    assert isinstance(engine, EngineRunner)  # as the settings name it
    if "generate" not in work.runners:
        return {"engine": engine}
    generate = GenerateRunner(engine.loaded, settings["generate"])
    generate.configure(settings["generate"])
    return {"engine": engine, "generate": generate} if "engine" in work.runners else {"generate": generate}


@dataclass(frozen=True, slots=True)
class RequestSeeds:
    """The seeds of a request's page and question, and its output tokens if not those of the settings."""

    page: int
    question: int
    tokens: int | None = None


def ask(work: Work, loaded: Loaded, seeds: Sequence[RequestSeeds], text_tokens: int = TEXT_TOKENS) -> list[Request]:
    """Return requests of one page and one question each, in order; equal pages are drawn once."""
    pages = {seed: page(seed) for seed in dict.fromkeys(request.page for request in seeds)}
    crops = plan_views(*PAGE, work.settings.pan_and_scan).crops
    sampling = work.settings.sampling
    return [
        Request(
            prompt=question(loaded.reader.prompts, request.question, crops=crops, text_tokens=text_tokens),
            images=[pages[request.page]],
            pan_and_scan=work.settings.pan_and_scan,
            sampling=replace(sampling, max_new_tokens=request.tokens or sampling.max_new_tokens),
            id=f"{number:05d}",
        )
        for number, request in enumerate(seeds)
    ]


def floors_of(loaded: Loaded, settings: Settings, result: Result) -> Floors:
    """Return the floors of requests like the answered one, at the ceilings of all GPUs of this machine together."""
    rates = measure_ceilings(loaded.device, loaded.dtype)
    shape = loaded.shape()
    counts, gpus = (result.views, result.prompt_tokens, settings.max_new_tokens), settings.tensor_parallel_size
    variant = Variant(shape, dtype="fp32" if loaded.dtype.itemsize == 4 else "bf16")
    roofline = Roofline(variant, gpus * rates.flops_per_s, gpus * rates.bytes_per_s, variant.weight_bytes())
    return Floors(roofline, RequestCounts(*counts))


def verdicts(work: Work, runners: Mapping[str, Runner], requests: Sequence[Request]) -> dict[str, Any]:
    """Return the verdict record of each runner on some requests, as ``panscan bench`` writes it.

    Call it before anything is measured: the reference needs the memory that caches take later.
    """
    if not work.compared or "vllm" in runners:  # panscan bench verifies vLLM, on a saved checkpoint
        return dict.fromkeys(runners)
    with TemporaryDirectory() as folder:
        source = Source(dataset=str(_dataset(Path(folder), requests[: work.compared])))
        items = load_workload(source, on_problem=_fail).items
        steps = min(TOKENS, work.settings.max_new_tokens)
        files = sorted(work.references.glob("*.safetensors")) if work.references and work.settings.quantized else ()
        references = [(path, load_reference(path)) for path in files]
        verifier = Verifier(References(items, source, steps, work.references, references, lambda _: None, say))
        records = {}
        for name, runner in runners.items():
            cell = Cell.of(runner.settings)
            if cell.settings.quantized:
                verifier.references.prepare_apart([cell.settings])
            else:
                verifier.references.prepare(runner, [cell.settings])
            runner.configure(cell.settings)
            verdict = verifier.verify(runner, cell)
            records[name] = to_builtins(verdict)
            if isinstance(runner, EngineRunner):
                runner.drop()  # the model must be as it was loaded for the others
            say(f"{name}: {verdict.verdict} {verdict.reason or ''}")
        return records


def _dataset(folder: Path, requests: Sequence[Request]) -> Path:
    """Write pages and questions as files, and return the dataset's path."""
    rows = []
    for request in requests:
        request.images[0].save(folder / f"{request.id}.png", compress_level=1)
        rows.append(json.dumps({"image": f"{request.id}.png", "question": request.prompt, "id": request.id}))
    path = folder / "questions.jsonl"
    path.write_text("\n".join(rows) + "\n", "utf-8")
    return path


def _fail(error: InputError) -> None:
    raise error


def base_record(work: Work, loaded: Loaded, result: Result) -> dict[str, Any]:
    """Return the fields that every record has: the machine, the model, the work and the command.

    Args:
        work: of the command line.
        loaded: the model.
        result: of any request; all have as many views and prompt tokens.
    """
    return {
        "workload": work.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": work.command,
        "environment": environment(),
        "gpu_uuids": gpu_uuids(),
        "model": {
            "name": work.settings.model_name,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "device": str(loaded.device),
            "weight_bytes": sum(tensor.nbytes for tensor in (*loaded.model.parameters(), *loaded.model.buffers())),
        },
        "settings": work.settings.changed(),
        "work": {
            "requests": work.num_requests,
            "repeats": work.repeats,
            "views": result.views,
            "prompt_tokens": result.prompt_tokens,
            "image_tokens": result.image_tokens,
            "output_tokens": work.settings.max_new_tokens,
        },
        "ceilings": asdict(measure_ceilings(loaded.device, loaded.dtype)),
    }


def save(work: Work, record: Mapping[str, Any]) -> None:
    """Write the complete record, or nothing.

    Raises:
        RecordsError: it cannot be written.
    """
    work.output.parent.mkdir(parents=True, exist_ok=True)
    write_file(work.output, json.dumps(record, indent=1, allow_nan=False).encode() + b"\n")
    say(f"wrote {work.output}")


def say(text: str) -> None:
    """Print progress on standard error."""
    print(text, file=sys.stderr, flush=True)
