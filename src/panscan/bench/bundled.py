"""Which weights stood behind the name of a bundled model in a run: the name stays when they change. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from panscan.bench.records import Run
from panscan.model.bundled import BUNDLED

__all__ = ["bundled_weights", "has_random_weights"]


def bundled_weights(run: Run) -> dict[str, str | None]:
    """The fingerprints of the bundled models that a run's cells name; None in runs older than fingerprints."""
    kept = run.header["environment"].get("bundled")
    known = kept if isinstance(kept, dict) else {}
    used = {_model(settings) for settings in run.cells.values()}
    return {name: known.get(name) for name in BUNDLED if name in used}


def has_random_weights(cells: Iterable[Mapping[str, Any]], weights: Mapping[str, str | None]) -> bool:
    """Whether no cell's weights were trained: those of ``mini`` were random as long as runs kept no fingerprint."""
    random = {None, "tiny", *(["mini"] if weights.get("mini") is None else [])}
    return all(_model(settings) in random for settings in cells)


def _model(settings: Mapping[str, Any]) -> str | None:
    """The checkpoint of a cell, by name; None where its weights are drawn for the run."""
    return None if settings.get("random_weights") else str(settings.get("model", "unknown"))
