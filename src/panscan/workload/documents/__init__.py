"""Made-up documents, drawn from a seed: receipts, boards, invoices, charts, notes, tables, forms and signs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

from panscan.core import ImageError
from panscan.images.ink import AILERON, Face
from panscan.workload.documents import board, chart, form, invoice, notes, receipt, sign, table
from panscan.workload.documents.sheet import Document, Print, Question, Sheet, Text

__all__ = ["COLUMNS", "KINDS", "Document", "Print", "Question", "Sheet", "Text", "draw_document"]

COLUMNS = 30
"""Characters of ordinary text that fit across a document's short side: small print for the bundled model's 192 pixels a
view. A hundred and more is small print for the 896 pixels of Google's checkpoints."""

KINDS: dict[str, tuple[Callable[[Random, Sheet, int], Document], int]] = {
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

_CYCLE: tuple[tuple[str, float, float], ...] = (
    # kind; height over width, from and to
    ("receipt", 2.0, 4.0),
    ("board", 1 / 3.5, 1 / 2.0),
    ("invoice", 1.41, 1.42),
    ("chart", 1.0, 1.0),
    ("receipt", 2.0, 4.0),
    ("table", 1 / 2.6, 1 / 1.8),
    ("notes", 1.6, 3.0),
    ("sign", 1.0, 1.0),
    ("form", 1.0, 1.0),
)
_FIRST = {"receipt": "total", "invoice": "total", "chart": "value", "form": "name", "sign": "number"}
"""The type of question that comes first; else any."""

_LOOKS: tuple[tuple[str, str, str], ...] = (
    # paper, accent, light
    ("#ffffff", "#1f4e79", "#eef3f8"),
    ("#fdfdf9", "#2f6b4f", "#f0f4ee"),
    ("#f8f8f4", "#6b3f54", "#f7f0f3"),
    ("#fdf6e3", "#8a3b2a", "#f6ead2"),
    ("#f6f8fa", "#333b46", "#e6eaef"),
)


@cache
def _faces() -> tuple[Face, ...]:
    """Pillow's typeface and those that come with matplotlib, which panscan needs anyway."""
    import matplotlib

    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    faces = [Face(n, str(fonts / f"{n}.ttf"), str(fonts / f"{n}-Bold.ttf")) for n in ("DejaVuSans", "DejaVuSerif")]
    for face in faces:
        if not Path(str(face.regular)).is_file() or not Path(str(face.bold)).is_file():
            raise ImageError(f"{fonts}: matplotlib's own typeface {face.name} is missing: install matplotlib again")
    return (AILERON, AILERON, *faces)


def draw_document(seed: int, index: int, *, columns: int = COLUMNS) -> Document:
    """Document ``index`` (from 0) of ``seed``, 448 to 900 pixels on its short side: a pure function of its arguments.

    Kinds, and layouts of a kind, take turns. It comes with two to four questions; where the print is so large that
    hardly anything fits, it is a little smaller than asked for.

    Raises:
        ImageError: the typefaces are not where matplotlib keeps them.
    """
    turn, place = divmod(index, len(_CYCLE))
    kind, low, high = _CYCLE[place]
    kinds = [kind for kind, *_ in _CYCLE]
    before = turn * kinds.count(kind) + kinds[:place].count(kind)
    questions: list[Question] = []
    while len(questions) < 2:
        drawn = _draw_kind(Random(f"{seed}-{index}"), kind, before, (low, high), columns)
        questions = list(dict.fromkeys(drawn.questions))
        columns += 2  # print so large that hardly anything fits
    rng = Random(f"{seed}-{index}-asks")
    first = rng.choice([ask for ask in questions if ask.type == _FIRST.get(kind)] or questions)
    others = [ask for ask in questions if ask != first]
    chosen = rng.sample(others, min(len(others), rng.randint(1, 3)))
    return Document(kind, drawn.image, drawn.texts, (first, *chosen))


def _draw_kind(rng: Random, kind: str, before: int, ratios: tuple[float, float], columns: int) -> Document:
    """A document of ``kind``, of which there were ``before`` others, with all its questions."""
    draw, layouts = KINDS[kind]
    short, ratio = rng.randrange(448, 901, 4), rng.uniform(*ratios)
    size = (short, round(short * ratio)) if ratio >= 1 else (round(short / ratio), short)
    face, (paper, accent, light) = rng.choice(_faces()), rng.choice(_LOOKS)
    print_size = Print.size_for(face, short, columns + rng.uniform(-2, 3))
    style = Print(face, print_size, rng.uniform(1.6, 1.9), paper, accent=accent, light=light)
    return draw(rng, Sheet(*size, style), before % (layouts - 1))
