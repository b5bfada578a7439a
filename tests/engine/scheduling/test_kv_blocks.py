"""The pool of slabs after any history; blocks of global and local layers: their names, and what a sequence needs."""

import gc
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tests.engine.drawn import PIECES, content, new_sequence

from panscan.engine.scheduling.batch import PromptLayout, Sequence, Span
from panscan.engine.scheduling.kv_blocks import BlockIndex, KVBlocks, SlabPool, block_hash, extend_hashes
from panscan.engine.scheduling.kv_sizes import KVShape

SIZES = st.integers(1, 5)
WINDOWS = st.none() | st.integers(2, 12)
LAYERS = st.sampled_from([(1, 1), (1, 3), (2, 5), (3, 7), (3, 1), (0, 2)])  # global, local
SLABS = st.integers(4, 40)
MOSTLY = st.integers(0, 4).map(bool)
TEXT = (2, 2, 2, 1, 2)
USERS = st.lists(st.tuples(PIECES, st.integers(1, 12), st.booleans()), max_size=5)  # prompt, chunk, stays


CHUNKS = st.integers(1, 12)
SHAPE = {"size": SIZES, "window": WINDOWS, "layers": LAYERS}


def blocks_of(slabs: int, size: int, window: int | None, layers: tuple[int, int] = (1, 1), **caching: bool) -> KVBlocks:
    shape = KVShape(1, *layers) if window is not None else KVShape(1, 1, 0)
    return KVBlocks(shape, slabs, block_size=size, window=window, **{"prefix_caching": True, **caching})


def compute(blocks: KVBlocks, one: Sequence, chunk: int) -> bool:
    """Compute all of a sequence's tokens as the scheduler does; whether the blocks sufficed."""
    while one.computed < len(one.ids):
        end = one.layout.cut(one.computed, min(one.computed + chunk, len(one.ids)))
        before = [list(table) for table in one.tables], blocks.pool.used
        if not blocks.extend(one, end):
            after = [list(table) for table in one.tables], blocks.pool.used
            assert before == after, "a failed extend changed something"
            return False
        one.computed = end
        blocks.commit(one)
    return True


def used_by(blocks: KVBlocks, users: list[tuple[list, int, bool]]) -> None:
    """A history: prompts computed one after the other, some of which stay."""
    for number, (pieces, chunk, stays) in enumerate(users):
        one = new_sequence(number, pieces)
        blocks.begin(one, blocks.hit(one))
        if not compute(blocks, one, max(chunk, one.layout.longest)) or not stays:
            blocks.release(one)


def overlapped(low: int, high: int, size: int) -> range:
    """Blocks that have one of the positions ``low .. high - 1``."""
    return range(low // size, -(-high // size)) if low < high else range(0)


def most_local(blocks: KVBlocks, computed: int, tokens: int, chunk: int) -> int:
    """Local slabs that a chunk and the window before it overlap, at most, from ``computed`` on."""
    group, size = blocks.groups[-1], blocks.block_size
    if group.window is None:
        return 0
    chunks = ((max(0, start - group.window + 1), min(start + chunk, tokens)) for start in range(computed, tokens))
    held = (overlapped(low, high, size) for low, high in chunks)
    return max(len({block // group.slab_blocks for block in blocks_held}) for blocks_held in held)


def all_global(blocks: KVBlocks, tokens: int) -> int:
    """Slabs that global layers fill."""
    group = blocks.groups[0]
    return -(-tokens // (blocks.block_size * group.slab_blocks)) if group.window is None else 0


def spare_slabs(blocks: KVBlocks) -> int:
    """Slabs by which a need may be announced too large: the worst start in a slab of several blocks may not occur."""
    return int(blocks.groups[-1].window is not None and blocks.groups[-1].slab_blocks > 1)


@given(tokens=st.integers(1, 40), chunk=CHUNKS, **SHAPE)
def test_needed_is_the_most_that_a_chunk_and_its_window_overlap(tokens: int, chunk: int, **shape: Any) -> None:
    blocks = blocks_of(99, **shape)
    least = all_global(blocks, tokens) + most_local(blocks, 0, tokens, chunk)
    assert least <= blocks.needed(tokens, chunk) <= least + spare_slabs(blocks)


@given(chunk=CHUNKS, slabs=st.integers(0, 24), **SHAPE)
def test_the_longest_sequence_fits_and_no_longer_one(chunk: int, slabs: int, **shape: Any) -> None:
    blocks = blocks_of(slabs, **shape)
    longest = blocks.longest(chunk, 999)
    assert [tokens for tokens in range(1000) if blocks.fits(tokens, chunk)] == [*range(longest + 1)]


@given(tokens=st.integers(1, 60), chunk=CHUNKS, slabs=SLABS, **SHAPE)
def test_as_many_sequences_as_announced_compute_at_once(tokens: int, chunk: int, slabs: int, **shape: Any) -> None:
    blocks = blocks_of(slabs, prefix_caching=False, **shape)
    assume(blocks.fits(tokens, chunk))
    count = blocks.concurrent(tokens, chunk)
    assert count >= 1
    layout = new_sequence(0, [(1,)]).layout
    for number in range(min(count, 10)):
        assert compute(blocks, Sequence(number, [1] * tokens, tokens, layout, tokens), chunk)


@settings(max_examples=200)
@given(users=USERS, pieces=PIECES, slabs=SLABS, left=st.integers(0, 20), caching=MOSTLY, data=st.data(), **SHAPE)
def test_a_hit_is_the_longest_whole_prefix(
    users: list, pieces: list, slabs: int, left: int, caching: bool, data: st.DataObject, **shape: Any
) -> None:
    """Of a sequence that may take blocks over: others compute everything."""
    blocks = blocks_of(slabs, prefix_caching=caching, **shape)
    size = blocks.block_size
    used_by(blocks, users)
    blocks.pool.allocate(max(0, blocks.pool.available - left))  # of what was cached, some is evicted
    one = new_sequence(99, pieces, reuse=data.draw(MOSTLY))
    one.ids += [1] * data.draw(st.integers(0, 3))  # as one that was preempted
    extend_hashes(one, size)

    def reads(hit: int, reach: int | None) -> range:
        return overlapped(0 if reach is None else max(0, hit - reach + 1), hit, size)

    def usable(hit: int) -> bool:
        aligned = hit % size == 0 and not any(span.start < hit < span.end for span in one.layout.spans)
        return aligned and all(
            one.hashes[block] in group.index for group in blocks.groups for block in reads(hit, group.window)
        )

    expected = max(hit for hit in range(len(one.ids)) if usable(hit)) if caching and one.reuse else 0
    where = [(group, block) for group in blocks.groups for block in reads(expected, group.window)]
    there = {(group.kind, block): group.index[one.hashes[block]] for group, block in where}
    assert blocks.hit(one) == expected
    blocks.begin(one, expected)
    assert one.computed == one.cached == expected
    assert one.registered == expected // size
    for group in blocks.groups:
        table = one.tables[group.kind]
        needed = reads(expected, group.window)
        assert [*table] == [there[group.kind, at] if at in needed else -1 for at in range(expected // size)]
        assert not blocks.pool.unheld(block for block in table if block != -1)


# What it shares leaves its window.
SHARED = {"users": [([TEXT], 8, True)], "pieces": [TEXT, b"long", b"long"], "chunk": 7, "slabs": 60}


@settings(max_examples=200)
@given(users=USERS, pieces=PIECES, chunk=CHUNKS, slabs=SLABS, **SHAPE)
@example(**SHARED, size=1, window=4, layers=(1, 1))
def test_who_can_begin_finds_room_to_its_end_even_if_others_take_the_most_that_they_may_claim(
    users: list, pieces: list, chunk: int, slabs: int, **shape: Any
) -> None:
    blocks = blocks_of(slabs, **shape)
    used_by(blocks, users)
    one = new_sequence(99, pieces, outputs=blocks.block_size)
    chunk = max(chunk, one.layout.longest)
    before = blocks.pool.used
    assume(blocks.can_begin(one, blocks.hit(one), chunk, 0))
    claimed = max(count for count in range(61) if blocks.can_begin(one, blocks.hit(one), chunk, count))
    assert blocks.pool.used == before and not any(one.tables)
    blocks.begin(one, blocks.hit(one))
    blocks.pool.allocate(claimed)
    one.ids += [1] * blocks.block_size
    assert compute(blocks, one, chunk)


@given(pieces=PIECES, chunk=CHUNKS, **SHAPE)
def test_a_claim_is_what_a_sequence_alone_still_takes(pieces: list, chunk: int, **shape: Any) -> None:
    blocks = blocks_of(99, **shape)
    size = blocks.block_size
    one = new_sequence(0, pieces, outputs=3 * size)
    chunk = max(chunk, one.layout.longest)
    blocks.begin(one, blocks.hit(one))
    goal = len(one.ids) + size
    while one.computed < len(one.ids):
        held, claim = blocks.pool.used, blocks.claim(one, chunk)
        local = len({block % blocks.pool.lane for block in one.tables[1] if block != -1})
        least = all_global(blocks, goal) + local - held
        least += max(0, most_local(blocks, one.computed, goal, chunk) - local)
        assert least <= claim <= least + spare_slabs(blocks)
        end = one.layout.cut(one.computed, min(one.computed + chunk, len(one.ids)))
        blocks.extend(one, end)
        assert blocks.pool.used - held <= claim
        one.computed = end
        blocks.commit(one)


@given(PIECES, SIZES, st.integers(0, 12))
def test_a_prefix_is_evicted_from_its_end(pieces: list, size: int, taken: int) -> None:
    one = new_sequence(0, pieces)
    count = -(-len(one.ids) // size)
    blocks = blocks_of(count, size, None)
    blocks.begin(one, blocks.hit(one))
    compute(blocks, one, len(one.ids))
    blocks.release(one)
    full = len(one.ids) // size
    taken = min(taken, count)
    blocks.pool.allocate(taken)
    left = [name in blocks.groups[0].index for name in one.hashes]
    assert left == [True] * min(full, count - taken) + [False] * (full - min(full, count - taken))


def test_of_blocks_that_left_the_window_the_last_are_evicted_first() -> None:
    """As in a prefix: a block is useless without those before it."""
    blocks = blocks_of(12, 1, 3, (0, 1))
    one = new_sequence(0, [(1, 2, 3, 4, 5, 6, 7, 8)])
    blocks.begin(one, 0)
    assert compute(blocks, one, 8)
    pool = blocks.pool
    pool.allocate(pool.available - 4)  # six blocks left the window
    assert [name in blocks.groups[0].index for name in one.hashes[:6]] == [True] * 4 + [False] * 2


def test_cached_blocks_are_no_containers() -> None:
    """Python collects garbage after a number of new containers, and would visit those of all cached blocks."""
    blocks = KVBlocks(KVShape(1, 1, 6), 500, block_size=2, window=64, prefix_caching=True)
    one = Sequence(0, [*range(400)], 400, PromptLayout(), 401)
    blocks.begin(one, blocks.hit(one))
    assert blocks.extend(one, 400)
    one.computed = 400
    before = len(gc.get_objects())
    blocks.commit(one)
    assert len(gc.get_objects()) - before < 20 and all(len(group.index) == 200 for group in blocks.groups)


IMAGES = st.lists(st.tuples(st.integers(-2, 2), st.binary(max_size=3)), max_size=2)
PARTS = st.tuples(st.binary(max_size=3), st.lists(st.integers(0, 3), max_size=3), IMAGES)


@given(PARTS, PARTS)
@example((b"", [], [(0, b"")]), (b"", [0], []))
@example((b"", [], [(0, b"")]), (b"\0" * 8, [], []))
@example((b"", [], [(0, b"")]), (b"", [], []))
@example((b"", [1], [(0, b"a" + bytes(8) + b"b")]), (b"", [1], [(0, b"a"), (0, b"b")]))
def test_different_parts_never_make_the_same_name(one: tuple, other: tuple) -> None:
    """Not even if bytes move from one part to the next."""
    assert (block_hash(*one) == block_hash(*other)) == (one == other)
    assert len(block_hash(*one)) >= 16


def names(one: Sequence, block_size: int) -> list[bytes]:
    extend_hashes(one, block_size)
    return list(one.hashes)


@given(PIECES, PIECES, st.integers(1, 5), st.integers(1, 30))
def test_blocks_share_names_of_equal_content_only(one: list, other: list, size: int, known: int) -> None:
    """Whenever they were made."""
    first, second = new_sequence(0, one), new_sequence(1, other)
    ids, second.ids = second.ids, second.ids[:known]
    assert len(names(second, size)) == len(second.ids) // size
    second.ids = ids
    for block, (name, other_name) in enumerate(zip(names(first, size), names(second, size), strict=False)):
        positions = range((block + 1) * size)
        equal = all(content(first, position) == content(second, position) for position in positions)
        assert (name == other_name) == equal


def spans(ids: list[int], *edges: int) -> Sequence:
    """Return a sequence with an image span between each edge and the next."""
    keys = (b"key", b"other")
    layout = PromptLayout([Span(*ends, key) for ends, key in zip(pairwise(edges), keys, strict=False)])
    return Sequence(0, ids, len(ids), layout, len(ids) + 1)


def test_what_a_token_of_an_image_span_is_depends_on_the_whole_span() -> None:
    """Where it begins, and where it ends, even if the block ends before."""
    assert names(spans([9] * 6, 0, 2, 6), 6) != names(spans([9] * 6, 0, 3, 6), 6)
    shorter, longer = (names(spans([1] + [9] * 8 + [1], 1, end), 2) for end in (7, 9))
    assert len(shorter) == 5 and not {*shorter} & {*longer}


def test_a_token_that_is_not_known_yet_is_in_no_name() -> None:
    one, other = (new_sequence(number, [(1, 2, 1)], outputs=2) for number in range(2))
    one.expect()
    assert len(names(one, 2)) == 1
    one.settle(2)
    other.ids.append(2)
    assert names(one, 2) == names(other, 2) and len(one.hashes) == 2


def test_a_pool_refuses_misuse_and_forgets_what_it_evicts() -> None:
    """Slabs 0 to 3 with up to three blocks: two blocks of the first are held, the others are released in turn."""
    pool = SlabPool(4)
    index = BlockIndex(offset * pool.lane for offset in range(3))
    first, second, third, last = pool.allocate(4)
    pool.share([first + pool.lane])
    pool.register(index, [first, first + pool.lane, second, third], [b"a", b"b", b"c", b"d"])
    pool.register(index, [last], [b"a"])  # another block has it
    assert index == {b"a": first, b"b": first + pool.lane, b"c": second, b"d": third}
    pool.release([first, third, last, second])
    assert (pool.used, pool.available, pool.unheld([first, second, third, third])) == (1, 3, 2)
    misuses = [
        (lambda: pool.allocate(4), "asked for"),
        (lambda: pool.allocate(-1), "asked for"),
        (lambda: pool.release([last]), "released more often"),
        (lambda: pool.share([last]), "free"),
        (lambda: pool.register(index, [last], [b"e"]), "not held"),
        (lambda: pool.register(index, [first], [b"e"]), "another hash"),
    ]
    for misuse, message in misuses:
        with pytest.raises(RuntimeError, match=message):
            misuse()
    assert pool.allocate(2) == [last, third] and index == {b"a": first, b"b": first + pool.lane, b"c": second}
    pool.share([second])
    pool.reset()  # of which nothing is evictable
    pool.release([second, first + pool.lane])
    assert (pool.used, len(index)) == (2, 3)
    pool.reset()
    assert (pool.used, pool.available, index, index.hashes) == (2, 2, {}, {})
