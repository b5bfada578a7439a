"""Two runs side by side: which cells and which requests pair, and in what the runs differ as a whole."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panscan.analysis.cells import cell_title, display_settings, distinguishing_names, effective_settings
from panscan.analysis.levels import level_names
from panscan.analysis.setting_words import CROPS, shown
from panscan.core import RecordsError
from panscan.core.groups import grouped
from panscan.core.text import count
from panscan.records.environment import bundled_weights
from panscan.records.goodput import missed_limits
from panscan.records.load_runs import block_size, in_blocks, is_load_run, load_settings
from panscan.records.metrics import batches_of, window_seconds
from panscan.records.request_records import RequestRecord
from panscan.records.store import CellSettings, Run, outcome_of
from panscan.settings import axes
from panscan.verdict.judgement import Verdict, verdict_of

ATTAINMENT = "attainment"
"""The name of a request's score that is 1 if it meets the limits of both runs, else 0."""
LOAD_WORKLOAD = ("arrival", "scenario", "image_reuse", "num_prompts", "seed", "ignore_eos")
"""Settings of a load run that make its requests, or when they arrive."""
_MOST_NAMED = 12  # cells without a partner, of one fate


@dataclass(frozen=True, slots=True)
class RequestPair:
    """Two requests of the same question, and the cluster that they are in (from 0, without gaps)."""

    a: RequestRecord
    b: RequestRecord
    cluster: int


@dataclass(frozen=True, slots=True, eq=False)
class PairedRequests:
    """Paired requests of two cells.

    Args:
        pairs: sorted by repeat, replica, request id, image hashes and prompt hash.
        work: float64 ``[2, clusters, 3]``: what A's and B's batches of each cluster did in their repeat's window:
            answered requests, output tokens, seconds.
        alone: answered requests of A and of B without a partner.
        failed: requests of A and of B that failed.
    """

    pairs: tuple[RequestPair, ...]
    work: NDArray[np.float64]
    alone: tuple[int, int]
    failed: tuple[int, int]

    @property
    def clusters(self) -> int:
        return int(self.work.shape[1])

    @property
    def repeats(self) -> list[int]:
        """The numbers of the repeats."""
        return sorted({pair.a.repeat for pair in self.pairs})


def pair_requests(a: Run, cell_a: str, b: Run, cell_b: str) -> PairedRequests:
    """Pair the requests of two cells by repeat, replica, id, images and prompt.

    A cluster is the smallest set of batches of both that no pair leaves: with equal batches on both sides, a batch.
    """
    sides = (a, cell_a), (b, cell_b)
    requests_a, requests_b = (
        {(one.repeat, one.replica, one.request, *one.question): one for one in run.answered(cell)}
        for run, cell in sides
    )
    keys = sorted(requests_a.keys() & requests_b.keys())
    clusters = _clusters([(_batch_node(0, requests_a[key]), _batch_node(1, requests_b[key])) for key in keys])
    work = np.zeros((2, len(set(clusters.values())), 3))
    for side, (run, cell) in enumerate(sides):
        for repeat, requests in run.repeats_of(cell):
            for batch in batches_of(repeat, requests):
                cluster = clusters.get((side, repeat.repeat, *batch.key)) if batch.key is not None else None
                if cluster is not None:
                    work[side, cluster] += batch.work
    failed_a, failed_b = (len(run.requests_of(cell)) - len(run.answered(cell)) for run, cell in sides)
    return PairedRequests(
        tuple(RequestPair(requests_a[key], requests_b[key], clusters[_batch_node(0, requests_a[key])]) for key in keys),
        work,
        (len(requests_a) - len(keys), len(requests_b) - len(keys)),
        (failed_a, failed_b),
    )


def _batch_node(side: int, request: RequestRecord) -> tuple[int, int, int, int]:
    return side, request.repeat, request.replica, request.batch


def _clusters(links: Sequence[tuple[Hashable, Hashable]]) -> dict[Hashable, int]:
    """Return the number of each node's connected component, in the order of the links."""
    above: dict[Hashable, Hashable] = {}

    def top(node: Hashable) -> Hashable:
        while above.setdefault(node, node) != node:
            above[node] = above[above[node]]
            node = above[node]
        return node

    for one, other in links:
        above[top(one)] = top(other)
    numbers = {node: number for number, node in enumerate(dict.fromkeys(top(one) for one, _ in links))}
    return {node: numbers[top(node)] for node in list(above)}


Cells = Mapping[str, CellSettings]


@dataclass(frozen=True, slots=True)
class CellPair:
    """A cell of A and its partner in B.

    Args:
        settings: A's; crop settings without pan and scan are None.
        title: the settings that vary within either run, and both ids (one if they are equal).
        cells: the ids.
        requests: what pairs in them; at least one request.
        verdicts: of both.
        peaks: highest ``peak_allocated_bytes`` (where a GPU was in use on both sides) and ``peak_rss_bytes`` of both.
    """

    settings: CellSettings
    title: str
    cells: tuple[str, str]
    requests: PairedRequests
    verdicts: tuple[Verdict, Verdict]
    peaks: Mapping[str, tuple[int, int]]

    @property
    def extent(self) -> str:
        """How much of the cells pairs."""
        repeats, batches = len(self.requests.repeats), self.requests.clusters
        extent = f"{repeats} repeats" if repeats > 1 else f"{batches} batch{'' if batches == 1 else 'es'}"
        return f"{count(len(self.requests.pairs), 'paired request')} in {extent}"

    @property
    def verdict(self) -> str:
        """Both verdicts in words."""
        return " -> ".join(dict.fromkeys(verdict.word for verdict in self.verdicts))


@dataclass(frozen=True, slots=True)
class Comparison:
    """What pairs in two runs.

    Args:
        a: the baseline.
        b: the other run.
        name: the letter that texts call the other run.
        pairs: at least one, in the order of A.
        varying: settings that differ between the measured cells of either run.
        apart: settings that are constant in each run and differ between them, as (A's value, B's value).
        alone: what has no partner, in lines.
        unpaired: measured cells of A that were not compared.
        differences: in environment, bundled weights and workload, as (A's value, B's value).
    """

    a: Run
    b: Run
    name: str
    pairs: tuple[CellPair, ...]
    varying: tuple[str, ...]
    apart: Mapping[str, tuple[Any, Any]]
    alone: tuple[str, ...]
    unpaired: int
    differences: Mapping[str, tuple[Any, Any]]


def compare_runs(a: Run, b: Run, name: str = "B") -> Comparison:
    """Pair the measured cells of two runs by their settings, and their requests by repeat, id, images and prompt.

    Settings that a run's version did not know have their defaults. Settings in which the runs differ as a whole are
    left out of the pairing. The levels of load runs pair by all of their settings.

    Args:
        a: the baseline.
        b: the other run.
        name: the letter that texts call it; the baseline is A.

    Raises:
        RecordsError: a run without a measured cell, nothing pairs, or only one of both is a load run.
    """
    a, b = _with_blocks(a, b)
    forms_a, forms_b = _measured_forms(a), _measured_forms(b)
    cells_a, cells_b = ({cell: forms[0] for cell, forms in side.items()} for side in (forms_a, forms_b))
    settings = list(dict.fromkeys(setting for cell in (*cells_a.values(), *cells_b.values()) for setting in cell))
    values = {setting: (_values_of(cells_a, setting), _values_of(cells_b, setting)) for setting in settings}
    apart = {
        setting: (next(iter(values_a.values())), next(iter(values_b.values())))
        for setting, (values_a, values_b) in values.items()
        if len(values_a) == len(values_b) == 1 and values_a.keys() != values_b.keys() and not is_load_run(a)
    }
    noun, folders = noun_of(a), f"{a.path.parent} and {b.path.parent}"
    on = [setting for setting in settings if setting not in apart]
    keys_a, keys_b = (
        {cell: [_key(form, on) for form in forms] for cell, forms in side.items()} for side in (forms_a, forms_b)
    )
    partners = _partners(keys_a, keys_b)
    if not partners:
        raise RecordsError(f"{folders}: no {noun} pairs: {_why_not(on, values, name)}")
    varies = {setting for cells in (cells_a, cells_b) for setting in distinguishing_names(list(cells.values()))}
    varying = tuple(setting for setting in settings if setting in varies)
    pairs = [_pair(a, cell, b, partner, cells_a[cell], varying) for cell, partner in partners.items()]
    compared = tuple(pair for pair in pairs if pair.requests.pairs)
    if not compared:
        raise RecordsError(f"{folders}: {noun}s pair, but no request does: other ids, images, prompts or repeats")
    alone = [
        *_cells_alone("A", cells_a, name, b, partners, on, varying),
        *_cells_alone(name, cells_b, "A", a, partners.values(), on, varying),
        *_requests_alone(pairs, noun, name),
    ]
    facts_a, facts_b = _facts_of(a), _facts_of(b)
    differences = {
        fact: (value, facts_b[fact]) for fact, value in facts_a.items() if fact in facts_b and value != facts_b[fact]
    }
    return Comparison(a, b, name, compared, varying, apart, tuple(alone), len(cells_a) - len(compared), differences)


def _with_blocks(a: Run, b: Run) -> tuple[Run, Run]:
    """Return two runs with the requests that a comparison tests.

    The batches of load runs become blocks of consecutive requests (:func:`panscan.records.load_runs.in_blocks`), of the
    same size in both runs. Each answered request is scored by :data:`ATTAINMENT` if both runs have the same limits.
    Sweeps are unchanged.

    Raises:
        RecordsError: one is a load run, the other is not; or stamps contradict counts.
    """
    if is_load_run(a) != is_load_run(b):
        load, sweep = (a, b) if is_load_run(a) else (b, a)
        raise RecordsError(
            f"{load.path.parent} is a load run of an endpoint and {sweep.path.parent} is a sweep of panscan bench:"
            " compare two of the same kind"
        )
    if not is_load_run(a):
        return a, b
    limits, others = load_settings(a).goodput, load_settings(b).goodput
    sizes: dict[tuple[str, int], int] = defaultdict(int)
    for run in (a, b):
        for key, requests in run.requests.items():
            sizes[key] = max(sizes[key], block_size(requests, window_seconds(run.repeats[key])))
    runs = []
    for run in (a, b):
        blocks = {key: in_blocks(requests, sizes[key]) for key, requests in run.requests.items()}
        for request in chain.from_iterable(blocks.values() if limits and limits == others else ()):
            if request.error is None:
                request.scores = {ATTAINMENT: float(not missed_limits(request, limits))}
        runs.append(replace(run, requests=blocks))
    return runs[0], runs[1]


def _partners(keys_a: Mapping[str, list[str]], keys_b: Mapping[str, list[str]]) -> dict[str, str]:
    """The cell of B for each cell of A that has one: with the same settings, else with an alias in common."""
    partners: dict[str, str] = {}
    for most in (1, None):
        for cell, keys in keys_a.items():
            free = (other for other in keys_b if cell not in partners and other not in partners.values())
            partner = next((other for other in free if not {*keys[:most]}.isdisjoint(keys_b[other][:most])), None)
            if partner is not None:
                partners[cell] = partner
    return {cell: partners[cell] for cell in keys_a if cell in partners}


def _measured_forms(run: Run) -> dict[str, list[CellSettings]]:
    """Return what each measured cell pairs by: its settings, then those of its aliases."""
    answered = {cell for (cell, _), requests in run.requests.items() if any(one.error is None for one in requests)}
    cells = {cell: forms for cell, forms in _forms(run).items() if cell in answered}
    if not cells:
        raise RecordsError(f"{run.path}: no {noun_of(run)} was measured, so there is nothing to compare")
    return cells


def _forms(run: Run) -> dict[str, list[CellSettings]]:
    """Return the settings of each cell and of its aliases, with the defaults of those that the run's version did not
    know. Load levels have no other settings."""
    forms = {id: cell.forms for id, cell in run.cells.items()}
    if is_load_run(run):
        return forms
    defaults = {name: axis.default for name, axis in axes().items()}
    return {cell: [effective_settings({**defaults, **form}) for form in alike] for cell, alike in forms.items()}


def noun_of(run: Run) -> str:
    """Return what a run's cells are called: ``cell``, or ``level`` of a load run."""
    return "level" if is_load_run(run) else "cell"


def _values_of(cells: Cells, name: str) -> dict[str, Any]:
    """The values that a setting has in a run, by their JSON; crops without pan and scan have none."""
    values = (cell.get(name) for cell in cells.values())
    return {json.dumps(value): value for value in values if value is not None or not name.startswith(CROPS)}


def _key(settings: CellSettings, names: Sequence[str]) -> str:
    return json.dumps([settings.get(name) for name in names])


def _why_not(on: Sequence[str], values: Mapping[str, tuple[dict[str, Any], dict[str, Any]]], name: str) -> str:
    for setting in on:
        values_a, values_b = values[setting]
        if values_a and values_b and not values_a.keys() & values_b.keys():
            text_a, text_b = (", ".join(map(shown, side.values())) for side in (values_a, values_b))
            return f"{setting} is {text_a} in A and {text_b} in {name}"
    return "no combination of settings is in both"


def _pair(a: Run, cell_a: str, b: Run, cell_b: str, settings: CellSettings, varying: Sequence[str]) -> CellPair:
    if is_load_run(a):
        title = f"level {level_names(a)[cell_a]}"
    else:
        shown_settings = display_settings([settings, *a.cells[cell_a].forms[1:]])
        title = cell_title(" / ".join(dict.fromkeys((cell_a, cell_b))), shown_settings, varying)
    peaks = {}
    sides = a.repeats_of(cell_a), b.repeats_of(cell_b)
    for name in ("peak_allocated_bytes", "peak_rss_bytes"):
        known = [[peak for repeat, _ in side if (peak := getattr(repeat, name)) is not None] for side in sides]
        if all(known):
            peaks[name] = max(known[0]), max(known[1])
    return CellPair(
        settings,
        title,
        (cell_a, cell_b),
        pair_requests(a, cell_a, b, cell_b),
        (verdict_of(a, cell_a), verdict_of(b, cell_b)),
        peaks,
    )


def _cells_alone(
    name: str, cells: Cells, other: str, run: Run, done: Collection[str], on: Sequence[str], varying: Sequence[str]
) -> list[str]:
    """For each fate that cells of run ``name`` without a partner have in the ``other`` run, how many and which."""
    outcomes = {_key(forms[0], on): outcome_of(run, cell) for cell, forms in _forms(run).items()}
    absent = "not in it", ""
    fates = grouped(
        (": ".join(filter(None, outcomes.get(_key(settings, on), absent))), cell_title(cell, settings, varying))
        for cell, settings in cells.items()
        if cell not in done
    )
    lines = []
    for fate, titles in fates.items():
        head = f"{count(len(titles), noun_of(run))} of {name} without a partner in {other} ({fate}):"
        more = len(titles) - _MOST_NAMED
        listed = [f"- {title}" for title in titles[:_MOST_NAMED]] + [f"- and {more} more"] * (more > 0)
        lines += [f"{head} {titles[0]}"] if len(titles) == 1 else [head, *listed]
    return lines


def _requests_alone(pairs: Sequence[CellPair], noun: str, name: str) -> list[str]:
    counts = {}
    for index, letter in enumerate(("A", name)):
        counts[f"requests of {letter} without a partner"] = sum(pair.requests.alone[index] for pair in pairs)
        counts[f"requests of {letter} that failed"] = sum(pair.requests.failed[index] for pair in pairs)
    counts[f"{noun}s that pair, but have no request in common"] = sum(not pair.requests.pairs for pair in pairs)
    return [f"{what}: {number}" for what, number in counts.items() if number]


def _facts_of(run: Run) -> dict[str, Any]:
    """What runs are compared by as a whole: environment, bundled weights, workload, and settings of a load run."""
    environment, settings = run.header.machine, run.header.settings
    known = ("cpu", "cpu_count", "torch_threads", "cuda", "panscan", "commit")
    workload = ("workload_sha256", "requests", "repeats", "warmup", "seed")
    facts = {
        "gpus": ", ".join(str(gpu.name) for gpu in environment.gpus) or None,
        **{name: getattr(environment, name) for name in known},
        **{name: environment.packages.get(name) for name in ("torch", "transformers")},
        **{f"{name} weights": digest for name, digest in bundled_weights(run).items()},
        **{name: getattr(settings, name) for name in workload[: 1 if is_load_run(run) else None]},
    }
    if settings.load is not None:
        facts |= {name: getattr(settings.load, name) for name in ("endpoint", "server", "model", *LOAD_WORKLOAD)}
        goodput = " ".join(f"{name}:{limit:g}" for name, limit in settings.load.goodput.items())
        facts |= {"goodput": goodput or None, "attainment": settings.load.attainment}
    return facts
