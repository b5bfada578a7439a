"""The SDPA backend against the interval rule in float64, for any heads, head sizes, dtypes and block tables."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from panscan.engine.attention import _TEXT_ROWS, SegmentsBackend
from panscan.engine.scheduling.batch import Chunk, PromptLayout, Sequence, Span, flatten
from panscan.model.layers import LayerCache
from panscan.model.linear.multiply import quantize_rows

BLOCKS = 900


def sequences(draw: random.Random, block_size: int, window: int) -> list[Chunk]:
    """Return chunks of sequences with image spans, in scattered blocks. Local blocks behind the window may be -1."""
    free = [draw.sample(range(BLOCKS), BLOCKS) for _ in range(2)]
    chunks = []
    for number in range(draw.randint(1, 6)):
        spans, at = [], draw.randint(0, 9)
        for _ in range(draw.randint(0, 3)):
            spans.append(Span(at, at + draw.randint(1, 20), b"%d/%d" % (number, len(spans))))
            at = spans[-1].end + draw.randint(0, 9)
        layout, length = PromptLayout(spans), at + draw.randint(1, 40)
        start = layout.cut_back(draw.randrange(length))
        end = layout.cut(start, draw.choice([start + 1, draw.randint(start + 1, length)]))
        held = -(-end // block_size)
        gone = draw.choice([0, max(0, start - window + 1) // block_size])
        tables = [free[0].pop() for _ in range(held)], [-1] * gone + [free[1].pop() for _ in range(held - gone)]
        ids = [draw.randrange(1000) for _ in range(length)]
        chunks.append(Chunk(Sequence(number, ids, length, layout, length, tables=tables), start, end))
    return chunks


def interval(chunk: Chunk, at: int, window: int, local: bool) -> tuple[int, int]:
    """Return the key interval of the row at a position, by definition."""
    ends = [span.end for span in chunk.sequence.layout.spans if span.start <= at < span.end]
    return (max(0, at - window + 1) if local else 0), ends[0] if ends else at + 1


def quantized_cache(keys: torch.Tensor, values: torch.Tensor) -> LayerCache:
    """Return an int8 cache of these keys and values; slots of NaN get a scale of NaN."""
    rows = [quantize_rows(part.cpu(), torch.int8) for part in (keys, values)]
    scales = torch.stack([part.scale[..., 0].T for part in rows])
    return LayerCache(*(tensor.to(keys.device) for tensor in (rows[0].values, rows[1].values, scales)))


def round_trip(rows: torch.Tensor) -> torch.Tensor:
    """Return keys or values as an int8 cache holds them, which it holds without further error."""
    quantized, scale = quantize_rows(rows, torch.int8)
    return (quantized * scale).to(rows.dtype)


@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from([1, 3, 16]),
    window=st.sampled_from([1, 5, 16, 50]),
    local=st.booleans(),
    heads=st.sampled_from([(1, 1), (2, 2), (1, 4), (3, 2)]),
    size=st.sampled_from([8, 32]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    int8=st.booleans(),
)
@settings(deadline=None, max_examples=80)
def test_every_row_attends_to_its_key_interval(
    seed: int,
    block_size: int,
    window: int,
    local: bool,
    heads: tuple[int, int],
    size: int,
    dtype: torch.dtype,
    int8: bool,
) -> None:
    draw = random.Random(seed)
    check(sequences(draw, block_size, window), draw, block_size, window, local, heads, size, dtype, int8)


@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize("local", [False, True])
def test_the_large_heads_of_the_published_models(size: int, local: bool) -> None:
    draw = random.Random(size)
    check(sequences(draw, 16, 20), draw, 16, 20, local, (2, 2), size, torch.float32)


@pytest.mark.parametrize("local", [False, True])
def test_long_text_behind_a_prefix_is_exact_across_parts(local: bool) -> None:
    length = 2 * _TEXT_ROWS + 40
    tables = random.Random(0).sample(range(BLOCKS), -(-length // 4)), random.Random(1).sample(range(BLOCKS), 150)
    chunk = Chunk(Sequence(0, [0] * length, length, PromptLayout(), length, tables=tables), 30, length)
    check([chunk], random.Random(0), 4, 100, local, (1, 2), 8, torch.float32)


def check(
    chunks: list[Chunk],
    draw: random.Random,
    block_size: int,
    window: int,
    local: bool,
    heads: tuple[int, int],
    size: int,
    dtype: torch.dtype,
    int8: bool = False,
) -> None:
    """Compare with float64; slots without keys of the rows' intervals are NaN."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    kv_heads, group = heads
    full = [torch.randn(2, chunk.end, kv_heads, size, generator=generator).to(dtype) for chunk in chunks]
    full = [round_trip(tensors) for tensors in full] if int8 else full
    caches = [torch.full((BLOCKS * block_size, kv_heads, size), torch.nan, dtype=dtype) for _ in range(2)]
    for chunk, tensors in zip(chunks, full, strict=True):
        table = chunk.sequence.tables[local]
        for at in range(max(0, chunk.start - window + 1) if local else 0, chunk.end):
            for cache, tensor in zip(caches, tensors, strict=True):
                cache[table[at // block_size] * block_size + at % block_size] = tensor[at]
    batch = flatten(chunks, block_size=block_size, window=window)
    query = torch.randn(batch.rows, kv_heads * group, size, generator=generator).to(dtype)
    plan = SegmentsBackend().plan(batch, local=local, device=torch.device("cpu"))
    assert plan.slots.tolist() == batch.slots(local=local).tolist()
    found = plan.attend(query, (quantized_cache if int8 else LayerCache)(*caches), 0.3)
    assert found.shape == query.shape and found.is_contiguous()
    row = 0
    for chunk, (keys, values) in zip(chunks, full, strict=True):
        for at in range(chunk.start, chunk.end):
            low, high = interval(chunk, at, window, local)
            wide = [part[low:high].double().repeat_interleave(group, 1) for part in (keys, values)]
            weights = (torch.einsum("hd,khd->hk", query[row].double(), wide[0]) * 0.3).softmax(-1)
            expected = torch.einsum("hk,khd->hd", weights, wide[1])
            close = 1e-5 if dtype == torch.float32 else 3e-2
            torch.testing.assert_close(found[row].double(), expected, rtol=close, atol=close)
            row += 1
