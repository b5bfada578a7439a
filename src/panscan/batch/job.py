"""The job itself: what is left of it, its requests through the engine, its answers in order into the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import count
from typing import Any, Protocol

from panscan import __version__
from panscan.batch.answers import AnswerFile, Record
from panscan.batch.items import Item
from panscan.core import RecordsError, Request, Result, Stamps, now
from panscan.settings import ENGINE_AXES, Settings, axes

__all__ = ["Answered", "Engine", "Job", "Tally", "answer", "changed_versions", "difference", "tally"]

SCHEMA = 1

_ANSWERS_STAY = frozenset({*ENGINE_AXES, "device", "device_map", "max_memory", "prefill_chunk_size"})
"""Settings of place and size: they may change on the way, as after a machine ran out of memory."""


class Engine(Protocol):
    """What answers. :class:`panscan.engine.engine.Engine` does."""

    def stream_results(
        self, requests: Iterable[Request], *, max_concurrency: int | None = None
    ) -> Iterator[tuple[int, Result]]:
        """Pairs of a request's index and its result, as they finish; pulls requests as it has room for them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every request of a job has in common. ``prompt`` is None where each item brings its question."""

    settings: Settings
    prompt: str | None
    system: str | None = None
    raw_prompt: bool = False
    whole_files: bool = False

    def request(self, item: Item) -> Request:
        """An item as a request."""
        return Request(
            prompt=self.prompt if item.question is None else item.question,
            images=item.images,
            system=self.system,
            raw=self.raw_prompt,
            pan_and_scan=self.settings.pan_and_scan,
            sampling=self.settings.sampling,
            id=item.id,
        )

    def header(self) -> Record:
        """How the answers are made, for the file beside them."""
        asked = asdict(self)
        settings = asked.pop("settings")
        versions = {"panscan": __version__, **{name: version(name) for name in ("torch", "transformers")}}
        return {"schema": SCHEMA, **asked, "settings": settings, "versions": versions}


def difference(begun: Mapping[str, Any], header: Mapping[str, Any]) -> str | None:
    """Why a file that began with one header cannot be resumed with another; None if the answers are the same."""
    if begun.get("schema") != SCHEMA:
        return f"was made by another version of panscan (schema {begun.get('schema')!r}, not {SCHEMA})"
    for name in ("prompt", "system", "raw_prompt", "whole_files"):
        if begun.get(name) != header[name]:
            return f"was made with another --{name.replace('_', '-')}"
    for name, value in header["settings"].items():
        before = begun.get("settings", {}).get(name, axes()[name].default)  # a setting that is newer than the file
        if before != value and name not in _ANSWERS_STAY:
            return f"was made with --{axes()[name].flag} {before}, not {value}"
    return None


def changed_versions(begun: Mapping[str, Any], header: Mapping[str, Any]) -> list[str]:
    """``torch 2.11.0, now 2.12.0`` for each library that is another one now, so that rounding may differ."""
    before = begun.get("versions", {})
    return [
        f"{name} {before.get(name)}, now {now}" for name, now in header["versions"].items() if before.get(name) != now
    ]


class Answered:
    """Which items a file has answers of.

    Args:
        file: the file.
        retry_failed: failed ones are taken out of it, to be asked again.

    Raises:
        RecordsError: a line is not an answer.
    """

    def __init__(self, file: AnswerFile, *, retry_failed: bool) -> None:
        self._path = file.path
        if retry_failed:
            file.keep(lambda record: record.get("error") is None)
        # Hashes, because a job may have more documents than memory has room for their questions.
        self._asked = {record["id"]: _asked(record["image"], record.get("question")) for record in file.records()}
        self.skipped = 0

    def left(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items without an answer.

        Raises:
            RecordsError: an answer has an item's id, but belongs to another question or image.
        """
        for item in items:
            if item.id not in self._asked:
                yield item
            elif self._asked[item.id] == _asked(item.named, item.question):
                self.skipped += 1
            else:
                raise RecordsError(
                    f"{self._path}: {item.id!r} was another image or question when it was answered:"
                    " give rows an 'id' that stays with them, or start anew with --force"
                )


def answer(
    engine: Engine,
    job: Job,
    items: Iterable[Item],
    write: Callable[[Record], None],
    *,
    window: int | None,
    on_answer: Callable[[Record], None],
) -> None:
    """Ask every item and write every answer.

    Args:
        engine: what answers.
        job: what the requests have in common.
        items: pulled as the engine has room.
        write: takes one answer's line.
        window: answers are written in the order of the items, and no item is begun that lies this far behind the first
            unwritten one: what bounds the answers that wait. None: they are written as they finish.
        on_answer: called with each line as its request finishes, before it is written.
    """
    lines = _Lines(write, window)
    asking = _Asking(job, iter(items), lines, on_answer)
    # A stream ends early when the window is full: what it has begun is then finished, and the next one goes on.
    most, before = job.settings.max_concurrency, -1
    while lines.begun > before:
        before = lines.begun
        for index, result in engine.stream_results(asking.requests(), max_concurrency=most):
            asking.finished(index, result)


class _Asking:
    """Items on their way through streams of an engine, one stream after the other."""

    def __init__(self, job: Job, queue: Iterator[Item], lines: _Lines, on_answer: Callable[[Record], None]) -> None:
        self._job, self._queue, self._lines, self._on_answer = job, queue, lines, on_answer
        self._flying: dict[int, tuple[int, Item]] = {}  # by the request's index in its stream

    def requests(self) -> Iterator[Request]:
        """The requests of the next stream; what cannot be asked is answered on the way."""
        index = count()
        while self._lines.has_room and (item := next(self._queue, None)) is not None:
            number = self._lines.begin()
            if item.problem is None:
                self._flying[next(index)] = number, item
                yield self._job.request(item)
            else:
                self._done(number, item, _not_asked(item))

    def finished(self, index: int, result: Result) -> None:
        """The request that the stream drew at ``index`` has its result."""
        self._done(*self._flying.pop(index), result)

    def _done(self, number: int, item: Item, result: Result) -> None:
        record = _record(item, result)
        self._on_answer(record)
        self._lines.add(number, record)


class _Lines:
    """Answers on their way to the file."""

    def __init__(self, write: Callable[[Record], None], window: int | None) -> None:
        self._write, self._window = write, window
        self._held: dict[int, Record] = {}
        self._written = 0
        self.begun = 0

    @property
    def has_room(self) -> bool:
        """Whether another item may begin."""
        return self._window is None or self.begun - self._written < self._window

    def begin(self) -> int:
        """The number of the item that begins now."""
        self.begun += 1
        return self.begun - 1

    def add(self, number: int, record: Record) -> None:
        """Write the answer of item ``number`` when those of all before it are written; at once without a window."""
        if self._window is None:
            self._write(record)
            return
        self._held[number] = record
        while self._written in self._held:
            self._write(self._held.pop(self._written))
            self._written += 1


def _record(item: Item, result: Result) -> Record:
    """An answer's line. What depends on the run, and not only on what was asked, comes last."""
    failed = result.error is not None
    stamps = result.stamps
    seconds = {"ttft_ms": stamps.ttft, "e2el_ms": stamps.e2e}
    return {
        "id": item.id,
        "image": list(item.named),
        **({} if item.question is None else {"question": item.question}),
        "answer": None if failed else result.text,
        "finish_reason": result.finish_reason,
        "views": result.views,
        "crops": result.crops,
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": result.output_tokens,
        "error": str(result.error) if failed else None,
        "cached_tokens": result.cached_tokens,
        **{name: None if value is None else round(1e3 * value, 3) for name, value in seconds.items()},
    }


def _not_asked(item: Item) -> Result:
    return Result(item.id, "", [], "error", 0, 0, 0, 0, Stamps(now()), error=item.problem)


def _asked(named: Iterable[str], question: str | None) -> int:
    return hash((tuple(named), question))


@dataclass(slots=True)
class Tally:
    """What a file of answers comes to; ``reasons`` are (id, error) of the first failed documents."""

    answered: int
    failed: int
    reasons: list[tuple[str, str]]


def tally(records: Iterable[Record], reasons: int) -> Tally:
    """Count answers, and keep up to ``reasons`` of the failures."""
    found = Tally(0, 0, [])
    for record in records:
        if record.get("error") is None:
            found.answered += 1
            continue
        found.failed += 1
        if len(found.reasons) < reasons:
            found.reasons.append((record["id"], str(record["error"])))
    return found
