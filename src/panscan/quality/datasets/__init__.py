"""Questions with answers from the disk, in panscan's own layout and those of public datasets. Nothing is fetched."""

from __future__ import annotations

from panscan.quality.datasets.formats import FORMATS, dataset_rows, load_dataset
from panscan.quality.datasets.rows import (
    Boundary,
    DatasetRow,
    Embedded,
    LoadedDataset,
    counted,
    read_text,
    unique_id,
)
from panscan.quality.datasets.tables import write_pictures

__all__ = [
    "FORMATS",
    "Boundary",
    "DatasetRow",
    "Embedded",
    "LoadedDataset",
    "counted",
    "dataset_rows",
    "load_dataset",
    "read_text",
    "unique_id",
    "write_pictures",
]
