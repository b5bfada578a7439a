"""Finished answers that are not yet in the output, in a separate file, so that ``kill -9`` loses none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from panscan.batch.jsonl import AnswerLog, Record, encode

__all__ = ["Outbox"]

_REPLACES = "replaces"  # additional key of the lines in this file
_DEAD = 1000  # lines of dropped answers after which the file is rewritten


class Outbox:
    """Held answers by id, each with the id of the failed answer that it replaces, or None. The last one of an id wins.

    Args:
        path: the file; created with the first answer, and removed on :meth:`close` if it has no answers.

    Raises:
        RecordsError: the file exists but cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: AnswerLog | None = None
        self._offsets: dict[str, tuple[int, str | None]] = {}  # id -> byte offset of its line, replaced id
        self._count = 0
        if path.exists():
            self._lines = AnswerLog(path)
            for line in self._lines:
                self._offsets[line.record["id"]] = line.offset, line.record.get(_REPLACES)
                self._count += 1

    def __contains__(self, id: str) -> bool:
        return id in self._offsets

    def __iter__(self) -> Iterator[tuple[Record, str | None]]:
        """Yield each answer with the id of the failed answer that it replaces, or None."""
        for id, (_, replaces) in self._offsets.items():
            yield self.get(id), replaces

    def add(self, record: Mapping[str, Any], replaces: str | None = None) -> None:
        """Add an answer.

        Raises:
            RecordsError: the answer cannot be written.
        """
        if self._lines is None:
            self._lines = AnswerLog(self._path)
        line = record if replaces is None else {**record, _REPLACES: replaces}
        self._offsets[record["id"]] = self._lines.append(encode(line)), replaces
        self._count += 1

    def get(self, id: str) -> Record:
        """Return the answer with this id, which must exist."""
        assert self._lines is not None  # it has a line
        record: Record = json.loads(self._lines.read(self._offsets[id][0]))
        record.pop(_REPLACES, None)
        return record

    def replacing(self) -> dict[str, list[str]]:
        """Return the ids of the answers that replace each failed one, with the pages of a file in order."""
        found: dict[str, list[str]] = {}
        for id, (_, replaces) in self._offsets.items():
            if replaces is not None:
                found.setdefault(replaces, []).append(id)
        # The entry of a file that failed again, before its pages could be listed, is not one of its pages.
        return {
            failed: sorted(set(ids) - {failed} or ids, key=lambda id: (len(id), id)) for failed, ids in found.items()
        }

    def drop(self, id: str) -> None:
        """Remove an answer. The file is rewritten when it contains too many removed answers."""
        del self._offsets[id]
        assert self._lines is not None  # it had a line
        if not self._offsets:
            self._lines.clear()
            self._count = 0
        elif self._count - len(self._offsets) > max(_DEAD, len(self._offsets)):
            self._rewrite(self._lines)

    def close(self) -> None:
        """Close the file; remove it if it has no answers."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None
            if not self._offsets:
                self._path.unlink(missing_ok=True)

    def _rewrite(self, lines: AnswerLog) -> None:
        kept = [
            ({**self.get(id), _REPLACES: replaces} if replaces is not None else self.get(id))
            for id, (_, replaces) in self._offsets.items()
        ]
        lines.rewrite(map(encode, kept))
        self._offsets = {line.record["id"]: (line.offset, line.record.get(_REPLACES)) for line in lines}
        self._count = len(self._offsets)
