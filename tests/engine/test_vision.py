"""The vision cache against a model of it, and what identifies a view."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from panscan.engine.vision import VisionCache, view_key
from panscan.images.pixels import PixelSpec

KEYS = st.sampled_from([bytes([value]) for value in range(12)])
SLOTS = 5


class CacheMachine(RuleBasedStateMachine):
    """The cache against a list. ``order``: keys from the least to the most recently used; ``slots``: theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = VisionCache(SLOTS)
        self.order: list[bytes] = []
        self.slots: dict[bytes, int] = {}

    @rule(keys=st.lists(KEYS, max_size=SLOTS, unique=True))
    def compute(self, keys: list[bytes]) -> None:
        """A pass: no view that it needs is dropped for another one."""
        known = [key for key in keys if key in self.slots]
        assert {key: slot for key in keys if (slot := self.cache.use(key)) is not None} == {
            key: self.slots[key] for key in known
        }
        for key in known:
            self.order.remove(key)
            self.order.append(key)
        for key in keys:
            if key not in known:
                if len(self.order) == SLOTS:
                    assert self.order[0] not in keys
                    self._drop(self.order[0])
                self.slots[key] = self.cache.add(key)
                self.order.append(key)

    @rule(keys=st.lists(KEYS, max_size=3))
    def forget(self, keys: list[bytes]) -> None:
        self.cache.forget(keys)
        for key in {*keys} & self.slots.keys():
            self._drop(key)

    @precondition(lambda self: len(self.order) > 3)
    @rule()
    def clear(self) -> None:
        self.cache.clear()
        for key in {*self.order}:
            self._drop(key)

    @invariant()
    def holds_what_the_model_says(self) -> None:
        assert {key for key in (bytes([value]) for value in range(12)) if self.cache.holds(key)} == {*self.order}
        assert len(self.cache) == len(self.order) <= SLOTS
        assert len({*self.slots.values()}) == len(self.slots), "one view per slot"
        assert {*self.slots.values()} <= {*range(SLOTS)}

    def _drop(self, key: bytes) -> None:
        self.order.remove(key)
        del self.slots[key]


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=40, stateful_step_count=30)


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
