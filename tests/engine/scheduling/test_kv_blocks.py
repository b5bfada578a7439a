"""Blocks of global and local layers: what a sequence needs, takes over and gives back, against plain definitions."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tests.engine.drawn import PIECES, sequence

from panscan.engine.scheduling.batch import Sequence
from panscan.engine.scheduling.kv_blocks import KVBlocks, extend_hashes

SIZES = st.integers(1, 5)
WINDOWS = st.none() | st.integers(1, 12)
POOL = st.integers(4, 24)
TEXT = (2, 2, 2, 1, 2)
USERS = st.lists(st.tuples(PIECES, st.integers(1, 12), st.booleans()), max_size=5)  # prompt, chunk, stays


def blocks_of(size: int, window: int | None, counts: tuple[int, int], *, prefix_caching: bool = True) -> KVBlocks:
    return KVBlocks(
        block_size=size,
        global_blocks=counts[0],
        local_blocks=counts[1],
        window=window,
        prefix_caching=prefix_caching,
    )


def compute(blocks: KVBlocks, one: Sequence, chunk: int) -> bool:
    """Compute all of a sequence's tokens as the scheduler does; whether the blocks sufficed."""
    while one.computed < len(one.ids):
        end = one.layout.cut(one.computed, min(one.computed + chunk, len(one.ids)))
        before = [list(table) for table in one.tables], blocks.usage()
        if not blocks.extend(one, end):
            assert before == ([list(table) for table in one.tables], blocks.usage()), (
                "a failed extend changed something"
            )
            return False
        one.computed = end
        blocks.commit(one)
    return True


def used_by(blocks: KVBlocks, users: list[tuple[list, int, bool]]) -> None:
    """A history: prompts computed one after the other, some of which stay."""
    for number, (pieces, chunk, stays) in enumerate(users):
        one = sequence(number, pieces)
        blocks.begin(one, blocks.hit(one))
        if not compute(blocks, one, max(chunk, one.layout.longest)) or not stays:
            blocks.release(one)


def overlapped(low: int, high: int, size: int) -> range:
    """Blocks that have one of the positions ``low .. high - 1``."""
    return range(low // size, -(-high // size)) if low < high else range(0)


def most_local(computed: int, tokens: int, chunk: int, size: int, window: int | None) -> int:
    """Blocks that a chunk and the window before it overlap, at most, from ``computed`` on."""
    if window is None:
        return 0
    chunks = ((max(0, start - window + 1), min(start + chunk, tokens)) for start in range(computed, tokens))
    return max(len(overlapped(low, high, size)) for low, high in chunks)


@given(st.integers(1, 40), st.integers(1, 12), SIZES, WINDOWS)
def test_needed_is_the_most_that_any_chunk_and_the_window_before_it_overlap(
    tokens: int, chunk: int, size: int, window: int | None
) -> None:
    blocks = blocks_of(size, window, (99, 99))
    assert blocks.needed(tokens, chunk) == (-(-tokens // size), most_local(0, tokens, chunk, size, window))


@given(PIECES, st.integers(1, 12), SIZES, WINDOWS)
def test_a_lone_sequence_is_computed_with_the_blocks_it_needs(
    pieces: list, chunk: int, size: int, window: int | None
) -> None:
    one = sequence(0, pieces)
    chunk = max(chunk, one.layout.longest)
    needed = blocks_of(size, window, (99, 99)).needed(len(one.ids), chunk)
    blocks = blocks_of(size, window, needed)
    assert blocks.fits(len(one.ids), chunk)
    blocks.begin(one, blocks.hit(one))
    assert compute(blocks, one, chunk)


@given(st.integers(1, 12), SIZES, WINDOWS, st.tuples(st.integers(0, 12), st.integers(0, 12)))
def test_the_longest_sequence_fits_and_no_longer_one(
    chunk: int, size: int, window: int | None, counts: tuple[int, int]
) -> None:
    blocks = blocks_of(size, window, counts)
    longest = blocks.longest(chunk)
    fitting = [tokens for tokens in range(200) if blocks.fits(tokens, chunk)]
    assert fitting == list(range(200 if longest is None else longest + 1))


@settings(max_examples=200, deadline=None)
@given(USERS, PIECES, SIZES, WINDOWS, st.tuples(POOL | st.just(0), POOL), st.integers(0, 3), st.integers(0, 20))
def test_a_hit_is_the_longest_prefix_whose_blocks_are_all_there(
    users: list, pieces: list, size: int, window: int | None, counts: tuple[int, int], outputs: int, left: int
) -> None:
    blocks = blocks_of(size, window, counts)
    used_by(blocks, users)
    for pool in blocks.pools:
        pool.allocate(max(0, pool.available - left))  # of what was cached, some is evicted
    one = sequence(99, pieces)
    one.ids += [1] * outputs  # as one that was preempted
    extend_hashes(one, size)
    pools = [(pool, reach) for pool, reach, there in zip(blocks.pools, (None, window), counts, strict=True) if there]
    pools = [(pool, reach) for pool, reach in pools if reach is not None or pool is blocks.pools[0]]

    def reads(hit: int, reach: int | None) -> range:
        return overlapped(0 if reach is None else max(0, hit - reach + 1), hit, size)

    def usable(hit: int) -> bool:
        whole = hit % size == 0 and not any(span.start < hit < span.end for span in one.layout.spans)
        return whole and all(
            pool.find(one.hashes[block]) is not None for pool, reach in pools for block in reads(hit, reach)
        )

    expected = max(hit for hit in range(len(one.ids)) if usable(hit))
    there = {(pool, block): pool.find(one.hashes[block]) for pool, reach in pools for block in reads(expected, reach)}
    assert blocks.hit(one) == expected
    blocks.begin(one, expected)
    assert one.computed == one.cached == expected
    assert one.registered == expected // size
    for pool, reach in pools:
        table = one.tables[blocks.pools.index(pool)]
        kept = reads(expected, reach)
        assert [*table] == [there[pool, at] if at in kept else -1 for at in range(expected // size)]
        assert all(pool.held_count([block]) for block in table if block != -1)


@settings(max_examples=200, deadline=None)
@given(USERS, PIECES, st.integers(1, 12), SIZES, WINDOWS, st.tuples(POOL, POOL))
@example([([TEXT], 8, True)], [TEXT, b"long", b"long"], 7, 1, 4, (40, 20))  # what it shares leaves its window
def test_who_can_begin_finds_room_to_its_end_even_if_others_take_the_most_that_they_may_claim(
    users: list, pieces: list, chunk: int, size: int, window: int | None, counts: tuple[int, int]
) -> None:
    blocks = blocks_of(size, window, counts)
    used_by(blocks, users)
    one = sequence(99, pieces, outputs=size)
    chunk = max(chunk, one.layout.longest)
    before = blocks.usage()
    assume(blocks.can_begin(one, blocks.hit(one), chunk, (0, 0)))
    claimed = (
        max(count for count in range(30) if blocks.can_begin(one, blocks.hit(one), chunk, (count, 0))),
        max(count for count in range(30) if blocks.can_begin(one, blocks.hit(one), chunk, (0, count))),
    )
    assert blocks.usage() == before and not any(one.tables)
    blocks.begin(one, blocks.hit(one))
    for pool, count in zip(blocks.pools, claimed, strict=True):
        pool.allocate(count if pool.count else 0)
    one.ids += [1] * size
    assert compute(blocks, one, chunk)


@given(USERS, PIECES, st.integers(1, 12), SIZES, WINDOWS, st.tuples(POOL, POOL))
def test_whatever_fits_can_begin_when_nobody_holds_a_block(
    users: list, pieces: list, chunk: int, size: int, window: int | None, counts: tuple[int, int]
) -> None:
    blocks = blocks_of(size, window, counts)
    used_by(blocks, [(each, step, False) for each, step, _ in users])
    one = sequence(99, pieces)
    chunk = max(chunk, one.layout.longest)
    assert blocks.can_begin(one, blocks.hit(one), chunk, (0, 0)) or not blocks.fits(one.limit, chunk)


@given(PIECES, st.integers(1, 12), SIZES, WINDOWS)
def test_a_claim_is_what_a_sequence_alone_still_takes(pieces: list, chunk: int, size: int, window: int | None) -> None:
    one = sequence(0, pieces, outputs=3 * size)
    chunk = max(chunk, one.layout.longest)
    blocks = blocks_of(size, window, (99, 99))
    blocks.begin(one, blocks.hit(one))
    goal = len(one.ids) + size
    while one.computed < len(one.ids):
        held = [used for used, _ in blocks.usage()]
        claim = blocks.claim(one, chunk)
        assert claim[0] == -(-goal // size) - held[0]
        assert claim[1] == max(0, most_local(one.computed, goal, chunk, size, window) - held[1])
        end = one.layout.cut(one.computed, min(one.computed + chunk, len(one.ids)))
        blocks.extend(one, end)
        taken = [used - old for (used, _), old in zip(blocks.usage(), held, strict=True)]
        assert taken[0] <= claim[0] and taken[1] <= claim[1]
        one.computed = end
        blocks.commit(one)


@given(PIECES, SIZES, st.integers(0, 12))
def test_a_prefix_is_evicted_from_its_end(pieces: list, size: int, taken: int) -> None:
    one = sequence(0, pieces)
    count = -(-len(one.ids) // size)
    blocks = blocks_of(size, None, (count, 0))
    blocks.begin(one, blocks.hit(one))
    compute(blocks, one, len(one.ids))
    blocks.release(one)
    full = len(one.ids) // size
    taken = min(taken, count)
    blocks.pools[0].allocate(taken)
    left = [blocks.pools[0].find(name) is not None for name in one.hashes]
    assert left == [True] * min(full, count - taken) + [False] * (full - min(full, count - taken))


@pytest.mark.parametrize("refuses", ["reuse", "prefix_caching"])
def test_a_sequence_that_must_compute_everything_takes_nothing_over(refuses: str) -> None:
    blocks = blocks_of(2, 4, (20, 20), prefix_caching=refuses != "prefix_caching")
    first = sequence(0, [(1, 2, 1), b"long"])
    second = sequence(1, [(1, 2, 1), b"long"], reuse=refuses != "reuse")
    blocks.begin(first, blocks.hit(first))
    compute(blocks, first, 7)
    blocks.begin(second, blocks.hit(second))
    assert second.cached == 0
    assert not any(second.tables)


def test_reset_forgets_what_nobody_holds_and_keeps_what_somebody_does() -> None:
    blocks = blocks_of(1, None, (20, 0))
    held, gone = sequence(0, [(1, 2, 1)]), sequence(1, [(2, 2, 2, 1, 2)])
    for one in (held, gone):
        blocks.begin(one, blocks.hit(one))
        compute(blocks, one, 8)
    blocks.release(gone)
    blocks.release(gone)  # a second time changes nothing
    assert blocks.usage()[0] == (3, 20)
    blocks.reset()
    assert blocks.hit(sequence(2, [(1, 2, 1)])) == 2
    assert blocks.hit(sequence(3, [(2, 2, 2, 1, 2)])) == 0


@given(st.integers(1, 9), st.integers(1, 30))
def test_local_blocks_are_given_back_when_no_later_row_reads_them(window: int, tokens: int) -> None:
    blocks = blocks_of(3, window, (40, 40))
    one = Sequence(0, [1] * tokens, tokens, sequence(0, [(1,)]).layout, tokens + 1)
    blocks.begin(one, blocks.hit(one))
    compute(blocks, one, 1)
    low = max(0, tokens - window + 1)
    kept = [block != -1 for block in one.tables[1]]
    assert kept == [(index + 1) * 3 > low for index in range(len(kept))]
    assert all(old <= new for old, new in pairwise(kept))
    assert blocks.usage()[1][0] == sum(kept)


def test_of_blocks_that_left_the_window_the_last_are_evicted_first() -> None:
    """As in a prefix: a block is useless without those before it."""
    blocks = blocks_of(1, 3, (0, 12))
    one = sequence(0, [(1, 2, 3, 4, 5, 6, 7, 8)])
    blocks.begin(one, 0)
    assert compute(blocks, one, 8)
    pool = blocks.pools[1]
    pool.allocate(pool.available - 4)  # six blocks left the window
    assert [pool.find(name) is not None for name in one.hashes[:6]] == [True] * 4 + [False] * 2
