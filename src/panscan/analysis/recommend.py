"""The recommended cell of a run: fastest among those whose answers can be trusted; and its preset file."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from panscan.analysis.candidates import Candidate, Selection, candidates_of, cell_name, costs_of, reason_of
from panscan.analysis.cells import alias_lines, label, number_text, preset_of
from panscan.analysis.levels import refuse_load_run
from panscan.analysis.significance import harmless, quality_difference
from panscan.core import RecordsError, SettingError
from panscan.records.quality import metric_title
from panscan.records.store import Run, write_atomically
from panscan.records.verdict import verdict_of
from panscan.settings import nearest, recorded_settings

__all__ = ["Recommendation", "preset_text", "recommend", "write_preset"]

_RANK = {"exact": 0, "close": 1}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The cell to use.

    Args:
        cell: its id.
        reason: why this one, in a sentence.
        runner_up: the best of the other cells that qualify.
        cost: sentences: what the choice costs against the alternatives, and what is not certain about it.
        rejected: why not, by cell id, of every cell that was no candidate in the end.
    """

    cell: str
    reason: str
    runner_up: str | None
    cost: tuple[str, ...]
    rejected: Mapping[str, str]


def recommend(
    run: Run, *, max_p95_ms: float | None = None, min_quality: float | None = None, allow: Collection[str] = ()
) -> Recommendation:
    """Choose a cell of a run.

    The highest ``request_throughput`` wins; among cells whose 95% interval overlaps the winner's, exact before close,
    then the lower p95 of E2E. Candidates are finished cells within the limits (``p95_e2el_ms`` at most ``max_p95_ms``,
    the mean of the run's metric of quality (:func:`panscan.records.quality.metric_of`) at least ``min_quality``) whose
    answers can be trusted:

    - exact and close ones;
    - a different one that ``allow`` names, or that loses nothing measurable: against the best exact or close cell with
      the same crop settings, whose answers must be right at least once, the 95% interval of the paired difference
      reaches 0 and excludes a loss of more than :data:`WORST_LOSS`, over at least :data:`LEAST_QUESTIONS` questions;
    - an unverified one that ``allow`` names, or where no finished cell is verified.

    Fewer views are another input, not a faster computation, and by speed alone the fewest crops would always win. So a
    cell is a candidate only if no other has more views on average, or if it loses nothing measurable (the same test)
    against the best of those, or if ``allow`` names it; a limit on p95 thereby buys as many views as it affords.
    ``min_quality`` is the user's own word on answers and takes the place of this rule.

    Args:
        run: a run, finished or not.
        max_p95_ms: milliseconds.
        min_quality: 0 to 1.
        allow: ids of cells that may be different, unverified or read fewer views.

    Raises:
        SettingError: a limit out of its range, an unknown cell in ``allow``, ``min_quality`` without answers.
        RecordsError: no cell qualifies (the message has the nearest miss), or it is a load run.
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
    left = within if min_quality is not None else _most_views(run, within, allow, rejected, why)
    chosen = best(left)
    others = [each for each in left if each is not chosen]
    second = best(others) if others else None
    choice = Selection(run, chosen, second, left, measured, rejected, max_p95_ms, min_quality, why.get(chosen.cell))
    return Recommendation(chosen.cell, reason_of(choice), second.cell if second else None, costs_of(choice), rejected)


def best(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest; among those that are as fast within the noise exact before close, then the lower p95 of E2E."""
    fastest = max(candidates, key=lambda each: (each.throughput, each.cell))

    def order(each: Candidate) -> tuple[int, float, float, str]:
        return _RANK.get(each.verdict, len(_RANK)), _p95(each), -each.throughput, each.cell

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
            why[each.cell] = "--allow-different names it"
        elif each.verdict == "unverified":
            rejected[each.cell] = f"unverified ({each.row.verdict.reason}), and other cells are verified"
        else:
            peers = [other for other in measured if other.verdict in _RANK and other.crops == each.crops]
            harmless, text = _loss(run, each, peers)
            if harmless:
                found.append(each)
                why[each.cell] = text
            else:
                rejected[each.cell] = f"different from the reference; {text}"
    if not found:
        fastest = max(measured, key=lambda each: each.throughput)
        raise RecordsError(
            f"{run.path}: no cell gives the reference's answers: the fastest is {fastest.name}, {fastest.verdict};"
            " --allow-different takes one by its id"
        )
    return found


def _loss(run: Run, candidate: Candidate, peers: Sequence[Candidate]) -> tuple[bool, str]:
    """Whether a cell loses nothing measurable in answers against the best of its peers, and what is known of it."""
    scored = [each for each in peers if each.quality is not None]
    if candidate.quality is None:
        return False, "without a dataset with answers its effect on answers is unknown"
    if not scored:
        return False, "no exact or close cell with the same views has answers to compare with"
    peer = max(scored, key=lambda each: (each.quality.mean if each.quality else 0.0, each.throughput, each.cell))
    difference = quality_difference(run, candidate.cell, peer.cell)
    if difference is None or peer.quality is None or not peer.quality.mean:
        return False, f"that this is harmless cannot be shown: {peer.name} answers nothing right"
    return harmless(run, difference, peer.name)


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
                f"no cell that may be taken has p95 E2E <= {max_p95_ms:g} ms:"
                f" the quickest is {near.name} with {_ms(near)}"
            )
    if min_quality is not None:
        quick, left = left, [each for each in left if each.quality and each.quality.mean >= min_quality]
        title = metric_title(run)
        rejected |= {each.cell: f"{title} {_mean(each)}, under {min_quality}" for each in quick if each not in left}
        if not left:
            near = max(quick, key=lambda each: each.quality.mean if each.quality else -1.0)
            raise RecordsError(
                f"no cell that may be taken has {title} >= {min_quality}: the best is {near.name} with {_mean(near)}"
            )
    return left


def _most_views(
    run: Run, within: Sequence[Candidate], allow: Collection[str], rejected: dict[str, str], why: dict[str, str]
) -> list[Candidate]:
    most = max(each.views for each in within)
    peers = [each for each in within if each.views == most]
    left = list(peers)
    for each in within:
        if each.cell in allow and each not in peers:
            left.append(each)
            why[each.cell] = "--allow-different names it"
        elif each not in peers:
            harmless, text = _loss(run, each, peers)
            if harmless:
                left.append(each)
                why[each.cell] = text
            else:
                rejected[each.cell] = f"fewer views ({each.views:.3g} a request, not {most:.3g}); {text}"
    return left


def _p95(candidate: Candidate) -> float:
    return float("inf") if candidate.p95_ms is None else candidate.p95_ms


def _ms(candidate: Candidate) -> str:
    return "not measured" if candidate.p95_ms is None else f"{number_text(candidate.p95_ms)} ms"


def _mean(candidate: Candidate) -> str:
    return "not scored" if candidate.quality is None else f"{candidate.quality.mean:.3f}"


_MARK = "# Written by panscan recommend, which may replace it."
_OF_THE_MACHINE = ("device", "device_map", "max_memory", "tp_plan", "tensor_parallel_size", "gpu_memory_gb")
_OF_THE_MEASUREMENT = ("ignore_eos",)


def preset_text(run: Run, chosen: Recommendation) -> str:
    """The chosen cell's settings that differ from the defaults, under comments of where they come from.

    Left out, and named in a comment: where the model was placed on that machine, and ``ignore_eos``, which measurements
    use and answers do not want.

    Raises:
        RecordsError: the cell's settings are another version's.
    """
    try:
        settings = recorded_settings(run.cells[chosen.cell]).changed()
    except (TypeError, SettingError) as error:
        raise RecordsError(f"{run.path}: cell {chosen.cell} has another version's settings ({error})") from error
    left_out = {name: settings.pop(name) for name in (*_OF_THE_MACHINE, *_OF_THE_MEASUREMENT) if name in settings}
    facts = {
        "cell": cell_name(run, chosen.cell),
        "preset": preset_of(run, chosen.cell) or "",
        "same work": " ".join(alias_lines(run, {chosen.cell: chosen.cell})),
        "run": f"{run.header['run_id']}, {run.header['created']}, {run.path}",
        "command": shlex.join(map(str, run.header["command"])),
        "verdict": verdict_of(run, chosen.cell).word,
        "reason": chosen.reason,
        "left out": label(left_out),
    }
    lines = [_MARK, *(f"# {name}: {_one_line(text)}" for name, text in facts.items() if text)]
    return "\n".join([*lines, yaml.safe_dump(settings, sort_keys=False)])


def write_preset(text: str, path: Path, *, force: bool = False) -> None:
    """Write a preset.

    Raises:
        SettingError: a file is there that :func:`preset_text` did not make, and not ``force``; or its name would not be
            taken for a preset's.
        RecordsError: the file cannot be written.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise SettingError(f"-o {path}: a preset's name ends in .yaml")
    if path.exists() and not force and not _ours(path):
        raise SettingError(f"{path} is there and was not written by panscan recommend: choose another -o, or --force")
    write_atomically(path, text.encode())


def _ours(path: Path) -> bool:
    try:
        return path.read_bytes().startswith(_MARK.encode())
    except OSError:
        return False


def _one_line(text: str) -> str:
    """Whatever names and paths hold, a comment stays one line of ASCII."""
    return " ".join(text.split()).encode("ascii", "backslashreplace").decode()
