"""Runner ``engine``: panscan's own engine, all requests of a cell in flight at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from panscan.core import Request, Result
from panscan.engine.engine import Engine
from panscan.engine.options import EngineOptions
from panscan.engine.ranks import RankGroup
from panscan.model.checkpoint import Loaded, drop_weights
from panscan.model.load import load_for
from panscan.model.machine import peak_memory, release_memory, reset_peak_memory
from panscan.model.observation import ForcedTokens, Observation
from panscan.model.runtime import apply_attention, apply_tf32
from panscan.model.sharding import check_divides
from panscan.runners.base import check_change
from panscan.settings import Settings

__all__ = ["EngineRunner"]


class EngineRunner:
    """Gemma 3 through :class:`panscan.engine.engine.Engine`, opened on first use and reopened for other sizes.

    Truths are computed on the bare model before that, while the engine's caches do not take memory yet. With a tensor
    parallel size, the bare model makes room for the ranks when the engine opens, and is loaded again by :meth:`drop`.
    """

    def __init__(self, loaded: Loaded, settings: Settings) -> None:
        self.loaded = loaded
        self.settings = settings
        self._engine: Engine | None = None
        self._ranks: RankGroup | None = None
        self._ranks_tf32 = settings.tf32
        self._weights_dropped = False
        if settings.tensor_parallel_size > 1:
            check_divides(loaded.model.config, settings.tensor_parallel_size)

    def configure(self, settings: Settings) -> None:
        """Take other settings of the same load."""
        check_change(self.settings, settings)
        if self.loaded.model.config._attn_implementation != settings.attention:
            apply_attention(self.loaded.model, settings.attention)
        apply_tf32(settings.tf32)
        self.settings = settings

    def run(self, batch: Sequence[Request]) -> list[Result]:
        """Answer requests with empty caches: what one measurement computed is no help to the next.

        Raises:
            PanscanError: of the first request that failed, when all have ended.
        """
        self.engine.reset_caches()
        return self.answer(batch)

    def answer(self, requests: Sequence[Request]) -> list[Result]:
        """Answer requests with whatever the caches hold.

        Raises:
            PanscanError: of the first request that failed, when all have ended.
        """
        in_flight = self.settings.max_concurrency or max(1, len(requests))
        results = dict(self.engine.stream_results(requests, max_concurrency=in_flight))
        for index in range(len(requests)):
            if (error := results[index].error) is not None:
                raise error
        return [results[index] for index in range(len(requests))]

    def pixels(self, settings: Settings) -> str:
        """Which rounding the pixels have under these settings: ``cpu`` or ``device``, as in ``--preprocess``."""
        return settings.preprocess

    def observe(self, batch: Sequence[Request], forced: Sequence[ForcedTokens]) -> list[Observation]:
        """Next-token distributions along given tokens, through the engine."""
        return self.engine.observe(batch, forced)

    @property
    def engine(self) -> Engine:
        """The engine of the present settings; reopened where its options or its precision of products change."""
        options = EngineOptions.of(self.settings)
        # Whether products use TF32 is part of what an engine recorded.
        kept = self._engine is not None and self._engine.settings.tf32 == self.settings.tf32
        failed = self._ranks is not None and self._ranks.failed
        if self._engine is None or not kept or failed or self._engine.options != options:
            self._close_engine()
            self._engine = Engine(self.loaded, options, self.settings, ranks=self._ranks_of(self.settings))
        return self._engine

    def reset_peak_memory(self) -> None:
        """Start new peaks, here and on the ranks. Opens the engine, so that its startup is not measured."""
        self.engine  # noqa: B018 - opened on first use
        reset_peak_memory()
        if self._ranks is not None and not self._ranks.failed:
            self._ranks.peak_memory(reset=True)

    def peak_memory(self) -> dict[str, int | None]:
        """Return peak bytes since :meth:`reset_peak_memory`, summed over this process and its ranks.

        Processes may peak at different times, so the sum is an upper bound. See
        :func:`panscan.model.machine.peak_memory`.
        """
        found = [peak_memory()]
        if self._ranks is not None and not self._ranks.failed:
            found += self._ranks.peak_memory()
        return {name: _total(each[name] for each in found) for name in found[0]}

    def drop(self) -> None:
        """Drop the engine and give its memory back; the model is as it was loaded."""
        self._close_engine()
        self._close_ranks()
        if self._weights_dropped:
            self.loaded.model = load_for(self.settings).model
            apply_attention(self.loaded.model, self.settings.attention)
            self._weights_dropped = False

    def close(self) -> None:
        """Drop the engine and the model."""
        self._close_engine()
        self._close_ranks()
        del self.loaded
        release_memory()

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            release_memory()  # before another cache is sized by what is free

    def _ranks_of(self, settings: Settings) -> RankGroup | None:
        """Return the rank processes, restarted if they have failed or TF32 changed; None without tensor parallelism."""
        if settings.tensor_parallel_size == 1:
            return None
        if self._ranks is None or self._ranks.failed or self._ranks_tf32 != settings.tf32:
            self._close_ranks()
            if not self._weights_dropped:
                drop_weights(self.loaded)
                self._weights_dropped = True
                release_memory()
            self._ranks, self._ranks_tf32 = RankGroup(settings), settings.tf32
        return self._ranks

    def _close_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


def _total(values: Iterable[int | None]) -> int | None:
    """Return the sum of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
