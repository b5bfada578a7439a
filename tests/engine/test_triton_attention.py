"""The Triton backend against the segments backend and against the interval rule in float64.

On a GPU the compiled kernels run, elsewhere Triton's interpreter. Everything that must not be read is NaN: slots of
other blocks, unwritten slots, the block that a table entry of -1 would point to, and uninitialised tensors.
"""

import importlib.util
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.test_attention import BLOCKS, interval, quantized_cache, round_trip, sequences
from tests.triton_here import DEVICE

from panscan.engine import kernels
from panscan.engine.attention import SegmentsBackend
from panscan.engine.graphs import padded_inputs
from panscan.engine.scheduling.batch import Chunk, FlatBatch, PromptLayout, Sequence, Span, flatten
from panscan.engine.triton_attention import (
    HEAD_SIZES,
    KernelInputs,
    TritonBackend,
    TritonPlan,
    pack,
    unpack,
    unsupported_reason,
)
from panscan.model.layers import AttentionPlan, LayerCache

SCALING = 0.3
CLOSE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]  # NumPy has no bfloat16
SPARE = BLOCKS  # a block that no sequence uses
EXAMPLES = 18 if DEVICE.type == "cuda" else 7  # the interpreter takes about a second for each


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
    int8: bool = False

    @property
    def batch(self) -> FlatBatch:
        return flatten(self.chunks, block_size=self.block_size, window=self.window)

    @property
    def backend(self) -> TritonBackend:
        return TritonBackend(self.query.shape[-1], self.query.dtype, shared_bytes=kernels.shared_bytes(DEVICE))

    def triton(self) -> TritonPlan:
        return self.backend.plan(self.batch, local=self.local, device=DEVICE)

    def attend(self, plan: AttentionPlan) -> torch.Tensor:
        """Store the rows' keys and values, then attend. The caches have NaN before them, where block -1 would be."""
        caches = []
        for cache, rows in zip(self.caches, (self.key, self.value), strict=True):
            wider = torch.full((self.block_size + len(cache), *cache.shape[1:]), torch.nan, dtype=cache.dtype)
            wider[self.block_size :] = cache
            caches.append(wider.to(DEVICE)[self.block_size :])
            caches[-1][plan.slots] = rows.to(DEVICE)
        cache = (quantized_cache if self.int8 else LayerCache)(*caches)
        parts = [part for part in cache if part is not None]
        before = [part.clone() for part in parts]
        with new_tensors_full_of_nan():
            output = plan.attend(self.query.to(DEVICE), cache, SCALING)
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


def drawn(
    draw: random.Random,
    chunks: list[Chunk],
    block_size: int,
    window: int,
    local: bool,
    heads: tuple[int, int],
    size: int,
    dtype: torch.dtype,
    int8: bool = False,
) -> Pass:
    """Return a pass of these chunks. The caches hold the earlier keys in some row's interval, and NaN elsewhere.

    With ``int8``, keys and values are such that an int8 cache holds them without error.
    """
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    kv_heads, group = heads
    counts = [chunk.end - chunk.start for chunk in chunks]
    query, key, value = (
        rows_of(draw, generator, sum(counts), number, size, dtype) for number in (kv_heads * group, kv_heads, kv_heads)
    )
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
    found, row = [], 0
    group = of.query.shape[1] // of.key.shape[1]
    for chunk, tensors in zip(of.chunks, of.full, strict=True):
        keys, values = tensors.double().repeat_interleave(group, 2)
        for at in range(chunk.start, chunk.end):
            low, high = interval(chunk, at, of.window, of.local)
            scores = torch.einsum("hd,khd->hk", of.query[row].double(), keys[low:high]) * SCALING
            found.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values[low:high]))
            row += 1
    return torch.stack(found)


def check(of: Pass, multiprocessors: int = 1) -> None:
    """``multiprocessors``: what the GPU seems to have; the kernels split keys where some would be idle."""
    plan = of.triton()
    with patch.object(kernels, "_multiprocessors", lambda _: multiprocessors):
        output = of.attend(plan)
    close = CLOSE[output.dtype]
    torch.testing.assert_close(output.cpu().double(), in_float64(of), rtol=close, atol=close)
    reference = SegmentsBackend().plan(of.batch, local=of.local, device=DEVICE)
    assert plan.slots.dtype == torch.int64 and torch.equal(plan.slots, reference.slots)
    assert output.is_contiguous()
    torch.testing.assert_close(output, of.attend(reference), rtol=close, atol=close)


SEEDS = st.integers(0, 2**32)
SHAPES = {
    "block_size": st.sampled_from([2, 8, 16, 32]),
    "window": st.sampled_from([1, 5, 16, 50]),
    "local": st.booleans(),
    "heads": st.sampled_from([(1, 1), (2, 2), (1, 4), (3, 2), (2, 3)]),
    "int8": st.booleans(),
}


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=SEEDS, size=st.sampled_from([16, 32, 64]), multiprocessors=st.sampled_from([1, 15, 60]), **SHAPES)
@settings(deadline=None, max_examples=EXAMPLES)
def test_every_row_attends_to_its_key_interval(
    dtype: torch.dtype,
    seed: int,
    size: int,
    multiprocessors: int,
    block_size: int,
    window: int,
    local: bool,
    heads: tuple[int, int],
    int8: bool,
) -> None:
    draw = random.Random(seed)
    chunks = sequences(draw, block_size, window)
    check(drawn(draw, chunks, block_size, window, local, heads, size, dtype, int8), multiprocessors)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_large_heads_of_the_published_models(dtype: torch.dtype, local: bool) -> None:
    """Of 128 and of 256 numbers, as these are and in int8."""
    size = 256 if local != (dtype == torch.float16) else 128
    draw = random.Random(size)
    multiprocessors = 132 if local else 1  # few rows for the GPU, or many
    check(drawn(draw, sequences(draw, 16, 20), 16, 20, local, (2, 2), size, dtype, int8=local), multiprocessors)


@pytest.mark.parametrize(("local", "multiprocessors"), [(False, 1), (True, 132)])
def test_chunks_of_many_tiles_behind_a_prefix(local: bool, multiprocessors: int) -> None:
    """An image span larger than a tile and than the window, in the middle of a prompt; two rows in a last tile."""
    chunks = []
    for number, (layout, start, end) in enumerate(
        [(PromptLayout([Span(100, 240, b"")]), 30, 260), (PromptLayout(), 100, 166)]
    ):
        blocks = random.Random(number).sample(range(450 * number, 450 * number + 450), 34)
        chunks.append(
            Chunk(Sequence(number, [0] * end, end, layout, end, tables=(blocks[:17], blocks[17:])), start, end)
        )
    check(drawn(random.Random(0), chunks, 16, 50, local, (1, 2), 16, torch.float32), multiprocessors)


@given(seed=SEEDS, window=SHAPES["window"], local=st.booleans())
@settings(deadline=None, max_examples=5)
def test_padding_changes_nothing(seed: int, window: int, local: bool) -> None:
    """A pass as a CUDA graph has it: more decode rows, other rows and tiles, wider tables."""
    draw = random.Random(seed)
    of = drawn(draw, sequences(draw, 8, window), 8, window, local, (2, 2), 16, torch.float32)
    singles = of.batch.decode_rows + draw.randint(0, 3)
    others = max(of.batch.rows - of.batch.decode_rows + draw.randint(0, 20), 2)
    places = [
        row if row < of.batch.decode_rows else row + singles - of.batch.decode_rows for row in range(of.batch.rows)
    ]
    size = singles, max(others, of.batch.rows - of.batch.decode_rows)
    arrays = padded_inputs(of.backend.inputs(of.batch, local=local), size, of.backend.tile_rows, SPARE * of.block_size)
    arrays = arrays._replace(
        decode_tables=np.pad(arrays.decode_tables, ((0, 0), (0, 3)), constant_values=-1),
    )
    inputs = KernelInputs(*unpack(torch.from_numpy(pack(arrays)).to(DEVICE), arrays))
    plan = TritonPlan(inputs, of.backend.tile_rows, of.block_size, window if local else 0)
    rows = [torch.randn(singles + others, *tensor.shape[1:]) for tensor in (of.query, of.key, of.value)]
    for to, tensor in zip(rows, (of.query, of.key, of.value), strict=True):
        to[places] = tensor
    found = replace(of, query=rows[0], key=rows[1], value=rows[2]).attend(plan)
    torch.testing.assert_close(found[places], of.attend(of.triton()), rtol=2e-5, atol=2e-5)


@given(seed=SEEDS, window=SHAPES["window"], local=st.booleans(), size=st.sampled_from(HEAD_SIZES))
@settings(deadline=None)
def test_tiles_hold_every_prefill_row_once_those_with_most_keys_first(
    seed: int, window: int, local: bool, size: int
) -> None:
    chunks = sequences(random.Random(seed), 4, window)
    backend = TritonBackend(size, torch.float32)
    inputs = backend.inputs(flatten(chunks, block_size=4, window=window), local=local)
    expected = [(number, at) for number, chunk in enumerate(chunks) for at in range(chunk.start, chunk.end)]
    single = len(inputs.lengths)
    assert single == next((at for at, chunk in enumerate(chunks) if chunk.end - chunk.start > 1), len(chunks))
    assert len(inputs.decode_tables) == single and len(inputs.prefill_tables) == len(chunks) - single
    tiles = inputs.tiles.tolist()
    found = {row + at: (chunk + single, place + at) for row, count, place, chunk in tiles for at in range(count)}
    assert found == dict(enumerate(expected[single:], single))
    assert sum(count for _, count, _, _ in tiles) == len(found)
    assert all(1 <= count <= backend.tile_rows for _, count, _, _ in tiles)
    keys = []
    for _, count, place, chunk in tiles:
        first, last = (interval(chunks[chunk + single], at, window, local) for at in (place, place + count - 1))
        keys.append(last[1] - first[0])
    assert keys == sorted(keys, reverse=True)


@given(st.lists(st.tuples(st.sampled_from([np.int32, np.int64]), st.lists(st.integers(0, 5), min_size=1, max_size=3))))
def test_packed_arrays_keep_their_values_at_aligned_addresses(kinds: list[tuple[type[Any], list[int]]]) -> None:
    draw = np.random.default_rng(0)
    arrays = [draw.integers(-(1 << 31), 1 << 31, shape, kind, endpoint=False) for kind, shape in kinds]
    packed = torch.from_numpy(pack(arrays))
    for array, tensor in zip(arrays, unpack(packed, arrays), strict=True):
        assert tensor.storage_offset() * tensor.element_size() % 16 == 0
        assert torch.equal(tensor, torch.from_numpy(array)) and tensor.dtype == torch.from_numpy(array).dtype


def test_the_reason_names_what_the_kernels_do_not_support() -> None:
    assert unsupported_reason(128, torch.float16, DEVICE) is None
    assert (
        unsupported_reason(72, torch.float16, DEVICE)
        == "heads of size 72: the Triton kernels take 16, 32, 64, 128, 256"
    )
    assert "torch.float64: the Triton kernels take torch.float32," in str(unsupported_reason(64, torch.float64, DEVICE))
    assert "need an NVIDIA GPU, not mps" in str(unsupported_reason(64, torch.float16, torch.device("mps")))


def test_the_reason_names_a_missing_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module must import without Triton."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "panscan.engine.kernels")
    spec = importlib.util.find_spec("panscan.engine.triton_attention")
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert fresh.unsupported_reason(64, torch.float16, DEVICE) == "Triton is not installed"
