"""Decode rows of sequences that share a prefix: which are grouped, and attention as without groups."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.triton_here import DEVICE

from panscan.engine import kernels
from panscan.engine.attention import KernelInputs, SegmentsBackend
from panscan.engine.kernels import DECODE_MEMBERS
from panscan.engine.scheduling.batch import Chunk, FlatBatch, PromptLayout, Sequence, flatten
from panscan.engine.triton_attention import TritonBackend, prefix_groups
from panscan.model.layers import LayerCache


def questions(seed: int, pages: list[int], *, block: int, system: int, page: int, window: int) -> FlatBatch:
    """Return a decode pass of questions, each about one of the pages, behind one system prompt.

    Args:
        seed: of the lengths and the blocks.
        pages: the page of each question.
        block: tokens per block.
        system: blocks of the system prompt.
        page: blocks of each page.
        window: of local layers.
    """
    draw = random.Random(seed)
    free = iter(draw.sample(range(4000), 4000))
    common = [next(free) for _ in range(system)]
    of_page = {number: common + [next(free) for _ in range(page)] for number in sorted(set(pages))}
    chunks = []
    for number, of in enumerate(pages):
        blocks = of_page[of] + [next(free) for _ in range(draw.randint(1, 5))]
        end = draw.randint((len(blocks) - 1) * block + 1, len(blocks) * block)
        local = [-1 if (at + 1) * block <= end - window else each for at, each in enumerate(blocks)]
        sequence = Sequence(number, [0] * end, end, PromptLayout(), end, tables=(blocks, local))
        chunks.append(Chunk(sequence, end - 1, end))
    return flatten(chunks, block_size=block, window=window)


PASSES = {
    "seed": st.integers(0, 2**32),
    "pages": st.lists(st.integers(0, 3), min_size=1, max_size=20),
    "block": st.sampled_from([2, 16]),
    "system": st.sampled_from([0, 9, 70]),
    "page": st.sampled_from([0, 1, 20, 80]),
    "window": st.sampled_from([40, 130, 200, 4000]),
}


@given(units=st.integers(1, 25), local=st.booleans(), **PASSES)
def test_groups_share_their_blocks_and_hold_every_row_once(units: int, local: bool, **drawn: Any) -> None:
    batch = questions(**drawn)
    block = batch.block_size
    groups, members = prefix_groups(batch, local=local, most=DECODE_MEMBERS, units=units)
    assert sorted(members.tolist()) == list(range(batch.rows))
    used = groups[groups[:, 1] > 0]
    assert not groups[len(used) :].any() and used[:, 1].max() <= DECODE_MEMBERS
    assert used[:, 0].tolist() == [0, *np.cumsum(used[:, 1])[:-1].tolist()] and used[:, 1].sum() == batch.rows
    for first, count, shared in used.tolist():
        rows = members[first : first + count]
        lengths = batch.ends[rows]
        assert lengths[0] == lengths.min() and shared < lengths[0] and shared % block == 0
        assert (count == 1) == (shared == 0)
        begin = max(int(lengths.max()) - batch.window, 0) // block if local else 0
        blocks = batch.tables[local][rows, begin : shared // block]
        assert (blocks == blocks[0]).all() and (blocks >= 0).all()
        assert count == 1 or shared - begin * block >= 128


@pytest.mark.parametrize("local", [False, True])
def test_questions_about_one_document_are_grouped_whatever_their_order(local: bool) -> None:
    """Four pages of 1,024 tokens behind a system prompt of 160, five questions about each, in rounds over the pages."""
    batch = questions(0, [0, 1, 2, 3] * 5, block=16, system=10, page=64, window=1024)
    groups, members = prefix_groups(batch, local=local, most=DECODE_MEMBERS, units=8)
    used = groups[groups[:, 1] > 0]
    assert used[:, 1:].tolist() == [[5, 74 * 16]] * 4
    pages = [{row % 4 for row in members[first : first + count].tolist()} for first, count, _ in used.tolist()]
    assert sorted(pages, key=min) == [{0}, {1}, {2}, {3}]


FEW = {"pages": st.lists(st.integers(0, 3), min_size=1, max_size=8), "page": st.sampled_from([0, 1, 20])}
MANY_PAGES = {"pages": [0, 1] * 9, "block": 16, "system": 9, "page": 20, "window": 130}
FEW_KEYS = {"pages": [0, 1], "block": 2, "system": 0, "page": 0, "window": 40}


@given(
    splits=st.sampled_from([1, 2, 3, 16]),
    units=st.integers(1, 25),
    heads=st.sampled_from([(1, 1), (2, 2), (1, 4)]),
    local=st.booleans(),
    **PASSES | FEW,
)
@settings(max_examples=8)
@example(splits=2, units=12, heads=(2, 2), local=True, seed=0, **MANY_PAGES)
@example(splits=12, units=1, heads=(1, 2), local=False, seed=0, **FEW_KEYS)  # splits without keys have no weight
def test_attention_is_that_without_groups(
    splits: int, units: int, heads: tuple[int, int], local: bool, **drawn: Any
) -> None:
    batch = questions(**drawn)
    kv_heads, group = heads
    generator = torch.Generator().manual_seed(drawn["seed"])
    cache = LayerCache(*torch.randn(2, 4000 * batch.block_size, kv_heads, 16, generator=generator).to(DEVICE))
    query = torch.randn(batch.rows, kv_heads * group, 16, generator=generator).to(DEVICE)
    arrays = TritonBackend(16, torch.float32, units).inputs(batch, local=local)
    inputs = KernelInputs(*(torch.from_numpy(array).to(DEVICE) for array in arrays))
    found = torch.full_like(query, torch.nan).contiguous()
    window = batch.window if local else 0
    kernels.decode(query, cache, found, inputs, window=window, page_size=batch.block_size, scaling=0.3, splits=splits)
    expected = SegmentsBackend().plan(batch, local=local, device=DEVICE).attend(query, cache, 0.3)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
