"""Measured masks of whole prompts: segments, the engine's passes, differences, and both pictures of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from panscan.core import Request, SettingError
from panscan.engine.options import EngineOptions
from panscan.inspect.attention import measure as attention
from panscan.inspect.attention.picture import attention_lines, draw_attention
from panscan.settings import Settings

SOFT, WINDOW = 7, 20
IDS = [1] * 4 + [SOFT] * 30 + [1] * 3 + [SOFT] * 30 + [1] * 9
IMAGE = np.array(IDS) == SOFT
SEGMENTS = attention.segments_of(IMAGE, [1])
_LEGEND = 130  # pixels of its height
_MISSING, _EXTRA = (0xD5, 0x5E, 0x00), (0xCC, 0x79, 0xA7)


def defined() -> NDArray[np.bool_]:
    """Gemma 3's mask of the prompt in global layers."""
    at = np.arange(len(IDS))
    ends = at + 1
    ends[4:34], ends[37:67] = 34, 67
    mask: NDArray[np.bool_] = at < ends[:, None]
    return mask


def shown_with(*others: NDArray[np.bool_]) -> attention.PromptAttention:
    """The prompt's global masks beside those of other implementations."""
    groups = [attention.Masks(("eager",), {"global": defined()})]
    groups += [attention.Masks((f"other{number}",), {"global": mask}) for number, mask in enumerate(others)]
    return attention.PromptAttention(
        "mini", "What?", ("x",) * len(IDS), 1, SEGMENTS, {"global": 1}, WINDOW, tuple(groups)
    )


def test_segments_cover_the_prompt_and_name_views() -> None:
    assert [(segment.start, segment.end, segment.label(images=1)) for segment in SEGMENTS] == [
        (0, 4, "text"),
        (4, 34, "whole"),
        (34, 37, "text"),
        (37, 67, "crop 1"),
        (67, 76, "text"),
    ]
    assert attention.segments_of(IMAGE, [0, 0])[3].label(images=2) == "image 2, whole"
    with pytest.raises(ValueError, match="2 views in the prompt, 3 expected"):
        attention.segments_of(IMAGE, [2])


@pytest.mark.parametrize("chunk", [2048, 32, 8])
def test_the_engine_computes_gemma_3s_masks_however_its_passes_cut_the_prompt(chunk: int) -> None:
    options = EngineOptions(prefill_chunk_size=chunk)
    masks, backend = attention.engine_mask(IDS, SOFT, WINDOW, options, torch.device("cpu"))
    at = np.arange(len(IDS))
    assert backend == "sdpa"
    np.testing.assert_array_equal(masks["global"], defined())
    np.testing.assert_array_equal(masks["local"], defined() & (at > at[:, None] - WINDOW))


def test_flash_attention_differs_in_the_later_tokens_of_each_view() -> None:
    request = Request("What?", [Image.new("RGB", (300, 300))])
    shown = attention.measure(request, Settings(model="tiny"), ["sdpa", "engine", "flash_attention_2"])
    assert [group.names for group in shown.groups] == [("eager", "sdpa", "engine"), ("flash_attention_2",)]
    [view] = [segment for segment in shown.segments if segment.image is not None]
    lost = view.tokens * (view.tokens - 1) // 2
    differences = [(layer.kind, layer.missing, layer.extra) for layer in attention.differences(shown, shown.groups[1])]
    assert differences == [("global", lost, 0), ("local", lost, 0)]
    statements = attention.statements(shown, shown.groups[1])
    assert all("image tokens attend only to earlier positions" in line for line in statements)
    assert any("as Transformers prepares it" in note for note in shown.groups[1].notes)


def test_causes_of_other_differences() -> None:
    reference = defined()
    cut, odd = reference.copy(), reference.copy()
    cut[4:20, 20:34] = False
    odd[70, 75] = True
    assert "do not attend to all of their view" in attention.cause(SEGMENTS, reference, cut)
    assert attention.cause(SEGMENTS, reference, odd) == "first at query 70, key 75"


def test_the_picture_marks_missing_and_extra_cells_alone() -> None:
    other = defined()
    other[10, 30], other[1, 60] = False, True
    cell = 9 * 9  # pixels of one of 76 cells
    assert _marked(shown_with()) == (0, 0)
    assert _marked(shown_with(other)) == (cell, cell)


def test_one_differing_cell_shows_in_a_picture_that_is_scaled_down() -> None:
    count = 3000
    mask = np.tril(np.ones((count, count), np.bool_))
    other = mask.copy()
    other[2000, 1000] = False
    groups = attention.Masks(("eager",), {"global": mask}), attention.Masks(("other",), {"global": other})
    shown = replace(shown_with(), tokens=("x",) * count, segments=(attention.Segment(0, count),), groups=groups)
    pixels = np.asarray(draw_attention(shown)).astype(int)
    reddish = np.count_nonzero(pixels[..., 0] > pixels[..., 2] + 80, axis=1)
    [cell, *legend] = np.flatnonzero(reddish)
    assert reddish[cell] == 1
    assert legend[0] > cell + 1


def test_the_terminal_shows_segments_and_marks_those_that_differ() -> None:
    other = defined()
    other[10, 30] = False
    lines = attention_lines(shown_with(other))
    rows = [line.split()[-1] for line in lines if line[:2].strip().isdigit()]
    assert rows == ["+....", "##...", "##+..", "####.", "####+", "+....", "#x...", "##+..", "####.", "####+"]


@pytest.mark.parametrize("segments", [1, 60])
def test_the_terminal_shows_equal_runs_where_segments_are_one_or_too_many(segments: int) -> None:
    count = 480
    edges = np.linspace(0, count, segments + 1).astype(int).tolist()
    shown = replace(
        shown_with(),
        tokens=("x",) * count,
        segments=tuple(map(attention.Segment, edges, edges[1:])),
        groups=(attention.Masks(("eager",), {"global": np.tril(np.ones((count, count), np.bool_))}),),
    )
    rows = [line.split()[-1] for line in attention_lines(shown)[-48:]]
    assert rows == ["#" * row + "+" + "." * (47 - row) for row in range(48)]


def test_the_terminal_shows_each_token_of_a_short_prompt() -> None:
    shown = attention.measure(Request("Hi"), Settings(model="tiny"), ["sdpa"])
    count = len(shown.tokens)
    rows = [line.split()[-2:] for line in attention_lines(shown, width=200)[-count:]]
    assert rows == [["#" * (at + 1) + "." * (count - at - 1)] * 2 for at in range(count)]


def test_unknown_names_and_long_prompts_are_refused() -> None:
    with pytest.raises(SettingError, match="did you mean 'engine'"):
        attention.check_names(["engin"])
    request = Request("word " * attention.MOST_TOKENS)
    with pytest.raises(SettingError, match="the picture takes at most 8,192: shorten -p"):
        attention.measure(request, Settings(model="tiny"), ["sdpa"])


def _marked(shown: attention.PromptAttention) -> tuple[int, int]:
    """Number of pixels that show a missing cell and of those that show an extra one, above the legend."""
    pixels = np.asarray(draw_attention(shown))
    counts = []
    for colour in (_MISSING, _EXTRA):
        rows = np.count_nonzero((pixels == colour).all(axis=-1), axis=1)
        cells = rows[: len(rows) - _LEGEND].sum()
        assert bool(cells) == bool(rows.sum())
        counts.append(int(cells))
    return counts[0], counts[1]
