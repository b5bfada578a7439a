"""The replica of :mod:`benchmarks.ingress`: a real actor with a stub instead of a model."""

from __future__ import annotations

import panscan.serve.replica as replica
from benchmarks.ingress import StubModel
from panscan.settings import Settings


class StubReplica(replica.DeployedReplica):
    """A :class:`panscan.serve.replica.DeployedReplica` that computes nothing."""

    def __init__(self, settings: Settings, replicas: int) -> None:
        vars(replica)["open_model"] = StubModel
        super().__init__(settings, replicas)
