"""What stands behind a report's figures: hardware and versions, the reference, definitions. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from panscan.analysis import significance
from panscan.analysis.cells import count, number_text
from panscan.quality import scores
from panscan.records import verdict
from panscan.records.environment import bundled_weights, has_random_weights
from panscan.records.metrics import LEAST_SAMPLES
from panscan.records.schema import FLOOR, InputCheck, LoadRecord
from panscan.records.store import Run
from panscan.report.formatting import clean

__all__ = [
    "ReferenceSummary",
    "definitions",
    "environment",
    "load_definitions",
    "machine",
    "model_names",
    "random_note",
    "references",
]

_WORDS = {
    "panscan": "panscan",
    "commit": "commit",
    "python": "Python",
    "platform": "system",
    "cpu": "CPU",
    "cpu_count": "logical CPUs",
    "torch_threads": "PyTorch threads",
    "memory_bytes": "memory",
    "packages": "packages",
    "bundled": "bundled weights",
    "cuda": "CUDA",
    "gpus": "GPUs",
}

_BYTES = ((2**30, "GiB"), (2**20, "MiB"))
_RATES = ((1e12, "T"), (1e9, "G"))


def model_names(run: Run) -> list[str]:
    """The models of a run's cells, each once."""
    return list(dict.fromkeys(_model(settings) for settings in run.cells.values()))


def _model(settings: Mapping[str, Any]) -> str:
    if settings.get("random_weights"):
        return clean(f"{settings.get('model_shape')} shape, random weights")
    return clean(settings.get("model", "unknown model"))


def random_note(run: Run, cells: Sequence[Mapping[str, Any]]) -> str:
    """What to expect of a model that was never trained; nothing where any of these cells' was."""
    if cells and has_random_weights(cells, bundled_weights(run)):
        return "These weights are random: times are real, answers are noise."
    return ""


def machine(run: Run) -> str:
    """The hardware in a few words."""
    facts = run.header.machine
    names = [str(gpu.name) for gpu in facts.gpus]
    if names:
        return clean(", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)))
    return clean(facts.cpu or "unknown hardware")


def environment(run: Run) -> list[tuple[str, str]]:
    """Everything that the run kept of where it took place, as (name, text)."""
    found = [
        (_WORDS.get(name, clean(name)), clean(_environment_text(name, value)))
        for name, value in run.header.environment.items()
        if value not in (None, [], {})
    ]
    loads = {id(load): load for load in run.loads.values()}
    return [*found, *map(_load_text, loads.values())]


def _load_text(load: LoadRecord) -> tuple[str, str]:
    parts = [f"{_scaled(load.weight_bytes, _BYTES)} of weights, loaded in {number_text(load.seconds)} s"]
    if load.flops_per_s:
        parts.append(f"{_scaled(load.flops_per_s, _RATES)}FLOP/s in a large product")
    if load.bytes_per_s:
        parts.append(f"{_scaled(load.bytes_per_s, _RATES)}B/s in a large copy")
    return f"loaded on {clean(load.device)}, {clean(load.dtype)}", ", ".join(parts)


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Three digits, in the largest unit that the value reaches; else in the smallest."""
    size, unit = next((each for each in units if value >= each[0]), units[-1])
    return f"{number_text(value / size)} {unit}"


def _environment_text(name: str, value: Any) -> str:
    if name == "memory_bytes":
        return _scaled(value, _BYTES)
    if name in ("packages", "bundled"):
        return ", ".join(f"{package} {version}" for package, version in value.items())
    if name == "gpus":
        return "; ".join(
            f"{gpu.get('name')}, {_scaled(gpu.get('memory_bytes') or 0, _BYTES)}, driver {gpu.get('driver')}"
            for gpu in value
        )
    return str(value)


@dataclass(frozen=True, slots=True)
class ReferenceSummary:
    """A reference, and the settings that were compared with it.

    Args:
        model: name of the model.
        settings: names of the compared settings.
        origin: "computed" or "loaded from FILE", with the seconds.
        requests: number of requests.
        tokens: answer tokens.
        image_positions: positions of image tokens.
        compared_seconds: time of all comparisons, excluded from all timings as is that of the reference.
        inputs: result of the comparison of its inputs with Transformers' processor; empty if not compared.
    """

    model: str
    settings: tuple[str, ...]
    origin: str
    requests: int
    tokens: int
    image_positions: int
    compared_seconds: float
    inputs: str = ""


def references(run: Run, names: Mapping[str, str]) -> list[ReferenceSummary]:
    """Return the references of a run.

    Args:
        run: the run.
        names: names of the cells by id.
    """
    found = []
    for name, truth in run.truths.items():
        compared = [verdict for verdict in run.verdicts.values() if verdict.truth == name]
        computed = truth.source == "computed"
        origin = "computed" if computed else f"loaded from {clean(truth.file)} (--reference)"
        found.append(
            ReferenceSummary(
                clean(truth.model),
                tuple(names[verdict.cell] for verdict in compared if verdict.cell in names),
                f"{origin} in {number_text(truth.seconds)} s",
                truth.requests,
                truth.tokens,
                truth.image_positions,
                sum(verdict.seconds for verdict in compared),
                _inputs(truth.inputs),
            )
        )
    return found


def _inputs(checked: InputCheck | None) -> str:
    if checked is None:
        return ""
    what = f"{count(checked.requests, 'request')} with {count(checked.views, 'view')}"
    note = f" ({clean(checked.note)})" if checked.note else ""
    if checked.difference is not None:
        return f"The inputs are NOT those of Transformers' own processor: {clean(checked.difference)}{note}."
    same = "boxes, token ids and pixels are bit-identical"
    return f"The inputs of {what} also went through Transformers' own processor: {same}{note}."


def definitions() -> list[tuple[str, str]]:
    """The terms of the report, as (term, meaning); limits come from the code that applies them."""
    return [*_about_speed(), *_about_answers(), *_about_quality()]


def _about_speed() -> list[tuple[str, str]]:
    samples = ", ".join(f"{least} for p{percent}" for percent, least in LEAST_SAMPLES.items())
    return [
        ("Accepted", "when the engine or server takes the request; for generate(), when its batch starts."),
        ("TTFT", "time to first token: from accepted to the first output token. The table has the median."),
        ("E2E", "from accepted to the last output token."),
        ("TPOT", "time per output token after the first: (E2E - TTFT) / (N - 1) for N output tokens, none for N < 2."),
        (
            "req/s",
            "requests answered over the wall time of the repeats, warm-up left out; of replicas, over the time in "
            "which all of them worked.",
        ),
        (
            "Stages",
            "load (read and decode the images), preprocess (crop and resize them), queue, vision, prefill, decode: "
            "means over requests that add up to the mean E2E. Queue is all waiting: for a thread that prepares the "
            "request, for the engine's first pass, for a lock, and after a preemption. Requests of a batch share its "
            "stages.",
        ),
        (
            "Intervals",
            "95% confidence by a seeded bootstrap that draws whole batches; none below two batches. Accuracies have "
            "Wilson intervals over questions.",
        ),
        (
            "~",
            f"a percentile of too few samples for 99% confidence (at least {samples}: MLPerf's early-stopping rule).",
        ),
        (
            "Floor",
            "the least time that the machine's two measured ceilings allow: FLOPs over FLOP/s or bytes over bytes/s, "
            "the larger of both, for the real tokens of the run's own batches.",
        ),
    ]


def _about_answers() -> list[tuple[str, str]]:
    return [
        (
            "Reference",
            "float32 eager attention on the same views and the same weights (unquantised ones for a quantised cell). "
            "The verdict compares next-token distributions along its greedy tokens, at answer positions and "
            "image positions.",
        ),
        (
            "Times the noise",
            "mean KL divergence of the setting from the reference, over that of plain eager attention at the same "
            f"precision: eager attention itself is 1x. Both count as at least {FLOOR:g} nats.",
        ),
        (
            "exact",
            f"KL at most {verdict.EXACT_RATIO:g}x the noise at answer and at image positions, and every measured token "
            "that differs is within the noise. In float32, all tokens are equal.",
        ),
        (
            "close",
            f"KL at most {verdict.CLOSE_RATIO:g}x the noise, and the reference's top token at {verdict.CLOSE_TOP1:.0%} "
            "or more of the positions where its margin exceeds the noise (top-1).",
        ),
        (
            "different",
            "the rest; also any setting with a measured token that differs from the reference's by more than "
            f"{verdict.EXACT_RATIO:g}x the noise, and any whose inputs are wrong.",
        ),
        (
            "Invariance",
            "the same greedy request gives the same tokens whatever the batch, the order, the caches, the prefill "
            "chunks and the number of GPUs; --check-invariance varies all of them but the GPUs.",
        ),
        ("unverified", "not compared, for the reason beside it."),
    ]


def _about_quality() -> list[tuple[str, str]]:
    return [
        ("Accuracy (exact match)", "share of answers that are one of the dataset's; case and surrounding space aside."),
        (
            "Accuracy (ANLS)",
            "average normalised Levenshtein similarity to the closest accepted answer, similarities below "
            f"{scores.ANLS_THRESHOLD:g} as 0: the metric of DocVQA and InfographicVQA.",
        ),
        (
            "Accuracy (relaxed)",
            f"share of answers that are an accepted number within {scores.RELAXED:.0%} of it, or an accepted text: "
            "ChartQA's metric.",
        ),
        ("Accuracy (contains answer)", "share of answers that contain an accepted one as whole words."),
        ("Accuracy (VQA)", "min(1, matches / 3) among nine annotators, averaged over the ten sets of nine: TextVQA's."),
        (
            "Accuracy vs exact",
            "of a cell that is not exact: its accuracy less that of the exact cell with the same views and model, in "
            "percentage points, paired by question, with the 95% interval and the p-value (sign-flip test).",
        ),
        (
            "No measurable loss",
            "on the same questions, paired: no significant difference (sign-flip permutation test, which is McNemar's "
            "exact test for right and wrong; Holm over all cells), and the 95% interval excludes a loss of more than "
            f"{100 * significance.WORST_LOSS:g} points, over at least "
            f"{significance.LEAST_QUESTIONS} questions. p-values are before that correction.",
        ),
    ]


def load_definitions() -> list[tuple[str, str]]:
    """The terms of a load run's report."""
    samples = ", ".join(f"{least} for p{percent}" for percent, least in LEAST_SAMPLES.items())
    return [
        ("Offered", "requests per second that the arrival process sends."),
        ("Answered", "answered requests over the time from the first request to the last answer."),
        ("TTFT", "time to first token: from sending the request to its first content chunk."),
        ("TPOT", "from the first to the last content chunk, over the output tokens after the first."),
        ("ITL", "time between content chunks; a chunk may hold several tokens."),
        ("E2E", "from sending the request to its last content chunk."),
        (
            "Goodput",
            "requests per second that meet all limits; a failed request meets none. The wait for a slot of "
            "--max-concurrency counts towards the limits on TTFT and E2E.",
        ),
        (
            "Keeps up",
            "whether completions follow arrivals: their 10th and 90th percentiles lie at most a ninth further apart.",
        ),
        (
            "Queued",
            "mean time that requests waited for --max-concurrency; excluded from latencies, counted in goodput.",
        ),
        ("Lag", "how late the load generator sent requests, excluding waits for --max-concurrency: median / p99."),
        ("Generator CPU", "share of one core that the load generator's busiest process used."),
        (
            "Intervals",
            "95% confidence by a seeded bootstrap over blocks of consecutive requests, at least as many as are in "
            "flight together; omitted for fewer than two blocks. Shares of requests have Wilson intervals.",
        ),
        (
            "~",
            f"a percentile of too few samples for 99% confidence (at least {samples}: MLPerf's early-stopping rule).",
        ),
    ]
