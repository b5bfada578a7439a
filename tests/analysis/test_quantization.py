"""Quantised cells: the size of their weights in every report, and when they are recommended."""

from typing import Any

import pytest
from tests.analysis.test_accuracy import BASE, cell_records
from tests.records import synthetic

from panscan.analysis.recommend import recommend
from panscan.records.store import Run

STORED = {"weights": "int4, groups of 64", "base_model": "mini", "weight_bytes": 2**30}
CELLS: dict[str, tuple[dict[str, Any], dict[str, Any], str, int]] = {
    "plain": ({}, {"weight_bytes": 4 * 2**30}, "exact", 2),
    "other": ({"batch_size": 4}, {"weight_bytes": 4 * 2**30}, "exact", 0),
    "int8": ({"quantization": "int8"}, {"weights": "int8", "weight_bytes": 2**31}, "different", 2),
    "stored": ({"model": "out/", "revision": "r"}, STORED, "different", 12),
    "cache": ({"quantization": "int8", "kv_cache_dtype": "int8"}, {"weights": "int8"}, "different", 2),
    "alone": ({"quantization": "int8", "max_new_tokens": 64}, {"weights": "int8"}, "different", 2),
}
"""By id: settings, fields of the load, verdict, and questions answered wrongly."""


def quantized_records() -> list[dict[str, Any]]:
    """Return a sweep of quantised and unquantised weights."""
    header = synthetic.header({cell: {**BASE, **settings} for cell, (settings, *_) in CELLS.items()})
    records = [header, synthetic.truth()]
    for cell, (_, load, word, wrong) in CELLS.items():
        records += [synthetic.load([cell], None, **load), *cell_records(cell, word, wrong)]
    return records


@pytest.fixture
def run() -> Run:
    return synthetic.in_memory(quantized_records())


def test_different_cells_are_recommended_only_without_a_loss(run: Run) -> None:
    """40 questions with equal answers do not exclude a loss of more than the limit; ten wrong ones are a loss."""
    rejected = recommend(run).rejected
    assert "the same score on all 40 questions; about" in rejected["int8"] and "loss: -25.0" in rejected["stored"]
    assert recommend(run, allow=["stored"]).rejected.keys() == rejected.keys() - {"stored"}
