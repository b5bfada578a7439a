"""Runner ``engine``: panscan's own engine, all requests of a cell in flight at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from panscan.core import Request, Result
from panscan.engine.engine import Engine
from panscan.engine.limits import unsupported_reason
from panscan.engine.options import EngineOptions
from panscan.model.checkpoint import Loaded
from panscan.model.machine import release_memory
from panscan.model.observation import ForcedTokens, Observation
from panscan.runners.generate import GenerateRunner
from panscan.settings import Settings

__all__ = ["EngineRunner"]


class EngineRunner(GenerateRunner):
    """Gemma 3 through :class:`panscan.engine.engine.Engine`."""

    def __init__(self, loaded: Loaded, settings: Settings) -> None:
        super().__init__(loaded, settings)
        self._engine: Engine | None = None

    def run(self, batch: Sequence[Request]) -> list[Result]:
        """Answer requests with empty caches: what one measurement computed is no help to the next.

        Raises:
            PanscanError: of the first request that failed, when all have ended.
        """
        self._opened().reset_caches()
        return self._answer(batch)

    def generate(self, requests: Iterable[Request]) -> list[Result]:
        """Answer requests, all of them in flight at once, in their order.

        Raises:
            PanscanError: of the first request that failed, when all have ended.
        """
        return self._answer(list(requests))

    def observe(self, batch: Sequence[Request], scripts: Sequence[ForcedTokens]) -> list[Observation]:
        """Next-token distributions along given tokens, through the engine."""
        return self._opened().observe(batch, scripts)

    @property
    def decisions(self) -> tuple[str, ...]:
        """What the engine chose at its start; nothing before it is needed for the first time."""
        return () if self._engine is None else self._engine.decisions

    def close(self) -> None:
        """Drop the model too."""
        self.drop()
        super().close()

    def _opened(self) -> Engine:
        """The engine of the present settings; its cache is allocated on first need, when truths are computed."""
        options = EngineOptions.of(self.settings)
        # Whether products use TF32 is part of what an engine compiled and recorded.
        kept = self._engine is not None and self._engine.settings.tf32 == self.settings.tf32
        if self._engine is None or not kept or self._engine.options != options:
            self.drop()
            self._engine = Engine(self.loaded, options, self.settings)
        return self._engine

    def _answer(self, requests: Sequence[Request]) -> list[Result]:
        in_flight = self.settings.max_concurrency or max(1, len(requests))
        results = dict(self._opened().stream_results(requests, max_concurrency=in_flight))
        for index in range(len(requests)):
            if (error := results[index].error) is not None:
                raise error
        return [results[index] for index in range(len(requests))]

    def drop(self) -> None:
        """Drop the engine and give its memory back; the model stays, and is as it was loaded."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            release_memory()  # before another cache is sized by what is free

    def _unsupported(self, settings: Settings) -> str | None:
        # The verdict's truth is computed by generate() on this runner's model, with eager attention.
        return unsupported_reason(replace(settings, attention="sdpa") if settings.attention == "eager" else settings)
