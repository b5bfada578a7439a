"""Tensor parallelism over four and eight ranks: threads of this process compute the tokens of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import count
from random import Random
from typing import Any

import pytest
import torch
from tests.conftest import noise
from tests.engine.driving import Driver, crops
from tests.model.test_sharding import ThreadRanks, Threads

from panscan import GenerateRunner, Request, Sampling
from panscan.engine.model_runner import ModelRunner
from panscan.engine.options import EngineOptions
from panscan.engine.passes import PassResult
from panscan.engine.scheduling.batch import FlatBatch
from panscan.model.checkpoint import load_random
from panscan.model.shapes import SHAPES, Shape, VisionShape
from panscan.settings import Settings

SIDE = 48  # pixels of a view
TEXT = replace(
    SHAPES["tiny"].text, vocabulary=1028, hidden=64, intermediate=96, layers=2, heads=16, kv_heads=8, head_size=16
)  # 8 does not divide the vocabulary
SHAPE = Shape(
    "t", replace(TEXT, pattern=2, window=40), VisionShape(16, 24, 1, 2, image_size=SIDE, patch_size=4), image_tokens=16
)
OPTIONS = EngineOptions(kv_cache_gb=0.01, max_num_seqs=40, prefill_chunk_size=600)
QUESTIONS = 16


class ThreadGroup:
    """Model runners of all ranks behind the interface of :class:`panscan.engine.ranks.RankGroup`."""

    def __init__(self, size: int) -> None:
        self._size, self._handles = size, count()
        self._pool = ThreadPoolExecutor(size)
        self._shards = [
            load_random("t", SHAPE, torch.float32, torch.device("cpu"), rank=rank, size=size) for rank in range(size)
        ]

    def _on_all(self, call: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
        return list(self._pool.map(torch.no_grad()(call), values))

    def start(self, options: EngineOptions) -> ThreadGroup:
        threads = Threads(self._size)
        ranks: list[Any] = [ThreadRanks(rank, self._size, threads) for rank in range(self._size)]
        self.runners = self._on_all(
            lambda each: ModelRunner(self._shards[each.rank], options, each, TEXT.vocabulary), ranks
        )
        self.facts, self.pixels = self.runners[0].facts, self
        return self

    def execute(self, batch: FlatBatch) -> Callable[[], PassResult]:
        waits = self._on_all(lambda runner: runner.execute(batch), self.runners)
        return lambda: self._on_all(lambda wait: wait(), waits)[0]

    def put(self, levels: Any, views: Sequence[Any]) -> list[int]:
        handles = [next(self._handles) for _ in views]
        for handle, view in zip(handles, views, strict=True):
            self.runners[handle % self._size].pixels.put(levels, [view], [handle])
        return handles

    def forget(self, handles: Iterable[int]) -> None:
        for handle in handles:
            self.runners[handle % self._size].pixels.forget([handle])

    def close(self) -> None:
        self._pool.shutdown()


@cache
def whole_model() -> GenerateRunner:
    loaded = load_random("t", SHAPE, torch.float32, torch.device("cpu"))
    return GenerateRunner(loaded, Settings(model="tiny", device="cpu", dtype="fp32"))


@cache
def questions() -> tuple[Request, ...]:
    """Random words of any length, a third of them about a page; some sampled."""
    draw = Random(0)
    words = ["total", "date", "page", "sum", "tax", "who", "when", "what", "is", "the", "of", "line"]
    asked = []
    for number in range(QUESTIONS):
        text = " ".join(draw.choices(words, k=draw.randint(1, 40)))
        images = [noise(draw.randint(20, 150), draw.randint(20, 150), number)] if number % 3 == 0 else []
        sampling = Sampling(4, temperature=draw.choice((0.0, 0.0, 0.9)), seed=number, ignore_eos=True)
        asked.append(Request(text, images, pan_and_scan=crops(2), sampling=sampling, id=str(number)))
    return tuple(asked)


def tokens_of(ranks: Any = None) -> list[list[int]]:
    driver = Driver(whole_model(), OPTIONS, ranks)
    answers = [driver.add(request) for request in questions()]
    driver.run()
    assert [answer.results[0].error for answer in answers] == [None] * QUESTIONS
    return [answer.tokens for answer in answers]


@cache
def tokens_of_one_rank() -> list[list[int]]:
    return tokens_of()


@pytest.mark.parametrize("size", [4, 8])
def test_tokens_are_those_of_one_rank(size: int) -> None:
    group = ThreadGroup(size)
    assert tokens_of(group) == tokens_of_one_rank()
    group.close()
    assert len({tuple(tokens) for tokens in tokens_of_one_rank()}) > QUESTIONS // 2  # they depend on the question
