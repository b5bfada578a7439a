"""Runner ``engine``: panscan's own engine, all requests of a cell in flight at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from panscan.core import Request, Result
from panscan.engine.engine import Engine
from panscan.engine.options import EngineOptions
from panscan.engine.ranks import RankGroup
from panscan.model.checkpoint import Loaded, drop_weights
from panscan.model.load import load_for
from panscan.model.machine import release_memory
from panscan.model.observation import ForcedTokens, Observation
from panscan.model.runtime import apply_attention
from panscan.model.sharding import check_divides
from panscan.runners.base import Runner
from panscan.settings import Settings


class EngineRunner(Runner):
    """Gemma 3 through :class:`panscan.engine.engine.Engine`, opened on first use and reopened for other options.

    References are computed on the bare model before the engine opens and its caches take memory. With tensor
    parallelism, the bare model's weights are freed for the ranks when the engine opens; :meth:`drop` loads them again.
    """

    def __init__(self, loaded: Loaded, settings: Settings) -> None:
        self.loaded = loaded
        self.settings = settings
        self._engine: Engine | None = None
        self._ranks: RankGroup | None = None
        self._weights_dropped = False
        if settings.tensor_parallel_size > 1:
            check_divides(loaded.model.config, settings.tensor_parallel_size)

    def configure(self, settings: Settings) -> None:
        """Switch to other settings of the same loaded model."""
        self._check_change(settings)
        if self.loaded.model.config._attn_implementation != settings.attention:
            apply_attention(self.loaded.model, settings.attention)
        self.settings = settings

    def run(self, batch: Sequence[Request]) -> list[Result]:
        """Answer requests with empty caches, so that measurements do not affect each other.

        Raises:
            PanscanError: the error of the first request that failed, after all have ended.
        """
        self.engine.reset_caches()
        return self.answer(batch)

    def answer(self, requests: Sequence[Request]) -> list[Result]:
        """Answer requests without emptying the caches.

        Raises:
            PanscanError: the error of the first request that failed, after all have ended.
        """
        in_flight = self.settings.max_concurrency or max(1, len(requests))
        results = dict(self.engine.stream_results(requests, max_concurrency=in_flight))
        for index in range(len(requests)):
            if (error := results[index].error) is not None:
                raise error
        return [results[index] for index in range(len(requests))]

    def observe(self, batch: Sequence[Request], forced: Sequence[ForcedTokens]) -> list[Observation]:
        """Return next-token distributions along forced tokens, computed by the engine."""
        return self.engine.observe(batch, forced)

    @property
    def engine(self) -> Engine:
        """The engine for the current settings; reopened if its options change."""
        options = EngineOptions.of(self.settings)
        failed = self._ranks is not None and self._ranks.failed
        if self._engine is not None and not failed and self._engine.options == options:
            return self._engine
        self._close_engine()
        if self.settings.tensor_parallel_size > 1 and (self._ranks is None or failed):
            self._close_ranks()
            if not self._weights_dropped:
                drop_weights(self.loaded)
                self._weights_dropped = True
                release_memory()
            self._ranks = RankGroup(self.settings)
        self._engine = Engine(self.loaded, options, self.settings, ranks=self._ranks)
        return self._engine

    def reset_peak_memory(self) -> None:
        """Reset the peaks of this process and its ranks. Opens the engine, so that its startup is not measured."""
        self.engine  # noqa: B018 - opened on first use
        super().reset_peak_memory()
        if self._ranks is not None and not self._ranks.failed:
            self._ranks.peak_memory()

    def peak_memory(self) -> dict[str, Any]:
        """Return peak bytes since :meth:`reset_peak_memory`, summed over this process and its ranks, which start new
        peaks.

        Processes may peak at different times, so the sum is an upper bound. See
        :func:`panscan.model.machine.peak_memory`.
        """
        peaks: list[dict[str, Any]] = [super().peak_memory()]
        if self._ranks is not None and not self._ranks.failed:
            peaks += self._ranks.peak_memory()
        known = {name: [peak[name] for peak in peaks if peak[name] is not None] for name in peaks[0]}
        return {name: sum(values) if values else None for name, values in known.items()}

    def drop(self) -> None:
        """Close the engine and free its memory; restore the loaded model."""
        self._close_engine()
        self._close_ranks()
        if self._weights_dropped:
            self.loaded.model = load_for(self.settings).model
            apply_attention(self.loaded.model, self.settings.attention)
            self._weights_dropped = False

    def close(self) -> None:
        """Close the engine and free the model."""
        self._weights_dropped = False  # nothing to restore
        super().close()

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            release_memory()  # before the next engine sizes its cache by free memory

    def _close_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
