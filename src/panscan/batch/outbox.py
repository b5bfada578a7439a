"""Answers that are finished but not yet in the output, kept in a file of their own so that ``kill -9`` loses none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from panscan.batch.jsonl import JsonLines, Record, encode

__all__ = ["Outbox"]

_REPLACES = "replaces"  # the one key more that a line has here
_DEAD = 1000  # lines of answers that have left the file, before it is written anew


class Outbox:
    """Answers by id, each with the id of the failed one whose place it takes, if it takes one. The last one counts.

    Args:
        path: of the file; made with the first answer, and removed on closing when no answer is left in it.

    Raises:
        RecordsError: the file is there but cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: JsonLines | None = None
        self._places: dict[str, tuple[int, str | None]] = {}  # id -> where its line begins, what it replaces
        self._count = 0
        if path.exists():
            self._lines = JsonLines(path)
            for line in self._lines:
                self._places[line.record["id"]] = line.at, line.record.get(_REPLACES)
                self._count += 1

    def __contains__(self, id: str) -> bool:
        return id in self._places

    def __iter__(self) -> Iterator[tuple[Record, str | None]]:
        """Each answer, and the id of the failed one that it replaces."""
        for id, (_, replaces) in self._places.items():
            yield self.get(id), replaces

    def add(self, record: Mapping[str, Any], replaces: str | None = None) -> None:
        """Take an answer.

        Raises:
            RecordsError: the disk does not take it.
        """
        if self._lines is None:
            self._lines = JsonLines(self._path)
        line = record if replaces is None else {**record, _REPLACES: replaces}
        self._places[record["id"]] = self._lines.append(line), replaces
        self._count += 1

    def get(self, id: str) -> Record:
        """The answer with an id that is there."""
        assert self._lines is not None  # it has a line
        record = self._lines.read(self._places[id][0])
        record.pop(_REPLACES, None)
        return record

    def replacing(self) -> dict[str, list[str]]:
        """The ids of the answers that take each failed one's place; the pages of a file in their order."""
        found: dict[str, list[str]] = {}
        for id, (_, replaces) in self._places.items():
            if replaces is not None:
                found.setdefault(replaces, []).append(id)
        # A file that failed again before its pages could be asked is not one of them.
        return {
            failed: sorted(set(ids) - {failed} or ids, key=lambda id: (len(id), id)) for failed, ids in found.items()
        }

    def drop(self, id: str) -> None:
        """Let go of an answer. The file is not allowed to grow with those that have left it."""
        del self._places[id]
        assert self._lines is not None  # it had a line
        if not self._places:
            self._lines.clear()
            self._count = 0
        elif self._count - len(self._places) > max(_DEAD, len(self._places)):
            self._rewrite(self._lines)

    def close(self) -> None:
        """Let go of the file; an empty one is removed."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None
            if not self._places:
                self._path.unlink(missing_ok=True)

    def _rewrite(self, lines: JsonLines) -> None:
        kept = [
            ({**self.get(id), _REPLACES: replaces} if replaces is not None else self.get(id))
            for id, (_, replaces) in self._places.items()
        ]
        lines.rewrite(map(encode, kept))
        self._places = {line.record["id"]: (line.at, line.record.get(_REPLACES)) for line in lines}
        self._count = len(self._places)
