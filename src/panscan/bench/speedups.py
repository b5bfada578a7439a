"""How many times faster a runner is than the others at the same requests, from one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from panscan.bench.rows import Row
from panscan.settings import ENGINE_AXES, VLLM_AXES, VLLM_LIMITS

__all__ = ["speedup_lines"]

_OWN = {"runner", *ENGINE_AXES, *VLLM_AXES, *VLLM_LIMITS}
"""Settings that only say how a runner goes about the same requests."""


def speedup_lines(rows: Sequence[Row]) -> list[str]:
    """One line for each other runner and each group of cells that ask the same: the engine's fastest cell to its.

    Nothing without cells of the engine and of another runner.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        same = {name: value for name, value in row.settings.items() if name not in _OWN}
        groups.setdefault(repr(sorted(same.items())), []).append(row)
    return [line for group in groups.values() for line in _lines(group)]


def _lines(group: Sequence[Row]) -> Iterator[str]:
    fastest: dict[str, Row] = {}
    for row in sorted(group, key=_throughput):
        fastest[row.settings.get("runner", "generate")] = row
    engine = fastest.pop("engine", None)
    if engine is None:
        return
    for runner, row in fastest.items():
        ours, theirs = _throughput(engine), _throughput(row)
        if not ours or not theirs:
            continue
        size = row.settings.get("batch_size")
        batch = f" (batch size {size})" if size is not None and runner == "generate" else ""
        words = f"verdicts {engine.verdict.word} and {row.verdict.word}"
        alone = "request_throughput" not in engine.metrics.intervals
        doubt = "; measured once: --repeats tells how far noise moves it" if alone else ""
        yield f"engine to {runner}{batch}: {ours / theirs:.2f}x the requests per second; {words}{doubt}."


def _throughput(row: Row) -> float:
    return row.metrics.values["request_throughput"] or 0.0
