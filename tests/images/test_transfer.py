"""Copies of host arrays to a device."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from panscan.images.transfer import upload

SHAPES = [(), (0, 3), (3, 1_000_000), (1_000_003,), (5, 400_000), (900, 900, 4)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_several_threads_upload_at_once_and_reuse_their_arrays(device: str) -> None:
    def uploaded(seed: int) -> bool:
        array = np.random.default_rng(seed).integers(0, 256, SHAPES[seed % len(SHAPES)], np.uint8)
        array = np.asarray(array, np.uint8)
        found, before = upload(array, torch.device(device)), array.copy()
        array[...] = 0
        return np.array_equal(found.cpu().numpy(), before)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(uploaded, range(24)))
