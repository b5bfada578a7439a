"""A repeat as batches one after the other: what each did, how long it took, and how much of it throughput counts.

Several replicas start a repeat together but end it one by one. Throughput is what they did while all of them worked:
in the common window, from the latest start to the earliest end. A batch that reaches over the window's edge counts by
the fraction of its time that lies inside.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Batch", "batches_of", "window_seconds"]

_Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of a repeat.

    Args:
        key: (replica, batch) in the records; None where every request of the replica failed.
        requests: that came to their end.
        tokens: of these requests.
        latency: seconds from accepted to the last token of any request; None where tokens were not stamped.
        share: seconds from the end of the batch before to its own; a replica's shares add up to its wall time.
        inside: the fraction of the share that lies in the repeat's window.
        replica: whose batch it is.
        replicas: how many ran this repeat.
    """

    key: tuple[int, int] | None
    requests: int
    tokens: int
    latency: float | None
    share: float
    inside: float = 1.0
    replica: int = 0
    replicas: int = 1

    @property
    def requests_inside(self) -> float:
        return self.requests * self.inside

    @property
    def tokens_inside(self) -> float:
        return self.tokens * self.inside

    @property
    def seconds_inside(self) -> float:
        """Its part of the window: these add up to the window over all batches of all replicas."""
        return self.share * self.inside / self.replicas


def window_seconds(repeat: _Record) -> float:
    """How long a repeat's window is; 0 where a replica ended before another had started."""
    seconds: float = repeat["ended"] - repeat["started"]
    return max(seconds, 0.0) if repeat.get("replicas") else seconds


def batches_of(repeat: _Record, records: Sequence[_Record]) -> list[Batch]:
    """The batches of a ``repeat`` record and its ``request`` records, by when they ended, replica by replica.

    Requests that failed are left out.
    """
    replicas = repeat.get("replicas")
    if not replicas:
        return [batch for _, _, batch in _timed(repeat, records)]
    found = []
    for each in replicas:
        number = each["replica"]
        for at, until, batch in _timed(each, [record for record in records if record.get("replica", 0) == number]):
            inside = _inside(at, until, repeat["started"], repeat["ended"])
            found.append(replace(batch, inside=inside, replica=number, replicas=len(replicas)))
    return found


def _inside(at: float, until: float, opens: float, closes: float) -> float:
    """The fraction of ``[at, until]`` that lies in the window; all or nothing for a batch that took no time."""
    if until <= at:
        return float(opens <= until <= closes)
    return max(0.0, min(until, closes) - max(at, opens)) / (until - at)


def _timed(process: _Record, records: Sequence[_Record]) -> list[tuple[float, float, Batch]]:
    """Each batch of one process that ``started`` and ``ended``, with when the one before it ended and when it did."""
    groups: dict[tuple[int, int], list[_Record]] = defaultdict(list)
    for record in records:
        if record["error"] is None:
            groups[record.get("replica", 0), record["batch"]].append(record)
    ends = []
    for key, group in groups.items():
        seen = all(record["stamps"]["tokens"] for record in group)
        last = max(record["stamps"]["tokens"][-1] for record in group) if seen else process["ended"]
        ends.append((last, seen, key, group))
    at, ended = process["started"], process["ended"]
    if not ends:  # every request failed: the time passed all the same
        return [(at, ended, Batch(None, 0, 0, None, ended - at))]
    ends.sort(key=lambda batch: batch[0])
    found = []
    for index, (last, seen, key, group) in enumerate(ends, 1):
        until = last if index < len(ends) else ended
        latency = last - min(record["stamps"]["accepted"] for record in group) if seen else None
        tokens = sum(record["output_tokens"] for record in group)
        found.append((at, until, Batch(key, len(group), tokens, latency, until - at)))
        at = until
    return found
