"""Tables of docs/faster.md: what each change gains, what it costs in exactness, and its command.

A gain is a ratio within one record, or between two records of the same GPU or CPU model.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.markdown import accuracies, table, times_text
from panscan.analysis.cells import measured_rows
from panscan.records.metrics import work_of
from panscan.records.store import Run, read_run

RECORDS = Path(__file__).parent / "records"
_RATE, _TIME = "requests/s", "ms"
_27B, _4B = "--model google/gemma-3-27b-it", "--model google/gemma-3-4b-it"
_PROMPT = '-p "What is the total?" -o answers.jsonl'
_BATCH = f"panscan batch scans/ {_PROMPT} {_27B}"
_BENCH = "panscan bench --dataset docs/questions.jsonl"
_INT4 = "int4, groups of 64"  # of the mini model, whose widths 128 does not divide
_HEADINGS = ["step", "gain", "before", "after", "verdict; mini's accuracy", "command", "record"]
_TEXTS = (0, 4, 5, 6)


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured figure.

    Args:
        values: of all turns or requests, in the unit.
        unit: requests/s, where more is better, or ms, where less is.
        record: name of the record that holds it.
        machine: GPU model, else CPU model.
        documents: of W1, how many were sent at once; 0 for other figures.
        overall: of all turns together, if that is shown instead of their median.
    """

    values: Sequence[float]
    unit: str
    record: str
    machine: str
    documents: int = 0
    overall: float | None = None

    @property
    def value(self) -> float:
        """Return the overall value, else the median."""
        return statistics.median(self.values) if self.overall is None else self.overall

    def __str__(self) -> str:
        """Return value and unit."""
        if self.unit == _TIME:
            return f"{self.value:,.{1 if self.value < 100 else 0}f} ms"
        return f"{self.value:,.2f}/s"

    def gain(self, before: Figure) -> str:
        """Return how many times better this figure is than an earlier one, with the range of all pairs.

        Raises:
            ValueError: they have different units, or come from different hardware.
        """
        if (self.unit, self.machine) != (before.unit, before.machine):
            raise ValueError(f"{self} of {self.record} and {before} of {before.record} cannot be compared")
        pair = (before.values, self.values) if self.unit == _TIME else (self.values, before.values)
        return times_text(*pair)


@dataclass(frozen=True, slots=True)
class Step:
    """One change.

    Args:
        name: what to do.
        before: a figure without it.
        after: the same with it.
        verdict: whether results are the same: a verdict, or the measured accuracy.
        command: as a reader types it; empty: nothing to do.
    """

    name: str
    before: Figure
    after: Figure
    verdict: str
    command: str

    def row(self) -> list[str]:
        """Return the cells of a table row."""
        what = "faster" if self.after.unit == _TIME else "throughput"
        return [
            self.name,
            f"{self.after.gain(self.before)} {what}",
            str(self.before),
            str(self.after),
            self.verdict,
            f"`{self.command}`" if self.command else "automatic",
            _named(self.before, self.after),
        ]


@dataclass(frozen=True, slots=True)
class _Layout:
    """A layout of 27B over several cards; ``figure`` is the throughput per card."""

    name: str
    figure: Figure
    verdict: str
    command: str


def faster_one() -> str:
    """Return the steps on one GPU, 27B."""
    return _steps(_one_steps())


def faster_transformers() -> str:
    """Return the steps for Transformers' ``generate()`` on one GPU."""
    return _steps(_transformers_steps())


def faster_several() -> str:
    """Return the steps with a second GPU."""
    return _steps(_several_steps())


def faster_cpu() -> str:
    """Return the steps without a GPU."""
    return _steps(_cpu_steps())


def faster_small() -> str:
    """Return the layouts of 27B on cards with little memory, compared per card."""
    layouts = _small_layouts()
    bases = {layout.figure.machine: layout.figure for layout in reversed(layouts)}  # the first one on each GPU
    rows = [
        [
            layout.name if _one_pool(layout.figure.record) else f"{layout.name} \\*",
            "1.00x"
            if layout.figure is bases[layout.figure.machine]
            else layout.figure.gain(bases[layout.figure.machine]),
            str(layout.figure),
            str(layout.figure.documents),
            layout.figure.machine.removeprefix("NVIDIA "),
            layout.verdict,
            f"`{layout.command}`",
            _named(layout.figure),
        ]
        for layout in layouts
    ]
    headings = [
        "one replica",
        "per card",
        "throughput per card",
        "documents",
        "at the speed of",
        "verdict; mini's accuracy",
        "command",
        "record",
    ]
    note = (
        "The commands use ten cards. Measured on one or two larger cards with the memory limit of `--gpu-memory-gb`, at"
        " their speed: compare the layouts of one GPU with each other. An A100 or RTX 4090 is slower. 'Per card' is"
        " relative to bf16 on two cards of the same GPU; in parentheses for all pairs of turns. Documents: sent at"
        " once; more of them raise the throughput, since the last ones run in small passes. \\*: measured before"
        " local and global layers shared one pool of memory, with a KV cache for fewer requests,"
        " as was the row that ratios of H200s are relative to."
    )
    return f"{table(headings, rows, text=(0, 4, 5, 6, 7))}\n\n{note}"


def _one_pool(record: str) -> bool:
    """Return whether the engine of a record logged how many requests fit, as it does since there is one pool."""
    return "requests at once by tokens" in (RECORDS / f"{record}.json").read_text("utf-8")


def faster_wrong() -> str:
    """Return changes that raise the throughput at a cost in answers, or do not raise it."""
    quality = _record("mini-quality")["summary"]
    right = {
        name: f"{100 * quality[f'tall and wide, {name}']['exact_match']:.1f}%"
        for name in ("with", "without", "crops-2")
    }
    chunked, unchunked = (_cell("h200-4b-chunks", prefill_chunk_size=size) for size in (1024, None))
    off, on = (_cell("h200-27b", do_pan_and_scan=scan, batch_size=12) for scan in (False, True))
    bf16, int4, two = _w1("w1-27b"), _w1("w1-27b-int4"), _w1("w1-27b-tp2", gpus=2)
    dropped, causal = (_task_cost(name) for name in ("dropped images", "causal image attention"))
    rows = [
        [
            "`generate(prefill_chunk_size=1024)`, 4B",
            _times(unchunked, chunked),
            f"{chunked.verdict}: images are dropped or cut apart; mini's accuracy without images {dropped}",
            _named(chunked.figure) + ", `task-cost`",
        ],
        [
            "flash attention in Transformers",
            "not measured",
            f"image tokens become causal; mini's accuracy {causal}",
            "`task-cost`",
        ],
        [
            "pan and scan off, 27B, batches of 12",
            _times(on, off),
            f"mini's accuracy on tall and wide documents {right['without']} instead of {right['with']}",
            _named(off.figure) + ", `mini-quality`",
        ],
        [
            "2 crops instead of 4",
            "not measured",
            f"mini's accuracy on tall and wide documents {right['crops-2']} instead of {right['with']}",
            "`mini-quality`",
        ],
        [
            "int4 for throughput, 27B",
            int4.gain(bf16),
            "prefill computes in bf16, after dequantising",
            _named(bf16, int4),
        ],
        [
            "one model over two GPUs where it fits on one, 27B",
            f"{two.gain(bf16)} per GPU",
            "ranks exchange data in each layer: use replicas for throughput",
            _named(bf16, two),
        ],
        ['`device_map="auto"` over several GPUs', "not measured", "the GPUs work one after the other", "-"],
    ]
    note = "Accuracy is the bundled mini model's on its own documents; other models lose a different share."
    return f"{table(['change', 'throughput', 'what happens', 'record'], rows, text=(0, 2, 3))}\n\n{note}"


def commands() -> list[str]:
    """Return the commands of all steps."""
    steps = [*_one_steps(), *_transformers_steps(), *_several_steps(), *_cpu_steps()]
    return [step.command for step in steps if step.command] + [layout.command for layout in _small_layouts()]


def _small_layouts() -> list[_Layout]:
    weights = {
        "int8, one 40 GB card": ("int8", "int8", "40gb"),
        "int4, one 40 GB card": ("int4", _INT4, "40gb"),
        "int4, one 24 GB card": ("int4", _INT4, "24gb"),
    }
    pair = "w1-27b-tp2-40gb"
    pairs, singles = f"{_BATCH} --replicas 5 --tensor-parallel-size 2", f"{_BATCH} --replicas 10 --quantization"
    bf16_pair, int8, int8_pair, fp8_cache, fp8_cache_pair = (
        f"w1-27b-{name}-h100"
        for name in ("bf16-tp2-40gb", "int8-40gb", "int8-tp2-40gb", "int8-fp8kv-40gb", "int8-fp8kv-tp2-40gb")
    )
    return [
        _Layout("bf16, two 40 GB cards", _w1(pair, gpus=2), _judged(pair), pairs),
        *(
            _Layout(
                name,
                _w1(f"w1-27b-{kind}", part=f"measured_{memory}"),
                _judged_with_points(f"w1-27b-{kind}", variant),
                f"{singles} {kind}",
            )
            for name, (kind, variant, memory) in weights.items()
        ),
        _Layout("bf16, two 40 GB cards", _w1(bf16_pair, gpus=2), _judged(bf16_pair), pairs),
        _Layout("int8, one 40 GB card", _w1(int8), _judged_with_points(int8, "int8"), f"{singles} int8"),
        _Layout(
            "int8, two 40 GB cards",
            _w1(int8_pair, gpus=2),
            _judged_with_points(int8_pair, "int8"),
            f"{pairs} --quantization int8",
        ),
        _Layout(
            "int8 and an fp8 KV cache, one 40 GB card",
            _w1(fp8_cache),
            "not compared",
            f"{singles} int8 --kv-cache-dtype fp8",
        ),
        _Layout(
            "int8 and an fp8 KV cache, two 40 GB cards",
            _w1(fp8_cache_pair, gpus=2),
            _judged(fp8_cache_pair),
            f"{pairs} --quantization int8 --kv-cache-dtype fp8",
        ),
        *_small_caches(singles),
    ]


def _small_caches(singles: str) -> list[_Layout]:
    """Return layouts whose speed the size of the KV cache limits, with what enlarges it."""
    pairs = singles.replace("--replicas 10", "--replicas 5 --tensor-parallel-size 2")
    bf16_pairs = pairs.removesuffix(" --quantization")
    bf16, head, cache = singles.removesuffix(" --quantization"), "--quantize-head int8", "--kv-cache-dtype int8"
    records = {
        "bf16, one 80 GB card": ("bf16-80gb", bf16),
        "bf16 and an int8 KV cache, one 80 GB card": ("bf16-80gb-int8kv", f"{bf16} {cache}"),
        "int8 with an int8 head, one 40 GB card": ("int8-40gb-head", f"{singles} int8 {head}"),
        "the same and an int8 KV cache": ("int8-40gb-head-int8kv", f"{singles} int8 {head} {cache}"),
        "int4 with an int8 head, one 24 GB card": ("int4-24gb-head", f"{singles} int4 {head}"),
        "int4 with an int8 head and an int8 KV cache, one 24 GB card": (
            "int4-24gb-head-int8kv",
            f"{singles} int4 {head} {cache}",
        ),
        "bf16 and an int8 KV cache, two 40 GB cards": ("bf16-tp2-40gb-int8kv", f"{bf16_pairs} {cache}"),
        "int8 with an int8 head, two 40 GB cards": ("int8-tp2-40gb-head", f"{pairs} int8 {head}"),
        "int8 with an int8 head and an int8 KV cache, two 40 GB cards": (
            "int8-tp2-40gb-head-int8kv",
            f"{pairs} int8 {head} {cache}",
        ),
    }
    return [
        _Layout(
            words,
            _w1(record, gpus=2 if "tp2" in record else 1),
            _judged(record),
            command,
        )
        for words, (record, command) in (
            (words, (f"w1-27b-{name}{gpu}", line))
            for words, (name, line) in records.items()
            for gpu in ("-h100", "")
            if (RECORDS / f"w1-27b-{name}{gpu}.json").exists()
        )
    ]


def _one_steps() -> list[Step]:
    single, batched, engine = (
        _cell("h200-27b-engine", runner=runner, batch_size=size)
        for runner, size in (("generate", 1), ("generate", 8), ("engine", None))
    )
    bf16, alone = _w1("w1-27b"), _alone("w1-27b")
    serial = Figure([1e3 / value for value in alone.values], _RATE, alone.record, alone.machine)
    exact = _judged("w1-27b")
    follow_up = _figure("w2-27b", *_record("w2-27b")["measured"]["engine"]["follow_up"]["ttft_ms"]["all"], unit=_TIME)
    pages = _figure("w2-27b", *_throughput(_record("w2-27b")["measured"]["engine"]["image_major"]))
    vision = _record("vision-tower")
    cudnn, hopper = (
        Figure(vision["ms_per_view"][kernel]["32"], _TIME, "vision-tower", _machine(vision))
        for kernel in ("cudnn", "hopper")
    )
    quantised = [
        Step(
            f"{kind} weights ({cards})",
            bf16,
            _w1(f"w1-27b-{kind}"),
            _judged_with_points(f"w1-27b-{kind}", kind),
            f"{_BATCH} --quantization {kind}",
        )
        for kind, cards in (("fp8", "H100, H200, L40S"), ("int8", "A100"))
    ]
    return [
        Step(
            "the engine with 16 requests in flight instead of `generate()` with one",
            single.figure,
            engine.figure,
            engine.verdict,
            _BATCH,
        ),
        Step(
            "the engine with 16 requests in flight instead of `generate()` in batches of 8",
            batched.figure,
            engine.figure,
            engine.verdict,
            f"{_BENCH} {_27B} --runner generate,engine --batch-size 1,8 --preprocess device",
        ),
        Step(
            "128 requests in flight, not one",
            serial,
            bf16,
            exact,
            "panscan load http://127.0.0.1:8000 --max-concurrency 1,128",
        ),
        Step(
            "several questions about each page, asked together (prefix caching)",
            bf16,
            pages,
            _judged("w2-27b"),
            f"panscan batch questions.jsonl -o answers.jsonl {_27B}",
        ),
        Step(
            "time to the first token of a later question about a page",
            _ttft("w1-27b"),
            follow_up,
            _judged("w2-27b"),
            f"panscan serve {_27B}",
        ),
        *quantised,
        Step(
            "int4 weights, one request at a time",
            alone,
            _alone("w1-27b-int4"),
            _judged_with_points("w1-27b-int4", _INT4),
            f"{_BATCH} --quantization int4",
        ),
        Step("vision attention for Hopper GPUs, per view", cudnn, hopper, exact, ""),
    ]


def _transformers_steps() -> list[Step]:
    def cell(attention: str, kv: str, preprocess: str) -> _Cell:
        return _cell("h200-4b", attention=attention, cache=kv, preprocess=preprocess)

    cells = [
        cell("eager", "dynamic", "cpu"),
        cell("sdpa", "dynamic", "cpu"),
        cell("sdpa", "static", "cpu"),
        cell("sdpa", "static", "device"),
    ]
    changes = [
        ("SDPA instead of eager attention, 4B", "--attn-impl eager,sdpa"),
        ("then a static cache, which compiles decoding, 4B", "--attn-impl sdpa --cache dynamic,static"),
        ("then preprocessing on the GPU, 4B", "--attn-impl sdpa --cache static --preprocess cpu,device"),
    ]
    single, batched = (_cell("h200-27b-engine", runner="generate", batch_size=size) for size in (1, 8))
    return [
        Step(
            "batches of 8 instead of 1, 27B",
            single.figure,
            batched.figure,
            batched.verdict,
            f"{_BENCH} {_27B} --preprocess device --batch-size 1,8",
        ),
        *(
            Step(name, before.figure, after.figure, after.verdict, f"{_BENCH} {_4B} --batch-size 4 {flags}")
            for (name, flags), before, after in zip(changes, cells, cells[1:], strict=False)
        ),
    ]


def _several_steps() -> list[Step]:
    one, two = (_cell(name) for name in ("h200-x2-one", "h200-x2-replicas"))
    replicas = _record("replicas-4b")
    engine, engines = (
        _figure("replicas-4b", *replicas["throughput"][count]["requests_per_s"]["all"]) for count in "12"
    )
    random, affinity = (
        _figure("replicas-4b", replicas["cache_hits"][routing]["requests_per_s"]) for routing in ("random", "affinity")
    )
    bf16, tp2 = _w1("w1-27b"), _w1("w1-27b-tp2")
    same = "not compared"
    return [
        Step(
            "a second replica of `generate()`, 4B", one.figure, two.figure, two.verdict, f"{_BENCH} {_4B} --replicas 2"
        ),
        Step(
            "a second engine replica, one burst shared by both, 4B",
            engine,
            engines,
            same,
            f"panscan serve {_4B} --replicas 2",
        ),
        Step(
            "follow-up questions routed to the replica that knows the page, 4B",
            random,
            affinity,
            same,
            f"panscan serve {_4B} --replicas 2 --routing affinity",
        ),
        Step(
            "one model on two GPUs, one request at a time, 27B",
            _alone("w1-27b"),
            _alone("w1-27b-tp2"),
            _judged("w1-27b-tp2"),
            f"panscan serve {_27B} --tensor-parallel-size 2",
        ),
        Step("one model on two GPUs, 27B", bf16, tp2, _judged("w1-27b-tp2"), f"{_BATCH} --tensor-parallel-size 2"),
        Step(
            "fp8 weights, one model on two GPUs, 27B",
            tp2,
            _w1("w1-27b-fp8-tp2"),
            _judged_with_points("w1-27b-fp8-tp2", "fp8"),
            f"{_BATCH} --tensor-parallel-size 2 --quantization fp8",
        ),
    ]


def _cpu_steps() -> list[Step]:
    record = _record("engine-on-cpu")
    methods = ("generate, one by one", "generate, batches of 4", "engine, 16 in flight")
    single, batched, engine = (
        _figure("engine-on-cpu", *(record["requests"] / seconds for seconds in record["seconds"][method]))
        for method in methods
    )
    pages = _record("batch-replicas")
    one, two = (
        _figure("batch-replicas", *(pages["pages"] / run["seconds"] for run in pages["runs"][count]))
        for count in ("engine", "2")
    )
    product = max(_record("quantization-mini")["products"]["times"], key=lambda timing: -int(timing["rows"]))
    dense, int8 = (_figure("quantization-mini", product[f"{kind}_ms"], unit=_TIME) for kind in ("float32", "int8"))
    ask, same = f"panscan batch scans/ {_PROMPT}", "the same tokens"
    return [
        *(
            Step(
                f"the engine with 16 requests in flight instead of `generate()` {what}, tiny", before, engine, same, ask
            )
            for what, before in (("with one", single), ("in batches of 4", batched))
        ),
        Step("two replicas with a core each, mini", one, two, "not compared", f"{ask} --replicas 2"),
        Step(
            f"int8 weights, one product of {product['rows']} row",
            dense,
            int8,
            _accuracy("int8"),
            f"{ask} --quantization int8",
        ),
    ]


def _steps(steps: Sequence[Step]) -> str:
    figures = [figure for step in steps for figure in (step.before, step.after)]
    notes = [
        ", ".join(sorted({figure.machine for figure in figures})),
        "One record: a ratio within a run; two: between runs on one GPU or CPU model, but on other days and perhaps"
        " other machines and code. In parentheses: the ratios of all pairs of turns, repeats or requests, which do not"
        f" cover how machines differ; without them, a side was measured once{_between_machines(figures)}",
    ]
    if any("points" in step.verdict for step in steps):
        notes.append(
            "Points: the bundled mini model's accuracy minus that with unquantised weights, 95% interval; its"
            " verdict where that of the record is not known"
        )
    return f"{table(_HEADINGS, [step.row() for step in steps], text=_TEXTS)}\n\n{'. '.join(notes)}."


def _between_machines(figures: Sequence[Figure]) -> str:
    """Return how far the same work differs between machines with the GPU of W1's record, if that is among figures."""
    if "w1-27b" not in {figure.record for figure in figures}:
        return ""
    medians = [_w1("w1-27b").value]
    runs = [run["record"] for run in _record("vllm-comparison")["parts"]["w1-27b"] if run["side"] == "engine"]
    medians += [statistics.median(_throughput(run["measured"]["engine"]["throughput"])) for run in runs]
    spread = f"{min(medians):.2f} to {max(medians):.2f} requests/s"
    return f". {len(medians)} runs of `w1-27b`'s work on H200s: {spread}"


@cache
def _record(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text("utf-8"))
    return record


def _machine(record: dict[str, Any]) -> str:
    facts = record["environment"]
    return str(facts["gpus"][0]["name"] if facts["gpus"] else facts["cpu"])


def _figure(name: str, *values: float, unit: str = _RATE) -> Figure:
    return Figure(values, unit, name, _machine(_record(name)))


def _throughput(turns: Sequence[dict[str, Any]]) -> list[float]:
    return [float(turn["requests_per_s"]) for turn in turns]


def _w1(name: str, *, part: str = "measured", gpus: int = 1) -> Figure:
    """Return the requests per second of W1, all at once, divided by a number of GPUs."""
    turns = _measured(name, part)["throughput"]
    figure = _figure(name, *(rate / gpus for rate in _throughput(turns)))
    return replace(figure, documents=int(turns[0]["requests"]))


def _alone(name: str) -> Figure:
    """Return the time of one request alone, end to end."""
    return _figure(name, *_measured(name)["alone"]["e2e_ms"]["all"], unit=_TIME)


def _ttft(name: str) -> Figure:
    return _figure(name, *_measured(name)["alone"]["ttft_ms"]["all"], unit=_TIME)


def _measured(name: str, part: str = "measured") -> dict[str, Any]:
    measured: dict[str, Any] = _record(name)[part]
    return dict(measured.get("engine", measured))


def _judged(name: str) -> str:
    """Return the verdict of a workload's record; that there is none without a comparison."""
    verdict = _record(name)["verdict"]["engine"]
    if verdict is None or verdict["answer"] is None:
        return "not compared"
    ratio = max(part["kl"] / part["noise"] for part in (verdict["answer"], verdict["image"]))
    return _verdict(verdict["verdict"], ratio)


def _judged_with_points(name: str, weights: str) -> str:
    """Return the verdict of a workload's record, and the mini model's change of accuracy with these weights.

    A record without a verdict has the mini model's.
    """
    verdict, (mini, _, points) = _judged(name), _accuracy(weights).partition("; ")
    return f"{verdict if verdict != 'not compared' else f'{mini} with mini'}; {points}"


def _verdict(word: str, ratio: float) -> str:
    return f"{word} ({ratio:,.{2 if ratio < 10 else 0}f}x the noise)"


def _accuracy(weights: str) -> str:
    """Return the mini model's verdict and its change of accuracy with quantised weights."""
    variants = _record("quantization-mini")["variants"]
    variant = variants[weights]
    groups = f", {weights.partition(', ')[2]}" if weights.startswith("int4") else ""
    return f"{variant['verdict']['verdict']}; {_points(variants, weights, 'unquantised')}{groups}"


def _task_cost(variant: str) -> str:
    variants = _record("task-cost")["variants"]
    return f"{_points(variants, variant, 'reference')}"


def _points(variants: dict[str, Any], name: str, base: str) -> str:
    return accuracies(variants, base)[name].short_text


@dataclass(frozen=True, slots=True)
class _Cell:
    """Throughput and verdict of a cell of a sweep."""

    figure: Figure
    verdict: str


def _repeat_rates(run: Run, cell: str) -> list[float]:
    """Return the requests per second of each repeat of a cell."""
    work = [work_of(repeat) for repeat in run.repeats_of(cell)]
    return [repeat.requests / repeat.seconds for repeat in work]


@cache
def _cells(name: str) -> tuple[tuple[dict[str, Any], _Cell], ...]:
    run = read_run(RECORDS / name)
    machine = str(run.header.machine.gpus[0].name)
    cells = []
    for row in measured_rows(run):
        rate, ratio = row.metrics.values["request_throughput"], row.verdict.ratio
        assert rate is not None and ratio is not None  # every committed sweep has both
        figure = Figure(_repeat_rates(run, row.cell), _RATE, name, machine, overall=rate)
        cells.append((dict(row.settings), _Cell(figure, _verdict(row.verdict.word, ratio))))
    return tuple(cells)


def _cell(name: str, **settings: Any) -> _Cell:
    """Return the one cell of a sweep with these settings."""
    [cell] = [cell for row_settings, cell in _cells(name) if settings.items() <= row_settings.items()]
    return cell


def _times(before: _Cell, after: _Cell) -> str:
    return after.figure.gain(before.figure)


def _named(*figures: Figure) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(figure.record for figure in figures))
