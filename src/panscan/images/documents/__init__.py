"""Made-up documents, drawn from a seed: receipts, tables, invoices, letters, charts and signs."""

from __future__ import annotations

from random import Random

from panscan.images.documents.chart import chart
from panscan.images.documents.invoice import invoice
from panscan.images.documents.letter import letter
from panscan.images.documents.receipt import receipt
from panscan.images.documents.sheet import Ask, Document, Text
from panscan.images.documents.sign import sign
from panscan.images.documents.table import table

__all__ = ["Ask", "Document", "Text", "draw_document"]

_CYCLE = (receipt, table, invoice, chart, receipt, table, letter, sign)


def draw_document(seed: int, index: int) -> Document:
    """Document ``index`` (from 0) of ``seed``: a pure function of both. Kinds, and layouts of a kind, take turns."""
    turn, place = divmod(index, len(_CYCLE))
    draw = _CYCLE[place]
    variant = turn * _CYCLE.count(draw) + _CYCLE[:place].count(draw)
    return draw(Random(f"{seed}-{index}"), variant)
