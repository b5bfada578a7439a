"""The one rule of recommendation, and the preset file of the recommended cell."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from panscan.analysis.accuracy import evidence_text, quality_difference
from panscan.analysis.cells import MeasuredCell, alias_lines, measured_rows, preset_of
from panscan.analysis.decision import Rule, Selection, costs_of, decision_of, reason_of
from panscan.analysis.levels import refuse_load_run
from panscan.analysis.setting_words import shown
from panscan.core import RecordsError, SettingError
from panscan.core.files import write_file
from panscan.core.text import number_text
from panscan.records.quality import metric_title
from panscan.records.store import Run, outcome_of
from panscan.settings import nearest, recorded_settings
from panscan.verdict.judgement import verdict_of

_RANK = {"exact": 0, "close": 1}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The cell to use.

    Args:
        cell: its id.
        name: its settings in words.
        decision: what to use and what it gains and costs, in one sentence.
        reason: why this cell, as a sentence without a period.
        runner_up: the id of the best other cell that qualifies; None without any.
        alternative: the id of the cell that ``decision`` compares with; None for a single finished cell.
        cost: costs and uncertainties of the choice, as sentences without a period.
        rejected: why each cell that does not qualify was rejected, by cell id.
    """

    cell: str
    name: str
    decision: str
    reason: str
    runner_up: str | None
    alternative: str | None
    cost: tuple[str, ...]
    rejected: Mapping[str, str]


def recommend(
    run: Run, *, max_p95_ms: float | None = None, min_quality: float | None = None, allow: Collection[str] = ()
) -> Recommendation:
    """Return the recommended cell of a run: first trusted answers, then accuracy, then speed.

    1. Trusted answers. A cell is exact or close; or it is different without a measurable loss of accuracy against the
       best exact or close cell with the same crop settings; or it is unverified in a run without verified cells.
    2. Limits. ``p95_e2el_ms`` is at most ``max_p95_ms``.
    3. Accuracy. In a run with scored answers, the cell has the highest accuracy, or no measurable loss against the best
       cell. Without scored answers, speed must not decide between inputs (the fewest crops would always win), so the
       cell has the most views. ``min_quality`` replaces this step: the accuracy is at least that.
    4. Speed. The highest ``request_throughput`` wins; among cells whose 95% interval overlaps the winner's, exact wins
       over close, then the higher accuracy, then more views, then the lower p95 of E2E.

    "No measurable loss" is :attr:`panscan.analysis.accuracy.QualityDifference.excludes_loss`.
    Accuracy is the mean of the run's metric of quality (:func:`panscan.records.quality.metric_of`).

    Args:
        run: a run, finished or not.
        max_p95_ms: limit in milliseconds.
        min_quality: limit, 0 to 1.
        allow: ids of cells that qualify in spite of steps 1 and 3.

    Raises:
        SettingError: a limit out of its range, an unknown cell in ``allow``, ``min_quality`` without scored answers.
        RecordsError: no cell qualifies (the message names the nearest miss), or it is a load run.
    """
    refuse_load_run(run, "recommendation")
    if max_p95_ms is not None and not 0 < max_p95_ms < float("inf"):
        raise SettingError(f"--max-p95-ms must be a number above 0, got {max_p95_ms:g}")
    if min_quality is not None and not 0 <= min_quality <= 1:
        raise SettingError(f"--min-quality must be between 0 and 1, got {min_quality:g}")
    for cell in allow:
        if cell not in run.cells:
            raise SettingError(f"--allow-different: {run.path} has no cell {cell!r}{nearest(cell, run.cells)}")
    measured, rejected = candidates_of(run)
    if not measured:
        raise RecordsError(f"{run.path}: no cell is finished, so none can be recommended")
    if min_quality is not None and all(row.quality is None for row in measured):
        raise SettingError("--min-quality: the dataset of this run has no answers (panscan bench --dataset)")
    why: dict[str, str] = {}
    trusted = _trusted(run, measured, allow, rejected, why)
    qualified = _within(run, trusted, max_p95_ms, min_quality, rejected)
    rule: Rule = "limit"
    if min_quality is None:
        rule = "accuracy" if any(row.accuracy for row in qualified) else "views"
        qualified = _harmless(run, qualified, rule, allow, rejected, why)
    chosen = best(qualified)
    others = [row for row in qualified if row is not chosen]
    second = best(others) if others else None
    choice = Selection(run, chosen, second, qualified, measured, max_p95_ms, min_quality, rule, why.get(chosen.cell))
    other = choice.alternative
    return Recommendation(
        chosen.cell,
        chosen.name,
        decision_of(choice),
        reason_of(choice),
        second.cell if second else None,
        other.cell if other else None,
        costs_of(choice),
        rejected,
    )


def candidates_of(run: Run) -> tuple[list[MeasuredCell], dict[str, str]]:
    """Return the finished cells of a run, and why each of the others is not one, by cell id.

    Raises:
        RecordsError: see :func:`panscan.analysis.summary.cell_metrics`.
    """
    rows = {row.cell: row for row in measured_rows(run)}
    finished, others = [], {}
    for cell in run.cells:
        outcome, reason = outcome_of(run, cell)
        if outcome != "done":
            others[cell] = f"{outcome}: {reason}" if reason else outcome
        elif cell in rows and rows[cell].speed:
            finished.append(rows[cell])
        else:
            others[cell] = "no request succeeded in measurable time"
    return finished, others


def best(candidates: Sequence[MeasuredCell]) -> MeasuredCell:
    """Return the fastest; within noise, exact before close, then the highest accuracy, views, and lowest p95 of E2E."""
    fastest = max(candidates, key=lambda row: (row.speed, row.cell))
    return min(
        (row for row in candidates if row.overlaps(fastest)),
        key=lambda row: (
            _RANK.get(row.verdict.word, len(_RANK)),
            -row.accuracy,
            -row.views,
            _p95(row),
            -row.speed,
            row.cell,
        ),
    )


def _trusted(
    run: Run, measured: Sequence[MeasuredCell], allow: Collection[str], rejected: dict[str, str], why: dict[str, str]
) -> list[MeasuredCell]:
    unverified = all(row.verdict.word == "unverified" for row in measured)
    trusted = []
    for row in measured:
        word = row.verdict.word
        if word in _RANK or unverified:
            trusted.append(row)
        elif row.cell in allow:
            trusted.append(row)
            why[row.cell] = "allowed by --allow-different"
        elif word == "unverified":
            rejected[row.cell] = f"unverified ({row.verdict.reason}), and other cells are verified"
        else:
            peers = [other for other in measured if other.verdict.word in _RANK and other.crops == row.crops]
            lossless, text = _loss(run, row, peers)
            if lossless:
                trusted.append(row)
                why[row.cell] = text
            else:
                rejected[row.cell] = f"different from the reference; {text}"
    if not trusted:
        fastest = max(measured, key=lambda row: row.speed)
        raise RecordsError(
            f"{run.path}: no cell gives the reference's answers: the fastest is {fastest.name}, {fastest.verdict.word};"
            f" to take it, use --allow-different {fastest.cell}"
        )
    return trusted


def _loss(run: Run, row: MeasuredCell, peers: Sequence[MeasuredCell]) -> tuple[bool, str]:
    """Return whether a cell has no measurable loss of accuracy against the best of its peers, and the evidence."""
    if row.quality is None:
        return False, "only a labelled dataset can show the accuracy cost"
    peer = max(
        (peer for peer in peers if peer.quality is not None),
        key=lambda peer: (peer.accuracy, peer.speed, peer.cell),
        default=None,
    )
    if peer is None:
        return False, "no exact or close cell with the same crop settings has answers to compare with"
    difference = quality_difference(run, row.cell, peer.cell)
    if difference is None or not peer.accuracy:
        return False, f"no loss can be measured: {peer.name} has no correct answer"
    return difference.excludes_loss, evidence_text(run, difference, peer.name)


def _within(
    run: Run,
    trusted: Sequence[MeasuredCell],
    max_p95_ms: float | None,
    min_quality: float | None,
    rejected: dict[str, str],
) -> list[MeasuredCell]:
    quick = list(trusted)
    if max_p95_ms is not None:
        quick = [row for row in trusted if _p95(row) <= max_p95_ms]
        rejected |= {row.cell: f"too slow: p95 E2E {_ms(row)}" for row in trusted if row not in quick}
        if not quick:
            near = min(trusted, key=lambda row: (_p95(row), row.cell))
            raise RecordsError(
                f"no cell with trusted answers has p95 E2E <= {max_p95_ms:g} ms:"
                f" the lowest is {_ms(near)} with {near.name}"
            )
    if min_quality is None:
        return quick
    right = [row for row in quick if row.quality and row.accuracy >= min_quality]
    title = metric_title(run)
    texts = {row.cell: "not scored" if row.quality is None else f"{row.accuracy:.1%}" for row in quick}
    rejected |= {row.cell: f"{title} {texts[row.cell]}, below {min_quality:.4g}" for row in quick if row not in right}
    if not right:
        near = max(quick, key=lambda row: row.accuracy)
        raise RecordsError(
            f"no cell with trusted answers has {title} >= {min_quality:.4g}: the highest is {texts[near.cell]} with"
            f" {near.name}"
        )
    return right


def _harmless(
    run: Run,
    within: Sequence[MeasuredCell],
    rule: Rule,
    allow: Collection[str],
    rejected: dict[str, str],
    why: dict[str, str],
) -> list[MeasuredCell]:
    """Return the most accurate candidates (or those with the most views), and those that lose nothing against them."""
    merits = {row.cell: row.accuracy if rule == "accuracy" else row.views for row in within}
    most = max(merits.values())
    peers = [row for row in within if merits[row.cell] == most]
    qualified = list(peers)
    for row in (row for row in within if row not in peers):
        lossless, text = _loss(run, row, peers)
        if lossless or row.cell in allow:
            qualified.append(row)
            why[row.cell] = "allowed by --allow-different" if row.cell in allow else text
        elif rule == "accuracy":
            rejected[row.cell] = "not scored" if row.quality is None else text
        else:
            rejected[row.cell] = f"fewer views per request ({row.views:.3g}, not {most:.3g}); {text}"
    return qualified


def _p95(row: MeasuredCell) -> float:
    return float("inf") if row.p95_ms is None else row.p95_ms


def _ms(row: MeasuredCell) -> str:
    return "not measured" if row.p95_ms is None else f"{number_text(row.p95_ms)} ms"


_MARK = "# Written by panscan recommend, which may replace it."
_LEFT_OUT = ("device", "device_map", "max_memory", "tensor_parallel_size", "gpu_memory_gb", "ignore_eos")
"""Settings of the machine and of the measurement."""


def preset_text(run: Run, chosen: Recommendation) -> str:
    """Return the chosen cell's settings that differ from the defaults as YAML, with comments on their origin.

    Settings of the machine and of the measurement (``ignore_eos``) are left out and named in a comment.

    Raises:
        RecordsError: the cell's settings are another version's.
    """
    try:
        settings = recorded_settings(run.cells[chosen.cell]).changed()
    except (TypeError, SettingError) as error:
        raise RecordsError(f"{run.path}: cell {chosen.cell} has another version's settings ({error})") from error
    left_out = {name: settings.pop(name) for name in _LEFT_OUT if name in settings}
    facts = {
        "decision": chosen.decision,
        "cell": chosen.cell,
        "preset": preset_of(run, chosen.cell) or "",
        "same work": " ".join(alias_lines(run, {chosen.cell: chosen.name})),
        "run": f"{run.header.run_id}, {run.header.created}, {run.path}",
        "command": shlex.join(run.header.command),
        "verdict": verdict_of(run, chosen.cell).word,
        "reason": chosen.reason,
        "left out": ", ".join(f"{name}={shown(value)}" for name, value in left_out.items()),
    }
    # Whatever names and paths hold, a comment stays one line of ASCII.
    texts = {name: " ".join(text.split()).encode("ascii", "backslashreplace").decode() for name, text in facts.items()}
    lines = [_MARK, *(f"# {name}: {text}" for name, text in texts.items() if text)]
    return "\n".join([*lines, yaml.safe_dump(settings, sort_keys=False)])


def write_preset(text: str, path: Path, *, force: bool = False) -> None:
    """Write a preset.

    Raises:
        SettingError: a file is there that :func:`preset_text` did not make, and not ``force``; or its name would not be
            taken for a preset's.
        InputError: the file cannot be written.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise SettingError(f"-o {path}: a preset's name ends in .yaml")
    if path.exists() and not force:
        written = b""
        with suppress(OSError):
            written = path.read_bytes()
        if not written.startswith(_MARK.encode()):
            raise SettingError(
                f"{path} is there and was not written by panscan recommend: choose another -o, or --force"
            )
    write_file(path, text)
