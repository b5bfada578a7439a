"""The paged attention kernels alone: splits, tile sizes, and large slots."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.attention_passes import SCALING
from tests.triton_here import DEVICE

from panscan.engine.kernels import choose_splits, decode_sizes, prefill_sizes
from panscan.engine.scheduling.batch import Chunk, PromptLayout, Sequence, flatten
from panscan.engine.triton_attention import HEAD_SIZES, TritonBackend
from panscan.model.layers import LayerCache


def test_slots_beyond_32_bits() -> None:
    """Element offsets in the cache beyond the range of int32. Few pages of its 4 GB are ever touched."""
    size, block = 256, (1 << 31) // 256 // 16
    chunks = [
        Chunk(Sequence(number, [0] * end, end, PromptLayout(), end, tables=([block + number], [])), start, end)
        for number, (start, end) in enumerate([(0, 1), (0, 3)])
    ]
    batch = flatten(chunks, block_size=16, window=1)
    plan = TritonBackend(size, torch.float16).plan(batch, local=False, device=DEVICE)
    cache = torch.empty((block + 2) * 16, 1, size, dtype=torch.float16, device=DEVICE)
    query, key = torch.randn(2, 4, 1, size, device=DEVICE).half()
    cache[plan.slots] = key
    found = plan.attend(query, LayerCache(cache, cache), SCALING)
    assert torch.equal(found[:2], key[:2])
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(tensor[1:].transpose(0, 1).float() for tensor in (query, key, key)), is_causal=True, scale=SCALING
    )
    torch.testing.assert_close(found[1:].float(), expected.transpose(0, 1), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_triton_accepts_the_tile_sizes(head_size: int, itemsize: int) -> None:
    for group in range(1, 40):
        prefill = [prefill_sizes(head_size, itemsize, shared) for shared in (0, 1 << 20)]
        few = [prefill_sizes(head_size, itemsize, shared, few=True) for shared in (0, 1 << 20)]
        assert [sizes.rows for sizes in prefill] == [sizes.rows for sizes in few]  # tiles are cut before it is known
        decode = [decode_sizes(head_size, itemsize, group, shared=shared) for shared in (False, True)]
        for sizes in (*prefill, *few, *decode):
            assert all(number >= 16 and number.bit_count() == 1 for number in (sizes.rows, sizes.keys))
            assert sizes.warps.bit_count() == sizes.heads.bit_count() == 1
        assert sizes.rows >= group


@given(programs=st.integers(1, 5000), wanted=st.integers(1, 600))
def test_splits_make_as_many_programs_as_wanted_and_no_more(programs: int, wanted: int) -> None:
    splits = choose_splits(programs, wanted)
    assert splits in (1, 2, 4, 8, 16)
    assert splits == 16 or programs * splits >= wanted
    assert splits == 1 or programs * splits // 2 < wanted
