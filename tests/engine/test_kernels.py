"""The paged attention kernels alone: splits, tile sizes, and large slots."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.test_triton_attention import SCALING, new_tensors_full_of_nan
from tests.triton_here import DEVICE

from panscan.engine import kernels
from panscan.engine.kernels import choose_splits, decode_sizes, prefill_sizes
from panscan.engine.scheduling.batch import Chunk, PromptLayout, Sequence, flatten
from panscan.engine.triton_attention import HEAD_SIZES, KernelInputs, TritonBackend
from panscan.model.layers import LayerCache


@pytest.mark.parametrize("splits", [1, 3, 12, 16])  # the tables have 13 blocks
@pytest.mark.parametrize("window", [0, 70])
def test_any_number_of_splits_gives_the_same_result(window: int, splits: int) -> None:
    """Also with more splits than keys: a split without keys has no weight."""
    lengths, size = [1, 70, 131, 200], 16
    generator = torch.Generator().manual_seed(splits)
    caches = torch.full((2, len(lengths) * 208, 1, size), torch.nan)
    query = torch.randn(len(lengths), 2, size, generator=generator)
    expected = torch.empty(len(lengths), 2, size, dtype=torch.float64)
    for row, length in enumerate(lengths):
        seen = slice(row * 208 + (max(0, length - window) if window else 0), row * 208 + length)
        caches[:, seen] = torch.randn(2, seen.stop - seen.start, 1, size, generator=generator)
        keys, values = caches[:, seen].double().repeat_interleave(2, 2)
        weights = (torch.einsum("hd,khd->hk", query[row].double(), keys) * SCALING).softmax(-1)
        expected[row] = torch.einsum("hk,khd->hd", weights, values)
    none = torch.empty(0, 4, dtype=torch.int32, device=DEVICE)
    inputs = KernelInputs(
        slots=none,
        lengths=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        groups=torch.tensor([[row, 1, 0] for row in range(len(lengths))], dtype=torch.int32, device=DEVICE),
        members=torch.arange(len(lengths), dtype=torch.int32, device=DEVICE),
        ends=none,
        tiles=none,
        decode_tables=torch.arange(len(lengths) * 13, dtype=torch.int32, device=DEVICE).view(-1, 13),
        prefill_tables=none,
    )
    with new_tensors_full_of_nan():
        output = torch.empty(len(lengths), 2, size, device=DEVICE)
        kernels.decode(
            query.to(DEVICE),
            LayerCache(*caches.to(DEVICE)),
            output,
            inputs,
            window=window,
            page_size=16,
            splits=splits,
            scaling=SCALING,
        )
    torch.testing.assert_close(output.cpu().double(), expected, rtol=2e-5, atol=2e-5)


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
