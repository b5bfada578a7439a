"""Pixels that wait for their pass, and features by slot: against the tower, one view at a time."""

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.conftest import noise
from tests.small_models import SIDE, model_of

from panscan.core import View
from panscan.engine.scheduling.batch import ImageRows, ViewToEncode
from panscan.engine.views import PixelStore, ViewFeatures
from panscan.images.pixels import PixelSpec, levels_of, pixels_pil, pixels_torch
from panscan.images.resize import choose_resize
from panscan.model.gemma3.vision_layers import VisionLayers
from panscan.model.sharding import SINGLE_RANK

NAME = "window inside image blocks"
CPU, SPEC = torch.device("cpu"), PixelSpec(SIDE)
TOKENS, HIDDEN = 16, 64
HANDLES = itertools.count(100)
VIEWS = [View("whole", (0, 0, 90, 60)), View("crop", (0, 0, 40, 60)), View("crop", (40, 0, 90, 60))]


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


@pytest.mark.parametrize("preprocess", ["cpu", "device"])
def test_pixels_are_those_of_transformers_processors(preprocess: str) -> None:
    resize, _ = choose_resize(preprocess, SPEC, CPU)
    image, pixels = noise(90, 60), PixelStore(CPU, torch.float32, SPEC, resize=resize)
    refs = range(len(VIEWS))
    pixels.put(levels_of(image), dict(enumerate(VIEWS)))
    if preprocess == "device":
        expected = pixels_torch(torch.from_numpy(np.array(image)).permute(2, 0, 1), VIEWS, SPEC)
    else:
        expected = pixels_pil(image, VIEWS, SPEC)
    assert len(pixels) == len(refs) == len(VIEWS)
    assert torch.equal(torch.stack([pixels.take(ref) for ref in refs]), expected)
    assert len(pixels) == 0


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


@pytest.mark.parametrize("batch_size", [1, 2, 3, 16])
def test_features_are_those_of_each_view_alone(batch_size: int) -> None:
    vision, pixels = VisionLayers(model_of(NAME)), store()
    batches: list[int] = []

    def encode(batch: torch.Tensor) -> torch.Tensor:
        batches.append(len(batch))
        return vision(batch)

    features = ViewFeatures(encode, pixels, batch_size, SINGLE_RANK)
    refs = put(pixels, 5)
    views = [ViewToEncode(slot, ref) for slot, ref in zip([3, 0, 7, 1, 4], refs, strict=True)]
    features.encode(views, torch.empty(0, TOKENS, HIDDEN))
    assert len(pixels) == 0
    assert sum(batches) == 5 and max(batches) == min(batch_size, 5)
    alone = [vision(torch.from_numpy(each[None]).permute(0, 3, 1, 2) / 127.5 - 1)[0] for each in levels(5)]
    torch.testing.assert_close(encoded(features, [3, 0, 7, 1, 4]), torch.stack(alone), rtol=1e-4, atol=1e-5)
    for one, other in itertools.combinations(alone, 2):
        assert not torch.allclose(one, other, atol=1e-3)


def test_a_slot_that_is_used_again_has_the_new_view_in_the_same_memory() -> None:
    pixels = store()
    features = ViewFeatures(
        lambda batch: batch.mean((1, 2, 3))[:, None, None].expand(-1, TOKENS, HIDDEN), pixels, 4, SINGLE_RANK
    )
    like = torch.empty(0, TOKENS, HIDDEN)
    refs = put(pixels, 4)
    expected = [float(torch.from_numpy(each).float().mean() / 127.5 - 1) for each in levels(4)]
    features.encode([ViewToEncode(slot, ref) for slot, ref in enumerate(refs[:3])], like)
    held = [each.data_ptr() for each in features._slots.values()]
    assert all(each.untyped_storage().nbytes() == TOKENS * HIDDEN * 4 for each in features._slots.values())
    features.encode([ViewToEncode(1, refs[3])], like)
    assert [each.data_ptr() for each in features._slots.values()] == held
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
