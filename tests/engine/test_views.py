"""Pixels that wait for their pass, features by slot, and the vision cache that gives views their slots."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.small_models import SIDE

from panscan.core import View
from panscan.engine.scheduling.batch import ImageRows, ViewToEncode
from panscan.engine.views import PixelStore, ViewFeatures
from panscan.engine.vision import VisionCache, view_key
from panscan.images.pixels import PixelSpec
from panscan.model.sharding import SINGLE_RANK

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


def test_pixels_are_taken_once_and_own_their_memory() -> None:
    pixels = store()
    first, second, third = put(pixels, 3)
    taken = pixels.take(second)
    assert taken.untyped_storage().nbytes() == taken.nbytes
    with pytest.raises(KeyError):
        pixels.take(second)
    pixels.forget([first, second, 99])
    assert len(pixels) == 1
    pixels.take(third)
    assert len(pixels) == 0


def encoded(features: ViewFeatures, slots: list[int]) -> torch.Tensor:
    """Return features ``[slots, tokens, hidden]`` as a pass gets them."""
    hidden = torch.full((len(slots) * TOKENS + 2, HIDDEN), torch.nan)
    features.fill(hidden, [ImageRows(1 + at * TOKENS, TOKENS, slot) for at, slot in enumerate(slots)])
    assert hidden[[0, -1]].isnan().all(), "rows without an image"
    return hidden[1:-1].unflatten(0, (-1, TOKENS))


def test_a_slot_that_is_used_again_has_the_new_view_in_the_same_memory() -> None:
    """Views are encoded two at a time."""
    pixels, batches = store(), list[int]()

    def encode(batch: torch.Tensor) -> torch.Tensor:
        batches.append(len(batch))
        return batch.mean((1, 2, 3))[:, None, None].expand(-1, TOKENS, HIDDEN)

    features = ViewFeatures(encode, pixels, 2, SINGLE_RANK)
    like = torch.empty(0, TOKENS, HIDDEN)
    refs = put(pixels, 4)
    expected = [float(torch.from_numpy(each).float().mean() / 127.5 - 1) for each in levels(4)]
    features.encode([ViewToEncode(slot, ref) for slot, ref in enumerate(refs[:3])], like)
    held = [each.data_ptr() for each in features._slots.values()]
    assert all(each.untyped_storage().nbytes() == TOKENS * HIDDEN * 4 for each in features._slots.values())
    features.encode([ViewToEncode(1, refs[3])], like)
    assert [each.data_ptr() for each in features._slots.values()] == held and batches == [2, 1, 1]
    means = encoded(features, [0, 1, 2]).mean((1, 2)).tolist()
    assert means == pytest.approx([expected[0], expected[3], expected[2]], abs=1e-5)


def test_pixels_beyond_the_limit_wait_elsewhere_and_are_the_same() -> None:
    free, bound = store(), PixelStore(CPU, torch.float32, SPEC, limit=2 * 3 * SIDE * SIDE * 4)
    refs = list(zip(put(free, 5), put(bound, 5), strict=True))
    bound.forget([refs[0][1], refs[4][1]])
    refs += zip(put(free, 1), put(bound, 1), strict=True)
    for one, other in [*refs[1:4], refs[5]]:
        assert torch.equal(free.take(one), bound.take(other))
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
        view_key(digest, box, preprocess, each)
        for digest in digests
        for box in ((0, 0, 4, 3), (0, 0, 3, 4))
        for preprocess in ("cpu", "device")
        for each in (spec, replace(spec, size=96), replace(spec, mean=(0.5, 0.5, 0.4)))
    }
    assert len(keys) == 5 * 2 * 2 * 3
    assert view_key(digests[0], (0, 0, 4, 3), "cpu", PixelSpec(48)) in keys
