"""Stages of real requests: waiting is in ``queue`` and nowhere else, and together they are the end-to-end time."""

from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.conftest import noise
from tests.engine.driving import SHORT, check_stages
from tests.images.test_pool import slow_pdf

from panscan import GenerateRunner, PanAndScan, Request
from panscan.core import now
from panscan.core.deadline import Deadline
from panscan.engine.engine import Engine
from panscan.engine.options import EngineOptions
from panscan.engine.prepare import _THREADS
from panscan.images import pool


class Watched:
    """An image that notes when it is read, from when to when."""

    def __init__(self, seed: int) -> None:
        self._levels = np.asarray(noise(700, 500, seed))
        self.start = self.end = 0.0

    def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[np.uint8]:
        self.start = now()
        copied = self._levels.copy()
        self.end = now()
        return copied


def test_waiting_for_a_turn_is_queueing(mini: GenerateRunner) -> None:
    """More requests than turns and seats, all accepted at once."""
    images = [Watched(seed) for seed in range(3 * _THREADS)]
    asked = [Request("What is it?", [image], sampling=SHORT, pan_and_scan=PanAndScan(False)) for image in images]
    with Engine(mini.loaded, EngineOptions(kv_cache_gb=0.02, max_num_seqs=2)) as engine:
        results = engine.generate(asked)
    loads = []
    for image, result in zip(images, results, strict=True):
        check_stages(result)
        stamps, stages = result.stamps, result.stamps.stages()
        assert stamps.accepted < stamps.preparing < image.start < image.end < stamps.loaded
        waited = sum(end - start for start, end in stamps.waits if end <= stamps.loaded)  # for a turn
        assert stages["load"] == pytest.approx(stamps.loaded - stamps.preparing - waited)
        assert stages["queue"] is not None and stages["queue"] >= stamps.preparing - stamps.accepted + waited - 1e-6
        loads += [(image.start, 1), (image.end, -1)]
    at_once, most = 0, 0
    for _, change in sorted(loads):
        at_once += change
        most = max(most, at_once)
    assert most <= _THREADS, "a request that loads has a turn"


def test_decoder_waits_are_queueing(tiny: GenerateRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only process is busy with another document."""
    noise(300, 300).save(tmp_path / "page.pdf")
    monkeypatch.setattr(pool, "_DOCUMENTS", pool.DecodingPool(1))
    slow = Deadline()
    request = Request("What?", [tmp_path / "page.pdf"], sampling=SHORT)
    with Engine(tiny.loaded, EngineOptions(kv_cache_gb=0.02)) as engine, ThreadPoolExecutor(2) as threads:
        busy = threads.submit(pool.read_page, BytesIO(slow_pdf()), None, "slow.pdf", deadline=slow)
        while not pool._DOCUMENTS._children:
            pass
        asked = threads.submit(engine.generate, [request])
        while not pool._DOCUMENTS._waiting:
            pass
        freed = now()
        slow.abandon()
        [result] = asked.result(60)
        assert isinstance(busy.exception(60), TimeoutError)
    pool._DOCUMENTS.close()
    check_stages(result)
    stamps, stages = result.stamps, result.stamps.stages()
    [(start, end)] = stamps.waits
    assert start <= end >= freed and stamps.preparing is not None and stamps.loaded is not None
    assert stages["load"] == pytest.approx(stamps.loaded - stamps.preparing - (end - start))
    assert stages["queue"] is not None and stages["queue"] >= end - start
