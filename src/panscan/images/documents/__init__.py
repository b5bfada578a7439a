"""Made-up documents, drawn from a seed: receipts, boards, invoices, charts, notes, tables, forms and signs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

from panscan.images.documents import board, chart, form, invoice, notes, receipt, sign, table
from panscan.images.documents.sheet import Ask, Document, Print, Sheet, Text, choose
from panscan.images.ink import AILERON, Face

__all__ = ["KINDS", "Ask", "Document", "Print", "Sheet", "Text", "draw_document", "sample_faces"]

Draw = Callable[[Random, Sheet, int, float], Document]

KINDS: dict[str, tuple[Draw, int]] = {
    "receipt": (receipt.receipt, len(receipt.LAYOUTS)),
    "board": (board.board, board.LAYOUTS),
    "invoice": (invoice.invoice, invoice.LAYOUTS),
    "chart": (chart.chart, chart.LAYOUTS),
    "notes": (notes.notes, notes.LAYOUTS),
    "table": (table.table, table.LAYOUTS),
    "form": (form.form, form.LAYOUTS),
    "sign": (sign.sign, sign.LAYOUTS),
}
"""How each kind is drawn, and its number of layouts. The last layout of each is never trained on."""
