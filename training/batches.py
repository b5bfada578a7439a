"""Batches of training: a pure function of seed and number, the same for any machine and any number of workers.

All documents of a batch have the same number of views, and several questions each. A question sees the views and
itself, never its neighbours: each stands in a slot of fixed length, with positions as if it alone followed the views.
So one forward pass answers all of them, and the mask is the same for the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from panscan.core import Request
from panscan.images.ink import Face
from panscan.model.prompt import PromptWriter
from panscan.model.shapes import SHAPES
from training.fonts import held_out_faces, training_faces
from training.pages import Page, a_page, a_page_of_labels, a_page_of_signs, rows_of
from training.tokenizer import build_tokenizer

IGNORED = -100
SHAPE = SHAPES["mini"]
assert SHAPE.vision is not None  # for the type checker: the mini sees
SIDE = SHAPE.vision.image_size
_SLOT, _LONG_SLOT = 72, 256
READ_ALL = "What does this document say?"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a batch is made of.

    Args:
        views: of each document, 1 to 7.
        documents: in the batch.
        ease: 1 draws large print and few lines, 0 what the model is for.
        whole_only: share of single views that show a tall or wide document squeezed, as without pan and scan.
        held_out: nothing, "fonts", "layouts" or "both" that training does not see.
        signs: share of single views that show random characters.
        labels: share of pages with labels of all sorts, in all sorts of arrangements.
        notes: share of pages with numbered lines, beside those that come anyway.
        sets: of questions about each document: drawing takes longer than learning, so a document is asked twice.
    """

    views: int
    documents: int
    ease: float = 0.0
    whole_only: float = 0.12
    held_out: str = ""
    signs: float = 0.0
    labels: float = 0.12
    notes: float = 0.0
    sets: int = 1


@dataclass(frozen=True, slots=True)
class Batch:
    """Arrays of a batch: pixels ``[documents * views, S, S, 3]`` uint8; token ids, and for each token the one that
    follows it if it has to be learnt, else -100, both ``[sets, documents, tokens of all slots]`` int16; types by set,
    document and slot."""

    views: int
    pixels: NDArray[np.uint8]
    ids: NDArray[np.int16]
    targets: NDArray[np.int16]
    types: list[list[list[str]]]


@cache
def _tokenizer() -> Any:
    return build_tokenizer(0)


@cache
def _vocabulary() -> dict[str, int]:
    vocabulary: dict[str, int] = _tokenizer().get_vocab()
    return vocabulary


def encode(text: str) -> list[int]:
    """Token ids of text without special tokens: one for each character (the tokenizer's own answer, but faster).

    Runs of line breaks are single tokens too, and are not expected here.
    """
    known, unknown = _vocabulary(), _vocabulary()["<unk>"]
    return [known.get("▁" if c == " " else c, unknown) for c in text]


@cache
def prefix_ids(views: int) -> tuple[int, ...]:
    """Ids of everything before the question, for an image of this many views."""
    writer = PromptWriter(_tokenizer(), SHAPE.image_tokens)
    ids = writer.write(Request(prompt="Q", images=["page"]), [views - 1]).ids
    return tuple(ids[: len(ids) - 1 - ids[::-1].index(_vocabulary()["Q"])])


@cache
def _answer_mark() -> tuple[int, ...]:
    """Ids between a question and its answer."""
    turn = _vocabulary()
    return (turn["<end_of_turn>"], turn["\n"], turn["<start_of_turn>"], *encode("model"), turn["\n"])


def slots_of(views: int) -> tuple[int, ...]:
    """Lengths of the slots: a single view is also read from top to bottom."""
    return (_LONG_SLOT, _SLOT, _SLOT, _SLOT, _SLOT) if views == 1 else (_SLOT,) * 10


def _fill(ids: NDArray[np.int16], targets: NDArray[np.int16], question: str, answer: str) -> bool:
    """Write one slot; an answer that is too long is cut, a question that is too long makes it False."""
    asked = [*encode(question), *_answer_mark()]
    said = [*encode(answer), _vocabulary()["<end_of_turn>"]]
    if len(asked) + (len(said) if len(ids) == _SLOT else 1) > len(ids):
        return False
    said = said[: len(ids) - len(asked) + 1]
    fed = asked + said[:-1]
    ids[: len(fed)] = fed
    targets[len(asked) - 1 : len(fed)] = said
    return True


def views_of(image: Image.Image, crops: int) -> NDArray[np.uint8]:
    """The whole image and its crops along the longer side, as the processor cuts them: ``[1 + crops, S, S, 3]``."""
    width, height = image.size
    pieces = [image]
    if crops:
        side = ceil(max(width, height) / crops)
        for index in range(crops):
            start, end = index * side, min((index + 1) * side, max(width, height))
            pieces.append(image.crop((start, 0, end, height) if width >= height else (0, start, width, end)))
    return np.stack([np.asarray(piece.resize((SIDE, SIDE), Image.Resampling.BILINEAR)) for piece in pieces])


def _a_ratio(rng: Random, views: int, whole_only: float) -> float:
    if views == 1:
        return rng.uniform(1.3, 4.4) if rng.random() < whole_only else rng.uniform(0.86, 1.19)
    if rng.random() < 0.1:  # fewer crops than the document needs
        return rng.uniform(views - 0.5, views + 2)
    low, high = (1.2, 2.5) if views == 3 else (views - 1.5, views - 0.5)
    return rng.uniform(low, high)


def _faces(plan: Plan) -> tuple[Face, ...]:
    return held_out_faces() if plan.held_out in ("fonts", "both") else training_faces()


def _page(rng: Random, plan: Plan) -> Page:
    """A page of the plan; one in some hundred thousand cannot be drawn, which must not end hours of training."""
    for _ in range(9):
        try:
            return _drawn(rng, plan)
        except (ValueError, IndexError) as error:
            print(f"a page was drawn anew: {error}", flush=True)
    return _drawn(rng, plan)


def _drawn(rng: Random, plan: Plan) -> Page:
    hardest, easiest = rng.uniform(21, 37), rng.uniform(9, 16)
    columns = easiest * plan.ease + hardest * (1 - plan.ease)
    ratio = _a_ratio(rng, plan.views, plan.whole_only * (1 - plan.ease))
    if plan.views == 1 and rng.random() < plan.signs:
        return a_page_of_signs(rng, min(ratio, 1.2), _faces(plan), columns=columns)
    if not plan.held_out and rng.random() < plan.labels:
        return a_page_of_labels(rng, ratio, _faces(plan), columns=columns)
    shorts = (200, 670) if rng.random() < 0.1 else (200, 420)  # large ones take long to draw and show the same
    new = plan.held_out in ("layouts", "both")
    kinds = ("notes",) if plan.notes and rng.random() < plan.notes else None
    return a_page(rng, ratio, _faces(plan), columns=columns, held_out_layouts=new, shorts=shorts, kinds=kinds)


def draw_batch(seed: str, number: int, plan: Plan) -> Batch:
    """Batch ``number`` of ``seed``."""
    lengths = slots_of(plan.views)
    shape = (plan.sets, plan.documents, sum(lengths))
    pad = _vocabulary()["<pad>"]
    ids, targets = np.full(shape, pad, np.int16), np.full(shape, IGNORED, np.int16)
    pixels = np.empty((plan.documents * plan.views, SIDE, SIDE, 3), np.uint8)
    types: list[list[list[str]]] = [[] for _ in range(plan.sets)]
    for row in range(plan.documents):
        rng = Random(f"{seed}-{number}-{row}")
        page = _page(rng, plan)
        pixels[row * plan.views : (row + 1) * plan.views] = views_of(page.image, plan.views - 1)
        for index in range(plan.sets):
            types[index].append(_ask(rng, page, lengths, ids[index, row], targets[index, row]))
    return Batch(plan.views, pixels, ids, targets, types)


def _ask(
    rng: Random, page: Page, lengths: tuple[int, ...], ids: NDArray[np.int16], targets: NDArray[np.int16]
) -> list[str]:
    """Fill a row's slots with questions of its page; types take turns, so that rare ones are not drowned."""
    by_type: dict[str, list[tuple[str, str]]] = {}
    for ask in page.document.questions:
        by_type.setdefault(ask.type, []).append((ask.question, ask.answers[0]))
    names, start, types = list(by_type), 0, []
    for length in lengths:
        place = slice(start, start + length)
        start += length
        if length == _LONG_SLOT:
            text = "\n".join(rows_of(page.document))
            types.append("all" if _fill(ids[place], targets[place], READ_ALL, text) else "")
            continue
        for _ in range(5):
            # Half by type, half by question: a receipt has one total and many prices.
            name = rng.choice(names) if rng.random() < 0.5 else rng.choice(page.document.questions).type
            if _fill(ids[place], targets[place], *rng.choice(by_type[name])):
                types.append(name)
                break
        else:
            types.append("")
    return types
