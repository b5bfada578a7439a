"""What every part shares: the result of a case, the sums that the record keeps, and the folder of failed inputs."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

FINE = frozenset({"read", "refused", "answered", "partly", "kept"})
"""Outcomes that are no failure."""
_MOST_FAILURES = 200
_EVERY = 5.0  # seconds between lines of progress


def random_of(seed: int, part: str, index: int) -> Random:
    """Return the random generator of one case, which does not depend on the cases before it."""
    return Random(f"{seed}:{part}:{index}")


@dataclass(frozen=True, slots=True)
class Case:
    """One input and its outcome.

    Args:
        index: number of the case; with the seed, it reproduces the case.
        group: what was damaged.
        how: what was done to it.
        outcome: one of :data:`FINE`, or what went wrong.
        detail: the message, or the end of a traceback.
        code: exit code of a command.
        seconds: until it ended.
        peak_mb: peak resident memory.
        noise: bytes on standard error beside panscan's messages.
        lost: finished results that are missing afterwards.
    """

    index: int
    group: str
    how: str
    outcome: str
    detail: str = ""
    code: int | None = None
    seconds: float = 0.0
    peak_mb: float = 0.0
    noise: int = 0
    lost: int = 0

    @property
    def failed(self) -> bool:
        return self.outcome not in FINE or self.noise > 0 or self.lost > 0


@dataclass(slots=True)
class Part:
    """The counts of one part's cases, with progress on standard error.

    Args:
        name: of the part.
        cases: their numbers.
        keep: folder for all cases (JSON lines) and the inputs of failed ones.
    """

    name: str
    cases: Sequence[int]
    keep: Path
    groups: dict[str, Counter[str]] = field(default_factory=dict)
    ways: dict[str, Counter[str]] = field(default_factory=dict)
    codes: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    done: int = 0
    failed: int = 0
    lost: int = 0
    slowest: float = 0.0
    peak_mb: float = 0.0
    _said: float = 0.0

    def add(self, case: Case, inputs: dict[str, bytes] | None = None) -> None:
        """Count a case; keep the inputs of a failed one as files."""
        self.done += 1
        self.lost += case.lost
        self.slowest, self.peak_mb = max(self.slowest, case.seconds), max(self.peak_mb, case.peak_mb)
        outcome = "noise" if case.noise and case.outcome in FINE else case.outcome
        self.groups.setdefault(case.group, Counter())[outcome] += 1
        self.ways.setdefault(case.how, Counter())[outcome] += 1
        if case.code is not None:
            self.codes[str(case.code)] += 1
        with (self.keep / f"{self.name}.jsonl").open("a") as file:
            file.write(json.dumps(asdict(case)) + "\n")
        if case.failed:
            self.failed += 1
            if len(self.failures) < _MOST_FAILURES:
                self.failures.append({**asdict(case), "detail": case.detail[-400:]})
            for name, content in (inputs or {}).items():
                (self.keep / f"{self.name}-{case.index}-{name}").write_bytes(content)
        self._progress()

    def _progress(self) -> None:
        now = time.monotonic()
        if now - self._said > _EVERY or self.done == len(self.cases):
            self._said = now
            print(f"{self.name}: {self.done} of {len(self.cases)}, {self.failed} failed", file=sys.stderr, flush=True)

    def record(self) -> dict[str, Any]:
        """Return the counts, and every failure with its number."""
        return {
            "cases": self.done,
            "failed": self.failed,
            "lost": self.lost,
            "slowest_s": round(self.slowest, 2),
            "peak_mb": round(self.peak_mb),
            "codes": dict(sorted(self.codes.items())),
            "groups": {name: dict(sorted(counts.items())) for name, counts in sorted(self.groups.items())},
            "ways": {name: dict(sorted(counts.items())) for name, counts in sorted(self.ways.items())},
            "failures": self.failures,
        }
