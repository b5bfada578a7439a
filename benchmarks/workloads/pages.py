"""Synthetic pages and questions: seeded, all different, with ink where the lines of a document would be."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from panscan.core import Request, SettingError
from panscan.model.prompt import PromptWriter

PAGE = (896, 2688)
"""Pixels, width and height: with the default settings three crops and the whole, each of them 896 pixels a side."""

_LETTERS = (10, 12, 14, 18, 26)  # pixels
_STROKE = 2  # pixels
_INK = 0.45  # of a word's box
_EMPTY_LINES = 0.08

_WORDS = (
    "account address amount balance bank before below between bill box buyer charge city code column company copy "
    "country currency customer date delivery discount due each end fee figure first form freight gross heading item "
    "label last left line list mark model month name net note number office order page paid part payment period phone "
    "place point price product quantity rate receipt record reference right row seller service ship sign size stamp "
    "state street sum supplier table tax terms third time total town unit value weight which who year zone"
)


def page(seed: int, size: tuple[int, int] = PAGE) -> Image.Image:
    """Return a page (RGB) of lines of words; a word is a box of random strokes, as dense as print."""
    rng = np.random.default_rng(seed)
    width, height = size
    sheet = np.full((height, width), rng.integers(230, 256), dtype=np.uint8)
    margin = int(rng.integers(width // 32, width // 12))
    top = margin
    while top + max(_LETTERS) < height - margin:
        letters = int(rng.choice(_LETTERS))
        if rng.random() >= _EMPTY_LINES:
            right = width - margin - int(rng.integers(0, width // 3))
            _write_line(sheet[top : top + letters, margin:right], rng)
        top += letters + int(rng.integers(4, 12))
    return Image.fromarray(sheet).convert("RGB")


def _write_line(line: NDArray[np.uint8], rng: np.random.Generator) -> None:
    """Fill a strip ``[pixels, pixels]`` of a page with words and gaps."""
    rows, columns = (-(-side // _STROKE) for side in line.shape)
    lengths = np.stack([rng.integers(6, 32, columns), rng.integers(3, 7, columns)], axis=1).ravel()
    words = np.repeat(np.tile([True, False], columns), lengths)[:columns]
    ink = (rng.random((rows, columns)) < _INK) & words
    drawn = ink.repeat(_STROKE, axis=0).repeat(_STROKE, axis=1)[: line.shape[0], : line.shape[1]]
    line[drawn] = rng.integers(0, 90)


def question(prompts: PromptWriter, seed: int, *, crops: int, text_tokens: int) -> str:
    """Return random words, as many as give the prompt with one image exactly ``text_tokens`` text tokens.

    Digits after the last word fill up the rest: each is one token in Gemma's tokenizer and in the bundled one.

    Args:
        prompts: of the checkpoint; its tokenizer counts.
        seed: of the words.
        crops: of the image.
        text_tokens: turn marks, image marks and the words around crops count too.

    Raises:
        SettingError: these alone are more than ``text_tokens``.
    """

    def missing(text: str) -> int:
        prompt = prompts.write(Request(prompt=text, images=["page"]), [crops])
        return text_tokens - (len(prompt.ids) - prompt.image_tokens)

    rng = random.Random(seed)
    words = rng.choices(_WORDS.split(), k=max(0, missing("")))
    count = 0
    while count < len(words) and missing(" ".join(words[: count + 1])) >= 0:
        count += 1
    text = " ".join(words[:count])
    while (missing_tokens := missing(text)) > 0:
        text += str(rng.randrange(10))
    if missing_tokens < 0:
        raise SettingError(
            f"a prompt of {text_tokens} tokens beside the image is not to be had: {-missing_tokens} too many"
        )
    return text
