"""One pass under way: what was launched, and what it tells when it is done."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any, Self

import torch

from panscan.core import now
from panscan.engine.executor import Pass, Pending
from panscan.engine.readback import mark
from panscan.engine.request_state import RequestState
from panscan.engine.sampling import Draws
from panscan.engine.scheduling.sequence import Sequence, Step

__all__ = ["InFlightPass", "Mark", "Seeing"]


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of a device's work."""

    at: float
    event: Any

    @classmethod
    def set(cls, device: torch.device) -> Self:
        """The moment when all work so far is done; elsewhere than on CUDA, now."""
        if device.type != "cuda":
            return cls(now(), None)
        return cls(now(), mark(device))

    def time(self, done: Any, landed: float) -> float:
        """Seconds of :func:`panscan.core.now`, of a mark before the CUDA event ``done``.

        That is taken to have been reached at ``landed``, when the host saw it: a little later than it was.
        """
        if self.event is None or done is None or self.event.device != done.device:
            return self.at
        return landed - float(self.event.elapsed_time(done)) / 1e3


@dataclass(frozen=True, slots=True)
class Seeing:
    """Views that the pass encodes first: for which requests, and from when to when."""

    states: Rows[RequestState]
    start: Mark
    end: Mark

    def tell(self, done: Any, landed: float) -> None:
        """Stamp the requests that have not ended meanwhile."""
        for state in self.states:
            if state.ended:
                continue
            state.saw(self.start.time(done, landed), self.end.time(done, landed))


@dataclass(frozen=True, slots=True)
class InFlightPass:
    """A launched step.

    Args:
        step: what it computes.
        sampled: the sequences whose next token it gives, in order.
        done: its logits, and hidden states that somebody watches.
        draws: the next token of each of ``sampled``.
        seeing: views that it encoded.
    """

    step: Step
    sampled: Rows[Sequence]
    done: Pass
    draws: Draws
    seeing: Seeing | None

    @property
    def pending(self) -> Pending:
        """Where the next pass finds its tokens."""
        return Pending(self.draws.tokens, {sequence: row for row, sequence in enumerate(self.sampled)})
