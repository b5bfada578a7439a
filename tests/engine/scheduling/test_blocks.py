"""The pool of blocks after any history, against a model that is slow and plain."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from panscan.engine.scheduling.kv_blocks import BlockPool

NAMES = st.sampled_from([bytes([value]) for value in range(6)])


class PoolHistory(RuleBasedStateMachine):
    """Holders as a list of takings, names as written on the blocks, evictable blocks in the order of release."""

    @initialize(count=st.integers(0, 5))
    def build(self, count: int) -> None:
        self.pool = BlockPool(count)
        self.count = count
        self.taken: list[int] = []
        self.names: dict[int, bytes] = {}
        self.evictable: list[int] = []

    @rule(count=st.integers(-1, 6))
    def allocate(self, count: int) -> None:
        free = set(range(self.count)) - set(self.taken) - set(self.evictable)
        if not 0 <= count <= len(free) + len(self.evictable):
            with pytest.raises(RuntimeError, match="asked for"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        evicted = max(0, count - len(free))
        assert sorted(blocks[: count - evicted]) == sorted(set(blocks) & free)
        assert blocks[count - evicted :] == self.evictable[:evicted]
        for block in self.evictable[:evicted]:
            del self.names[block]
        del self.evictable[:evicted]
        self.taken += blocks

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.taken), unique=True)) if self.taken else []
        self.pool.release(blocks)
        for block in blocks:
            self.taken.remove(block)
            if block not in self.taken and block in self.names:
                self.evictable.append(block)

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), name=NAMES)
    def register(self, data: st.DataObject, name: bytes) -> None:
        block = data.draw(st.sampled_from(self.taken))
        if self.names.get(block, name) != name:
            with pytest.raises(RuntimeError, match="another hash"):
                self.pool.register([block], [name])
            return
        self.pool.register([block], [name])
        if name not in self.names.values():
            self.names[block] = name

    @rule(names=st.lists(NAMES, unique=True))
    def find_and_share(self, names: list[bytes]) -> None:
        blocks = self.pool.find_all(names)
        self.pool.share(blocks)
        self.taken += blocks
        self.evictable = [other for other in self.evictable if other not in blocks]

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        for block in self.evictable:
            del self.names[block]
        self.evictable = []

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(0, self.count - 1))
        if block in self.taken:
            return
        with pytest.raises(RuntimeError, match="released more often"):
            self.pool.release([block])
        with pytest.raises(RuntimeError, match="not held"):
            self.pool.register([block], [b"new"])
        if block not in self.evictable:
            with pytest.raises(RuntimeError, match="free"):
                self.pool.share([block])

    @invariant()
    def pool_and_model_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        held = set(self.taken)
        assert all(self.pool.held_count([block]) == (block in held) for block in range(self.count))
        assert (self.pool.used, self.pool.available) == (len(held), self.count - len(held))
        assert self.pool.held_count(range(self.count)) == len(held)
        hashes = [bytes([value]) for value in range(6)]
        each = [self.pool.find(content_hash) for content_hash in hashes]
        assert self.pool.find_all(hashes) == [block for block in each if block is not None]
        assert self.pool.leading(hashes) == (each.index(None) if None in each else len(each))
        found = {self.pool.find(bytes([value])): bytes([value]) for value in range(6)}
        found.pop(None, None)
        assert found == self.names


TestPoolHistory = PoolHistory.TestCase
TestPoolHistory.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
