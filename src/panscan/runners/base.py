"""The one interface over the ways to run requests, and how requests are cut into its calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from panscan.core import Request, Result, SettingError
from panscan.settings import ALL_AT_ONCE, Settings

if TYPE_CHECKING:
    from panscan.model.checkpoint import Loaded
    from panscan.model.observation import ForcedTokens, Observation

__all__ = ["Runner", "TracksPeakMemory", "batches", "calls", "check_change"]


class Runner(Protocol):
    """A loaded model that answers requests. Settings of level "call" may change between batches."""

    settings: Settings
    loaded: Loaded

    def configure(self, settings: Settings) -> None:
        """Take other settings of the same load. Raises SettingError or UnsupportedError."""
        ...

    def run(self, batch: Sequence[Request]) -> list[Result]:
        """Answer one batch; the requests' own pan-and-scan and sampling settings count."""
        ...

    def pixels(self, settings: Settings) -> str:
        """Which rounding the pixels of views have under these settings: that of ``--preprocess cpu`` or ``device``."""
        ...

    def observe(self, batch: Sequence[Request], forced: Sequence[ForcedTokens]) -> list[Observation]:
        """Next-token distributions of one batch along given tokens, through its own path.

        Raises UnsupportedError where there is no way to look in.
        """
        ...

    def drop(self) -> None:
        """Give back the memory of everything but the loaded model; the next call builds it again."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


@runtime_checkable
class TracksPeakMemory(Protocol):
    """A runner whose model may run in other processes, and which measures their peak memory."""

    def reset_peak_memory(self) -> None:
        """Start new peaks."""
        ...

    def peak_memory(self) -> dict[str, int | None]:
        """Return peaks since the last reset (see :func:`panscan.model.machine.peak_memory`)."""
        ...


def check_change(loaded: Settings, wanted: Settings) -> None:
    """Refuse settings that a runner cannot switch to without loading other weights.

    Args:
        loaded: the runner's present settings.
        wanted: those that it should take.

    Raises:
        SettingError: they need other weights.
        UnsupportedError: they cannot run here.
    """
    from panscan.model.support import require_supported

    if wanted.load_key != loaded.load_key:
        raise SettingError("other weights need another runner")
    if wanted != loaded:  # the loaded ones were asked before loading
        require_supported(wanted)


def calls(views: Sequence[int], settings: Settings) -> list[list[int]]:
    """Indices of the requests of each ``run`` call: engines take all at once, other runners batch by batch.

    Args:
        views: view count of each request.
        settings: runner, batch size and so on.
    """
    size = len(views) if settings.runner in ALL_AT_ONCE else settings.batch_size
    return batches(views, size, equal_views=settings.equal_views)


def batches(views: Sequence[int], batch_size: int, *, equal_views: bool) -> list[list[int]]:
    """Indices of requests, batch by batch.

    Args:
        views: view count of each request.
        batch_size: requests in a batch at most.
        equal_views: only requests with equal view counts share a batch, so that none is padded for another's crops;
            batches then come in the order of their first request.
    """
    return list(_batches(views, batch_size, equal_views=equal_views))


def _batches(views: Sequence[int], batch_size: int, *, equal_views: bool) -> Iterator[list[int]]:
    groups: dict[int, list[int]] = {}
    for index, count in enumerate(views):
        groups.setdefault(count if equal_views else 0, []).append(index)
    cut = [group[at : at + batch_size] for group in groups.values() for at in range(0, len(group), batch_size)]
    yield from sorted(cut, key=lambda batch: batch[0])
