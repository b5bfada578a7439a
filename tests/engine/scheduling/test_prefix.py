"""Names of blocks: equal exactly where the content and all before it is equal."""

from hypothesis import given
from hypothesis import strategies as st
from tests.engine.drawn import PIECES, content, sequence

from panscan.engine.scheduling.batch import PromptLayout, Sequence, Span
from panscan.engine.scheduling.kv_blocks import block_hash, extend_hashes

PARTS = st.tuples(
    st.binary(max_size=3),
    st.lists(st.integers(0, 3), max_size=3),
    st.lists(st.tuples(st.integers(-2, 2), st.binary(max_size=3)), max_size=2),
)


@given(PARTS, PARTS)
def test_different_parts_never_make_the_same_name(one: tuple, other: tuple) -> None:
    assert (block_hash(*one) == block_hash(*other)) == (one == other)
    assert len(block_hash(*one)) >= 16


def test_bytes_that_move_from_one_part_to_the_next_change_the_name() -> None:
    image = block_hash(b"", [], [(0, b"")])
    assert image not in {block_hash(b"", [0], []), block_hash(b"\0" * 8, [], []), block_hash(b"", [], [])}
    assert block_hash(b"", [1], [(0, b"ab")]) != block_hash(b"", [1], [(0, b"a"), (0, b"b")])


@given(PIECES, PIECES, st.integers(1, 5))
def test_two_sequences_share_names_of_blocks_of_equal_content_only(one: list, other: list, block_size: int) -> None:
    first, second = sequence(0, one), sequence(1, other)
    for each in (first, second):
        extend_hashes(each, block_size)
        assert len(each.hashes) == len(each.ids) // block_size
    for block, (mine, theirs) in enumerate(zip(first.hashes, second.hashes, strict=False)):
        positions = range((block + 1) * block_size)
        equal = all(content(first, position) == content(second, position) for position in positions)
        assert (mine == theirs) == equal


@given(PIECES, st.integers(1, 5), st.integers(1, 30))
def test_names_do_not_depend_on_when_they_were_made(pieces: list, block_size: int, first: int) -> None:
    whole, grown = sequence(0, pieces), sequence(1, pieces)
    grown.ids = whole.ids[:first]
    extend_hashes(grown, block_size)
    grown.ids = whole.ids
    for each in (whole, grown):
        extend_hashes(each, block_size)
    assert grown.hashes == whole.hashes


def test_images_of_equal_tokens_that_begin_elsewhere_have_other_names() -> None:
    ids, key, other = [9] * 6, b"key", b"other"
    layouts = (PromptLayout([Span(0, at, key), Span(at, 6, other)]) for at in (2, 3))
    first, second = (Sequence(0, ids, 6, layout, 7) for layout in layouts)
    for each in (first, second):
        extend_hashes(each, 6)
    assert first.hashes != second.hashes


def test_image_spans_of_other_lengths_share_no_name_not_even_of_where_they_are_alike() -> None:
    """What a token of an image span is depends on the whole span."""
    ids = [1] + [9] * 8 + [1]
    first, second = (Sequence(0, ids, 10, PromptLayout([Span(1, end, b"key")]), 11) for end in (7, 9))
    for each in (first, second):
        extend_hashes(each, 2)
    assert len(first.hashes) == 5 and not set(first.hashes) & set(second.hashes)


def test_a_token_that_is_not_known_yet_is_in_no_name() -> None:
    one, other = (sequence(number, [(1, 2, 1)], outputs=2) for number in range(2))
    one.expect()
    extend_hashes(one, 2)
    assert len(one.hashes) == 1
    one.settle(2)
    other.ids.append(2)
    for each in (one, other):
        extend_hashes(each, 2)
    assert one.hashes == other.hashes and len(one.hashes) == 2
