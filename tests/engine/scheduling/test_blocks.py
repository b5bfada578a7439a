"""The pool of slabs after any history, against a model that is slow and plain."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from panscan.engine.scheduling.kv_blocks import BlockIndex, SlabPool

NAMES = st.sampled_from([bytes([value]) for value in range(6)])


class PoolHistory(RuleBasedStateMachine):
    """Holders as a list of takings of blocks, names as written on blocks, evictable slabs in the order of release."""

    @initialize(count=st.integers(0, 5))
    def build(self, count: int) -> None:
        self.pool = SlabPool(count)
        self.count = count
        self.taken: list[int] = []
        self.index = BlockIndex(offset * self.pool.lane for offset in range(3))
        self.names: dict[bytes, int] = {}
        self.evictable: list[int] = []

    def slab(self, block: int) -> int:
        return block % self.pool.lane

    @property
    def held(self) -> set[int]:
        return {self.slab(block) for block in self.taken}

    def named(self, slab: int) -> bool:
        return any(self.slab(block) == slab for block in self.names.values())

    @rule(count=st.integers(-1, 6))
    def allocate(self, count: int) -> None:
        free = set(range(self.count)) - self.held - set(self.evictable)
        if not 0 <= count <= len(free) + len(self.evictable):
            with pytest.raises(RuntimeError, match="asked for"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        slabs = [self.slab(block) for block in blocks]
        evicted = max(0, count - len(free))
        assert sorted(slabs[: count - evicted]) == sorted(set(slabs) & free)
        assert slabs[count - evicted :] == self.evictable[:evicted]
        self.evict(self.evictable[:evicted])
        self.taken += blocks

    def evict(self, slabs: list[int]) -> None:
        self.names = {name: block for name, block in self.names.items() if self.slab(block) not in slabs}
        self.evictable = [slab for slab in self.evictable if slab not in slabs]

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.taken), unique=True))
        self.pool.release(blocks)
        for block in blocks:
            self.taken.remove(block)
            if self.slab(block) not in self.held and self.named(self.slab(block)):
                self.evictable.append(self.slab(block))

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), offset=st.integers(0, 2))
    def take_another_block_of_a_slab(self, data: st.DataObject, offset: int) -> None:
        block = self.slab(data.draw(st.sampled_from(self.taken))) + offset * self.pool.lane
        self.pool.share([block])
        self.taken.append(block)

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), name=NAMES)
    def register(self, data: st.DataObject, name: bytes) -> None:
        block = data.draw(st.sampled_from(self.taken))
        if block in self.names.values() and self.names.get(name) != block:
            with pytest.raises(RuntimeError, match="another hash"):
                self.pool.register(self.index, [block], [name])
            return
        self.pool.register(self.index, [block], [name])
        self.names.setdefault(name, block)

    @rule(names=st.lists(NAMES, unique=True))
    def find_and_share(self, names: list[bytes]) -> None:
        blocks = [self.index[name] for name in names if name in self.index]
        assert self.pool.unheld(blocks) == len({*map(self.slab, blocks)} - self.held)
        self.pool.share(blocks)
        self.taken += blocks
        self.evictable = [slab for slab in self.evictable if slab not in self.held]

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.evict(list(self.evictable))

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(0, self.count - 1)) + self.pool.lane
        if self.slab(block) in self.held:
            return
        with pytest.raises(RuntimeError, match="released more often"):
            self.pool.release([block])
        with pytest.raises(RuntimeError, match="not held"):
            self.pool.register(self.index, [block], [b"new"])
        if self.slab(block) not in self.evictable:
            with pytest.raises(RuntimeError, match="free"):
                self.pool.share([block])

    @invariant()
    def pool_and_model_agree(self) -> None:
        if hasattr(self, "pool"):
            assert (self.pool.used, self.pool.available) == (len(self.held), self.count - len(self.held))
            assert self.index == self.names and {*self.index.hashes} == {*self.names.values()}


TestPoolHistory = PoolHistory.TestCase
TestPoolHistory.settings = settings(max_examples=100, stateful_step_count=40)
