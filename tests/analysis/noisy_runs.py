"""Runs whose latencies are known up to noise, for tests of comparisons."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tests.records.synthetic import header, in_memory, outcome, repeat, request

from panscan.records.store import Run

CELLS: Sequence[dict[str, Any]] = ({"batch_size": 1}, {"batch_size": 2}, {"batch_size": 2, "attention": "eager"})


def noisy_records(
    seed: int,
    *,
    factor: float | Sequence[float] = 1.0,
    noise: float = 0.03,
    spread: float = 0.0,
    cells: Sequence[dict[str, Any]] = CELLS,
    batches: int = 12,
    repeats: int = 5,
    between: float = 0.0,
    **others: Any,
) -> list[dict[str, Any]]:
    """Lognormal batch latencies around 1 s times ``factor`` (one for all batches or one for each, the quickest first).

    Questions differ by ``spread``, in every run alike; all batches of a repeat by ``between``.
    """
    draws = np.random.default_rng(seed)
    sizes = np.sort(np.exp(np.random.default_rng(99).normal(0, spread, batches))) * np.broadcast_to(factor, batches)
    named = {f"c{number}": {"model": "mini"} | settings for number, settings in enumerate(cells)}
    records = [header(named)]
    for cell, settings in named.items():
        for turn in range(repeats):
            at = started = 100.0
            pace = np.exp(draws.normal(0, between)) if between else 1.0
            for batch in range(batches):
                latency = pace * sizes[batch] * np.exp(draws.normal(0, noise))
                tokens = [at + latency * part for part in (0.5, 0.75, 1.0)]
                records += [
                    request(cell, f"q{batch}.{index}", at, tokens, repeat=turn, batch=batch, **others)
                    for index in range(settings.get("batch_size", 1))
                ]
                at += latency
            records.append(repeat(cell, turn, started, at))
        records.append(outcome(cell, "done"))
    return records


def noisy_run(seed: int, **options: Any) -> Run:
    return in_memory(noisy_records(seed, **options))
