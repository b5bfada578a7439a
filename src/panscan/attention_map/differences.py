"""How the masks of an implementation differ from the reference's, as numbers and in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from panscan.attention_map.measure import Masks, PromptAttention
from panscan.attention_map.segments import Segment
from panscan.model.attention_masks import LayerKind

__all__ = ["MaskDifference", "cause", "differences", "statements"]


@dataclass(frozen=True, slots=True)
class MaskDifference:
    """Cells, that is, pairs of a query and a key, in the layers of one kind.

    Args:
        kind: of layers.
        reference: cells in which the reference attends.
        missing: those of them in which the other implementation does not.
        extra: cells in which only the other one does.
    """

    kind: LayerKind
    reference: int
    missing: int
    extra: int


def differences(shown: PromptAttention, other: Masks) -> tuple[MaskDifference, ...]:
    """Return how an implementation's masks differ from the reference's, by layer kind."""
    found = []
    for kind in shown.layers:
        reference, mask = shown.reference.by_kind[kind], other.by_kind[kind]
        counts = (np.count_nonzero(cells) for cells in (reference, reference & ~mask, mask & ~reference))
        found.append(MaskDifference(kind, *map(int, counts)))
    return tuple(found)


def statements(shown: PromptAttention, other: Masks) -> list[str]:
    """Return a line for each layer kind in which an implementation differs from the reference."""
    name, reference = _listed(other.names), shown.reference.names[0]
    lines = []
    for each in differences(shown, other):
        if not each.missing and not each.extra:
            lines.append(f"{each.kind} layers: {name} and {reference} agree on all token pairs")
            continue
        why = cause(shown.segments, shown.reference.by_kind[each.kind], other.by_kind[each.kind])
        parts = [f"lacks {each.missing:,} of the {each.reference:,} token pairs in which {reference} attends"]
        parts = parts if each.missing else []
        parts += [f"adds {each.extra:,} token pairs"] if each.extra else []
        lines.append(f"{each.kind} layers: {name} {' and '.join(parts)}: {why}")
    return lines


def cause(segments: Sequence[Segment], reference: NDArray[np.bool_], other: NDArray[np.bool_]) -> str:
    """Return what explains the difference of two masks ``[queries, keys]``; the first differing cell if nothing known
    does."""
    later = np.zeros_like(reference)  # keys of a view behind the query
    for segment in segments:
        if segment.image is not None:
            block = slice(segment.start, segment.end)
            later[block, block] = np.triu(np.ones((segment.tokens, segment.tokens), np.bool_), 1)
    if np.array_equal(other, reference & ~later):
        return "image tokens attend only to earlier positions"
    if not (other & ~reference).any() and not (reference & ~other & ~later).any():
        return "some image tokens do not attend to all of their view"
    query, key = (int(at[0]) for at in np.nonzero(reference != other))
    return f"first at query {query}, key {key}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
