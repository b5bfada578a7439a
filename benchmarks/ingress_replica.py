"""The replica of :mod:`benchmarks.ingress`: a real actor with a stub instead of a model."""

from __future__ import annotations

import panscan.serve.loaded_model as loaded_model
from benchmarks.ingress import StubModel
from panscan.serve.replica import CommandContext, EngineReplica
from panscan.settings import Settings


class StubReplica(EngineReplica):
    """A :class:`panscan.serve.replica.EngineReplica` that computes nothing."""

    def __init__(self, settings: Settings, replicas: int, context: CommandContext | None = None) -> None:
        vars(loaded_model)["open_model"] = StubModel
        super().__init__(settings, replicas, context)
