"""Image spans in a prompt, against a list that says for each position which span it belongs to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panscan.engine.scheduling.batch import PromptLayout, Span

SOFT = 9
Drawn = tuple[PromptLayout, list[int | None]]


@st.composite
def layouts(draw: st.DrawFn) -> Drawn:
    """A layout, and for each position the index of its image span or None for text."""
    owners: list[int | None] = []
    spans: list[Span] = []
    for length, image in draw(st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=8)):
        if image:
            spans.append(Span(len(owners), len(owners) + length, bytes([len(spans)])))
        owners += [len(spans) - 1 if image else None] * length
    return PromptLayout(spans), owners


def cuts(owners: list[int | None], position: int) -> bool:
    """Whether a chunk that ends here cuts an image span."""
    return 0 < position < len(owners) and owners[position] is not None and owners[position - 1] == owners[position]


@given(layouts())
def test_cut_back_is_the_last_boundary_that_cuts_no_image_span(drawn: Drawn) -> None:
    layout, owners = drawn
    for position in range(len(owners) + 1):
        expected = max(at for at in range(position + 1) if not cuts(owners, at))
        assert layout.cut_back(position) == expected


@given(layouts())
def test_a_chunk_ends_before_an_image_span_unless_it_would_be_empty(drawn: Drawn) -> None:
    layout, owners = drawn
    boundaries = [at for at in range(len(owners) + 1) if not cuts(owners, at)]
    for start in boundaries:
        for end in range(start, len(owners) + 1):
            within = [at for at in boundaries if start < at <= end]
            beyond = [at for at in boundaries if at > end]
            expected = start if end == start else within[-1] if within else beyond[0]
            assert layout.cut(start, end) == expected


@given(layouts(), st.integers(0, 40), st.integers(0, 40))
def test_spans_within_a_range_begin_in_it(drawn: Drawn, start: int, end: int) -> None:
    layout, _ = drawn
    assert layout.within(start, end) == tuple(span for span in layout.spans if start <= span.start < end)


@given(layouts())
def test_the_longest_block_counts(drawn: Drawn) -> None:
    layout, owners = drawn
    assert layout.longest == max((owners.count(index) for index in range(len(layout.spans))), default=0)


@given(st.lists(st.tuples(st.sampled_from([0, 1, SOFT]), st.integers(1, 5)), max_size=8))
def test_a_layout_of_ids_has_one_block_for_each_run_of_soft_tokens(runs: list[tuple[int, int]]) -> None:
    ids = [token for token, length in runs for _ in range(length)]
    starts = [at for at, token in enumerate(ids) if token == SOFT and (at == 0 or ids[at - 1] != SOFT)]
    keys = [bytes([index]) for index in range(len(starts))]
    spans = PromptLayout.of(ids, SOFT, keys).spans
    assert [span.start for span in spans] == starts
    assert [span.key for span in spans] == keys
    covered = {at for span in spans for at in range(span.start, span.end)}
    assert covered == {at for at, token in enumerate(ids) if token == SOFT}
    for wrong in ([*keys, b"more"], keys[1:] if keys else [b"more"]):
        with pytest.raises(ValueError, match="views"):
            PromptLayout.of(ids, SOFT, wrong)


def test_a_model_without_images_has_no_blocks() -> None:
    assert PromptLayout.of([1, 2, 3], None, []).spans == ()
