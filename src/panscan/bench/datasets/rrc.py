"""DocVQA and InfographicVQA as the Robust Reading Competition publishes them (rrc.cvc.uab.es, challenge 17).

``{"data": [{"questionId", "question", "answers", ...}]}`` in one file a split; test splits have no answers. DocVQA's
rows name ``image`` ("documents/x.png") and ``question_types``, InfographicVQA's ``image_local_name`` and, with question
types, ``answer_type``, ``evidence`` and ``operation/reasoning``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from panscan.bench.datasets.pictures import Pictures
from panscan.bench.datasets.rows import Loaded
from panscan.bench.datasets.text_files import read_json
from panscan.core import DatasetError

__all__ = ["data_rows", "read_docvqa", "read_infographicvqa"]

_DOCVQA_FOLDERS = ("documents", "spdocvqa_images", "images", "train/documents", "val/documents", "test/documents")
_INFOGRAPHIC_FOLDERS = ("infographicsvqa_images", "images", "infographicVQA_images", "infographicvqa_images")


def read_docvqa(files: Sequence[Path], called: str, loaded: Loaded) -> None:
    """Take the rows of DocVQA's files.

    Raises:
        DatasetError: a file cannot be read or is not DocVQA's.
    """
    _read(files, called, loaded, folders=_DOCVQA_FOLDERS, image="image", kind="question_types")


def read_infographicvqa(files: Sequence[Path], called: str, loaded: Loaded) -> None:
    """Take the rows of InfographicVQA's files.

    Raises:
        DatasetError: a file cannot be read or is not InfographicVQA's.
    """
    _read(files, called, loaded, folders=_INFOGRAPHIC_FOLDERS, image="image_local_name", kind="answer_type")


def _read(files: Sequence[Path], called: str, loaded: Loaded, *, folders: Sequence[str], image: str, kind: str) -> None:
    for path in files:
        pictures = Pictures((path.parent, path.parent.parent), folders)
        for row in data_rows(path, called):
            tags = [("type", row.get(kind))]
            found = pictures.find(row.get(image))
            loaded.add(row.get("questionId"), found, row.get("question") or None, row.get("answers"), tags)


def data_rows(path: Path, called: str) -> list[dict[str, Any]]:
    """The objects under "data" of a JSON file, of this challenge or of TextVQA.

    Raises:
        DatasetError: the file cannot be read or has none.
    """
    content = read_json(path, f"{called}: {path.name}")
    rows = content.get("data") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DatasetError(f"{called}: {path.name}: expected an object with a list 'data' of questions")
    return rows
