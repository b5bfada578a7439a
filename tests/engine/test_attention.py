"""The SDPA backend against the interval rule in float64, for any heads, head sizes, dtypes and block tables."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.attention_passes import BLOCKS, SHAPES, Pass, drawn_pass, in_float64

from panscan.engine.attention import _TEXT_ROWS, SegmentsBackend
from panscan.engine.scheduling.batch import Chunk, PromptLayout, Sequence

DRAWN = {"block_size": st.sampled_from([1, 3, 16]), "size": st.sampled_from([8, 32, 128, 256]), **SHAPES}


def check(of: Pass) -> None:
    plan = SegmentsBackend().plan(of.batch, local=of.local, device=torch.device("cpu"))
    assert plan.slots.tolist() == of.batch.slots(local=of.local).tolist()
    found = of.attend(plan)
    assert found.shape == of.query.shape and found.is_contiguous()
    close = 1e-5 if found.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.double(), in_float64(of), rtol=close, atol=close)


@given(dtype=st.sampled_from([torch.float32, torch.bfloat16]), **DRAWN)
@settings(max_examples=80)
def test_every_row_attends_to_its_key_interval(**shape: Any) -> None:
    check(drawn_pass(**shape))


@pytest.mark.parametrize("local", [False, True])
def test_long_text_behind_a_prefix_is_exact_across_parts(local: bool) -> None:
    length = 2 * _TEXT_ROWS + 40
    tables = [random.Random(seed).sample(range(BLOCKS - 3), -(-length // 4)) for seed in range(2)]
    chunk = Chunk(Sequence(0, [0] * length, length, PromptLayout(), length, tables=tables), 30, length)
    decode = Chunk(Sequence(1, [0] * 9, 9, PromptLayout(), 9, tables=([897, 898, 899], [897, 898, 899])), 8, 9)
    check(drawn_pass(seed=0, block_size=4, window=100, local=local, heads=(1, 2), size=8, chunks=[decode, chunk]))
