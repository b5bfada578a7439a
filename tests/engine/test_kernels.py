"""The kernels of paged attention alone, and how they are cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.test_triton_attention import SCALING, new_tensors_full_of_nan
from tests.triton_here import DEVICE

from panscan.engine import kernels
from panscan.engine.kernels import choose_splits, decode_sizes, prefill_sizes
from panscan.engine.scheduling.sequence import AttentionRows, Chunk, PromptLayout, Sequence, Step
from panscan.engine.triton_attention import HEAD_SIZES, TritonBackend


@pytest.mark.parametrize("splits", range(1, 17))
@pytest.mark.parametrize("window", [0, 70])
def test_any_number_of_splits_gives_the_same(window: int, splits: int) -> None:
    """More of them than there are keys, too: those without keys count nothing."""
    lengths, size = [1, 70, 131, 200], 16
    generator = torch.Generator().manual_seed(splits)
    caches = torch.full((2, len(lengths) * 208, 1, size), torch.nan)
    query = torch.randn(1, 2, len(lengths), size, generator=generator)
    expected = torch.empty(1, len(lengths), 2, size, dtype=torch.float64)
    for row, length in enumerate(lengths):
        seen = slice(row * 208 + (max(0, length - window) if window else 0), row * 208 + length)
        caches[:, seen] = torch.randn(2, seen.stop - seen.start, 1, size, generator=generator)
        keys, values = caches[:, seen].double().repeat_interleave(2, 2)
        weights = (torch.einsum("hd,khd->hk", query[0, :, row].double(), keys) * SCALING).softmax(-1)
        expected[0, row] = torch.einsum("hk,khd->hd", weights, values)
    tables = torch.arange(len(lengths) * 13, dtype=torch.int32, device=DEVICE).view(-1, 13)
    with new_tensors_full_of_nan():
        output = torch.empty(1, len(lengths), 2, size, device=DEVICE)
        kernels.decode(
            query.to(DEVICE), *caches.to(DEVICE), output, tables=tables, window=window, page_size=16, splits=splits,
            lengths=torch.tensor(lengths, dtype=torch.int32, device=DEVICE), scaling=SCALING,
        )  # fmt: skip
    torch.testing.assert_close(output.cpu().double(), expected, rtol=2e-5, atol=2e-5)


def test_slots_beyond_32_bits() -> None:
    """Keys and values whose place in the cache no int32 holds; of the cache's 4 GB only few pages come to be."""
    size, block = 256, (1 << 31) // 256 // 16
    chunks = [
        Chunk(Sequence(number, [0] * end, end, PromptLayout(), end, tables=([block + number], [])), start, end)
        for number, (start, end) in enumerate([(0, 1), (0, 3)])
    ]
    plan = TritonBackend(size, torch.float16).plan(AttentionRows.of(Step(chunks), 16, 1), local=False, device=DEVICE)
    cache = torch.empty((block + 2) * 16, 1, size, dtype=torch.float16, device=DEVICE)
    query, key = torch.randn(2, 1, 1, 4, size, device=DEVICE).half()
    found = plan.attend(query, key, key, cache, cache, SCALING)
    assert torch.equal(cache[plan.slots], key[0].transpose(0, 1))
    assert torch.equal(found[0, :2], key[0].transpose(0, 1)[:2])
    seen = torch.nn.functional.scaled_dot_product_attention(
        *(tensor[:, :, 1:].float() for tensor in (query, key, key)), is_causal=True, scale=SCALING
    )
    torch.testing.assert_close(found[:, 1:].float(), seen.transpose(1, 2), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_sizes_are_what_triton_takes(head_size: int, itemsize: int) -> None:
    for group in range(1, 40):
        least, most = (prefill_sizes(head_size, itemsize, shared) for shared in (0, 1 << 20))
        assert least.rows == most.rows, "which plans do not depend on"
        for sizes in (least, most, decode_sizes(head_size, itemsize, group)):
            assert all(number >= 16 and number.bit_count() == 1 for number in (sizes.rows, sizes.keys))
            assert sizes.warps.bit_count() == 1
        assert sizes.rows >= group


@given(programs=st.integers(1, 5000), wanted=st.integers(1, 600))
def test_splits_make_as_many_programs_as_wanted_and_no_more(programs: int, wanted: int) -> None:
    splits = choose_splits(programs, wanted)
    assert splits in (1, 2, 4, 8, 16)
    assert splits == 16 or programs * splits >= wanted
    assert splits == 1 or programs * splits // 2 < wanted
