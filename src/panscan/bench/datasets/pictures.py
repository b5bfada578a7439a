"""Where the pictures of a public dataset lie: beside its questions, in one of the folders that it is published with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from panscan.bench.datasets.answer_texts import Number

__all__ = ["Pictures", "is_file"]


class Pictures:
    """Finds pictures by the names that rows have for them.

    Args:
        roots: folders that names are relative to, and that have the other folders; the first that has a picture counts.
        folders: names of folders of pictures, which hold files of a row's last name.
    """

    def __init__(self, roots: Sequence[Path], folders: Sequence[str]) -> None:
        self._places = [root / folder for root in roots for folder in folders]
        self._places = [place for place in self._places if place.is_dir()]
        self._roots = list(roots)

    def find(self, name: Any) -> list[str]:
        """The path of a picture in a list of its own, an empty list if there is none (or no name)."""
        if not isinstance(name, str) or isinstance(name, Number) or not name.strip() or "\0" in name:
            return []
        last = PurePosixPath(name).name
        for index, place in enumerate(self._places):
            if is_file(place / last):
                self._places.insert(0, self._places.pop(index))  # the others are there, too
                return [str(self._places[0] / last)]
        for root in self._roots:
            if is_file(root / name):
                return [str(root / name)]
        return []


def is_file(path: Path) -> bool:
    """Whether there is such a file; a path that cannot be asked about names none."""
    try:
        return path.is_file()
    except OSError:  # a name that is too long for any file, a folder that may not be entered
        return False
