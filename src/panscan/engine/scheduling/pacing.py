"""Pacing of prefill: limits the prefill in a pass with decoding requests, given a target for their TPOT.

A pass delivers the tokens of decoding requests when all of it is computed, so views and prompts in the same pass delay
them. A :class:`Pacer` learns from finished passes what decoding, prompt tokens and views cost on this device, and
limits the prefill of the next pass to the time that the decoding requests have left. It has no clock and no tensors:
the engine and its simulation in ``panscan plan`` share it.
"""

from __future__ import annotations

import statistics
from collections import abc, deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from panscan.engine.scheduling.batch import PromptLayout, Sequence, Step

_MARGIN = 0.95  # share of the target to aim at, because passes differ from their prediction
_WINDOW = 8  # tokens that TPOT is averaged over
_PATIENCE = 1.5  # seconds that a prompt may wait before the target is raised
_LEAST_CHUNK = 288  # prompt tokens: an image span of Gemma 3 and the text around it
_SAMPLES = 9  # finished passes that a cost is the median of
_FEWEST_SAMPLES = 3  # before a cost is used: a single pass may have compiled kernels
_LEAST_ROWS = 64  # fewer prompt tokens say little about the cost of one


@dataclass(frozen=True, slots=True)
class PrefillLimit:
    """The device time that the prefill of one pass may take.

    Args:
        seconds: time left for prefill; negative if decoding alone is too slow.
        row_seconds: cost of one prompt token; above 0.
        view_seconds: cost of encoding one view.
    """

    seconds: float
    row_seconds: float
    view_seconds: float

    def cost(self, layout: PromptLayout, start: int, end: int) -> float:
        """Return the predicted seconds of the chunk ``[start, end)``, with every image span as a view to encode."""
        return (end - start) * self.row_seconds + len(layout.within(start, end)) * self.view_seconds

    def reach(self, layout: PromptLayout, start: int, end: int) -> int:
        """Return the end of the longest chunk that fits in the time and cuts no image span; ``start`` if none does.

        Args:
            layout: image spans of the prompt.
            start: start of the chunk, not inside an image span.
            end: largest possible end, not inside an image span.
        """
        left, at = self.seconds, start
        for span in layout.within(start, end):
            text = self._rows(left, span.start - at)
            if at + text < span.start:
                return at + text
            left -= self.cost(layout, at, span.end)
            if left < 0:
                return span.start
            at = span.end
        return at + self._rows(left, end - at)

    def _rows(self, seconds: float, most: int) -> int:
        return max(0, min(most, int(seconds / self.row_seconds)))


@dataclass(frozen=True, slots=True)
class PassSize:
    """The work of a launched pass.

    Args:
        launched: time of the launch, in seconds.
        prefill_rows: prompt tokens.
        views: views to encode.
    """

    launched: float
    prefill_rows: int
    views: int

    @classmethod
    def of(cls, step: Step[Sequence], views: int, launched: float) -> PassSize:
        """Return the size of a step."""
        rows = sum(chunk.end - chunk.start for chunk in step if not chunk.sequence.decodes)
        return cls(launched, rows, views)


class Pacer:
    """Limits prefill so that each decoding request keeps a TPOT, averaged over 8 tokens.

    Passes stay close to the target in length: small chunks in every pass cost less than large ones in a few, because
    decoding reads all weights in any case. A view may take longer than one pass has, if earlier ones left time for it.

    While the oldest prompt waits for more than 1.5 seconds, the target rises in proportion to its wait. Under overload,
    prefill therefore gets its share, and a large backlog is computed at full throughput.

    Args:
        target: seconds per output token.
    """

    def __init__(self, target: float) -> None:
        self._target = _MARGIN * target
        self._decode, self._row, self._view = _Cost(), _Cost(), _Cost()  # seconds of a pass, a prompt token, a view
        self._finished_at = -inf

    def limit(
        self, now: float, inflight: PassSize | None, requests: Iterable[tuple[Sequence, float, abc.Sequence[float]]]
    ) -> PrefillLimit | None:
        """Return the limit of the next pass; None if no request decodes or the costs are not known yet.

        Args:
            now: current time, in seconds.
            inflight: the launched pass that has not finished; None: there is none.
            requests: queued and running requests: sequence, time of acceptance, and times of the delivered tokens.
        """
        if not (self._decode.known and self._row.known):
            return None
        start = now
        if inflight is not None:
            prefill = inflight.prefill_rows * self._row.seconds + inflight.views * self._view.seconds
            start = max(now, self._started(inflight) + self._decode.seconds + prefill)
        earliest, oldest = inf, now
        for sequence, accepted, tokens in requests:
            if sequence.full:
                continue
            if sequence.decodes:
                first = max(0, len(tokens) + sequence.pending - _WINDOW)
                earliest = min(earliest, tokens[first] if first < len(tokens) else start)
            else:
                oldest = min(oldest, tokens[-1] if tokens else accepted)
        if earliest == inf:
            return None
        target = self._target * max(1.0, (now - oldest) / _PATIENCE)
        decode, row, view = self._decode.seconds, self._row.seconds, self._view.seconds
        if decode >= self._target:  # decoding alone misses the target: delaying prompts would not help
            return None
        ahead = earliest + _WINDOW * target - start - decode
        steady = max(target - decode, _LEAST_CHUNK * row + view)
        return PrefillLimit(min(ahead, steady), row, view)

    def pass_finished(self, size: PassSize, at: float, vision: float) -> None:
        """Learn from a finished pass.

        Args:
            size: work of the pass.
            at: time at which its tokens reached the host, in seconds.
            vision: seconds of it that encoded views.
        """
        seconds = at - self._started(size)
        self._finished_at = at
        if size.views:
            self._view.add(vision / size.views)
        if not size.prefill_rows:
            self._decode.add(seconds)
        elif self._decode.known and size.prefill_rows >= _LEAST_ROWS:
            rest = seconds - vision - self._decode.seconds
            self._row.add(max(rest / size.prefill_rows, 1e-9))

    def _started(self, size: PassSize) -> float:
        """Return when the device began a pass: passes run one after the other."""
        return max(size.launched, self._finished_at)


class _Cost:
    """The median of the last few measurements, in seconds; 0 before the first. One slow pass does not change it."""

    def __init__(self) -> None:
        self._samples = deque[float](maxlen=_SAMPLES)
        self.seconds = 0.0

    @property
    def known(self) -> bool:
        return len(self._samples) >= _FEWEST_SAMPLES

    def add(self, seconds: float) -> None:
        self._samples.append(seconds)
        self.seconds = statistics.median(self._samples)
