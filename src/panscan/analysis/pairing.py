"""Two runs side by side: which cells and which requests pair, and in what the runs differ as a whole."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from panscan.analysis.cells import aliases_of, cell_title, count, distinguishing_names, effective_settings
from panscan.analysis.load_pairing import comparable, load_differences
from panscan.analysis.setting_words import shown
from panscan.core import RecordsError
from panscan.records.environment import bundled_weights
from panscan.records.load_runs import is_load_run
from panscan.records.metrics import Batch, batches_of
from panscan.records.store import Record, Run, outcome_of
from panscan.records.verdict import Verdict, verdict_of
from panscan.settings import axes

__all__ = [
    "CellPair",
    "ClusterWork",
    "Comparison",
    "PairedRequests",
    "RequestPair",
    "compare_runs",
    "noun_of",
    "pair_requests",
]

_Key = tuple[int, int, str, tuple[str, ...], str]
"""Repeat, replica, request id, hashes of its images, hash of its prompt."""


@dataclass(frozen=True, slots=True)
class RequestPair:
    """Two ``request`` records of the same question, and the cluster that they are in (from 0, without gaps)."""

    a: Record
    b: Record
    cluster: int


@dataclass(frozen=True, slots=True)
class ClusterWork:
    """What one side's batches of a cluster did in their repeat's window: answered requests, output tokens, seconds."""

    requests: float
    tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class PairedRequests:
    """Paired requests of two cells.

    Args:
        pairs: sorted by repeat, replica, request id, image hashes and prompt hash.
        work: of each cluster, A's and B's.
        alone: answered requests of A and of B without a partner.
        failed: requests of A and of B that failed.
    """

    pairs: tuple[RequestPair, ...]
    work: tuple[tuple[ClusterWork, ClusterWork], ...]
    alone: tuple[int, int]
    failed: tuple[int, int]


def pair_requests(a: Run, cell_a: str, b: Run, cell_b: str) -> PairedRequests:
    """Pair the requests of two cells by repeat, replica, id, images and prompt.

    A cluster is the smallest set of batches of both that no pair leaves: with equal batches on both sides, a batch.
    """
    records_a, records_b = _answered(a, cell_a), _answered(b, cell_b)
    keys = sorted(records_a.keys() & records_b.keys())
    batches = [(("A", *_batch(records_a[key])), ("B", *_batch(records_b[key]))) for key in keys]
    clusters = _components(batches)
    numbers = {cluster: number for number, cluster in enumerate(dict.fromkeys(clusters[ours] for ours, _ in batches))}
    pairs = [
        RequestPair(records_a[key], records_b[key], numbers[clusters[ours]])
        for key, (ours, _) in zip(keys, batches, strict=True)
    ]
    sides = [_work(run, cell, side, clusters, numbers) for side, run, cell in (("A", a, cell_a), ("B", b, cell_b))]
    return PairedRequests(
        tuple(pairs),
        tuple(zip(*sides, strict=True)),
        (len(records_a) - len(keys), len(records_b) - len(keys)),
        (_failed(a, cell_a), _failed(b, cell_b)),
    )


def _answered(run: Run, cell: str) -> dict[_Key, Record]:
    return {
        (record["repeat"], record.get("replica", 0), record["request"], *_content(record)): record
        for key, records in run.requests.items()
        if key[0] == cell
        for record in records
        if record["error"] is None
    }


def _content(record: Record) -> tuple[tuple[str, ...], str]:
    return tuple(map(str, record["image_sha256"])), record["prompt_sha256"]


def _failed(run: Run, cell: str) -> int:
    records = (record for key, group in run.requests.items() if key[0] == cell for record in group)
    return sum(record["error"] is not None for record in records)


def _batch(record: Record) -> tuple[int, int, int]:
    return record["repeat"], record.get("replica", 0), record["batch"]


def _components(links: Iterable[tuple[Hashable, Hashable]]) -> dict[Hashable, Hashable]:
    """Return each node's representative, the same one for all nodes of a connected component."""
    above: dict[Hashable, Hashable] = {}

    def top(node: Hashable) -> Hashable:
        while above.setdefault(node, node) != node:
            above[node] = above[above[node]]
            node = above[node]
        return node

    for one, other in links:
        above[top(one)] = top(other)
    return {node: top(node) for node in above}


def _work(
    run: Run, cell: str, side: str, clusters: dict[Hashable, Hashable], numbers: dict[Hashable, int]
) -> Sequence[ClusterWork]:
    groups: list[list[Batch]] = [[] for _ in numbers]
    for key in sorted(key for key in run.repeats if key[0] == cell):
        for batch in batches_of(run.repeats[key], run.requests[key]):
            cluster = clusters.get((side, key[1], *batch.key)) if batch.key is not None else None
            if cluster is not None:
                groups[numbers[cluster]].append(batch)
    return [
        ClusterWork(
            sum(batch.requests_inside for batch in group),
            sum(batch.tokens_inside for batch in group),
            sum(batch.seconds_inside for batch in group),
        )
        for group in groups
    ]


_CROPS = "pan_and_scan_"
_MOST_NAMED = 12  # cells without a partner, of one fate

Cells = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class CellPair:
    """A cell of A and its partner in B.

    Args:
        settings: A's; crop settings without pan and scan are None.
        cells: the ids.
        requests: what pairs in them; at least one request.
        verdicts: of both.
        peaks: highest ``peak_allocated_bytes`` (where a GPU was in use on both sides) and ``peak_rss_bytes`` of both.
    """

    settings: Mapping[str, Any]
    cells: tuple[str, str]
    requests: PairedRequests
    verdicts: tuple[Verdict, Verdict]
    peaks: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What pairs in two runs.

    Args:
        a: the baseline.
        b: the other run.
        pairs: at least one, in the order of A.
        varying: settings that differ between the measured cells of either run.
        apart: settings that are constant in each run and differ between them, as (A's value, B's value).
        alone: what has no partner, in lines.
        unpaired: measured cells of A that were not compared.
        differences: in environment, bundled weights and workload, as (A's value, B's value).
    """

    a: Run
    b: Run
    pairs: tuple[CellPair, ...]
    varying: tuple[str, ...]
    apart: Mapping[str, tuple[Any, Any]]
    alone: tuple[str, ...]
    unpaired: int
    differences: Mapping[str, tuple[Any, Any]]


def compare_runs(a: Run, b: Run) -> Comparison:
    """Pair the measured cells of two runs by their settings, and their requests by repeat, id, images and prompt.

    Settings that a run's version did not know have their defaults. Settings in which the runs differ as a whole are
    left out of the pairing. The levels of load runs pair by all of their settings.

    Raises:
        RecordsError: a run without a measured cell, nothing pairs, or only one of both is a load run.
    """
    a, b = comparable(a, b)
    cells_a, cells_b = _measured(a), _measured(b)
    names = list(dict.fromkeys(name for cell in (*cells_a.values(), *cells_b.values()) for name in cell))
    values = {name: (_values(cells_a, name), _values(cells_b, name)) for name in names}
    apart = {} if is_load_run(a) else _apart(values)
    noun = noun_of(a)
    on = [name for name in names if name not in apart]
    found = _partners(_keys(a, cells_a, on), _keys(b, cells_b, on))
    if not found:
        raise RecordsError(f"{_names(a, b)}: no {noun} pairs: {_why_not(on, values)}")
    pairs = [_pair(a, cell, b, partner, cells_a[cell]) for cell, partner in found.items()]
    compared = tuple(pair for pair in pairs if pair.requests.pairs)
    if not compared:
        raise RecordsError(f"{_names(a, b)}: {noun}s pair, but no request does: other ids, images, prompts or repeats")
    varies = {name for cells in (cells_a, cells_b) for name in distinguishing_names(list(cells.values()))}
    varying = tuple(name for name in names if name in varies)
    return Comparison(
        a,
        b,
        compared,
        varying,
        apart,
        (
            *_cells_alone("AB", cells_a, b, found, on, varying),
            *_cells_alone("BA", cells_b, a, set(found.values()), on, varying),
            *_requests_alone(pairs, noun),
        ),
        len(cells_a) - len(compared),
        _environment(a, b) | _weights(a, b) | _workload(a, b) | load_differences(a, b),
    )


def _keys(run: Run, cells: Cells, on: Sequence[str]) -> dict[str, list[Any]]:
    """What each cell pairs by: its settings, then those of its aliases."""
    others = {cell: [_filled_in(run, alias) for alias in aliases_of(run, cell)] for cell in cells}
    return {cell: [_key(each, on) for each in (settings, *others[cell])] for cell, settings in cells.items()}


def _partners(keys_a: Mapping[str, list[Any]], keys_b: Mapping[str, list[Any]]) -> dict[str, str]:
    """The cell of B for each cell of A that has one: with the same settings, else with an alias in common."""
    found: dict[str, str] = {}
    for own in (True, False):
        for cell, keys in keys_a.items():
            free = {
                other: theirs[:1] if own else theirs for other, theirs in keys_b.items() if other not in found.values()
            }
            wanted = keys[:1] if own else keys
            partner = next((other for other, theirs in free.items() if any(key in theirs for key in wanted)), None)
            if cell not in found and partner is not None:
                found[cell] = partner
    return {cell: found[cell] for cell in keys_a if cell in found}


def _names(a: Run, b: Run) -> str:
    return f"{a.path.parent} and {b.path.parent}"


def _measured(run: Run) -> dict[str, Mapping[str, Any]]:
    answered = {key[0] for key, records in run.requests.items() if any(record["error"] is None for record in records)}
    found = {cell: settings for cell, settings in _filled(run).items() if cell in answered}
    if not found:
        raise RecordsError(f"{run.path}: no {noun_of(run)} was measured, so there is nothing to compare")
    return found


def _filled(run: Run) -> dict[str, Mapping[str, Any]]:
    return {cell: _filled_in(run, settings) for cell, settings in run.cells.items()}


def _filled_in(run: Run, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings with the defaults of those that the run's version did not know. Load levels have no other settings."""
    if is_load_run(run):
        return settings
    return effective_settings({**{name: axis.default for name, axis in axes().items()}, **settings})


def noun_of(run: Run) -> str:
    """Return what a run's cells are called: ``cell``, or ``level`` of a load run."""
    return "level" if is_load_run(run) else "cell"


def _values(cells: Cells, name: str) -> dict[str, Any]:
    """The values that a setting has in a run, by their JSON; crops without pan and scan have none."""
    values = (cell.get(name) for cell in cells.values())
    return {json.dumps(value): value for value in values if value is not None or not name.startswith(_CROPS)}


def _apart(values: Mapping[str, tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (next(iter(ours.values())), next(iter(theirs.values())))
        for name, (ours, theirs) in values.items()
        if len(ours) == len(theirs) == 1 and ours.keys() != theirs.keys()
    }


def _key(settings: Mapping[str, Any], names: Sequence[str]) -> str:
    return json.dumps([settings.get(name) for name in names])


def _why_not(on: Sequence[str], values: Mapping[str, tuple[dict[str, Any], dict[str, Any]]]) -> str:
    for name in on:
        ours, theirs = values[name]
        if ours and theirs and not ours.keys() & theirs.keys():
            here, there = (", ".join(map(shown, side.values())) for side in (ours, theirs))
            return f"{name} is {here} in A and {there} in B"
    return "no combination of settings is in both"


def _pair(a: Run, cell_a: str, b: Run, cell_b: str, settings: Mapping[str, Any]) -> CellPair:
    peaks = {}
    for name in ("peak_allocated_bytes", "peak_rss_bytes"):
        ours, theirs = _peak(a, cell_a, name), _peak(b, cell_b, name)
        if ours is not None and theirs is not None:
            peaks[name] = ours, theirs
    return CellPair(
        settings,
        (cell_a, cell_b),
        pair_requests(a, cell_a, b, cell_b),
        (verdict_of(a, cell_a), verdict_of(b, cell_b)),
        peaks,
    )


def _peak(run: Run, cell: str, name: str) -> int | None:
    peaks = [record[name] for key, record in run.repeats.items() if key[0] == cell]
    return max((peak for peak in peaks if peak is not None), default=None)


def _cells_alone(
    names: str, cells: Cells, run: Run, done: Collection[str], on: Sequence[str], varying: Sequence[str]
) -> list[str]:
    """For each fate that cells without a partner have in the other run, how many and which.

    Args:
        names: the letter of the cells' run, then of ``run``, the other one.
    """
    fates: dict[str, list[str]] = defaultdict(list)
    there = {_key(settings, on): outcome_of(run, cell) for cell, settings in _filled(run).items()}
    for cell in (cell for cell in cells if cell not in done):
        outcome, reason = there.get(_key(cells[cell], on), ("not in it", ""))
        fates[": ".join(filter(None, (outcome, reason)))].append(cell_title(cell, cells[cell], varying))
    lines = []
    for fate, found in fates.items():
        head = f"{count(len(found), noun_of(run))} of {names[0]} without a partner in {names[1]} ({fate}):"
        more = len(found) - _MOST_NAMED
        listed = [f"- {each}" for each in found[:_MOST_NAMED]] + [f"- and {more} more"] * (more > 0)
        lines += [f"{head} {found[0]}"] if len(found) == 1 else [head, *listed]
    return lines


def _requests_alone(pairs: Sequence[CellPair], noun: str) -> list[str]:
    lines = []
    for index, name in enumerate("AB"):
        alone = sum(pair.requests.alone[index] for pair in pairs)
        failed = sum(pair.requests.failed[index] for pair in pairs)
        lines += [f"requests of {name} without a partner: {alone}"] * bool(alone)
        lines += [f"requests of {name} that failed: {failed}"] * bool(failed)
    empty = sum(not pair.requests.pairs for pair in pairs)
    return [*lines, *([f"{noun}s that pair, but have no request in common: {empty}"] * bool(empty))]


def _environment(a: Run, b: Run) -> dict[str, tuple[Any, Any]]:
    ours, theirs = _facts(a.header["environment"]), _facts(b.header["environment"])
    return {name: (value, theirs[name]) for name, value in ours.items() if value != theirs[name]}


def _facts(environment: Mapping[str, Any]) -> dict[str, Any]:
    found, kept = environment.get("packages"), environment.get("gpus")
    packages = found if isinstance(found, dict) else {}
    gpus = ", ".join(str(gpu.get("name")) for gpu in (kept if isinstance(kept, list) else ()) if isinstance(gpu, dict))
    known = ("cpu", "cpu_count", "torch_threads", "cuda", "panscan", "commit")
    return {
        "gpus": gpus or None,
        **{name: environment.get(name) for name in known},
        **{name: packages.get(name) for name in ("torch", "transformers")},
    }


def _weights(a: Run, b: Run) -> dict[str, tuple[Any, Any]]:
    """Bundled models that both runs name but that are not the same, as ``NAME weights``."""
    ours, theirs = bundled_weights(a), bundled_weights(b)
    return {
        f"{name} weights": (ours[name], theirs[name]) for name in ours if ours[name] != theirs.get(name, ours[name])
    }


def _workload(a: Run, b: Run) -> dict[str, tuple[Any, Any]]:
    ours, theirs = a.header["settings"], b.header["settings"]
    names = ("workload_sha256", "requests", "repeats", "warmup", "seed")
    return {name: (ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)}
