"""Questions with answers from the disk, in panscan's own layout and those of public datasets. Nothing is fetched."""

from __future__ import annotations

from panscan.bench.datasets.json_lines import dataset_rows
from panscan.bench.datasets.layouts import LAYOUTS, load_dataset
from panscan.bench.datasets.rows import DatasetFacts, Embedded, Loaded, Row, counted, facts_of_header, unique_id
from panscan.bench.datasets.tables import write_pictures
from panscan.bench.datasets.text_files import read_text

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
