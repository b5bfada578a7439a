"""Encoded views: the cache against a model of it, the encoder against the tower one view at a time."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from PIL import Image
from tests.conftest import noise
from tests.engine.pages import decoder_of, model_of

from panscan.core import SettingError
from panscan.engine.vision import VisionCache, VisionEncoder, image_digest, view_key
from panscan.images.pixels import PixelSpec, levels_of

NAME = "window inside image blocks"
KEYS = st.sampled_from([bytes([value]) for value in range(12)])


class CacheMachine(RuleBasedStateMachine):
    """Five views fit. ``order``: keys from the least to the most recently used."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = VisionCache(5 * 8 + 3)
        self.order: list[bytes] = []
        self.pinned: set[bytes] = set()

    @rule(key=KEYS)
    def pin(self, key: bytes) -> None:
        assert self.cache.pin(key) == (key in self.order)
        if key in self.order:
            self.order.remove(key)
            self.order.append(key)
            self.pinned.add(key)

    @rule(key=KEYS)
    def put(self, key: bytes) -> None:
        if key in self.order:
            return
        view = torch.tensor([key[0], 0], dtype=torch.float32)
        if len(self.order) == 5:
            dropped = next((held for held in self.order if held not in self.pinned), None)
            if dropped is None:
                with pytest.raises(SettingError, match=r"--vision-cache-gb .* holds 5 encoded views"):
                    self.cache.put(key, view)
                return
            self.order.remove(dropped)
        self.cache.put(key, view)
        self.order.append(key)
        self.pinned.add(key)

    @rule()
    def release(self) -> None:
        self.cache.release()
        self.pinned.clear()

    @precondition(lambda self: len(self.order) > 3)
    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.order = [key for key in self.order if key in self.pinned]

    @invariant()
    def what_is_held_is_what_the_model_says(self) -> None:
        assert [key for key in (bytes([value]) for value in range(12)) if self.cache.holds(key)] == sorted(self.order)
        assert self.cache.bytes == 8 * len(self.order) <= self.cache.max_bytes
        for key in self.order:
            assert float(self.cache.features(key)[0]) == key[0]


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def views(count: int) -> list[tuple[bytes, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(bytes([at]), torch.rand(3, 48, 48, generator=generator) * 2 - 1) for at in range(count)]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 16])
def test_features_are_those_of_each_view_alone(batch_size: int) -> None:
    decoder, cache = decoder_of(NAME), VisionCache(10**9)
    encoder = VisionEncoder(decoder.encode, cache, batch_size)
    wanted = views(5)
    batches = []
    hook = model_of(NAME).model.vision_tower.register_forward_pre_hook(
        lambda _, __, options: batches.append(len(options["pixel_values"])), with_kwargs=True
    )
    try:
        again = [(key, lambda view=view: view) for key, view in wanted]
        assert encoder.encode([*wanted, *again]) == 5
        assert encoder.encode(again[1:3]) == 0
    finally:
        hook.remove()
    assert (encoder.encoded, encoder.reused) == (5, 7)
    assert sum(batches) == 5
    assert max(batches) == min(batch_size, 5)
    alone = [decoder.encode(view[None])[0] for _, view in wanted]
    for (key, _), expected in zip(wanted, alone, strict=True):
        torch.testing.assert_close(cache.features(key), expected, rtol=1e-4, atol=1e-5)
    for one, other in itertools.combinations(alone, 2):
        assert not torch.allclose(one, other, atol=1e-3)


def test_a_view_holds_no_more_memory_than_is_counted() -> None:
    decoder, cache = decoder_of(NAME), VisionCache(10**9)
    VisionEncoder(decoder.encode, cache, 16).encode(views(4))
    assert cache.bytes == 4 * decoder.view_bytes
    for key, _ in views(4):
        assert cache.features(key).untyped_storage().nbytes() == decoder.view_bytes


def test_a_pass_keeps_its_views_until_it_is_over() -> None:
    decoder = decoder_of(NAME)
    cache = VisionCache(3 * decoder.view_bytes)
    encoder = VisionEncoder(decoder.encode, cache, 1)
    first, *others = views(5)
    encoder.encode([first, others[0]])
    encoder.release()
    assert encoder.encode([first, others[1], others[2]]) == 2  # the second made room, not the oldest: it is wanted
    assert cache.holds(first[0])
    with pytest.raises(SettingError, match="a pass needs more"):
        encoder.encode([others[3]])
    encoder.release()
    assert encoder.encode([others[3]]) == 1
    assert not cache.holds(first[0])


def test_keys_tell_all_that_pixels_depend_on() -> None:
    picture = noise(40, 30)
    spec = PixelSpec(48)
    digests = {
        image_digest(levels_of(image))
        for image in (picture, noise(40, 30, 1), picture.crop((0, 0, 40, 29)), Image.new("RGB", (2, 3)),
                      Image.new("RGB", (3, 2)))
    }  # fmt: skip
    assert len(digests) == 5
    assert image_digest(levels_of(picture)) in digests
    large = np.zeros((2, 1 << 19, 3), np.uint8)  # three pieces, which several threads hash
    large[0, 0, 0] = 1
    turned, other = large.copy(), large.copy()
    turned[0, 0, 0], turned[-1, -1, -1], other[-1, -1, -1] = 0, 1, 1
    assert len({image_digest(each) for each in (large, turned, other, large.copy())}) == 3
    keys = {
        view_key(digest, box, preprocess, each)
        for digest in digests for box in ((0, 0, 4, 3), (0, 0, 3, 4)) for preprocess in ("cpu", "device")
        for each in (spec, replace(spec, size=96), replace(spec, mean=(0.5, 0.5, 0.4)))
    }  # fmt: skip
    assert len(keys) == 5 * 2 * 2 * 3
    assert view_key(image_digest(levels_of(picture)), (0, 0, 4, 3), "cpu", PixelSpec(48)) in keys
