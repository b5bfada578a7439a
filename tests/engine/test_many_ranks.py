"""Tensor parallelism over four and eight ranks: threads of this process compute the tokens of one rank."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from benchmarks.tensor_parallel import SHAPE, random_questions
from tests.engine.driving import Driver
from tests.model.test_sharding import ThreadRanks, Threads, shard

from panscan import GenerateRunner
from panscan.engine.model_runner import ModelRunner
from panscan.engine.options import EngineOptions
from panscan.engine.passes import PassResult
from panscan.engine.scheduling.batch import FlatBatch
from panscan.model.checkpoint import Loaded, load_random, ready_model
from panscan.settings import Settings

OPTIONS = EngineOptions(kv_cache_gb=0.01, max_num_seqs=40, prefill_chunk_size=600)
QUESTIONS = 16


@cache
def whole_model() -> GenerateRunner:
    loaded = load_random("t", SHAPE, torch.float32, torch.device("cpu"))
    return GenerateRunner(loaded, Settings(model="tiny", device="cpu", dtype="fp32"))


def part_of(loaded: Loaded, rank: int, size: int) -> Loaded:
    model = shard(loaded.model, rank, size)
    model.generation_config = loaded.model.generation_config
    return replace(ready_model(model, loaded.reader), vocab_size=SHAPE.text.vocabulary)


class ThreadGroup:
    """Model runners of all ranks behind the interface of :class:`panscan.engine.ranks.RankGroup`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pool = ThreadPoolExecutor(size)
        self._shards = [part_of(whole_model().loaded, rank, size) for rank in range(size)]

    def _on_all(self, call: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
        return list(self._pool.map(torch.no_grad()(call), values))

    def start(self, options: EngineOptions) -> Any:
        threads = Threads(self._size)
        ranks: list[Any] = [ThreadRanks(rank, self._size, threads) for rank in range(self._size)]
        self.runners = self._on_all(lambda each: ModelRunner(self._shards[each.rank], options, each), ranks)
        self.facts, self.pixels = self.runners[0].facts, self
        return self

    def execute(self, batch: FlatBatch) -> Callable[[], PassResult]:
        waits = self._on_all(lambda runner: runner.execute(batch), self.runners)
        return lambda: self._on_all(lambda wait: wait(), waits)[0]

    def put(self, levels: Any, views: Mapping[int, Any]) -> None:
        for handle, view in views.items():
            self.runners[handle % self._size].pixels.put(levels, {handle: view})

    def forget(self, handles: Iterable[int]) -> None:
        for handle in handles:
            self.runners[handle % self._size].pixels.forget([handle])

    def close(self) -> None:
        self._pool.shutdown()


def tokens_of(ranks: Any = None) -> list[list[int]]:
    driver = Driver(whole_model(), OPTIONS, ranks)
    answers = [driver.add(request) for request in random_questions(QUESTIONS, tokens=4)]
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
    assert len(set(map(tuple, tokens_of_one_rank()))) == QUESTIONS  # they depend on the question
