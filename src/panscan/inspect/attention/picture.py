"""A picture of attention masks: queries as rows, keys as columns, and the cells in which an implementation differs.

On the terminal, characters show a cell per pair of tokens for short prompts, per pair of segments for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, cycle
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageDraw

from panscan.images.ink import printable, shorten, text_width, wrap, write
from panscan.inspect.attention.measure import (
    Mask,
    Masks,
    PromptAttention,
    Segment,
    differences,
    plain_token,
    statements,
)
from panscan.model.attention_masks import LayerKind
from panscan.report.table import Column, Table

_PAPER, _INK, _GREY, _LINE, _NONE = "#fbfbf9", "#22252b", "#5d626a", "#aeb2b9", "#ffffff"
_TEXT = "#7a8089"  # keys that are text
_VIEWS = ("#0072b2", "#009e73", "#56b4e9")  # keys in views, in turn; of Okabe and Ito's colours, as in images/draw.py
_MISSING, _EXTRA = "#d55e00", "#cc79a7"
_TITLE_SIZE, _ROW_SIZE, _FACTS_SIZE, _SMALL_SIZE = 24, 19, 16, 14
_MARGIN, _GAP, _PITCH = 32, 28, 22
_BAND = 14  # segments along the edges of a panel
_LABELS = 116  # width of the segments' labels
_TOP = 62  # above a panel's cells: its title, labels and band
_BLEND_ABOVE, _BLENDED = 960, 900  # tokens from which a pixel shows several cells; pixels of such a panel's side
_WANTED = 720  # pixels of a smaller panel's side, about
_FAINTEST = 0.55  # share of a difference's colour in a pixel with a single differing cell

_MOST_CELLS = 48  # characters of a row of cells
_LABEL = 20
_ALL, _SOME, _NO, _DIFFERS = "#", "+", ".", "x"


@dataclass(frozen=True, slots=True)
class _Scale:
    """From tokens to pixels along both sides of a panel."""

    tokens: int
    side: int

    @classmethod
    def of(cls, tokens: int) -> _Scale:
        """Return the scale of a prompt: whole pixels per cell, unless there are more cells than pixels."""
        return cls(tokens, _BLENDED if tokens > _BLEND_ABOVE else tokens * max(1, round(_WANTED / tokens)))

    @property
    def blends(self) -> bool:
        """Whether a pixel shows several cells."""
        return self.side < self.tokens

    def pixel(self, position: int) -> int:
        """Return the pixel at which a position begins."""
        return round(position * self.side / self.tokens)


def draw_attention(shown: PromptAttention) -> Image.Image:
    """Draw the masks of a prompt: a row of panels for each group of equal masks, a panel for each kind of layers.

    A prompt of more than 960 tokens is scaled down: the colour of a pixel is the mean of its cells, but a pixel with a
    differing cell always shows it.

    Returns:
        A new RGB image, at most 2,100 pixels wide.
    """
    scale = _Scale.of(len(shown.tokens))
    width = max(2 * _MARGIN + _LABELS + len(shown.layers) * (_BAND + scale.side + _GAP) - _GAP, 760)
    strips = [_header(shown, width), *(_panel_row(shown, group, scale, width) for group in shown.groups)]
    strips.append(_legend(shown, scale, width))
    picture = Image.new("RGB", (width, sum(strip.height for strip in strips)))
    top = 0
    for strip in strips:
        picture.paste(strip, (0, top))
        top += strip.height
    return picture


def _header(shown: PromptAttention, width: int) -> Image.Image:
    """Return the title and the facts about the prompt."""
    room = width - 2 * _MARGIN
    views = sum(segment.image is not None for segment in shown.segments)
    counts = f"{len(shown.tokens):,} tokens, {views} view{'' if views == 1 else 's'}"
    prompt = shorten(printable(f'Prompt: "{shown.prompt}"'), _FACTS_SIZE, room)
    about = f"{shown.model} - {counts} - each row is a query, each column a key; measured on the attention code"
    facts = [prompt, *wrap(printable(about), _FACTS_SIZE, room)]
    strip, draw = _strip(width, _MARGIN + _TITLE_SIZE + _PITCH * len(facts) + _GAP)
    title = shorten("Which positions attend to which", _TITLE_SIZE, room, bold=True)
    write(draw, (_MARGIN, _MARGIN + _TITLE_SIZE - 6), title, _TITLE_SIZE, fill=_INK, bold=True)
    for index, line in enumerate(facts, 1):
        write(draw, (_MARGIN, _MARGIN + _TITLE_SIZE + _PITCH * index - 2), line, _FACTS_SIZE, fill=_GREY)
    return strip


def _strip(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    picture = Image.new("RGB", (width, height), _PAPER)
    return picture, ImageDraw.Draw(picture)


def _panel_row(shown: PromptAttention, group: Masks, scale: _Scale, width: int) -> Image.Image:
    """Return a group's names, its notes and how it differs, and its panels."""
    is_reference, room = group is shown.reference, width - 2 * _MARGIN
    title = ", ".join(group.names)
    if is_reference:
        reference, *agreeing = group.names
        title = f"{reference} (reference)" + (f"; the same: {', '.join(agreeing)}" if agreeing else "")
    texts = (*(() if is_reference else statements(shown, group)), *group.notes)
    lines = [line for text in texts for line in wrap(printable(text), _SMALL_SIZE, room)]
    top = _ROW_SIZE + 12 + _PITCH * len(lines) + _TOP
    strip, draw = _strip(width, top + scale.side + _GAP)
    title = shorten(printable(title), _ROW_SIZE, room, bold=True)
    write(draw, (_MARGIN, _ROW_SIZE - 4), title, _ROW_SIZE, fill=_INK, bold=True)
    for index, line in enumerate(lines, 1):
        write(draw, (_MARGIN, _ROW_SIZE + 4 + _PITCH * index), line, _SMALL_SIZE, fill=_GREY if is_reference else _INK)
    left = _MARGIN + _LABELS + _BAND
    _draw_query_labels(draw, shown, scale, left - _BAND - 8, top)
    for kind in shown.layers:
        _draw_panel(strip, shown, group, kind, scale, (left, top))
        left += scale.side + _BAND + _GAP
    return strip


def _draw_query_labels(draw: ImageDraw.ImageDraw, shown: PromptAttention, scale: _Scale, right: int, top: int) -> None:
    """Write the labels of tokens, or else of segments, left of a row's first panel; those with room for a line."""
    write(draw, (right, top - _BAND - 6), "queries", _SMALL_SIZE, fill=_GREY, anchor="rs")
    labels = [(segment.start, segment.end, segment.label(images=shown.images)) for segment in shown.segments]
    if scale.pixel(1) >= _SMALL_SIZE:
        labels = [(index, index + 1, printable(plain_token(token))) for index, token in enumerate(shown.tokens)]
    for first, last, label in labels:
        start, end = scale.pixel(first), scale.pixel(last)
        if end - start >= _SMALL_SIZE:
            short = shorten(label, _SMALL_SIZE, _LABELS - 8)
            write(draw, (right, top + (start + end) // 2 + 5), short, _SMALL_SIZE, fill=_INK, anchor="rs")


def _draw_panel(
    picture: Image.Image, shown: PromptAttention, group: Masks, kind: LayerKind, scale: _Scale, corner: tuple[int, int]
) -> None:
    """Draw the cells of one kind of layers with the segments along both edges; ``corner``: of the first cell."""
    draw, (left, top) = ImageDraw.Draw(picture), corner
    total = sum(shown.layers.values())
    title = f"{kind.capitalize()} layers ({shown.layers[kind]} of {total}"
    title += f", window {shown.window:,})" if kind == "local" else ")"
    write(draw, (left - _BAND, top - _BAND - 26), title, _FACTS_SIZE, fill=_INK, bold=True)
    colours = _segment_colours(shown.segments)
    for segment, colour in zip(shown.segments, colours, strict=True):
        start, end = scale.pixel(segment.start), max(scale.pixel(segment.end), scale.pixel(segment.start) + 1)
        draw.rectangle((left + start, top - _BAND, left + end - 1, top - 3), fill=colour)
        draw.rectangle((left - _BAND, top + start, left - 3, top + end - 1), fill=colour)
        labels = (segment.label(images=shown.images), segment.label(images=1))  # the second one is shorter
        fitting = (label for label in labels if text_width(label, _SMALL_SIZE) <= end - start - 4)
        middle = (left + (start + end) // 2, top - _BAND - 6)
        write(draw, middle, next(fitting, ""), _SMALL_SIZE, fill=_INK, anchor="ms")
    cells = _panel_cells(shown.reference.by_kind[kind], group.by_kind[kind], shown.segments, scale)
    picture.paste(cells, corner)
    draw.rectangle((left - 1, top - 1, left + scale.side, top + scale.side), outline=_LINE)


def _segment_colours(segments: Sequence[Segment]) -> list[str]:
    """Return the colour of each segment: views take theirs in turn."""
    views = cycle(_VIEWS)
    return [_TEXT if segment.image is None else next(views) for segment in segments]


def _panel_cells(reference: Mask, mask: Mask, segments: Sequence[Segment], scale: _Scale) -> Image.Image:
    """Return the cells of a mask, ``scale.side`` pixels square, with their differences from the reference."""
    size = scale.side, scale.side
    method = Image.Resampling.BOX if scale.blends else Image.Resampling.NEAREST
    key_index = np.repeat(np.arange(1, len(segments) + 1), [segment.tokens for segment in segments])
    palette = np.array([ImageColor.getrgb(colour) for colour in (_NONE, *_segment_colours(segments))], np.uint8)
    picture = Image.fromarray(palette[np.where(mask, key_index, 0)]).resize(size, method)
    for differing, colour in ((reference & ~mask, _MISSING), (mask & ~reference, _EXTRA)):
        # Scaled as floats: a share below 1 / 255 would round to 0.
        shares = np.asarray(Image.fromarray(differing.astype(np.float32)).resize(size, method))
        opacity = np.where(shares > 0, 255 * (_FAINTEST + (1 - _FAINTEST) * shares), 0)
        picture.paste(colour, (0, 0), Image.fromarray(opacity.astype(np.uint8)))
    lines = Image.new("L", size)  # pale, at the edges of views
    draw = ImageDraw.Draw(lines)
    views = [segment for segment in segments if segment.image is not None]
    for edge in (edge for view in views for edge in (view.start, view.end)):
        pixel = min(scale.pixel(edge), scale.side - 1)
        draw.line((pixel, 0, pixel, scale.side), fill=46)
        draw.line((0, pixel, scale.side, pixel), fill=46)
    picture.paste(_INK, (0, 0), lines)
    return picture


def _legend(shown: PromptAttention, scale: _Scale, width: int) -> Image.Image:
    """Return the entries of the legend that the picture needs, one below the other."""
    views = min(sum(segment.image is not None for segment in shown.segments), len(_VIEWS))
    reference = shown.reference.names[0]
    changes = [difference for group in shown.groups[1:] for difference in differences(shown, group)]
    cells = f"{scale.tokens / scale.side:.1f}"
    entries: tuple[tuple[Sequence[str], str, bool], ...] = (
        ([_NONE], "no attention", True),
        ([_TEXT], "attends to text", True),
        (_VIEWS[:views], "attends to a view" + " (colours in turn)" * (views > 1), views > 0),
        ([_MISSING], f"missing: only {reference} attends", any(difference.missing for difference in changes)),
        ([_EXTRA], f"extra: {reference} does not attend", any(difference.extra for difference in changes)),
        ([], f"A pixel is {cells} x {cells} token pairs: paler where only some of them attend.", scale.blends),
    )
    needed = [(colours, text) for colours, text, applies in entries if applies]
    strip, draw = _strip(width, _PITCH * len(needed) + _MARGIN)
    for row, (colours, text) in enumerate(needed):
        for left, colour in zip(count(_MARGIN, 20), colours, strict=False):
            draw.rectangle((left, _PITCH * row, left + 15, _PITCH * row + 15), fill=colour, outline=_LINE)
        corner = _MARGIN + 20 * len(colours) + 6 * bool(colours), _PITCH * row + 12
        write(draw, corner, printable(text), _SMALL_SIZE, fill=_GREY)
    return strip


class _Bins(NamedTuple):
    """Runs of positions, each a row and a column of characters.

    Args:
        edges: first position of each run, and the number of tokens.
        labels: of the runs.
        what: what a run is, in the plural.
    """

    edges: tuple[int, ...]
    labels: tuple[str, ...]
    what: str


def attention_lines(shown: PromptAttention, *, width: int = 100) -> list[str]:
    """Return the masks as lines of text with a legend.

    Args:
        shown: the masks.
        width: characters of a line; panels that do not fit side by side follow each other.
    """
    bins = _bins(shown)
    lines = [f"{_ALL} attends in all pairs of tokens   {_SOME} in some   {_NO} in none; rows are queries, columns keys"]
    if len(shown.groups) > 1:
        lines[0] += f"; {_DIFFERS} differs from {shown.reference.names[0]}"
    lines.append(f"cells: {bins.what}")
    for group in shown.groups:
        lines += ["", *_group_lines(shown, group, bins, width)]
    return lines


def _bins(shown: PromptAttention) -> _Bins:
    """Return tokens, or segments if there are too many tokens, or equal runs if there are too many segments."""
    count = len(shown.tokens)
    if count <= _MOST_CELLS:
        return _Bins(tuple(range(count + 1)), tuple(map(plain_token, shown.tokens)), "tokens")
    segments = shown.segments
    if 2 <= len(segments) <= _MOST_CELLS:
        labels = (f"{segment.label(images=shown.images)} ({segment.tokens})" for segment in segments)
        return _Bins((*(segment.start for segment in segments), count), tuple(labels), "segments (tokens)")
    edges = np.linspace(0, count, _MOST_CELLS + 1).round().astype(int).tolist()
    labels = (f"from token {start}" for start in edges[:-1])
    return _Bins(tuple(edges), tuple(labels), f"{_MOST_CELLS} equal runs of tokens")


def _group_lines(shown: PromptAttention, group: Masks, bins: _Bins, width: int) -> list[str]:
    """Return the panels of a group of equal masks, below its names and above its differences."""
    labels = [f"{number:>2} {label[:_LABEL]}" for number, label in enumerate(bins.labels, 1)]
    panels = [_panel_column(shown, group, kind, bins) for kind in shown.layers]
    rows = range(len(labels))
    label_column: Column[int] = Column("", lambda row: labels[row])
    lines = [", ".join(group.names) + " (reference)" * (group is shown.reference and len(group.names) == 1)]
    together = Table([label_column, *panels], rows).lines(width)[1:]
    fit = max(map(len, together)) <= width
    lines += together if fit else [line for one in panels for line in Table([label_column, one], rows).lines(width)[1:]]
    if group is not shown.reference:
        lines += statements(shown, group)
    return [*lines, *group.notes]


def _panel_column(shown: PromptAttention, group: Masks, kind: LayerKind, bins: _Bins) -> Column[int]:
    """Return the cells of one kind of layers: a line for each run of queries."""
    mask, reference = group.by_kind[kind], shown.reference.by_kind[kind]
    shares = _run_shares(mask, bins.edges)
    cells = np.where(shares == 1, _ALL, np.where(shares > 0, _SOME, _NO))
    cells[_run_shares(mask != reference, bins.edges) > 0] = _DIFFERS
    return Column(f"{kind} layers ({shown.layers[kind]})", lambda row: "".join(cells[row]))


def _run_shares(mask: Mask, edges: Sequence[int]) -> NDArray[np.float64]:
    """Return the share of true cells of each pair of runs: ``[runs, runs]``."""
    starts = list(edges[:-1])
    counts = np.add.reduceat(np.add.reduceat(mask, starts, axis=0, dtype=np.int64), starts, axis=1)
    sizes = np.diff(edges)
    shares: NDArray[np.float64] = counts / (sizes[:, None] * sizes)
    return shares
