"""Documents that take long to open delay no picture, and stop with their request."""

from collections.abc import Iterator
from queue import SimpleQueue

import psutil
import pytest
from tests.conftest import noise
from tests.images.test_pool import slow_pdf

from panscan import GenerateRunner, Request, Result, Sampling
from panscan.engine.engine import Engine
from panscan.engine.options import EngineOptions
from panscan.images import pool
from panscan.images.encode import encoded_image

SHORT = Sampling(max_new_tokens=2)


@pytest.fixture
def engine(tiny: GenerateRunner, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    documents = pool.DecodingPool(2, seconds=300.0)
    monkeypatch.setattr(pool, "_DOCUMENTS", documents)
    with Engine(tiny.loaded, EngineOptions(kv_cache_gb=0.02, max_num_seqs=2)) as opened:
        yield opened
    documents.close()


def test_many_slow_documents_delay_no_picture_and_stop_when_cancelled(engine: Engine) -> None:
    """More of them than threads prepare requests, and than requests may be in preparation."""
    slow = slow_pdf()
    ended: SimpleQueue[Result] = SimpleQueue()
    cancels = [
        engine.start(Request("What is it?", [slow], sampling=SHORT, id=f"slow-{number}"), None, ended.put)
        for number in range(40)
    ]
    [result] = engine.generate([Request("What is it?", [encoded_image(noise(60, 40))], sampling=SHORT)], progress=False)
    assert (result.error, result.views) == (None, 1)
    assert ended.empty()
    children = [psutil.Process(child.pid) for child in pool._DOCUMENTS._children]
    for cancel in cancels:
        cancel()
    assert {ended.get(timeout=60).finish_reason for _ in cancels} == {"cancelled"}
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert engine.stats().waiting == 0
