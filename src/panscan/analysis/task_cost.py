"""What a cell that is not exact costs in accuracy: its answers against those of an exact cell of the same run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from panscan.analysis.cells import effective_settings
from panscan.analysis.significance import QualityDifference, p_text, points_text, quality_difference
from panscan.core import same_model
from panscan.core.sampling import SAMPLING_NAMES
from panscan.records.quality import metrics_in
from panscan.records.store import Run
from panscan.verdict.judgement import verdict_of

TITLE = "accuracy vs exact"
NO_EXACT_CELL = "no exact cell"
COLUMNS = ("exact_cell", *(f"accuracy_vs_exact{part}" for part in ("", "_low", "_high", "_p_value")))
_SAME = ("revision", "random_weights", "model_shape", *SAMPLING_NAMES, "sampling_seed")
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
        """``-3.1 (-5.0 to -1.2), p = 0.004``, in percentage points, or why there is nothing to say."""
        found = self.difference
        if found is None:
            return NO_EXACT_CELL
        low, high = points_text(found.low), points_text(found.high)
        return f"{points_text(found.value)} ({low} to {high}), {p_text(found.p_value)}"


def costs_of_cells(run: Run) -> dict[str, TaskCost]:
    """Return the accuracy cost of each answered cell that is not exact, by cell id; empty without accepted answers.

    Paired by question; see :func:`panscan.analysis.significance.quality_difference`. p-values are not corrected for
    the number of cells.
    """
    if not metrics_in(run):
        return {}
    cells = {key[0]: _views(run, key[0]) for key in run.repeats}
    exact = [cell for cell in cells if verdict_of(run, cell).word == "exact"]
    costs = {}
    for cell, views in cells.items():
        if cell in exact or not views:
            continue
        peers = [peer for peer in exact if _comparable(run, cell, peer) and _same_views(views, cells[peer])]
        peers.sort(key=lambda peer: _distance(run, cell, peer))  # stable: the first of several
        found = ((peer, quality_difference(run, cell, peer)) for peer in peers)
        costs[cell] = next((TaskCost(*each) for each in found if each[1] is not None), TaskCost(None, None))
    return costs


def _views(run: Run, cell: str) -> Mapping[tuple[str, ...], int]:
    """Views of each request that was answered, by its id and pictures."""
    return {(request.request, *request.image_sha256): request.views or 0 for request in run.answered(cell)}


def _same_views(ours: Mapping[tuple[str, ...], int], theirs: Mapping[tuple[str, ...], int]) -> bool:
    return all(ours[request] == theirs[request] for request in ours.keys() & theirs.keys())


def _comparable(run: Run, cell: str, peer: str) -> bool:
    ours, theirs = run.cells[cell], run.cells[peer]
    load = run.loads.get(cell)
    base = None if load is None else load.base_model  # of a quantised checkpoint
    if base is not None and same_model(base, theirs.get("model")):
        ours = {**ours, "model": base, "revision": theirs.get("revision")}
    same_settings = all(ours.get(name) == theirs.get(name) for name in _SAME)
    return same_settings and same_model(ours.get("model"), theirs.get("model"))


def _distance(run: Run, cell: str, peer: str) -> int:
    """Settings that differ, of those that mean something."""
    ours, theirs = effective_settings(run.cells[cell]), effective_settings(run.cells[peer])
    return sum(value != theirs.get(name) for name, value in ours.items())


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
    found: dict[str, dict[str, float | str | None]] = {cell: dict.fromkeys(COLUMNS) for cell in run.cells}
    for cell, cost in costs_of_cells(run).items():
        each = cost.difference
        values = () if each is None else (each.value, each.low, each.high, each.p_value)
        found[cell] |= zip(COLUMNS, (cost.exact or NO_EXACT_CELL, *values), strict=False)
    return found
