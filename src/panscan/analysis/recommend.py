"""The one rule of recommendation, and the preset file of the recommended cell."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from panscan.analysis.candidates import Candidate, candidates_of
from panscan.analysis.cells import alias_lines, preset_of
from panscan.analysis.decision import Rule, Selection, costs_of, decision_of, reason_of
from panscan.analysis.levels import refuse_load_run
from panscan.analysis.setting_words import shown
from panscan.analysis.significance import quality_difference, shows_no_loss
from panscan.core import RecordsError, SettingError
from panscan.core.files import write_file
from panscan.core.text import number_text
from panscan.records.quality import metric_title
from panscan.records.store import Run
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

    "No measurable loss" is :func:`panscan.analysis.significance.shows_no_loss`: the 95% interval of the paired
    difference reaches 0 and excludes a loss of more than :data:`WORST_LOSS`, over at least :data:`LEAST_QUESTIONS`
    questions.
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
    _check(run, max_p95_ms, min_quality, allow)
    measured, rejected = candidates_of(run)
    if not measured:
        raise RecordsError(f"{run.path}: no cell is finished, so none can be recommended")
    if min_quality is not None and all(each.quality is None for each in measured):
        raise SettingError("--min-quality: the dataset of this run has no answers (panscan bench --dataset)")
    why: dict[str, str] = {}
    trusted = _trusted(run, measured, allow, rejected, why)
    within = _within(run, trusted, max_p95_ms, min_quality, rejected)
    rule: Rule = "limit"
    left = within
    if min_quality is None:
        rule = "accuracy" if any(each.quality and each.quality.mean for each in within) else "views"
        left = _harmless(run, within, rule, allow, rejected, why)
    chosen = best(left)
    others = [each for each in left if each is not chosen]
    second = best(others) if others else None
    choice = Selection(
        run, chosen, second, left, measured, rejected, max_p95_ms, min_quality, rule, why.get(chosen.cell)
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


def best(candidates: Sequence[Candidate]) -> Candidate:
    """Return the fastest; within noise, exact before close, then the highest accuracy, views, and lowest p95 of E2E."""
    fastest = max(candidates, key=lambda each: (each.throughput, each.cell))

    def order(each: Candidate) -> tuple[int, float, float, float, float, str]:
        accuracy = each.quality.mean if each.quality else 0.0
        return _RANK.get(each.verdict, len(_RANK)), -accuracy, -each.views, _p95(each), -each.throughput, each.cell

    return min((each for each in candidates if each.overlaps(fastest)), key=order)


def _check(run: Run, max_p95_ms: float | None, min_quality: float | None, allow: Collection[str]) -> None:
    if max_p95_ms is not None and not 0 < max_p95_ms < float("inf"):
        raise SettingError(f"--max-p95-ms must be a number above 0, got {max_p95_ms:g}")
    if min_quality is not None and not 0 <= min_quality <= 1:
        raise SettingError(f"--min-quality must be between 0 and 1, got {min_quality:g}")
    for cell in allow:
        if cell not in run.cells:
            raise SettingError(f"--allow-different: {run.path} has no cell {cell!r}{nearest(cell, run.cells)}")


def _trusted(
    run: Run, measured: Sequence[Candidate], allow: Collection[str], rejected: dict[str, str], why: dict[str, str]
) -> list[Candidate]:
    verified = [each for each in measured if each.verdict != "unverified"]
    found = []
    for each in measured:
        if each.verdict in _RANK or (each.verdict == "unverified" and not verified):
            found.append(each)
        elif each.cell in allow:
            found.append(each)
            why[each.cell] = "allowed by --allow-different"
        elif each.verdict == "unverified":
            rejected[each.cell] = f"unverified ({each.row.verdict.reason}), and other cells are verified"
        else:
            peers = [other for other in measured if other.verdict in _RANK and other.crops == each.crops]
            lossless, text = _loss(run, each, peers)
            if lossless:
                found.append(each)
                why[each.cell] = text
            else:
                rejected[each.cell] = f"different from the reference; {text}"
    if not found:
        fastest = max(measured, key=lambda each: each.throughput)
        raise RecordsError(
            f"{run.path}: no cell gives the reference's answers: the fastest is {fastest.name}, {fastest.verdict};"
            f" to take it, use --allow-different {fastest.cell}"
        )
    return found


def _loss(run: Run, candidate: Candidate, peers: Sequence[Candidate]) -> tuple[bool, str]:
    """Return whether a cell has no measurable loss of accuracy against the best of its peers, and the evidence."""
    scored = [each for each in peers if each.quality is not None]
    if candidate.quality is None:
        return False, "only a labelled dataset can show the accuracy cost"
    if not scored:
        return False, "no exact or close cell with the same crop settings has answers to compare with"
    peer = max(scored, key=lambda each: (each.quality.mean if each.quality else 0.0, each.throughput, each.cell))
    difference = quality_difference(run, candidate.cell, peer.cell)
    if difference is None or peer.quality is None or not peer.quality.mean:
        return False, f"no loss can be measured: {peer.name} has no correct answer"
    return shows_no_loss(run, difference, peer.name)


def _within(
    run: Run,
    trusted: Sequence[Candidate],
    max_p95_ms: float | None,
    min_quality: float | None,
    rejected: dict[str, str],
) -> list[Candidate]:
    left = list(trusted)
    if max_p95_ms is not None:
        left = [each for each in trusted if _p95(each) <= max_p95_ms]
        rejected |= {each.cell: f"too slow: p95 E2E {_ms(each)}" for each in trusted if each not in left}
        if not left:
            near = min(trusted, key=lambda each: (_p95(each), each.cell))
            raise RecordsError(
                f"no cell with trusted answers has p95 E2E <= {max_p95_ms:g} ms:"
                f" the lowest is {_ms(near)} with {near.name}"
            )
    if min_quality is not None:
        quick, left = left, [each for each in left if each.quality and each.quality.mean >= min_quality]
        title = metric_title(run)
        rejected |= {each.cell: f"{title} {_mean(each)}, below {min_quality:.4g}" for each in quick if each not in left}
        if not left:
            near = max(quick, key=lambda each: each.quality.mean if each.quality else -1.0)
            raise RecordsError(
                f"no cell with trusted answers has {title} >= {min_quality:.4g}: the highest is {_mean(near)} with"
                f" {near.name}"
            )
    return left


def _harmless(
    run: Run,
    within: Sequence[Candidate],
    rule: Rule,
    allow: Collection[str],
    rejected: dict[str, str],
    why: dict[str, str],
) -> list[Candidate]:
    """Return the most accurate candidates (or those with the most views), and those that lose nothing against them."""

    def merit(each: Candidate) -> float:
        return (each.quality.mean if each.quality else -1.0) if rule == "accuracy" else each.views

    most = max(map(merit, within))
    peers = [each for each in within if merit(each) == most]
    left = list(peers)
    for each in (each for each in within if each not in peers):
        lossless, text = _loss(run, each, peers)
        if each.cell in allow:
            left.append(each)
            why[each.cell] = "allowed by --allow-different"
        elif lossless:
            left.append(each)
            why[each.cell] = text
        elif rule == "accuracy":
            rejected[each.cell] = "not scored" if each.quality is None else text
        else:
            rejected[each.cell] = f"fewer views per request ({each.views:.3g}, not {most:.3g}); {text}"
    return left


def _p95(candidate: Candidate) -> float:
    return float("inf") if candidate.p95_ms is None else candidate.p95_ms


def _ms(candidate: Candidate) -> str:
    return "not measured" if candidate.p95_ms is None else f"{number_text(candidate.p95_ms)} ms"


def _mean(candidate: Candidate) -> str:
    return "not scored" if candidate.quality is None else f"{candidate.quality.mean:.1%}"


_MARK = "# Written by panscan recommend, which may replace it."
_OF_THE_MACHINE = ("device", "device_map", "max_memory", "tensor_parallel_size", "gpu_memory_gb")
_OF_THE_MEASUREMENT = ("ignore_eos",)


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
    left_out = {name: settings.pop(name) for name in (*_OF_THE_MACHINE, *_OF_THE_MEASUREMENT) if name in settings}
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
    lines = [_MARK, *(f"# {name}: {_one_line(text)}" for name, text in facts.items() if text)]
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
    if path.exists() and not force and not _ours(path):
        raise SettingError(f"{path} is there and was not written by panscan recommend: choose another -o, or --force")
    write_file(path, text)


def _ours(path: Path) -> bool:
    try:
        return path.read_bytes().startswith(_MARK.encode())
    except OSError:
        return False


def _one_line(text: str) -> str:
    """Whatever names and paths hold, a comment stays one line of ASCII."""
    return " ".join(text.split()).encode("ascii", "backslashreplace").decode()
