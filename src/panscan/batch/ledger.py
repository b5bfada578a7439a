"""The ledger of a job: pages, failures by reason, tokens, retries and time, in ``NAME.ledger.json``.

Answers are counted in the output file; times and retries are stored per start, because a job may be resumed. The file
is replaced atomically every few seconds and when a start ends.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import replace

from panscan.batch.jsonl import AnswerRecord, read_sidecar
from panscan.core import RecordsError, now
from panscan.core.files import write_file

Ending = Literal["running", "finished", "stopped"]

_INTERVAL_SECONDS = 10.0  # a killed start loses the time since the last write
_REASONS = 50  # different reasons with their own counts; the rest share one entry
_OTHER = "other reasons"
_TOKENS = ("prompt_tokens", "image_tokens", "cached_tokens", "output_tokens")
_DERIVED = ("seconds", "load_seconds", "retries", "pages_per_second", "price_per_million_pages")


_MOST = msgspec.Meta(ge=0, le=10**15)
_Count = Annotated[int, _MOST]
_Number = Annotated[float, _MOST]


class JobStart(msgspec.Struct):
    """One start of a job.

    Args:
        began: UTC time in ISO 8601.
        load_seconds: time to load the model.
        seconds: wall time from the loaded model to the last answer.
        pages: images of finished requests.
        successful_pages: images of answered requests.
        retries: requests retried because they had failed in an earlier start.
        ending: how the start ended; ``running`` if it is in progress or was killed.
    """

    began: str
    load_seconds: _Number = 0.0
    seconds: _Number = 0.0
    pages: _Count = 0
    successful_pages: _Count = 0
    retries: _Count = 0
    ending: Ending = "running"


class Ledger(msgspec.Struct, kw_only=True):
    """Totals of a job. Counts of answers are from the end of the last start.

    Args:
        schema: version of the file.
        requests: lines in the output file.
        pages: images of these requests.
        successful_pages: images of answered requests.
        failed_pages: images of failed requests.
        reasons: number of failed requests by reason, without document names.
        prompt_tokens: prompt tokens of all requests, including image tokens.
        image_tokens: image tokens of all requests.
        cached_tokens: prompt tokens found in the prefix cache.
        output_tokens: output tokens of all requests.
        replica_retries: retries on another replica because one had failed.
        starts: the job's starts in order.
        cost_per_hour: price of the machines, in any currency; None: not given.
    """

    schema: Literal[1] = 1
    requests: _Count = 0
    pages: _Count = 0
    successful_pages: _Count = 0
    failed_pages: _Count = 0
    reasons: dict[str, int] = {}
    prompt_tokens: _Count = 0
    image_tokens: _Count = 0
    cached_tokens: _Count = 0
    output_tokens: _Count = 0
    replica_retries: _Count = 0
    starts: list[JobStart] = []
    cost_per_hour: _Number | None = None

    @property
    def seconds(self) -> float:
        """Wall time of all starts, excluding model loading."""
        return sum(start.seconds for start in self.starts)

    @property
    def load_seconds(self) -> float:
        """Model loading time of all starts."""
        return sum(start.load_seconds for start in self.starts)

    @property
    def retries(self) -> int:
        """Requests retried because they or a replica had failed."""
        return self.replica_retries + sum(start.retries for start in self.starts)

    @property
    def pages_per_second(self) -> float | None:
        """Successful pages per second, excluding model loading; None before the first answer."""
        return sum(start.successful_pages for start in self.starts) / self.seconds if self.seconds > 0 else None

    @property
    def price_per_million_pages(self) -> float | None:
        """Price of a million successful pages; None without a price per hour, or before the first page."""
        speed = self.pages_per_second
        return 1e6 * self.cost_per_hour / 3600 / speed if self.cost_per_hour is not None and speed else None


def ledger_path(answers: Path) -> Path:
    """Return the path of the ledger of an output file."""
    return answers.with_name(f"{answers.name}.ledger.json")


def read_ledger(path: Path) -> Ledger:
    """Read the ledger of a job, running or ended.

    Args:
        path: the ledger file, such as ``answers.jsonl.ledger.json``.

    Raises:
        RecordsError: the file cannot be read, or is not a ledger of this version.
    """
    return read_sidecar(path, Ledger, "a ledger of schema 1", "delete it to start a new one")


class LedgerWriter:
    """Updates the ledger of a running job.

    Args:
        answers: output file of the job.
        resumed: whether to continue the ledger of earlier starts.
        cost_per_hour: price of the machines; None: the price from an earlier start.

    Attributes:
        path: the ledger file.
        ledger: the ledger including the current start.

    Raises:
        RecordsError: the ledger of an earlier start cannot be read.
    """

    def __init__(self, answers: Path, *, resumed: bool, cost_per_hour: float | None) -> None:
        self.path = ledger_path(answers)
        self._before = read_ledger(self.path) if resumed and self.path.exists() else Ledger()
        self._start = JobStart(datetime.now(UTC).isoformat(timespec="seconds"))
        cost = self._before.cost_per_hour if cost_per_hour is None else cost_per_hour
        self.ledger = replace(self._before, cost_per_hour=cost, starts=[*self._before.starts, self._start])
        self._began = self._written = now()

    def loaded(self, seconds: float) -> None:
        """Record how long the model took to load, and start the timer."""
        self._began = now()
        self._start.load_seconds = seconds

    def retried(self) -> None:
        """Count a retried request."""
        self._start.retries += 1

    def add(self, answer: AnswerRecord) -> None:
        """Count an answer, and write the ledger if a write is due.

        Raises:
            RecordsError: the ledger cannot be written.
        """
        pages = len(answer.image)
        self._start.seconds = now() - self._began
        self._start.pages += pages
        if answer.error is None:
            self._start.successful_pages += pages
        if now() - self._written >= _INTERVAL_SECONDS:
            self._write()

    def is_complete(self, answers: Iterable[AnswerRecord]) -> bool:
        """Return whether the ledger of earlier starts counts all answers of a finished job.

        It does not if a start was killed before it could write them.

        Args:
            answers: all answers of the output file.

        Raises:
            RecordsError: a line is not an answer.
        """
        ended = [start.ending for start in self._before.starts][-1:] == ["finished"]
        return ended and replace(self._before, **_answer_counts(answers)) == self._before

    def end(self, answers: Iterable[AnswerRecord], ending: Ending) -> Ledger:
        """Count all answers, write the ledger and return it.

        Args:
            answers: all answers of the output file.
            ending: ``finished`` if the job is complete, else ``stopped``.

        Raises:
            RecordsError: the ledger cannot be written, or a line is not an answer.
        """
        self.ledger = replace(self.ledger, **_answer_counts(answers))
        self._start.ending = ending
        self._write()
        return self.ledger

    def _write(self) -> None:
        document = msgspec.to_builtins(self.ledger) | {name: getattr(self.ledger, name) for name in _DERIVED}
        write_file(self.path, json.dumps(document, indent=2, ensure_ascii=False) + "\n", RecordsError)
        self._written = now()


def _answer_counts(answers: Iterable[AnswerRecord]) -> dict[str, Any]:
    """Return the fields of a ledger that count answers."""
    sums = dict.fromkeys(("requests", "pages", "successful_pages", "failed_pages", "replica_retries", *_TOKENS), 0)
    reasons: Counter[str] = Counter()
    for answer in answers:
        pages, failed = len(answer.image), answer.error is not None
        sums["requests"] += 1
        sums["pages"] += pages
        sums["failed_pages" if failed else "successful_pages"] += pages
        sums["replica_retries"] += answer.retries or 0
        for name in _TOKENS:
            sums[name] += getattr(answer, name) or 0  # lines of older versions lack some
        if failed:
            reason = answer.error or ""  # without document names, so that equal failures share one reason
            for name in (answer.id, *answer.image):
                for document in (name, re.sub("#page=[0-9]+$", "", name)):
                    reason = reason.removeprefix(f"{document}: ")
            reason = re.sub(r"^image \d+ of \d+: ", "", reason)
            reasons[reason if reason in reasons or len(reasons) < _REASONS else _OTHER] += 1
    return {**sums, "reasons": dict(reasons.most_common())}
