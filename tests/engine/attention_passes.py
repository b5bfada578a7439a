"""Passes of random rows for attention backends, and their attention by definition, in float64.

Everything that must not be read is NaN: slots of other blocks, unwritten slots, the block that a table entry of -1
would point to, and uninitialised tensors.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from panscan.engine.scheduling.batch import Chunk, FlatBatch, PromptLayout, Sequence, Span, flatten
from panscan.model.layers import AttentionPlan, LayerCache
from panscan.model.linear.multiply import quantize_rows

BLOCKS = 900
CLOSE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
SCALING = 0.3
SHAPES = {
    "seed": st.integers(0, 2**32),
    "window": st.sampled_from([1, 5, 16, 50]),
    "local": st.booleans(),
    "heads": st.sampled_from([(1, 1), (2, 2), (1, 4), (3, 2), (2, 3)]),
    "int8": st.booleans(),
}
"""Arguments of :func:`drawn_pass` in any pass."""


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


@dataclass(frozen=True)
class Pass:
    """Rows of chunks, their queries, keys and values, and the KV cache before the pass.

    ``full``: keys and values ``[2, end, kv heads, D]`` of each chunk's sequence; ``query``, ``key``, ``value``: rows
    ``[T, heads, D]``.
    """

    chunks: list[Chunk]
    block_size: int
    window: int
    local: bool
    full: list[torch.Tensor]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    caches: list[torch.Tensor]
    int8: bool

    @property
    def batch(self) -> FlatBatch:
        return flatten(self.chunks, block_size=self.block_size, window=self.window)

    def attend(self, plan: AttentionPlan) -> torch.Tensor:
        """Store the rows' keys and values, then attend. The caches have NaN before them, where block -1 would be."""
        caches, device = [], plan.slots.device
        for cache, rows in zip(self.caches, (self.key, self.value), strict=True):
            wider = torch.full((self.block_size + len(cache), *cache.shape[1:]), torch.nan, dtype=cache.dtype)
            wider[self.block_size :] = cache
            caches.append(wider.to(device)[self.block_size :])
            caches[-1][plan.slots] = rows.to(device)
        cache = (quantized_cache if self.int8 else LayerCache)(*caches)
        parts = [part for part in cache if part is not None]
        before = [part.clone() for part in parts]
        with new_tensors_full_of_nan():
            output = plan.attend(self.query.to(device), cache, SCALING)
        for part, expected in zip(parts, before, strict=True):
            torch.testing.assert_close(part, expected, rtol=0, atol=0, equal_nan=True)
        return output


@contextmanager
def new_tensors_full_of_nan() -> Iterator[None]:
    """Make torch.empty return NaN, so that an unwritten output shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def rows_of(
    draw: random.Random, generator: torch.Generator, count: int, heads: int, size: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return random ``[count, heads, size]`` in one of the memory layouts that projections leave."""
    tensor = torch.randn(count, heads, size, generator=generator).to(dtype)
    layout = draw.choice(["heads first", "rows first", "columns of a wider tensor"])
    if layout == "heads first":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    wider = torch.full((count, heads if layout == "rows first" else heads + 2, size), torch.nan, dtype=dtype)
    wider[:, :heads] = tensor
    return wider[:, :heads]


def drawn_pass(
    *,
    seed: int,
    block_size: int,
    window: int,
    local: bool,
    heads: tuple[int, int],
    size: int,
    dtype: torch.dtype = torch.float32,
    int8: bool = False,
    chunks: list[Chunk] | None = None,
) -> Pass:
    """Return a pass of these chunks, or of random ones. The caches hold the earlier keys in some row's interval.

    With ``int8``, keys and values are such that an int8 cache holds them without error.
    """
    draw = random.Random(seed)
    chunks = sequences(draw, block_size, window) if chunks is None else chunks
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    kv_heads, group = heads
    counts = [chunk.end - chunk.start for chunk in chunks]
    numbers = (kv_heads * group, kv_heads, kv_heads)
    query, key, value = (rows_of(draw, generator, sum(counts), number, size, dtype) for number in numbers)
    if int8:
        key.copy_(round_trip(key)), value.copy_(round_trip(value))
    caches = [torch.full(((BLOCKS + 1) * block_size, kv_heads, size), torch.nan, dtype=dtype) for _ in range(2)]
    full, row = [], 0
    for chunk, count in zip(chunks, counts, strict=True):
        tensors = torch.randn(2, chunk.end, kv_heads, size, generator=generator).to(dtype)
        tensors = round_trip(tensors) if int8 else tensors
        for new, tensor, cache in zip((key, value), tensors, caches, strict=True):
            tensor[chunk.start :] = new[row : row + count]
            read = range(max(0, chunk.start - window + 1) if local else 0, chunk.start)
            table = chunk.sequence.tables[local]
            slots = [table[at // block_size] * block_size + at % block_size for at in read]
            cache[slots] = tensor[read.start : chunk.start]
        full.append(tensors)
        row += count
    return Pass(chunks, block_size, window, local, full, query, key, value, caches, int8)


def in_float64(of: Pass) -> torch.Tensor:
    """Return ``[T, heads, D]`` by definition, row by row."""
    outputs, row = [], 0
    group = of.query.shape[1] // of.key.shape[1]
    for chunk, tensors in zip(of.chunks, of.full, strict=True):
        keys, values = tensors.double().repeat_interleave(group, 2)
        for at in range(chunk.start, chunk.end):
            low, high = interval(chunk, at, of.window, of.local)
            scores = torch.einsum("hd,khd->hk", of.query[row].double(), keys[low:high]) * SCALING
            outputs.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values[low:high]))
            row += 1
    return torch.stack(outputs)


def check_backend(of: Pass, backend: Any, device: torch.device) -> None:
    """Compare a backend's slots and attention with their definition."""
    plan = backend.plan(of.batch, local=of.local, device=device)
    assert plan.slots.dtype == torch.int64 and plan.slots.tolist() == of.batch.slots(local=of.local).tolist()
    attended, expected = of.attend(plan), in_float64(of)
    assert attended.shape == expected.shape and attended.is_contiguous()
    close = CLOSE[attended.dtype]
    torch.testing.assert_close(attended.cpu().double(), expected, rtol=close, atol=close)
