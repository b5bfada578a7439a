"""A picture of attention masks: queries as rows, keys as columns, and the cells in which an implementation differs.

On the terminal, characters show a cell per pair of tokens for short prompts, per pair of segments for others.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor

from panscan.core.text import clean, count, cut
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
from panscan.report.draw import LIGHT, chart_style
from panscan.report.table import table_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

_NONE, _TEXT, _VIEW = "#ffffff", "#7a8089", "#0072b2"  # no key; keys that are text; keys in views
_MISSING, _EXTRA = "#d55e00", "#cc79a7"  # with that of views, of Okabe and Ito's colours, as in images/draw.py
_INCH, _LETTER, _PITCH = 100, 7, 20  # pixels: of an inch, a letter and a line
_MARGIN, _GAP = 30, 40
_LEFT, _TOP = 150, 56  # around a panel's cells: labels of the queries; its title and labels of the keys
_NARROWEST = 760
_MOST_PROMPT = 300  # characters
_BLEND_ABOVE, _BLENDED = 960, 900  # tokens from which a pixel shows several cells; pixels of such a panel's side
_WANTED = 720  # pixels of a smaller panel's side, about
_FAINTEST = 0.55  # share of a difference's colour in a pixel with a single differing cell

_MOST_CELLS = 48  # characters of a row of cells
_LABEL = 20
_ALL, _SOME, _NO, _DIFFERS = "#", "+", ".", "x"


def draw_attention(shown: PromptAttention) -> Image.Image:
    """Draw the masks of a prompt: a row of panels for each group of equal masks, a panel for each kind of layers.

    A prompt of more than 960 tokens is scaled down: the colour of a pixel is the mean of its cells, but a pixel with a
    differing cell always shows it.

    Returns:
        A new RGB image, at most 2,100 pixels wide.
    """
    from matplotlib.figure import Figure

    tokens = len(shown.tokens)
    side = _BLENDED if tokens > _BLEND_ABOVE else tokens * max(1, round(_WANTED / tokens))
    width = max(_LEFT + len(shown.layers) * (side + _GAP), _NARROWEST)
    header = _wrapped(_header_texts(shown), width)
    rows = [(group, _wrapped(_group_texts(shown, group), width)) for group in shown.groups]
    entries = _legend_entries(shown, tokens / side)
    lines = len(header) + len(entries) + sum(len(texts) for _, texts in rows)
    height = 2 * _MARGIN + _PITCH * (lines + 1) + len(rows) * (_TOP + side + _GAP)
    with chart_style(LIGHT, ""):
        figure = Figure(figsize=(width / _INCH, height / _INCH), dpi=_INCH)
        top = _write(figure, header, _MARGIN) + _PITCH
        for group, texts in rows:
            top = _write(figure, texts, top) + _TOP
            for number, kind in enumerate(shown.layers):
                corner = (_LEFT + number * (side + _GAP)) / width, 1 - (top + side) / height
                axes = figure.add_axes((*corner, side / width, side / height))
                _draw_panel(axes, shown, group, kind, side, with_queries=not number)
            top += side + _GAP
        figure.legend(handles=entries, loc="lower left", fontsize=9, frameon=False)
        data = io.BytesIO()
        figure.savefig(data, format="png")
    return Image.open(data).convert("RGB")


def _wrapped(texts: Iterable[str], width: int) -> list[str]:
    return [line for text in texts for line in textwrap.wrap(clean(text), (width - 2 * _MARGIN) // _LETTER)]


def _header_texts(shown: PromptAttention) -> tuple[str, ...]:
    views = count(sum(segment.image is not None for segment in shown.segments), "view")
    about = f"{shown.model}: {len(shown.tokens):,} tokens, {views}. Rows are queries, columns are keys"
    return (
        "Which positions attend to which",
        f'Prompt: "{cut(shown.prompt, _MOST_PROMPT)}"',
        f"{about}; measured on the attention code.",
    )


def _group_texts(shown: PromptAttention, group: Masks) -> tuple[str, ...]:
    """Return a group's names, how it differs, and its notes."""
    if group is not shown.reference:
        return ", ".join(group.names), *statements(shown, group), *group.notes
    reference, *agreeing = group.names
    return f"{reference} (reference)" + (f"; the same: {', '.join(agreeing)}" if agreeing else ""), *group.notes


def _write(figure: Figure, lines: Sequence[str], top: int) -> int:
    """Write lines from ``top`` pixels on, the first in bold; return where they end."""
    width, height = figure.get_size_inches() * _INCH
    for index, line in enumerate(lines):
        weight = "normal" if index else "bold"
        figure.text(_MARGIN / width, 1 - top / height, line, va="top", fontsize=9, fontweight=weight)
        top += _PITCH
    return top


def _draw_panel(
    axes: Axes, shown: PromptAttention, group: Masks, kind: LayerKind, side: int, *, with_queries: bool
) -> None:
    """Draw the cells of one kind of layers, with labels where there is room."""
    tokens, total = len(shown.tokens), sum(shown.layers.values())
    window = f", window {shown.window:,}" if kind == "local" else ""
    axes.set_title(f"{kind.capitalize()} layers ({shown.layers[kind]} of {total}{window})", loc="left", fontsize=9)
    cells = _panel_cells(shown.reference.by_kind[kind], group.by_kind[kind], shown.segments, side)
    axes.imshow(np.asarray(cells), interpolation="nearest", extent=(0, tokens, tokens, 0))
    pixels = side / tokens  # per token
    keys = [
        ((segment.start + segment.end) / 2, label)
        for segment in shown.segments
        if len(label := segment.label(images=1)) * _LETTER < segment.tokens * pixels
    ]
    queries = [
        ((segment.start + segment.end) / 2, segment.label(images=shown.images)[:_LABEL])
        for segment in shown.segments
        if segment.tokens * pixels >= _PITCH / 2
    ]
    if pixels >= _PITCH / 2:
        queries = [(index + 0.5, clean(plain_token(token))[:_LABEL]) for index, token in enumerate(shown.tokens)]
    for axis, labels in ((axes.xaxis, keys), (axes.yaxis, queries if with_queries else [])):
        axis.set_ticks([place for place, _ in labels], [label for _, label in labels], fontsize=8)
        axis.set_ticks([edge for view in shown.segments if view.image for edge in (view.start, view.end)], minor=True)
    axes.tick_params(which="both", length=0, bottom=False, labelbottom=False, labeltop=True)
    axes.grid(which="minor", color=LIGHT["ink"], alpha=0.2, linewidth=0.7)
    axes.spines[:].set(visible=True, linewidth=0.7)


def _panel_cells(reference: Mask, mask: Mask, segments: Sequence[Segment], side: int) -> Image.Image:
    """Return the cells of a mask, ``side`` pixels square, with their differences from the reference."""
    size, method = (side, side), Image.Resampling.BOX if side < len(mask) else Image.Resampling.NEAREST
    kinds = [1 if segment.image is None else 2 for segment in segments]
    keys = np.repeat(kinds, [segment.tokens for segment in segments])
    palette = np.array([ImageColor.getrgb(colour) for colour in (_NONE, _TEXT, _VIEW)], np.uint8)
    picture = Image.fromarray(palette[np.where(mask, keys, 0)]).resize(size, method)
    for differing, colour in ((reference & ~mask, _MISSING), (mask & ~reference, _EXTRA)):
        # Scaled as floats: a share below 1 / 255 would round to 0.
        shares = np.asarray(Image.fromarray(differing.astype(np.float32)).resize(size, method))
        opacity = np.where(shares > 0, 255 * (_FAINTEST + (1 - _FAINTEST) * shares), 0)
        picture.paste(colour, (0, 0), Image.fromarray(opacity.astype(np.uint8)))
    return picture


def _legend_entries(shown: PromptAttention, cells: float) -> list[Patch]:
    """Return the swatches of the legend that the picture needs; ``cells``: along a pixel."""
    from matplotlib.patches import Patch

    reference = shown.reference.names[0]
    changes = [difference for group in shown.groups[1:] for difference in differences(shown, group)]
    entries = (
        (_NONE, "no attention", True),
        (_TEXT, "attends to text", True),
        (_VIEW, "attends to a view", shown.images > 0),
        (_MISSING, f"missing: only {reference} attends", any(difference.missing for difference in changes)),
        (_EXTRA, f"extra: {reference} does not attend", any(difference.extra for difference in changes)),
        (_NONE, f"A pixel is {cells:.1f} x {cells:.1f} token pairs: paler where only some attend.", cells > 1),
    )
    rule = LIGHT["rule"]
    return [Patch(facecolor=colour, edgecolor=rule, label=text) for colour, text, applies in entries if applies]


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
    """Return tokens, or segments if there are too many tokens, or equal runs if segments are one or too many."""
    size = len(shown.tokens)
    if size <= _MOST_CELLS:
        return _Bins(tuple(range(size + 1)), tuple(map(plain_token, shown.tokens)), "tokens")
    if 2 <= len(shown.segments) <= _MOST_CELLS:
        labels = (f"{segment.label(images=shown.images)} ({segment.tokens})" for segment in shown.segments)
        return _Bins((*(segment.start for segment in shown.segments), size), tuple(labels), "segments (tokens)")
    edges = np.linspace(0, size, _MOST_CELLS + 1).round().astype(int).tolist()
    labels = (f"from token {start}" for start in edges[:-1])
    return _Bins(tuple(edges), tuple(labels), f"{_MOST_CELLS} equal runs of tokens")


def _group_lines(shown: PromptAttention, group: Masks, bins: _Bins, width: int) -> list[str]:
    """Return the panels of a group of equal masks, below its names and above its differences."""
    labels = [f"{number:>2} {label[:_LABEL]}" for number, label in enumerate(bins.labels, 1)]

    def panels(*kinds: LayerKind) -> list[str]:
        headings = [f"{kind} layers ({shown.layers[kind]})" for kind in kinds]
        cells = [_panel_rows(shown, group, kind, bins) for kind in kinds]
        return table_of(("", *headings), list(zip(labels, *cells, strict=True))).lines(width)[1:]

    lines = [", ".join(group.names) + " (reference)" * (group is shown.reference and len(group.names) == 1)]
    together = panels(*shown.layers)
    fit = max(map(len, together)) <= width
    lines += together if fit else [line for kind in shown.layers for line in panels(kind)]
    if group is not shown.reference:
        lines += statements(shown, group)
    return [*lines, *group.notes]


def _panel_rows(shown: PromptAttention, group: Masks, kind: LayerKind, bins: _Bins) -> list[str]:
    """Return the cells of one kind of layers: a line for each run of queries."""
    mask, reference = group.by_kind[kind], shown.reference.by_kind[kind]
    shares = _run_shares(mask, bins.edges)
    cells = np.where(shares == 1, _ALL, np.where(shares > 0, _SOME, _NO))
    cells[_run_shares(mask != reference, bins.edges) > 0] = _DIFFERS
    return ["".join(row) for row in cells]


def _run_shares(mask: Mask, edges: Sequence[int]) -> NDArray[np.float64]:
    """Return the share of true cells of each pair of runs: ``[runs, runs]``."""
    starts = list(edges[:-1])
    counts = np.add.reduceat(np.add.reduceat(mask, starts, axis=0, dtype=np.int64), starts, axis=1)
    sizes = np.diff(edges)
    shares: NDArray[np.float64] = counts / (sizes[:, None] * sizes)
    return shares
