"""Flat batches and image spans against the definition of every row, block and position, one at a time."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.attention_passes import SHAPES, interval, sequences

from panscan.engine.scheduling.batch import Chunk, PromptLayout, Sequence, Span, flatten

SHAPES = {name: SHAPES[name] for name in ("seed", "window")} | {"block_size": st.sampled_from([1, 3, 16])}
PENDING = -1


def rows_of(chunks: list[Chunk]) -> list[tuple[int, int]]:
    """Return the chunk and the position of each row."""
    return [(number, at) for number, chunk in enumerate(chunks) for at in range(chunk.start, chunk.end)]


@given(**SHAPES)
def test_every_row_has_its_id_position_interval_and_slot(seed: int, block_size: int, window: int) -> None:
    draw = random.Random(seed)
    chunks = sequences(draw, block_size, window)
    for chunk in draw.sample(chunks, draw.randint(0, len(chunks))):
        chunk.sequence.expect()
        chunk.sequence.ids[chunk.end - 1] = PENDING
    batch, rows = flatten(chunks, block_size=block_size, window=window), rows_of(chunks)
    assert batch.rows == len(rows) and (batch.block_size, batch.window) == (block_size, window)
    assert batch.ids.tolist() == [max(chunks[number].sequence.ids[at], 0) for number, at in rows]
    several = (number for number, chunk in enumerate(chunks) if chunk.end - chunk.start > 1)
    assert batch.decode_rows == next(several, len(chunks))
    assert batch.positions.tolist() == [at for _, at in rows]
    assert batch.chunk_of_row.tolist() == [number for number, _ in rows]
    assert batch.offsets.tolist() == [sum(number < chunk for number, _ in rows) for chunk in range(len(chunks) + 1)]
    for local in (False, True):
        intervals = [interval(chunks[number], at, window, local) for number, at in rows]
        first_keys = batch.first_keys(local=local).tolist()
        assert list(zip(first_keys, batch.ends.tolist(), strict=True)) == intervals
        tables = [chunk.sequence.tables[local] for chunk in chunks]
        slots = [tables[number][at // block_size] * block_size + at % block_size for number, at in rows]
        assert batch.slots(local=local).tolist() == slots
    dtypes = [array.dtype for array in (batch.ids, batch.positions, batch.ends, batch.offsets, *batch.tables)]
    assert dtypes == [np.int64] * 2 + [np.int32] * 4


@given(**SHAPES)
def test_tables_hold_the_blocks_that_some_row_reads_or_writes(seed: int, block_size: int, window: int) -> None:
    chunks = sequences(random.Random(seed), block_size, window)
    batch = flatten(chunks, block_size=block_size, window=window)
    for local, table in enumerate(batch.tables):
        for chunk, blocks in zip(chunks, table.tolist(), strict=True):
            keys = {key for at in range(chunk.start, chunk.end) for key in range(*interval(chunk, at, window, local))}
            needed = {key // block_size for key in keys}
            held = chunk.sequence.tables[local]
            assert blocks == [held[block] if block in needed else -1 for block in range(len(blocks))]
            assert max(needed) < len(blocks)


@given(**SHAPES)
def test_image_rows_take_the_features_of_their_views_in_order(seed: int, block_size: int, window: int) -> None:
    chunks = sequences(random.Random(seed), block_size, window)
    keys = [span.key for chunk in chunks for span in chunk.sequence.layout.spans]
    slots = {key: slot for slot, key in enumerate(reversed(keys))}
    batch = flatten(chunks, block_size=block_size, window=window, slots=slots)
    expected = {}
    for row, (number, at) in enumerate(rows_of(chunks)):
        for span in chunks[number].sequence.layout.spans:
            if span.start <= at < span.end:
                expected[row] = (slots[span.key], at - span.start)
    features = [(image.row + token, (image.slot, token)) for image in batch.images for token in range(image.tokens)]
    assert dict(features) == expected and len(features) == len(expected)


@given(**SHAPES)
def test_sampled_rows_decode_with_the_intervals_of_the_whole_pass(seed: int, block_size: int, window: int) -> None:
    draw = random.Random(seed)
    batch = flatten(sequences(draw, block_size, window), block_size=block_size, window=window)
    last = batch.offsets[1:].astype(np.int64) - 1
    rows = last[sorted(draw.sample(range(len(last)), draw.randint(0, len(last))))]
    subset = replace(batch, sampled=rows).sampled_rows()
    assert subset.rows == subset.decode_rows == len(rows)
    assert subset.ends.tolist() == (subset.positions + 1).tolist()
    for name in ("ids", "positions", "ends"):
        assert getattr(subset, name).tolist() == getattr(batch, name)[rows].tolist()
    for local in (False, True):
        assert subset.first_keys(local=local).tolist() == batch.first_keys(local=local)[rows].tolist()
        assert subset.slots(local=local).tolist() == batch.slots(local=local)[rows].tolist()
        assert subset.tables[local].tolist() == batch.tables[local][batch.chunk_of_row[rows]].tolist()


def test_a_kind_without_layers_needs_no_blocks() -> None:
    chunk = Chunk(Sequence(0, [7, 8], 2, PromptLayout(), 3, tables=([5], [])), 0, 2)
    batch = flatten([chunk], block_size=16, window=4)
    assert [table.tolist() for table in batch.tables] == [[[5]], [[-1]]]


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


@given(layouts(), st.integers(0, 40), st.integers(0, 40))
def test_chunks_end_where_they_cut_no_image_span(drawn: Drawn, first: int, last: int) -> None:
    """A chunk ends before an image span, unless it would be empty."""
    layout, owners = drawn
    boundaries = [at for at in range(len(owners) + 1) if not cuts(owners, at)]
    for start in range(len(owners) + 1):
        assert layout.cut_back(start) == max(at for at in boundaries if at <= start)
        for end in range(start, len(owners) + 1) if start in boundaries else ():
            within = [at for at in boundaries if start < at <= end]
            beyond = [at for at in boundaries if at > end]
            expected = start if end == start else within[-1] if within else beyond[0]
            assert layout.cut(start, end) == expected
    assert layout.within(first, last) == tuple(span for span in layout.spans if first <= span.start < last)
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
    assert PromptLayout.of(ids, None, []).spans == ()
    for wrong in ([*keys, b"more"], keys[1:] if keys else [b"more"]):
        with pytest.raises(ValueError, match="views"):
            PromptLayout.of(ids, SOFT, wrong)
