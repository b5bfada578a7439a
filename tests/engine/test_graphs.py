"""Padded passes against passes without padding: from CUDA graphs on a GPU, with interpreted kernels elsewhere."""

import random
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.attention_passes import BLOCKS, sequences
from tests.triton_here import DEVICE

from panscan.engine.graphs import Graphs
from panscan.engine.scheduling.batch import Chunk, FlatBatch, PromptLayout, Sequence, flatten
from panscan.engine.scheduling.graph_sizes import decode_sizes, graph_sizes
from panscan.engine.triton_attention import TritonBackend, TritonPlan, shares_prefix
from panscan.model.layers import LayerCache
from panscan.model.machine import GraphRecorder

HEADS, KV_HEADS, SIZE, HIDDEN = 2, 1, 16, 24
SPARE = BLOCKS
WINDOW = 20
KINDS = st.sampled_from([(False,), (True,), (False, True)])


@pytest.mark.parametrize("most", [1, 2, 3, 8, 64, 65, 128, 200])
def test_decode_sizes_are_close_together_and_end_with_the_most_rows(most: int) -> None:
    sizes = decode_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    assert all(after - before <= (8 if after <= 64 else 16) for before, after in pairwise(sizes))


class Layers:
    """Attention layers with random projections, one of each kind, and their KV caches.

    Blocks of sequences hold random keys and values; the spare ones hold NaN, which must not reach a sequence's rows.
    """

    hidden_size, window, dtype, device = HIDDEN, WINDOW, torch.float32, DEVICE

    def __init__(self, kinds: tuple[bool, ...], block_size: int) -> None:
        self.layers = [SimpleNamespace(local=local) for local in kinds]
        generator = torch.Generator().manual_seed(0)
        shapes = (HIDDEN, (HEADS + 2 * KV_HEADS) * SIZE), (HEADS * SIZE, HIDDEN)
        self.kinds, self.used = kinds, BLOCKS * block_size
        self.shared: list[bool] = []  # whether plans expected common prefixes, run after run
        self.weights = {
            kind: [(torch.randn(shape, generator=generator) / 5).to(DEVICE) for shape in shapes] for kind in kinds
        }
        self.caches = {}
        for kind in kinds:
            caches = torch.full((2, (BLOCKS + 2) * block_size, KV_HEADS, SIZE), torch.nan)
            caches[:, : self.used] = torch.randn(2, self.used, KV_HEADS, SIZE, generator=generator)
            self.caches[kind] = caches.to(DEVICE)

    def run(
        self, embedded: torch.Tensor, positions: torch.Tensor, _: object, plans: Mapping[bool, TritonPlan]
    ) -> torch.Tensor:
        self.shared.append(any(plan.shared for plan in plans.values()))
        hidden = embedded + positions[:, None].float().sin()
        for kind in self.kinds:
            into, out = self.weights[kind]
            rows = (hidden @ into).view(len(hidden), -1, SIZE)
            for cache, part in zip(self.caches[kind], rows[:, HEADS:].split(KV_HEADS, 1), strict=True):
                cache.index_copy_(0, plans[kind].slots, part)
            attended = plans[kind].attend(rows[:, :HEADS], LayerCache(*self.caches[kind]), SIZE**-0.5)
            hidden = hidden + attended.flatten(1) @ out
        return hidden

    def sequence_blocks(self) -> torch.Tensor:
        """Return the keys and values of all blocks but the spare ones."""
        return torch.stack([self.caches[kind][:, : self.used] for kind in self.kinds])


class Compared:
    """Graphs of :class:`Layers`, and the same layers without graphs."""

    def __init__(self, kinds: tuple[bool, ...], block_size: int, decode_rows: int, chunk_rows: int) -> None:
        self.plain, self.layers = Layers(kinds, block_size), Layers(kinds, block_size)
        self.backend, self.block_size = TritonBackend(SIZE, torch.float32), block_size
        cache: Any = SimpleNamespace(layers=None, spare=SPARE)  # the layers have their own
        self.graphs = Graphs(
            self.layers,  # type: ignore[arg-type]  # these have one projection each
            cache,
            self.backend,
            sizes=graph_sizes(decode_rows, chunk_rows),
            longest=150,
            block_size=block_size,
            recorder=GraphRecorder(DEVICE, capture=DEVICE.type == "cuda"),
        )
        self.graphs.prepare()

    def check(self, chunks: list[Chunk], seed: int = 0) -> bool:
        """Compare one pass; return whether a graph ran it."""
        batch = flatten(chunks, block_size=self.block_size, window=WINDOW)
        embedded = torch.randn(batch.rows, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        found = self.graphs.run(batch, embedded)
        if found is None:
            return False
        plans = {kind: self.backend.plan(batch, local=kind, device=DEVICE) for kind in self.plain.kinds}
        positions = torch.from_numpy(batch.positions).to(DEVICE)
        torch.testing.assert_close(found, self.plain.run(embedded, positions, None, plans), rtol=1e-4, atol=1e-4)
        blocks = self.layers.sequence_blocks()
        torch.testing.assert_close(blocks, self.plain.sequence_blocks(), rtol=1e-4, atol=1e-4)
        return True


def fits(batch: FlatBatch, decode_rows: int, chunk_rows: int) -> bool:
    """Whether some size has room for the rows of a pass."""
    single = batch.decode_rows
    return (not single or decode_rows >= single) and batch.rows - single <= chunk_rows


@given(seed=st.integers(0, 2**32), block_size=st.sampled_from([4, 16]), kinds=KINDS)
@settings(max_examples=4)
def test_padded_passes_equal_unpadded_passes(seed: int, block_size: int, kinds: tuple[bool, ...]) -> None:
    """Also after passes with longer tables, more chunks or more tiles, whose rows were elsewhere."""
    draw = random.Random(seed)
    compared = Compared(kinds, block_size, decode_rows=3, chunk_rows=64)
    for _ in range(6):
        chunks = sequences(draw, block_size, WINDOW)
        chunks.sort(key=lambda chunk: chunk.end - chunk.start > 1)
        batch = flatten(chunks, block_size=block_size, window=WINDOW)
        assert compared.check(chunks, draw.randrange(1000)) == fits(batch, 3, 64)


def text(number: int, start: int, end: int, first_block: int) -> Chunk:
    """Return a chunk of a text in consecutive blocks of 16 tokens."""
    blocks = list(range(first_block, first_block + -(-end // 16)))
    return Chunk(Sequence(number, [0] * end, end, PromptLayout(), end, tables=(blocks, blocks)), start, end)


@pytest.mark.parametrize("kinds", [(False,), (False, True)])
def test_tiles_and_tables_of_a_pass_do_not_outlive_it(kinds: tuple[bool, ...]) -> None:
    """Many short chunks, then one chunk in the same rows; long sequences, then short ones."""
    compared = Compared(kinds, 16, decode_rows=2, chunk_rows=32)
    assert compared.check([text(number, 0, 7, 20 * number) for number in range(4)])
    assert compared.check([text(9, 0, 28, 100)])
    assert compared.check([text(1, 140, 141, 200), text(2, 90, 91, 250)])
    assert compared.check([text(3, 2, 3, 300)])


def test_passes_with_and_without_common_prefixes() -> None:
    """They are recorded separately, and follow each other in any order."""
    compared = Compared((False, True), 16, decode_rows=4, chunk_rows=32)
    apart = [text(number, 150 + number, 151 + number, 20 * number) for number in range(4)]
    together = [replace(chunk, sequence=copy(chunk.sequence)) for chunk in apart]
    for chunk in together[1:]:
        own = chunk.sequence.tables[0][9:]
        chunk.sequence.tables = ([*together[0].sequence.tables[0][:9], *own],) * 2
    backend = compared.backend
    passes = [(apart, False), (together, True), (apart, False), (together[:3], True), (together[:1], False)]
    for chunks, shared in passes:
        batch = flatten(chunks, block_size=16, window=WINDOW)
        assert shares_prefix(backend.inputs(batch, local=False)) == shared
        assert compared.check(chunks)
        if not compared.graphs.recorder.capture:  # a captured pass does not call its layers again
            assert compared.layers.shared[-1] == shared
