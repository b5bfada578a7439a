"""TextVQA as textvqa.org publishes it: ``TextVQA_0.5.1_val.json`` and ``train_images/<image_id>.jpg``.

Each question has the answers of ten people. Pictures of the validation split lie among those of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from panscan.bench.datasets.pictures import Pictures
from panscan.bench.datasets.rows import Loaded
from panscan.bench.datasets.rrc import data_rows

__all__ = ["read"]

_FOLDERS = (
    "train_images", "test_images", "train_val_images/train_images", "train_val_images", "val_images", "images",
)  # fmt: skip


def read(files: Sequence[Path], called: str, loaded: Loaded) -> None:
    """Take the rows of TextVQA's files.

    Raises:
        DatasetError: a file cannot be read or is not TextVQA's.
    """
    for path in files:
        pictures = Pictures((path.parent, path.parent.parent, *_subfolders(path.parent)), _FOLDERS)
        for row in data_rows(path, called):
            name = row.get("image_id")
            found = pictures.find(f"{name}.jpg") if name is not None else []
            loaded.add(row.get("question_id"), found, row.get("question"), row.get("answers"), people=True)


def _subfolders(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
