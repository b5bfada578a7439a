"""Padded passes, as graphs have them: on a CPU launch by launch, by interpreted kernels."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.pages import Pages, ask, decoder_of
from tests.engine.test_executor import check, led
from tests.triton_here import interpreted

from panscan.engine.executor import Executor
from panscan.engine.graphs import Graphs, decode_sizes, graph_sizes
from panscan.engine.scheduling.sequence import AttentionRows, Chunk, PromptLayout, Sequence
from panscan.engine.triton_attention import TritonBackend

NAMES = ["window inside image blocks", "global layers only", "local layers only"]


@pytest.mark.parametrize("most", [1, 2, 3, 8, 64, 65, 128, 200])
def test_sizes_end_with_the_most_rows_and_lie_close(most: int) -> None:
    sizes = decode_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    assert all(after - before <= (8 if after <= 64 else 16) for before, after in pairwise(sizes))


class Counted(Graphs):
    """Knows how many passes it ran, and how many it left to others."""

    ran = left = 0

    def run(self, rows: AttentionRows, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        done = super().run(rows, hidden, positions)
        self.ran += done is not None
        self.left += done is None
        return done


def graphed(
    name: str, block_size: int, draw: random.Random, decode_rows: int, chunk_rows: int
) -> tuple[Pages, Counted]:
    pages = Pages(name, block_size, draw)
    for free in pages.free:  # block 0, which a wrong spare one would be, is somebody's
        free.remove(0)
        free.append(0)
    facts = decoder_of(name).layers[0]
    backend = TritonBackend(facts.head_size, facts.dtype)
    graphs = Counted(
        pages.decoder, pages.cache, backend,
        decode_rows=decode_rows, chunk_rows=chunk_rows, longest=500, block_size=block_size, capture=False,
    )  # fmt: skip
    assert sorted(graphs.prepare()) == sorted(graph_sizes(decode_rows, chunk_rows))
    pages.executor = Executor(pages.decoder, pages.cache, backend, block_size, graphs)
    return pages, graphs


@interpreted
@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32), block_size=st.sampled_from([4, 16]))
@settings(deadline=None, max_examples=1)
def test_padded_passes_have_the_logits_of_one_eager_pass(name: str, seed: int, block_size: int) -> None:
    """Also where one pass had longer tables, more chunks or more tiles than the next, and other rows padded it."""
    draw = random.Random(seed)
    batch = [ask(name, draw, number=number, longest=5) for number in range(3)]
    pages, graphs = graphed(name, block_size, draw, decode_rows=2, chunk_rows=64)
    check(name, batch, led(name, batch, pages, draw, 40))
    assert graphs.ran > graphs.left


@interpreted
def test_tiles_of_a_pass_do_not_outlive_it() -> None:
    """Many short chunks, then a single one whose rows are where theirs were."""
    name, draw = "text only", random.Random(0)
    pages, graphs = graphed(name, 16, draw, decode_rows=1, chunk_rows=32)
    short = [Sequence(number, [20 + number] * 7, 7, PromptLayout(), 9) for number in range(4)]
    pages.run([Chunk(each, 0, 7) for each in short], {})
    whole = ask(name, draw, longest=30)
    whole.sequence = Sequence(9, list(range(30, 58)), 28, PromptLayout(), 31)
    check(name, [whole], led(name, [whole], pages, draw, 1000))
    assert graphs.ran >= 2
