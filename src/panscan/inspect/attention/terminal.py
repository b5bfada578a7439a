"""Attention masks as characters: a cell per pair of tokens for short prompts, per pair of segments for others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from panscan.inspect.attention.measure import Mask, Masks, PromptAttention, plain_token, statements
from panscan.model.attention_masks import LayerKind

_MOST_CELLS = 48  # characters of a row of cells
_LABEL = 20
_ALL, _SOME, _NO, _DIFFERS = "#", "+", ".", "x"
_GAP = "   "


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
    names = ", ".join(group.names)
    lines = [f"{names} (reference)" if group is shown.reference and len(group.names) == 1 else names]
    panels = [_panel(shown, group, kind, bins) for kind in shown.layers]
    labels = ["", *(f"{number:>2} {label[:_LABEL]}" for number, label in enumerate(bins.labels, 1))]
    margin = max(map(len, labels)) + 1
    fit = margin + sum(len(panel[1]) + len(_GAP) for panel in panels) <= width
    for row in [panels] if fit else [[panel] for panel in panels]:
        padded = [[line.ljust(max(map(len, panel))) for line in panel] for panel in row]
        for label, *parts in zip(labels, *padded, strict=True):
            lines.append(f"{label:<{margin}}{_GAP.join(parts)}".rstrip())
    if group is not shown.reference:
        lines += statements(shown, group)
    return [*lines, *group.notes]


def _panel(shown: PromptAttention, group: Masks, kind: LayerKind, bins: _Bins) -> list[str]:
    """Return a heading and a line for each run of queries."""
    mask, reference = group.by_kind[kind], shown.reference.by_kind[kind]
    shares = _shares(mask, bins.edges)
    cells = np.where(shares == 1, _ALL, np.where(shares > 0, _SOME, _NO))
    cells[_shares(mask != reference, bins.edges) > 0] = _DIFFERS
    return [f"{kind} layers ({shown.layers[kind]})", *("".join(row) for row in cells)]


def _shares(mask: Mask, edges: Sequence[int]) -> NDArray[np.float64]:
    """Return the share of true cells of each pair of runs: ``[runs, runs]``."""
    starts = list(edges[:-1])
    counts = np.add.reduceat(np.add.reduceat(mask, starts, axis=0, dtype=np.int64), starts, axis=1)
    sizes = np.diff(edges)
    shares: NDArray[np.float64] = counts / (sizes[:, None] * sizes)
    return shares
