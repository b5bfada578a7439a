"""The same greedy requests under other conditions: their tokens must not change beyond what rounding explains.

What a run varies anyway (repeats, cells that differ in one axis only) is compared for free; :func:`variants` runs the
requests again for the rest. Where two answers part, the reference tells how much the two tokens differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from panscan.core import Request, Result
from panscan.core.errors import error_line
from panscan.engine.options import EngineOptions
from panscan.model.machine import release_memory
from panscan.records.verdict_records import AxisCheck, Departure
from panscan.runners.base import Runner, calls
from panscan.settings import Settings
from panscan.verdict.tokens import Judge, ReferenceRows, Tokens, first_difference

_ALONE = 8  # requests that are answered alone
_JUDGED = 4  # differences of an axis whose margin is computed; each takes a float32 pass over prompt and answer
_SETTINGS = {
    "batch": (
        "batch_size",
        "max_num_seqs",
        "max_concurrency",
        "equal_views",
        "vision_batch_size",
    ),
    "chunk": ("prefill_chunk_size",),
    "cache": ("prefix_caching", "vision_cache_gb", "kv_cache_gb", "gpu_memory_utilization", "gpu_memory_gb"),
    "gpus": ("device_map", "max_memory", "tensor_parallel_size"),
}
"""The settings of each axis, which may not change any answer."""

Answers = Mapping[str, Tokens]
"""Measured tokens by request id."""


@dataclass(frozen=True, slots=True)
class RunAnswers:
    """The answers of one run of a cell's requests; ``note`` describes the conditions, or why there are no answers."""

    axis: str
    note: str
    answers: Answers

    @classmethod
    def of(cls, axis: str, note: str, results: Sequence[Result]) -> RunAnswers:
        """Return the answers of results."""
        return cls(axis, note, {result.id: result.token_ids for result in results})


def shared_axis(a: Settings, b: Settings) -> str | None:
    """The only axis in whose settings two cells differ; None if there is no such axis."""
    for axis, names in _SETTINGS.items():
        if a != b and replace(a, **{name: getattr(b, name) for name in names}) == b:
            return axis
    return None


def variants(runner: Runner, requests: Sequence[Request], views: Sequence[int], longest: int) -> Iterator[RunAnswers]:
    """Answer the requests again: in reverse order, with warm caches, alone, and in smaller prefill chunks.

    Args:
        runner: configured for the cell.
        requests: the cell's.
        views: view count of each.
        longest: tokens of the longest prompt; a third of it is a chunk that cuts most prompts.
    """
    settings = runner.settings
    backwards = range(len(requests))[::-1]
    yield _variant("order", "in reverse order", lambda: answer_again(runner, requests, views, backwards))
    yield warm_variant(runner, requests)
    if len(requests) > 1 or settings.batch_size > 1:
        alone = requests[:: max(1, len(requests) // _ALONE)][:_ALONE]
        yield _variant("batch", "each alone", lambda: [runner.run([request])[0] for request in alone])
    if settings.runner == "engine":
        size = max(16, min(longest, EngineOptions.of(settings).prefill_chunk_size) // 3 - 5)
        yield _variant("chunk", f"chunks of {size} tokens", lambda: _in_chunks(runner, requests, settings, size))


def warm_variant(runner: Runner, requests: Sequence[Request]) -> RunAnswers:
    """Answer requests again with the caches that earlier passes have filled."""
    if not hasattr(runner, "answer"):
        return RunAnswers("cache", "the runner keeps no cache between calls", {})
    return _variant("cache", "with the caches of an earlier pass", lambda: runner.answer(requests))


def answer_again(
    runner: Runner, requests: Sequence[Request], views: Sequence[int], order: Sequence[int]
) -> list[Result]:
    """Answer a cell's requests again in an order, in the batches that the cell makes of it.

    Raises:
        PanscanError: of a request that failed.
    """
    batches = calls([views[index] for index in order], runner.settings)
    return [result for batch in batches for result in runner.run([requests[order[index]] for index in batch])]


def _variant(axis: str, note: str, run: Callable[[], Sequence[Result]]) -> RunAnswers:
    try:
        return RunAnswers.of(axis, note, run())
    except Exception as error:  # out of memory, too: the measurement and its verdict stand
        reason = error_line(error)
    release_memory()
    return RunAnswers(axis, f"failed: {reason}", {})


def _in_chunks(runner: Runner, requests: Sequence[Request], settings: Settings, size: int) -> list[Result]:
    runner.configure(replace(settings, prefill_chunk_size=size))
    try:
        return runner.run(requests)
    finally:
        runner.configure(settings)


def compare(
    variant: RunAnswers, measured: Answers, judge: Judge, reference: ReferenceRows, *, same_cell: bool
) -> AxisCheck:
    """Compare two runs of the same requests. Answers of different length limits are equal as far as both reach.

    Args:
        variant: the run that the cell's measured answers are compared with.
        measured: the cell's answers.
        judge: of the cell.
        reference: hidden states along the cell's answers.
        same_cell: whether the variant is another run of the cell, so that a fault in it is the cell's.
    """
    pairs = {
        request: (measured[request], variant.answers[request]) for request in measured if request in variant.answers
    }
    parted = {request: first_difference(a[: len(b)], b[: len(a)]) for request, (a, b) in pairs.items()}
    differences = [(request, position) for request, position in parted.items() if position is not None]
    judged = [
        _judged_difference(request, position, *pairs[request], judge, reference)
        for request, position in differences[:_JUDGED]
    ]
    clear = [departure for departure in judged if departure[0].clear]
    if same_cell and not clear:
        rest = (
            _wrong_continuation(request, position, pairs[request][1], judge, reference)
            for request, position in differences[:_JUDGED]
        )
        clear = [(departure, False) for departure in rest if departure is not None][:1]
    first, departs = next(iter(clear or judged), (None, True))
    return AxisCheck(variant.axis, len(pairs), len(differences), first, same_cell or departs, variant.note)


def _wrong_continuation(
    request: str, position: int, tokens: Tokens, judge: Judge, reference: ReferenceRows
) -> Departure | None:
    """Return the first clearly wrong token of the other answer, which may follow a difference within the noise."""
    try:
        return reference.check(judge, request, tokens, position).first if position < len(tokens) else None
    except Exception:  # as in _judged_difference
        return None


def _judged_difference(
    request: str, position: int, measured: Tokens, other: Tokens, judge: Judge, reference: ReferenceRows
) -> tuple[Departure, bool]:
    """Return the departure from the token that the reference prefers, and whether the measured answer departs."""
    a, b = measured[position], other[position]
    try:
        hidden = reference.along(request, measured[: position + 1])[position]
    except Exception:  # quantised or offloaded weights, no memory, tokens that are no text: the margin is unknown
        return judge.departure(request, position, (a, b), None), True
    row = judge.logits(hidden[None])[0]
    best = int(row.argmax())
    pair = (a, b) if best == b or row[a] < row[b] else (b, a)
    return judge.departure(request, position, pair, hidden), pair[0] == a
