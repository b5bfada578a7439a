"""ChartQA as its authors publish it: ``test/test_human.json``, ``test/test_augmented.json`` and ``test/png/``.

A list of ``{"imgname", "query", "label"}``; questions by people and questions made from summaries are two files, and so
two types here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from panscan.bench.datasets.pictures import Pictures
from panscan.bench.datasets.rows import Loaded
from panscan.bench.datasets.text_files import read_json
from panscan.core import DatasetError

__all__ = ["read"]


def read(files: Sequence[Path], called: str, loaded: Loaded) -> None:
    """Take the rows of ChartQA's files. They have no ids, so theirs are the type and the number in its file.

    Raises:
        DatasetError: a file cannot be read or is not ChartQA's.
    """
    for path in files:
        rows = read_json(path, f"{called}: {path.name}")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise DatasetError(f"{called}: {path.name}: expected a list of questions")
        kind = path.stem.rpartition("_")[2]
        pictures = Pictures((path.parent,), ("png", "images"))
        for number, row in enumerate(rows):
            found = pictures.find(row.get("imgname"))
            label = row.get("label")
            plain = not isinstance(label, list | dict)
            loaded.add(f"{kind}-{number:05d}", found, row.get("query") or None, label, [("type", kind)], plain=plain)
