"""The accuracy of cells against each other: the one rule for a measurable loss, and what cells that are not exact, or
that have quantised weights, cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from panscan.analysis.cells import MeasuredCell, effective_settings
from panscan.analysis.significance import ALPHA, ROUNDING, decide, sign_flip_p_value
from panscan.core import same_model
from panscan.core.sampling import SAMPLING_NAMES
from panscan.records.intervals import Z95
from panscan.records.quality import metric_of, metric_title, metrics_in, quality_of, scores_of_cell
from panscan.records.store import Run
from panscan.verdict.judgement import is_quantized, verdict_of

LEAST_QUESTIONS = 30
"""Fewer different questions show nothing about answers."""
WORST_LOSS = 0.02
"""Loss of quality that the 95% interval must exclude, for a loss to be called not measurable."""


def points_text(share: float) -> str:
    """Percentage points with their sign; no minus before nothing."""
    return f"{100 * share + 0.0:+.1f}".replace("-0.0", "+0.0")


def p_text(p_value: float) -> str:
    """``p = 0.62``; no 0 for what is only small."""
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.2g}"


@dataclass(frozen=True, slots=True)
class QualityDifference:
    """A cell's quality less another's, over the questions that both answered.

    Args:
        value: the mean difference over questions, -1 to 1.
        low: of its 95% interval.
        high: of its 95% interval.
        questions: in both.
        better: questions that the cell answers better.
        worse: questions that the cell answers worse.
        p_value: two-sided; see :func:`panscan.analysis.significance.sign_flip_p_value`.
    """

    value: float
    low: float
    high: float
    questions: int
    better: int
    worse: int
    p_value: float

    @property
    def text(self) -> str:
        """``-3.1 (-5.0 to -1.2), p = 0.004``, in percentage points."""
        return f"{points_text(self.value)} ({self.bounds}), {p_text(self.p_value)}"

    @property
    def bounds(self) -> str:
        """``-5.0 to -1.2``: the 95% interval in percentage points."""
        return f"{points_text(self.low)} to {points_text(self.high)}"

    @property
    def is_loss(self) -> bool:
        """Whether the interval lies below 0, or the p-value, not corrected for other tests, shows a loss."""
        return self.high < 0 or (self.value < 0 and self.p_value < ALPHA)

    @property
    def excludes_loss(self) -> bool:
        """Whether there is no measurable loss, the one rule of recommendations and reports.

        The 95% interval of the paired difference reaches 0 and excludes a loss of more than :data:`WORST_LOSS`, over at
        least :data:`LEAST_QUESTIONS` questions, and the p-value does not show a loss: for shares the interval is so
        wide that it alone would overlook small losses of many questions.
        """
        return self.questions >= LEAST_QUESTIONS and self.low >= -WORST_LOSS and not self.is_loss


def quality_difference(run: Run, cell: str, baseline: str) -> QualityDifference | None:
    """A metric of a cell less the baseline's, over requests that both have a score of; None without a common request.

    Paired by request and repeat, averaged within a question; see :func:`paired_difference`.
    """
    name = metric_of(run)
    scores, others = (
        {(question, key): score for question, key, score in scores_of_cell(run, one, name)} for one in (cell, baseline)
    )
    by_question: dict[object, list[float]] = defaultdict(list)
    for pair in sorted(scores.keys() & others.keys()):
        by_question[pair[0]].append(scores[pair] - others[pair])
    means = [sum(values) / len(values) for values in by_question.values()]
    return paired_difference(means) if means else None


def paired_difference(means: Sequence[float]) -> QualityDifference:
    """The difference of two qualities from each question's own, -1 to 1.

    The 95% interval is Agresti and Min's for matched proportions (Statistics in Medicine 24, 2005): Wald's after half
    an observation has been added to each outcome of a pair, here half a win, half a loss and one tie. It stays honest
    where no answer differs: a bootstrap would then be certain after one question. For scores between 0 and 1 a win is
    the largest difference there can be, so the interval is rather too wide than too narrow.
    """
    count = len(means) + 2
    centre = sum(means) / count
    spread = sqrt(((sum(mean**2 for mean in means) + 1) / count - centre**2) / count)
    value = sum(means) / len(means)
    return QualityDifference(
        value=value,
        low=max(-1.0, min(value, centre - Z95 * spread)),
        high=min(1.0, max(value, centre + Z95 * spread)),
        questions=len(means),
        better=sum(mean > ROUNDING for mean in means),
        worse=sum(mean < -ROUNDING for mean in means),
        p_value=sign_flip_p_value(means),
    )


def evidence_text(run: Run, difference: QualityDifference, peer: str) -> str:
    """Return whether a cell has no measurable loss against the cell named ``peer``, with the figures."""
    text = (
        f"{metric_title(run)} {points_text(difference.value)} points (95%: {difference.bounds},"
        f" {p_text(difference.p_value)}) against {peer} over {difference.questions} questions"
    )
    if difference.questions < LEAST_QUESTIONS:
        return f"{text}, fewer than the {LEAST_QUESTIONS} required"
    if difference.is_loss:
        return f"measurable loss: {text}"
    if not difference.excludes_loss:
        return f"undecided, a loss of {-100 * difference.low:.1f} points is possible: {text}"
    return f"no measurable loss: {text}"


def compare_with_baseline(
    run: Run, cells: Sequence[str], views: Callable[[str], float]
) -> tuple[str, dict[str, str]] | None:
    """Return the baseline, and by cell id the result of every other cell: a word, figures, and what they can show.

    The words are "measurable loss", "measurable gain", "no measurable loss", and "undecided". The baseline is the cell
    with the most views per request, which settings with fewer crops must match; of several, the first, because the best
    one would partly be chosen by luck. All tests are one family: the chance that any cell is falsely called worse or
    better is at most 5% (:func:`panscan.analysis.significance.decide`).

    Args:
        run: run with scored answers.
        cells: ids of the cells to compare.
        views: returns the mean views per request of a cell, by its id.

    Returns:
        None if fewer than two cells have scores.
    """
    means = {cell: quality.mean for cell in cells if (quality := quality_of(run, cell)) is not None}
    if len(means) < 2:
        return None
    baseline = max(means, key=views)
    differences = {
        cell: difference
        for cell in means
        if cell != baseline and (difference := quality_difference(run, cell, baseline)) is not None
    }
    alarms = decide(
        [difference.p_value for difference in differences.values()],
        # The smallest p-value that the differing questions could give: all of them differ the same way.
        [min(1.0, 2 * 0.5 ** (difference.better + difference.worse)) for difference in differences.values()],
    )
    return baseline, {
        cell: _baseline_text(difference, alarm=bool(alarm))
        if means[cell] or means[baseline]
        else "undecided: neither cell has a correct answer"
        for (cell, difference), alarm in zip(differences.items(), alarms, strict=True)
    }


def _baseline_text(difference: QualityDifference, *, alarm: bool) -> str:
    low = difference.low
    figures = f"({p_text(difference.p_value)}, difference {points_text(difference.value)} points"
    figures += f" [{points_text(low)}, {points_text(difference.high)}])"
    if alarm:
        return f"measurable {'loss' if difference.value < 0 else 'gain'} {figures}"
    questions = f"with {difference.questions:,} question{'' if difference.questions == 1 else 's'}"
    reach = f"{100 * max(0.0, -low):.1f}"
    if difference.excludes_loss:
        return f"no measurable loss {figures}: {questions}, a loss of more than {reach} points is excluded"
    seen = f"a loss of {reach} points is possible" if low < 0 else "the result may be chance"
    return f"undecided {figures}: {questions}, {seen}"


TITLE = "accuracy vs exact"
NO_EXACT_CELL = "no exact cell"
COLUMNS = ("exact_cell", *(f"accuracy_vs_exact{part}" for part in ("", "_low", "_high", "_p_value")))
_ANSWER_SETTINGS = ("revision", "random_weights", "model_shape", *SAMPLING_NAMES, "sampling_seed")
"""Settings besides the model that change the answers: a difference would not be the verdict's."""


@dataclass(frozen=True, slots=True)
class TaskCost:
    """The accuracy of a cell that is not exact, less that of an exact cell.

    Args:
        exact: the id of the cell that it is compared with: the exact one with the same views and model whose other
            settings are closest; None where there is none.
        difference: over the questions that both answered; None without an exact cell.
    """

    exact: str | None
    difference: QualityDifference | None

    @property
    def text(self) -> str:
        """The difference, or why there is none."""
        return NO_EXACT_CELL if self.difference is None else self.difference.text


def costs_of_cells(run: Run) -> dict[str, TaskCost]:
    """Return the accuracy cost of each answered cell that is not exact, by cell id; empty without accepted answers.

    Paired by question; see :func:`quality_difference`. p-values are not corrected for the number of cells.
    """
    if not metrics_in(run):
        return {}
    views = {
        key[0]: {(request.request, *request.image_sha256): request.views or 0 for request in run.answered(key[0])}
        for key in run.repeats
    }
    settings = {cell: effective_settings(run.cells[cell]) for cell in views}
    exact = [cell for cell in views if verdict_of(run, cell).word == "exact"]
    costs = {}
    for cell, own_views in views.items():
        if cell in exact or not own_views:
            continue
        peers = [
            peer
            for peer in exact
            if _comparable(run, cell, peer, _ANSWER_SETTINGS)
            and all(own_views[request] == views[peer][request] for request in own_views.keys() & views[peer].keys())
        ]
        # The fewest differing settings; stable: the first of several.
        peers.sort(key=lambda peer: sum(value != settings[peer].get(name) for name, value in settings[cell].items()))
        differences = ((peer, quality_difference(run, cell, peer)) for peer in peers)
        costs[cell] = next((TaskCost(*pair) for pair in differences if pair[1] is not None), TaskCost(None, None))
    return costs


def _comparable(run: Run, cell: str, peer: str, names: Iterable[str] | None = None) -> bool:
    """Whether two cells have the same model, or the second has the base of the first's quantised checkpoint, and equal
    values of some settings; None: of all but the quantisation."""
    settings, others = dict(effective_settings(run.cells[cell])), effective_settings(run.cells[peer])
    load = run.loads.get(cell)
    if load is not None and load.base_model and same_model(load.base_model, others.get("model")):
        settings |= {"model": load.base_model, "revision": others.get("revision")}
    if names is None:
        names = {*settings, *others} - {"quantization", "quantization_group_size", "model"}
    same_settings = all(settings.get(name) == others.get(name) for name in names)
    return same_settings and same_model(settings.get("model"), others.get("model"))


def cost_lines(costs: Mapping[str, TaskCost]) -> list[str]:
    """What a reader of the column must know."""
    lines = []
    if any(cost.exact is not None for cost in costs.values()):
        lines.append(
            "Accuracy vs exact: percentage points against the exact cell with the same views and model, with the 95%"
            " interval; paired by question."
        )
    missing = sum(cost.exact is None for cost in costs.values())
    if missing:
        who = "1 cell that is" if missing == 1 else f"{missing} cells that are"
        lines.append(
            f"{who} not exact cannot be compared: the run has no exact cell with the same views and model."
            " The accuracy cost is unknown; add an exact cell, for example with --attention eager."
        )
    return lines


def cost_columns(run: Run) -> dict[str, dict[str, float | str | None]]:
    """By cell id, the columns of ``summary.csv``: :data:`COLUMNS` for a run with accepted answers, else none."""
    if not metrics_in(run):
        return {}
    rows: dict[str, dict[str, float | str | None]] = {cell: dict.fromkeys(COLUMNS) for cell in run.cells}
    for cell, cost in costs_of_cells(run).items():
        lost = cost.difference
        values = () if lost is None else (lost.value, lost.low, lost.high, lost.p_value)
        rows[cell] |= zip(COLUMNS, (cost.exact or NO_EXACT_CELL, *values), strict=False)
    return rows


QUANTIZATION_NOTE = (
    "KL is the mean divergence of next-token distributions from the float32 reference of the unquantised model. "
    "Quantised cells are usually different, because they deviate by more than rounding noise. Such a cell is "
    "recommended only if a labelled dataset shows no measurable loss, or if --allow-different names it."
)


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """Cost and savings of quantised weights in one cell.

    Args:
        row: the measured cell.
        weights: weight format, such as ``int4, groups of 128``; empty for an unquantised cell.
        weight_bytes: size of the stored weights; None if the load was not recorded.
        base: unquantised cell with otherwise identical settings; None if there is none, and for unquantised cells.
        difference: accuracy minus that of the base, paired by question; None without a base or accepted answers.
    """

    row: MeasuredCell
    weights: str
    weight_bytes: int | None
    base: Tradeoff | None
    difference: QualityDifference | None

    @property
    def kl(self) -> tuple[float | None, float | None]:
        """Mean divergence from the reference in nats, at answer positions and at image positions."""
        answer, image = self.row.verdict.answer, self.row.verdict.image
        return None if answer is None else answer.kl, None if image is None else image.kl

    @property
    def relative_size(self) -> float | None:
        """Bytes of weights over the base's."""
        if self.base is None or not self.base.weight_bytes or self.weight_bytes is None:
            return None
        return self.weight_bytes / self.base.weight_bytes

    @property
    def relative_speed(self) -> float | None:
        """Requests per second over the base's."""
        return None if self.base is None or not self.base.row.speed else self.row.speed / self.base.row.speed


def tradeoffs_of(run: Run, rows: Sequence[MeasuredCell]) -> list[Tradeoff]:
    """Return the trade-offs of all quantised cells, each group after the unquantised cell that they are compared with.

    Empty for a run without quantised cells.
    """
    plain = [_tradeoff(run, row, None) for row in rows if not is_quantized(run, row.cell)]
    groups: dict[int | None, list[Tradeoff]] = {}
    for row in rows:
        if is_quantized(run, row.cell):
            place = next((i for i, other in enumerate(plain) if _comparable(run, row.cell, other.row.cell)), None)
            base = None if place is None else plain[place]
            groups.setdefault(place, [] if base is None else [base]).append(_tradeoff(run, row, base))
    return [tradeoff for group in groups.values() for tradeoff in group]


def _tradeoff(run: Run, row: MeasuredCell, base: Tradeoff | None) -> Tradeoff:
    load, settings = run.loads.get(row.cell), run.cells[row.cell]
    difference = None if base is None or row.quality is None else quality_difference(run, row.cell, base.row.cell)
    weights = (load and load.weights) or settings.get("quantization") or ""
    if load is not None and load.base_model:
        weights += f" ({settings.get('model')})"
    return Tradeoff(row, weights, None if load is None else load.weight_bytes, base, difference)
