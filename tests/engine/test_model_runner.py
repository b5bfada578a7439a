"""Passes of a model runner against one eager pass of Transformers' model; their attention, pixels and features."""

import itertools
import random
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.engine.attention_passes import BLOCKS, SHAPES, check_backend, drawn_pass
from tests.engine.pages import ForcedSequence, Pages, ask, teacher
from tests.small_models import SIDE, loaded_of, odd_configs, odd_model

from panscan.core import View
from panscan.engine.attention import _TEXT_ROWS, SegmentsBackend
from panscan.engine.model_runner import ModelRunner
from panscan.engine.options import EngineOptions
from panscan.engine.scheduling.batch import Chunk, ImageRows, PromptLayout, Sequence, ViewToEncode
from panscan.engine.triton_attention import HEAD_SIZES
from panscan.engine.views import PixelStore, ViewFeatures
from panscan.engine.vision import VisionCache, view_key
from panscan.images.pixels import PixelSpec
from panscan.model.checkpoint import Loaded
from panscan.model.sharding import SINGLE_RANK

SEEDS = st.integers(0, 2**32)


Logits = dict[Sequence, dict[int, torch.Tensor]]
"""Logits by position."""


def computed(batch: list[ForcedSequence], pages: Pages, draw: random.Random, most: int) -> Logits:
    """Run sequences to their ends, some of them in each pass, in any order; return logits of all positions.

    Passes observe all of their rows, some or none. Of the other rows, only the logits of sampled ones are known.
    """
    seen: Logits = {asked.sequence: {} for asked in batch}
    while rest := [asked for asked in batch if not asked.done]:
        chunks = [asked.next_chunk(draw, most) for asked in draw.sample(rest, draw.randint(1, len(rest)))]
        rows = [(chunk.sequence, position) for chunk in chunks for position in range(chunk.start, chunk.end)]
        observed = sorted(draw.sample(range(len(rows)), draw.choice([0, len(rows), draw.randint(0, len(rows))])))
        result = pages.run(chunks, batch, observed)
        samples = [chunk for chunk in chunks if chunk.samples]
        assert len(result.tokens) == len(samples) and (result.answers is None) == (not samples)
        assert (result.logits is None) == (not observed)
        for row, logits in zip(observed, () if result.logits is None else result.logits, strict=True):
            sequence, position = rows[row]
            seen[sequence][position] = logits
        for chunk, logits in zip(samples, [] if result.answers is None else result.answers, strict=True):
            torch.testing.assert_close(logits, seen[chunk.sequence].setdefault(chunk.end - 1, logits))
    assert len(pages.runner.pixels) == 0
    return seen


def check(loaded: Loaded, batch: list[ForcedSequence], logits: Logits) -> None:
    for asked in batch:
        expected, by_position = teacher(loaded, asked), logits[asked.sequence]
        assert len(expected) - 1 in by_position
        rows = [*by_position]
        apart = (torch.stack([*by_position.values()]) - expected[rows]).abs().amax(1)
        close = torch.full_like(apart, 1e-5 * float(expected.abs().max()))
        if bool((apart > close).any()):
            # Norms over few values amplify the rounding of some rows, in Transformers too: float64 shows which.
            exact = teacher(replace(loaded, model=deepcopy(loaded.model).double()), asked)[rows]
            close = close.maximum(20 * (expected[rows] - exact).abs().amax(1).float())
        assert bool((apart <= close).all()), (apart / close).max()


@given(config=odd_configs(), seed=SEEDS, block_size=st.integers(1, 20), most=st.sampled_from([4, 20, 1000]))
@settings(max_examples=40)
def test_all_logits_are_those_of_one_eager_pass(config: Any, seed: int, block_size: int, most: int) -> None:
    """Of prompts of several sequences, whole or in chunks, mixed with decode rows, in scattered blocks."""
    draw, loaded = random.Random(seed), odd_model(config)
    batch = [ask(loaded, draw, number=number) for number in range(draw.randint(1, 4))]
    check(loaded, batch, computed(batch, Pages(loaded, block_size, draw), draw, most))


@pytest.mark.usefixtures("interpreter")
@given(config=odd_configs(HEAD_SIZES, most_layers=2, most_kv_heads=2), seed=SEEDS)
@settings(max_examples=5)
def test_odd_checkpoints_with_kernels(config: Any, seed: int) -> None:
    """Interpreted kernels are slow, so there is little text."""
    draw, loaded = random.Random(seed), odd_model(config)
    batch = [ask(loaded, draw, number=number, longest=4, outputs=2) for number in range(2)]
    check(loaded, batch, computed(batch, Pages(loaded, 4, draw, attention_backend="triton"), draw, 20))


@pytest.mark.usefixtures("interpreter")
def test_padded_passes_have_the_logits_of_one_eager_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes that CUDA graphs record, launched one by one; padding uses the spare blocks, which hold NaN."""
    monkeypatch.setattr(ModelRunner, "_slow_reason", lambda _: None)
    draw, loaded = random.Random(1), loaded_of("window inside image blocks")
    batch = [ask(loaded, draw, number=number, longest=3, outputs=2) for number in range(2)]
    pages = Pages(loaded, 4, draw, attention_backend="triton", max_num_seqs=2, prefill_chunk_size=32)
    assert pages.runner.graphs is not None
    check(loaded, batch, computed(batch, pages, draw, 18))


def test_the_context_ends_where_rotary_frequencies_change() -> None:
    loaded = loaded_of("text only")
    parameters = loaded.model.config.rope_parameters["full_attention"]
    before = dict(parameters)
    parameters.update(rope_type="longrope", original_max_position_embeddings=77)
    try:
        assert ModelRunner(loaded, EngineOptions(kv_cache_gb=0.01)).facts.max_positions == 77
    finally:
        parameters.clear()
        parameters.update(before)


SDPA_PASSES = {"block_size": st.sampled_from([1, 3, 16]), "size": st.sampled_from([8, 32, 128, 256]), **SHAPES}


@given(dtype=st.sampled_from([torch.float32, torch.bfloat16]), **SDPA_PASSES)
@settings(max_examples=80)
def test_every_row_attends_to_its_key_interval(**shape: Any) -> None:
    check_backend(drawn_pass(**shape), SegmentsBackend(), CPU)


@pytest.mark.parametrize("local", [False, True])
def test_long_text_behind_a_prefix_is_exact_across_parts(local: bool) -> None:
    length = 2 * _TEXT_ROWS + 40
    tables = [random.Random(seed).sample(range(BLOCKS - 3), -(-length // 4)) for seed in range(2)]
    chunk = Chunk(Sequence(0, [0] * length, length, PromptLayout(), length, tables=tables), 30, length)
    decode = Chunk(Sequence(1, [0] * 9, 9, PromptLayout(), 9, tables=([897, 898, 899], [897, 898, 899])), 8, 9)
    shape = {"block_size": 4, "window": 100, "heads": (1, 2), "size": 8}
    check_backend(drawn_pass(seed=0, local=local, chunks=[decode, chunk], **shape), SegmentsBackend(), CPU)


CPU, SPEC = torch.device("cpu"), PixelSpec(SIDE)
TOKENS, HIDDEN = 16, 64
HANDLES = itertools.count(100)


def levels(count: int) -> NDArray[np.uint8]:
    """Return levels of views, ``[count, side, side, 3]``."""
    return np.random.default_rng(0).integers(0, 256, (count, SIDE, SIDE, 3), np.uint8)


def store() -> PixelStore:
    return PixelStore(CPU, torch.float32, SPEC)


def put(pixels: PixelStore, count: int) -> list[int]:
    """Put the views of :func:`levels`, which come below each other on one page."""
    views = [View("crop", (0, at * SIDE, SIDE, (at + 1) * SIDE)) for at in range(count)]
    handles = [next(HANDLES) for _ in views]
    pixels.put(levels(count).reshape(-1, SIDE, 3), dict(zip(handles, views, strict=True)))
    return handles


def encoded_rows(features: ViewFeatures, slots: list[int]) -> torch.Tensor:
    """Return features ``[slots, tokens, hidden]`` as a pass gets them."""
    hidden = torch.full((len(slots) * TOKENS + 2, HIDDEN), torch.nan)
    features.fill(hidden, [ImageRows(1 + at * TOKENS, TOKENS, slot) for at, slot in enumerate(slots)])
    assert hidden[[0, -1]].isnan().all(), "rows without an image"
    return hidden[1:-1].unflatten(0, (-1, TOKENS))


def test_a_slot_that_is_used_again_has_the_new_view_in_the_same_memory() -> None:
    """Views are encoded_rows two at a time."""
    pixels, batches = store(), list[int]()

    def encode(batch: torch.Tensor) -> torch.Tensor:
        batches.append(len(batch))
        return batch.mean((1, 2, 3))[:, None, None].expand(-1, TOKENS, HIDDEN)

    features = ViewFeatures(encode, pixels, 2, SINGLE_RANK)
    like = torch.empty(0, TOKENS, HIDDEN)
    refs = put(pixels, 4)
    expected = [float(torch.from_numpy(view).float().mean() / 127.5 - 1) for view in levels(4)]
    features.encode([ViewToEncode(slot, ref) for slot, ref in enumerate(refs[:3])], like)
    held = [memory.data_ptr() for memory in features._slots.values()]
    assert all(memory.untyped_storage().nbytes() == TOKENS * HIDDEN * 4 for memory in features._slots.values())
    features.encode([ViewToEncode(1, refs[3])], like)
    assert [memory.data_ptr() for memory in features._slots.values()] == held and batches == [2, 1, 1]
    means = encoded_rows(features, [0, 1, 2]).mean((1, 2)).tolist()
    assert means == pytest.approx([expected[0], expected[3], expected[2]], abs=1e-5)


def test_pixels_are_taken_once_and_beyond_a_limit_wait_elsewhere() -> None:
    """Each view has memory of its own."""
    free, bound = store(), PixelStore(CPU, torch.float32, SPEC, limit=2 * 3 * SIDE * SIDE * 4)
    refs = list(zip(put(free, 5), put(bound, 5), strict=True))
    bound.forget([refs[0][1], refs[4][1], 99])
    refs += zip(put(free, 1), put(bound, 1), strict=True)
    for one, other in [*refs[1:4], refs[5]]:
        pixels = free.take(one)
        assert pixels.untyped_storage().nbytes() == pixels.nbytes
        assert torch.equal(pixels, bound.take(other))
        with pytest.raises(KeyError):
            bound.take(other)
    assert len(bound) == 0


KEYS = st.sampled_from([bytes([value]) for value in range(12)])
VIEW_SLOTS = 5


@settings(max_examples=150)
@given(st.lists(st.tuples(st.lists(KEYS, max_size=VIEW_SLOTS, unique=True), st.lists(KEYS, max_size=2)), max_size=20))
def test_no_view_of_a_pass_is_dropped_for_another_one(history: list[tuple[list[bytes], list[bytes]]]) -> None:
    """The cache after passes, each followed by views that are forgotten, against slots in the order of their use."""
    cache, slots = VisionCache(VIEW_SLOTS), dict[bytes, int]()
    for keys, forgotten in history:
        assert [cache.use(key) for key in keys] == [slots.get(key) for key in keys]
        slots |= {key: slots.pop(key) for key in keys if key in slots}
        for key in [key for key in keys if key not in slots]:
            if len(slots) == VIEW_SLOTS:
                slots.pop(next(iter(slots)))
            slots[key] = cache.add(key)
        for key in {*forgotten} & slots.keys():
            del slots[key]
        cache.forget(forgotten)
        assert {bytes([value]) for value in range(12) if cache.holds(bytes([value]))} == slots.keys()
        assert {*slots.values()} <= {*range(VIEW_SLOTS)} and len({*slots.values()}) == len(slots) == len(cache)
    cache.clear()
    assert len(cache) == 0 and {cache.add(bytes([value])) for value in range(VIEW_SLOTS)} == {*range(VIEW_SLOTS)}


def test_keys_differ_in_all_that_pixels_depend_on() -> None:
    spec = PixelSpec(48)
    digests = [bytes([number]) * 32 for number in range(5)]
    keys = {
        view_key(digest, box, preprocess, image_spec)
        for digest in digests
        for box in ((0, 0, 4, 3), (0, 0, 3, 4))
        for preprocess in ("cpu", "device")
        for image_spec in (spec, replace(spec, size=96), replace(spec, mean=(0.5, 0.5, 0.4)))
    }
    assert len(keys) == 5 * 2 * 2 * 3
    assert view_key(digests[0], (0, 0, 4, 3), "cpu", PixelSpec(48)) in keys
