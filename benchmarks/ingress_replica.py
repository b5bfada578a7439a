"""The replica of :mod:`benchmarks.ingress`: a real actor with a stub instead of a model. Ray imports it by name."""

from __future__ import annotations

from typing import Any

from benchmarks.ingress import StubModel
from panscan.serve.replica import EngineReplica
from panscan.settings import Settings


class StubReplica(EngineReplica):
    """A :class:`panscan.serve.replica.EngineReplica` that computes nothing."""

    def _load(self, settings: Settings, replicas: int, threads: int | None) -> None:
        model: Any = StubModel()
        self._model, self._hang_seconds = model, 60.0
