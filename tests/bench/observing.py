"""An observer of sweeps that remembers what it was told."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from panscan.bench.grid import Cell
from panscan.records.store import AnyRecord
from panscan.settings import Settings


@dataclass
class RecordingObserver:
    """What a sweep told; ``acts`` happen right before the measurement of their number starts everywhere."""

    acts: dict[int, Callable[[], None]] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)
    starts: list[tuple[str, int]] = field(default_factory=list)
    batches: int = 0
    stages: list[str] = field(default_factory=list)
    problems: list[tuple[str, str, str]] = field(default_factory=list)

    def loading(self, settings: Settings) -> None:
        self.loads.append(settings.model_name)

    def ready(self, cell: Cell, repeat: int) -> None:
        self.acts.get(len(self.starts), lambda: None)()
        self.starts.append((cell.id, repeat))

    def batch_done(self) -> None:
        self.batches += 1

    def stage(self, what: str) -> None:
        self.stages.append(what)

    def problem(self, cell: Cell, outcome: str, reason: str) -> None:
        self.problems.append((cell.id, outcome, reason))


@dataclass
class RecordingWriter(RecordingObserver):
    """The same, and a writer that keeps the records."""

    records: list[Any] = field(default_factory=list)

    def write(self, records: Sequence[AnyRecord]) -> None:
        self.records += records
