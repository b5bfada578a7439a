"""Results of load runs: the level that is chosen, and the words about it, which are kept in a file."""

from collections.abc import Sequence
from typing import Any

from tests.records import load_runs as loads
from tests.records.synthetic import in_memory, outcome
from tests.report.test_snapshots import compare

from panscan.analysis.levels import error_groups, levels_of, load_result, load_warnings, unfinished_levels

Lines = list[dict[str, Any]]


def limited(lines: Sequence[dict[str, Any]]) -> Lines:
    """Return the records of a level with a load generator that was too slow."""
    client = loads.CLIENT | {"limited": True, "reason": "p99 lag of 90 ms"}
    return [line | {"load": {"client": client}} if line["type"] == "repeat" else line for line in lines]


def rates(*levels: tuple[float, Lines], **load: Any) -> Lines:
    """Return a run of levels at rates."""
    cells = {f"rate-{rate:g}": loads.level(rate) for rate, _ in levels}
    return [loads.load_header(cells, **load), *(line for _, lines in levels for line in lines)]


def single(requests: Lines, **load: Any) -> Lines:
    """Return a run of one level of single requests, one per second."""
    return [loads.load_header({"c": loads.level(1.0)}, **load), *loads.level_records("c", requests)]


ANSWERED = [loads.load_request("c", n, loads.START + n, 0.05, 0.01) for n in range(7)]
FAILED = [loads.failed_request("c", n, loads.START + n, error=f"HTTP 500, try {n}") for n in (7, 8)]
HEADER, *LINES = loads.load_run()
CONTRADICTING = [
    (rate, loads.steady(f"rate-{rate:g}", rate, ttft)) for rate, ttft in ((4.0, 0.05), (8.0, 0.2), (16.0, 0.05))
]
OVERLOADED = [(rate, loads.saturated(f"rate-{rate:g}", rate, 10.0, 0.08)) for rate in (16.0, 32.0)]
CLOSED = [*loads.steady("concurrency-4", 8.0, 0.09), *loads.steady("concurrency-2", 5.0, 0.05)]
OTHERS, EIGHTH = ([line for line in LINES if (line["cell"] == "rate-8") == eighth] for eighth in (False, True))
LOST = loads.failed_request("c", 9, loads.START + 9, "timeout", "no answer in 5 s")
IN_CHUNKS = {chunks: loads.steady("rate-4", 4.0, 0.05, chunks=chunks, output_tokens=12) for chunks in (1, 6, 12)}
CASES: dict[str, Lines] = {
    "the highest rate that meets the goodput": loads.load_run(attainment=0.8),
    "a level passes by the lower end of its interval": loads.load_run(),
    "levels that contradict the result": rates(*CONTRADICTING),
    "without limits, the fastest level that is kept up with": loads.load_run(goodput={}),
    "overload is no success": rates(*OVERLOADED, goodput={}),
    "overload is no success with limits": rates(*OVERLOADED, goodput={"ttft": 100.0}),
    "a level that the generator limits is no result": [HEADER, *OTHERS, *limited(EIGHTH)],
    "nor are levels that it limits all": [HEADER, *limited(LINES)],
    "too few requests to tell": single(ANSWERED[:3], goodput={}),
    "a limit on TPOT alone, which overload meets": loads.load_run(goodput={"tpot": 20.0}),
    "a closed loop": [
        loads.load_header({f"concurrency-{n}": loads.level(None, n) for n in (4, 2)}, arrival="closed"),
        *CLOSED,
    ],
    "no level meets the goodput": loads.load_run(goodput={"ttft": 10.0}),
    "errors count as missed": single([*ANSWERED, *FAILED, LOST]),
    "every request failed": single(
        [loads.failed_request("c", n, loads.START + n, "connect", "refused") for n in range(3)]
    ),
    "nothing was measured": [loads.load_header({"c": loads.level(1.0)}), outcome("c", "failed", "endpoint is down")],
    **{f"answers of 12 tokens in {chunks} chunks": rates((4.0, lines)) for chunks, lines in IN_CHUNKS.items()},
}


def test_each_run_has_its_result_and_says_why() -> None:
    """See :mod:`tests.report.test_snapshots`."""
    texts = []
    for name, lines in CASES.items():
        run = in_memory(lines)
        levels = levels_of(run)
        result = load_result(run, levels)
        shown = [f"{one.name}: {one.failed} failed, attainment {one.goodput.attainment}" for one in levels]
        errors = [f"{one.kind} {one.requests} {one.levels} {one.example}" for one in error_groups(run, levels)]
        unfinished = [" ".join(one) for one in unfinished_levels(run)]
        warnings = load_warnings(run, levels)
        text = (f"meets {result.meets}", result.headline, *result.notes, *warnings, *shown, *errors, *unfinished)
        texts.append("\n  ".join([f"{name}:", *text]) + "\n")
    compare("load-results.txt", "".join(texts))
