"""The Triton backend against the segments backend and against the interval rule in float64.

On a GPU the compiled kernels run, elsewhere Triton's interpreter. Whatever nobody may read is NaN: slots of other
blocks, slots that nobody wrote yet, what the entry -1 of a table would lead to, and new tensors.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.test_attention import BLOCKS, interval, sequences
from tests.triton_here import DEVICE

from panscan.engine import kernels
from panscan.engine.attention import AttentionPlan, SegmentsBackend
from panscan.engine.scheduling.sequence import AttentionRows, Chunk, PromptLayout, Sequence, Span, Step
from panscan.engine.triton_attention import HEAD_SIZES, DecodeRows, TritonBackend, TritonPlan, unsupported_reason

SCALING = 0.3
CLOSE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]  # NumPy has no bfloat16
SPARE = BLOCKS  # a block that is no sequence's


@dataclass(frozen=True)
class Pass:
    """Rows of chunks, what their sequences hold, and the caches before the pass. ``full``: K and V of each chunk."""

    chunks: list[Chunk]
    block_size: int
    window: int
    local: bool
    full: list[torch.Tensor]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    caches: list[torch.Tensor]

    @property
    def rows(self) -> AttentionRows:
        return AttentionRows.of(Step(self.chunks), self.block_size, self.window)

    def triton(self) -> TritonPlan:
        return TritonBackend(self.query.shape[-1], self.query.dtype).plan(self.rows, local=self.local, device=DEVICE)

    def attend(self, plan: AttentionPlan) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The output, and the caches afterwards. Between NaN, so that the block -1 is NaN too."""
        caches = []
        for cache in self.caches:
            padded = torch.full((self.block_size + len(cache), *cache.shape[1:]), torch.nan, dtype=cache.dtype)
            padded[self.block_size :] = cache
            caches.append(padded.to(DEVICE)[self.block_size :])
        rows = [tensor.to(DEVICE) for tensor in (self.query, self.key, self.value)]
        with new_tensors_full_of_nan():
            return plan.attend(*rows, *caches, SCALING), caches


@contextmanager
def new_tensors_full_of_nan() -> Iterator[None]:
    """What torch.empty gives, so that nobody gets away with not filling it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def rows_of(
    draw: random.Random, generator: torch.Generator, count: int, heads: int, size: int, dtype: torch.dtype
) -> torch.Tensor:
    """Random ``[1, heads, count, size]``, in any layout that projections and rotations leave."""
    tensor = torch.randn(1, heads, count, size, generator=generator).to(dtype)
    layout = draw.choice(["heads first", "rows first", "columns of a wider one"])
    if layout == "heads first":
        return tensor
    columns = heads if layout == "rows first" else heads + 2
    wider = torch.full((1, count, columns, size), torch.nan, dtype=dtype)
    wider[:, :, :heads] = tensor.transpose(1, 2)
    return wider[:, :, :heads].transpose(1, 2)


def drawn(
    draw: random.Random, chunks: list[Chunk], block_size: int, window: int, local: bool, heads: tuple[int, int],
    size: int, dtype: torch.dtype,
) -> Pass:  # fmt: skip
    """A pass of these chunks. In the caches is what earlier passes left and some row of this one sees."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    kv_heads, group = heads
    counts = [chunk.end - chunk.start for chunk in chunks]
    query, key, value = (
        rows_of(draw, generator, sum(counts), number, size, dtype) for number in (kv_heads * group, kv_heads, kv_heads)
    )
    caches = [torch.full(((BLOCKS + 1) * block_size, kv_heads, size), torch.nan, dtype=dtype) for _ in range(2)]
    full, row = [], 0
    for chunk, count in zip(chunks, counts, strict=True):
        tensors = torch.randn(2, chunk.end, kv_heads, size, generator=generator).to(dtype)
        for new, tensor, cache in zip((key, value), tensors, caches, strict=True):
            tensor[chunk.start :] = new[0, :, row : row + count].transpose(0, 1)
            seen = range(max(0, chunk.start - window + 1) if local else 0, chunk.start)
            table = chunk.sequence.tables[local]
            slots = [table[at // block_size] * block_size + at % block_size for at in seen]
            cache[slots] = tensor[seen.start : chunk.start]
        full.append(tensors)
        row += count
    return Pass(chunks, block_size, window, local, full, query, key, value, caches)


def in_float64(of: Pass) -> torch.Tensor:
    """The rule, row by row: ``[1, T, heads, D]``."""
    found, row = [], 0
    group = of.query.shape[1] // of.key.shape[1]
    for chunk, tensors in zip(of.chunks, of.full, strict=True):
        keys, values = tensors.double().repeat_interleave(group, 2)
        for at in range(chunk.start, chunk.end):
            low, high = interval(chunk, at, of.window, of.local)
            scores = torch.einsum("hd,khd->hk", of.query[0, :, row].double(), keys[low:high]) * SCALING
            found.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values[low:high]))
            row += 1
    return torch.stack(found)[None]


def check(of: Pass, multiprocessors: int = 1) -> None:
    """``multiprocessors``: that the GPU seems to have; keys are cut into parts where they would have nothing to do."""
    with patch.object(kernels, "_multiprocessors", lambda _: multiprocessors):
        output, caches = of.attend(of.triton())
    close = CLOSE[output.dtype]
    torch.testing.assert_close(output.cpu().double(), in_float64(of), rtol=close, atol=close)
    expected, expected_caches = of.attend(SegmentsBackend().plan(of.rows, local=of.local, device=DEVICE))
    assert output.is_contiguous()
    torch.testing.assert_close(output, expected, rtol=close, atol=close)
    for cache, other in zip(caches, expected_caches, strict=True):
        torch.testing.assert_close(cache, other, rtol=0, atol=0, equal_nan=True)


SEEDS = st.integers(0, 2**32)
SHAPES = {
    "block_size": st.sampled_from([2, 8, 16, 32]), "window": st.sampled_from([1, 5, 16, 50]), "local": st.booleans(),
    "heads": st.sampled_from([(1, 1), (2, 2), (1, 4), (3, 2)]),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=SEEDS, size=st.sampled_from([16, 32, 64]), multiprocessors=st.sampled_from([1, 15, 60]), **SHAPES)
@settings(deadline=None, max_examples=18)
def test_every_row_sees_its_interval_of_keys(
    dtype: torch.dtype, seed: int, size: int, multiprocessors: int, block_size: int, window: int, local: bool,
    heads: tuple[int, int],
) -> None:  # fmt: skip
    draw = random.Random(seed)
    chunks = sequences(draw, block_size, window)
    check(drawn(draw, chunks, block_size, window, local, heads, size, dtype), multiprocessors)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_large_heads_of_the_published_models(dtype: torch.dtype, size: int, local: bool) -> None:
    draw = random.Random(size)
    check(drawn(draw, sequences(draw, 16, 20), 16, 20, local, (2, 2), size, dtype))


@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize("local", [False, True])
def test_chunks_of_many_tiles_behind_a_prefix(local: bool, multiprocessors: int) -> None:
    """An image block larger than a tile and than the window, in the middle of a prompt; two rows in a last tile."""
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
@settings(deadline=None, max_examples=7)
def test_padding_changes_nothing(seed: int, window: int, local: bool) -> None:
    """As a CUDA graph has it: more decode rows, tiles and rows than there are, what is too many on a spare block."""
    draw = random.Random(seed)
    of = drawn(draw, sequences(draw, 8, window), 8, window, local, (2, 2), 16, torch.float32)
    expected, expected_caches = of.attend(of.triton())
    padded, places = padded_plan(of.triton(), len(of.key[0, 0]))
    rows = [torch.randn(1, tensor.shape[1], max(places) + 3, 16) for tensor in (of.query, of.key, of.value)]
    for to, tensor in zip(rows, (of.query, of.key, of.value), strict=True):
        to[:, :, places] = tensor
    found, caches = replace(of, query=rows[0], key=rows[1], value=rows[2]).attend(padded)
    torch.testing.assert_close(found[:, places], expected, rtol=2e-5, atol=2e-5)
    for cache, other in zip(caches, expected_caches, strict=True):
        torch.testing.assert_close(cache[: SPARE * 8], other[: SPARE * 8], rtol=0, atol=0, equal_nan=True)


def padded_plan(plan: TritonPlan, rows: int) -> tuple[TritonPlan, list[int]]:
    """Two decode rows, two tiles and at least two rows more; and where the rows are now."""

    def pad(tensor: torch.Tensor, *, before: int = 0, value: int) -> torch.Tensor:
        shape = tensor.shape[1:]
        parts = tensor.new_full((before, *shape), value), tensor, tensor.new_full((2, *shape), value)
        return torch.cat(parts)

    decode, prefill, single = plan.decode, plan.prefill, 0
    if decode is not None:
        single = len(decode.lengths)
        decode = replace(decode, tables=pad(decode.tables, value=SPARE), lengths=pad(decode.lengths, value=1))
    else:
        tables = torch.full((2, 1), SPARE, dtype=torch.int32, device=DEVICE)
        decode = DecodeRows(tables, torch.ones(2, dtype=torch.int32, device=DEVICE), 0)
    if prefill is not None:
        tiles = pad(prefill.tiles, value=0)
        tiles[:-2, 0] += 2
        prefill = replace(prefill, start=single + 2, tiles=tiles, ends=pad(prefill.ends, value=0))
    slots = torch.full((rows + 5,), SPARE * plan.block_size, dtype=torch.int64, device=DEVICE)
    places = [row if row < single else row + 2 for row in range(rows)]
    slots[places] = plan.slots
    return TritonPlan(plan.block_size, slots, decode, prefill), places


@given(seed=SEEDS, window=SHAPES["window"], local=st.booleans(), size=st.sampled_from(HEAD_SIZES))
@settings(deadline=None)
def test_tiles_hold_every_prefill_row_once_those_with_most_keys_first(
    seed: int, window: int, local: bool, size: int
) -> None:
    chunks = sequences(random.Random(seed), 4, window)
    rows = AttentionRows.of(Step(chunks), 4, window)
    plan = TritonBackend(size, torch.float32).plan(rows, local=local, device=torch.device("cpu"))
    expected = [(number, at) for number, chunk in enumerate(chunks) for at in range(chunk.start, chunk.end)]
    single = 0 if plan.decode is None else len(plan.decode.lengths)
    assert single == next((at for at, chunk in enumerate(chunks) if chunk.end - chunk.start > 1), len(chunks))
    tiles = [] if plan.prefill is None else plan.prefill.tiles.tolist()
    found = {row + at: (chunk + single, place + at) for row, count, place, chunk in tiles for at in range(count)}
    assert found == dict(enumerate(expected[single:], single))
    assert sum(count for _, count, _, _ in tiles) == len(found)
    assert all(1 <= count <= plan.prefill.tile_rows for _, count, _, _ in tiles)
    keys = []
    for _, count, place, chunk in tiles:
        first, last = (interval(chunks[chunk + single], at, window, local) for at in (place, place + count - 1))
        keys.append(last[1] - first[0])
    assert keys == sorted(keys, reverse=True)


def test_what_the_kernels_cannot_do_is_said() -> None:
    assert unsupported_reason(128, torch.float16, DEVICE) is None
    assert (
        unsupported_reason(72, torch.float16, DEVICE)
        == "heads of size 72: the Triton kernels take 16, 32, 64, 128, 256"
    )
    assert "torch.float64: the Triton kernels take torch.float32," in str(unsupported_reason(64, torch.float64, DEVICE))
    assert "need an NVIDIA GPU, not mps" in str(unsupported_reason(64, torch.float16, torch.device("mps")))


def test_without_triton_the_reason_is_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is imported everywhere, also where there is no Triton."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "panscan.engine.kernels")
    spec = importlib.util.find_spec("panscan.engine.triton_attention")
    assert spec is not None and spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert fresh.unsupported_reason(64, torch.float16, DEVICE) == "Triton is not installed"
