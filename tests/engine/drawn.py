"""Random sequences for tests of the engine's bookkeeping, and the expected content of their positions."""

from collections.abc import Iterable

from hypothesis import strategies as st

from panscan.engine.scheduling.batch import PromptLayout, Sequence, Span

SOFT = 9
IMAGES = {b"a": 3, b"b": 3, b"long": 7}  # tokens per view key; two views differ in their keys only
TEXT = ((1,), (2,), (1, 2, 1), (2, 2, 2, 1, 2))
_DOCUMENTS = ((b"a", (2, 1, 2, 1)), (b"b", (2, 1, 2, 1)), ((2,), b"long", (1, 1, 2)))
PIECES = st.builds(  # prompts that often share a prefix
    lambda document, rest: [*document, *rest],
    st.sampled_from(_DOCUMENTS),
    st.lists(st.sampled_from(TEXT) | st.sampled_from(sorted(IMAGES)), min_size=1, max_size=3),
)


Piece = bytes | tuple[int, ...]


def prompt(pieces: Iterable[Piece]) -> tuple[list[int], PromptLayout]:
    """Return the ids and the layout of text and views in this order."""
    ids: list[int] = []
    spans = []
    for piece in pieces:
        if isinstance(piece, bytes):
            spans.append(Span(len(ids), len(ids) + IMAGES[piece], piece))
            ids += [SOFT] * IMAGES[piece]
        else:
            ids += piece
    return ids, PromptLayout(spans)


def new_sequence(number: int, pieces: Iterable[Piece], outputs: int = 1, *, reuse: bool = True) -> Sequence:
    ids, layout = prompt(pieces)
    return Sequence(number, ids, len(ids), layout, len(ids) + outputs, reuse)


def seen_until(layout: PromptLayout, position: int) -> int:
    """Return the end of the row's key interval: the end of its image span, or of its own position."""
    return next((span.end for span in layout.spans if span.start <= position < span.end), position + 1)


def content(of: Sequence, position: int) -> object:
    """Return everything that the keys and values at a position depend on: tokens and images up to its last key."""
    end = seen_until(of.layout, position)
    return position, tuple(of.ids[:end]), tuple((span.start, span.key) for span in of.layout.spans if span.start < end)
