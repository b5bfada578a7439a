"""The one rule of recommendation, and the preset file of the recommended cell."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

import yaml

from panscan.analysis.accuracy import RANK, Standings, standings_of
from panscan.analysis.cells import MeasuredCell, alias_lines, measured_rows
from panscan.analysis.decision import NO_LABELS, Rule, Selection, costs_of, decision_of, reason_of
from panscan.analysis.levels import refuse_load_run
from panscan.analysis.setting_words import shown
from panscan.core import RecordsError, SettingError
from panscan.core.files import write_file
from panscan.core.text import number_text
from panscan.records.quality import metric_title
from panscan.records.store import Run, outcome_of
from panscan.settings import nearest, recorded_settings
from panscan.verdict.judgement import verdict_of

Rejected = dict[str, str]
"""Why a cell does not qualify, by its id."""


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

    1. Trusted answers. In a run with scored answers, a cell is the baseline, or computes the same answers (exact or
       close, with the same model, views and sampling) and shows no loss, or its answers show no loss
       (:class:`panscan.analysis.accuracy.Standings`). Without scored answers, it is exact or close, or the run has no
       verified cell.
    2. Limits. ``p95_e2el_ms`` is at most ``max_p95_ms``.
    3. Without scored answers, speed must not decide between inputs (the fewest crops would always win), so the cell has
       the most views. ``min_quality`` replaces the rule on accuracy: the 95% interval of the accuracy reaches no lower.
    4. Speed. The highest ``request_throughput`` wins; among cells that are not measurably slower (paired by repeat),
       exact wins over close, then more views, then the higher throughput.

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
    if max_p95_ms is not None and not 0 < max_p95_ms < inf:
        raise SettingError(f"--max-p95-ms must be a number above 0, got {max_p95_ms:g}")
    if min_quality is not None and not 0 <= min_quality <= 1:
        raise SettingError(f"--min-quality must be between 0 and 1, got {min_quality:g}")
    for cell in allow:
        if cell not in run.cells:
            raise SettingError(f"--allow-different: {run.path} has no cell {cell!r}{nearest(cell, run.cells)}")
    rows = measured_rows(run)
    measured, rejected = _candidates(run, rows)
    if not measured:
        raise RecordsError(f"{run.path}: no cell is finished, so none can be recommended")
    if min_quality is not None and all(row.quality is None for row in measured):
        raise SettingError("--min-quality: the dataset of this run has no answers (panscan bench --dataset)")
    standings = standings_of(run, rows)
    by_answers = standings.baseline is not None and any(row.accuracy for row in measured)
    rule: Rule = "limit" if min_quality is not None else "accuracy" if by_answers else "views"
    trusted = _trusted(run, measured, standings, allow, rejected, by_verdict=rule != "accuracy")
    qualified = _quick(trusted, max_p95_ms, rejected)
    if min_quality is not None:
        qualified = _accurate(run, qualified, min_quality, rejected)
    elif rule == "views":
        qualified = _most_views(qualified, allow, rejected)
    chosen = best(qualified)
    others = [row for row in qualified if row is not chosen]
    second = best(others) if others else None
    standing = standings.cells.get(chosen.cell)
    why = None if standing is None else standing.text
    if chosen.cell in allow:
        why = "allowed by --allow-different"
    choice = Selection(
        run, chosen, second, qualified, measured, max_p95_ms, min_quality, rule, standings, rejected, why
    )
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


def _candidates(run: Run, measured: Sequence[MeasuredCell]) -> tuple[list[MeasuredCell], Rejected]:
    """Return the finished cells of a run, and why each of the others is not one, by cell id."""
    rows = {row.cell: row for row in measured}
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
    """Return the fastest; of those not measurably slower, exact before close, then the most views, then the fastest."""
    fastest = max(candidates, key=lambda row: (row.speed, row.cell))
    return min(
        (row for row in candidates if row.within_noise_of(fastest)),
        key=lambda row: (RANK.get(row.verdict.word, len(RANK)), -row.views, -row.speed, row.cell),
    )


def _trusted(
    run: Run,
    measured: Sequence[MeasuredCell],
    standings: Standings,
    allow: Collection[str],
    rejected: Rejected,
    *,
    by_verdict: bool,
) -> list[MeasuredCell]:
    """Return the cells whose answers the rule accepts, and those that are allowed.

    With ``by_verdict``, also those that are exact or close, or all cells of a run without a verified one.
    """
    words = {row.verdict.word for row in measured}
    accepted = (RANK if words != {"unverified"} else words) if by_verdict else ()
    trusted = []
    for row in measured:
        if row.verdict.word in accepted or row.cell in allow or standings.qualifies(row):
            trusted.append(row)
            continue
        standing = standings.cells.get(row.cell)
        evidence = standing.text if standing else NO_LABELS if by_verdict else "not scored"
        doubt = {
            "different": "different from the reference; ",
            "unverified": f"unverified ({row.verdict.reason}); ",
        }
        rejected[row.cell] = doubt.get(row.verdict.word, "") + evidence
    if not trusted:
        fastest = max(measured, key=lambda row: row.speed)
        raise RecordsError(
            f"{run.path}: no cell gives the reference's answers: the fastest is {fastest.name}, {fastest.verdict.word};"
            f" to take it, use --allow-different {fastest.cell}"
        )
    return trusted


def _quick(trusted: Sequence[MeasuredCell], max_p95_ms: float | None, rejected: Rejected) -> list[MeasuredCell]:
    """Return the cells within the limit on p95."""
    if max_p95_ms is None:
        return list(trusted)
    p95 = {row.cell: inf if row.p95_ms is None else row.p95_ms for row in trusted}
    texts = {cell: "not measured" if value == inf else f"{number_text(value)} ms" for cell, value in p95.items()}
    quick = [row for row in trusted if p95[row.cell] <= max_p95_ms]
    rejected |= {row.cell: f"too slow: p95 E2E {texts[row.cell]}" for row in trusted if row not in quick}
    if not quick:
        near = min(trusted, key=lambda row: (p95[row.cell], row.cell))
        raise RecordsError(
            f"no cell with trusted answers has p95 E2E <= {max_p95_ms:g} ms: the lowest is {texts[near.cell]} with"
            f" {near.name}"
        )
    return quick


def _accurate(run: Run, quick: Sequence[MeasuredCell], min_quality: float, rejected: Rejected) -> list[MeasuredCell]:
    """Return the cells whose accuracy is shown to be at least the limit."""
    right = [row for row in quick if row.quality and row.quality.low >= min_quality]
    title = metric_title(run)
    texts = {
        row.cell: "not scored" if row.quality is None else f"{row.quality.mean:.1%} (95%: from {row.quality.low:.1%})"
        for row in quick
    }
    few = f"not shown to be {min_quality:.4g} or more"
    rejected |= {row.cell: f"{title} {texts[row.cell]}, {few}" for row in quick if row not in right}
    if not right:
        near = max(quick, key=lambda row: (0.0 if row.quality is None else row.quality.low, row.speed))
        more = "; more questions narrow the interval" if near.accuracy >= min_quality else ""
        raise RecordsError(
            f"no cell with trusted answers is shown to have {title} >= {min_quality:.4g}: the nearest has"
            f" {texts[near.cell]}, {near.name}{more}"
        )
    return right


def _most_views(quick: Sequence[MeasuredCell], allow: Collection[str], rejected: Rejected) -> list[MeasuredCell]:
    """Return the cells with the most views, and those that are allowed."""
    most = max(row.views for row in quick)
    candidates = [row for row in quick if row.views == most or row.cell in allow]
    for row in quick:
        if row not in candidates:
            rejected[row.cell] = f"fewer views per request ({row.views:.3g}, not {most:.3g}); {NO_LABELS}"
    return candidates


_MARK = "# Written by panscan recommend, which may replace it."
_LEFT_OUT = ("device", "device_map", "max_memory", "tensor_parallel_size", "gpu_memory_gb", "ignore_eos")
"""Settings of the machine and of the measurement."""


def preset_text(run: Run, chosen: Recommendation) -> str:
    """Return the chosen cell's settings that differ from the defaults as YAML, with comments on their origin.

    Settings of the machine and of the measurement (``ignore_eos``) are left out and named in a comment.

    Raises:
        RecordsError: the cell's settings are another version's.
    """
    cell = run.cells[chosen.cell]
    try:
        settings = recorded_settings(cell.settings).changed()
    except (TypeError, SettingError) as error:
        raise RecordsError(f"{run.path}: cell {chosen.cell} has another version's settings ({error})") from error
    left_out = {name: settings.pop(name) for name in _LEFT_OUT if name in settings}
    facts = {
        "decision": chosen.decision,
        "cell": chosen.cell,
        "preset": cell.preset_words,
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
