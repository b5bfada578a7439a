"""Questions with answers from the disk, in panscan's own layout and those of public datasets. Nothing is fetched."""

from __future__ import annotations

from panscan.quality.datasets.layouts import LAYOUTS, dataset_rows, load_dataset
from panscan.quality.datasets.rows import (
    DatasetFacts,
    Embedded,
    Loaded,
    Row,
    counted,
    facts_of_header,
    read_text,
    unique_id,
)
from panscan.quality.datasets.tables import write_pictures

__all__ = [
    "LAYOUTS",
    "DatasetFacts",
    "Embedded",
    "Loaded",
    "Row",
    "counted",
    "dataset_rows",
    "facts_of_header",
    "load_dataset",
    "read_text",
    "unique_id",
    "write_pictures",
]
