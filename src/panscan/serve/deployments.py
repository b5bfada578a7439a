"""The server as Ray Serve deployments: one HTTP ingress in front of engine replicas."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from typing import Any

from panscan.core import PanscanError, SettingError
from panscan.core.ranges import Range
from panscan.images.pool import decode_in_children
from panscan.serve.backend import ServeBackend
from panscan.serve.options import ServeOptions
from panscan.serve.replica import DeployedReplica

__all__ = ["APP", "Ingress", "Scale", "application"]

log = logging.getLogger("panscan.serve")

APP = "panscan"
"""Name of the application on a Ray cluster."""

CreateApp = Callable[[ServeOptions, ServeBackend], Any]

_RETRY_SECONDS = 2.0  # between attempts to reach the first replica
_REPLICAS = Range(integer=True, ge=1, le=1024)
_HTTP_REQUESTS = 65_536  # concurrent requests on the ingress; far above the queue bound, which returns 429
_QUERIES = 16  # concurrent calls to a replica in addition to requests: token counts, statistics
_STOP_SECONDS = 3.0  # for the error responses of all requests
_REPLY_SECONDS = 0.5  # until Ray's proxy has sent the last of them
_STARTS = 1  # failed starts until the deployment fails: a model that cannot be loaded fails at once


@dataclass(frozen=True, slots=True)
class Scale:
    """The number of replicas, fixed or scaled by load.

    Args:
        replicas: minimum number of replicas.
        most: maximum number of replicas; None: always ``replicas``.

    Raises:
        SettingError: a number is out of range.
    """

    replicas: int
    most: int | None = None

    def __post_init__(self) -> None:
        _REPLICAS.check("--replicas", self.replicas)
        if self.most is not None:
            _REPLICAS.check("--max-replicas", self.most)
            if self.most < self.replicas:
                raise SettingError(f"--max-replicas {self.most}: must be at least --replicas ({self.replicas})")

    @property
    def bound(self) -> int:
        """Maximum number of replicas."""
        return self.replicas if self.most is None else self.most


class Ingress:
    """The HTTP server: the same application as without a cluster, with the replicas as its backend.

    Args:
        engines: Ray's handle of the engine replicas.
        create_app: :func:`panscan.serve.app.create_app`.
        options: server options.
        replicas: maximum number of replicas.
    """

    def __init__(self, engines: Any, create_app: CreateApp, options: ServeOptions, replicas: int) -> None:
        from ray import serve

        from panscan.serve.replica_backend import ReplicaBackend

        # A configuration file may use another application name: one cluster can serve several models.
        name = serve.get_replica_context().app_name
        self._backend = ReplicaBackend(engines, options, app=name, replicas=replicas)
        decode_in_children()
        self._app = create_app(options, self._backend)
        self._loading = asyncio.get_running_loop().create_task(self._load())

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application. Ray calls this once."""
        return self._app

    async def drain(self) -> bool:
        """Refuse new requests, and return whether those in flight ended within the drain timeout."""
        drained: bool = await self._app.state.admission.drain()
        return drained

    async def stop(self) -> None:
        """End all requests with an error, which their clients receive."""
        admission = self._app.state.admission
        admission.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await admission.wait_until_idle()
        await asyncio.sleep(_REPLY_SECONDS)

    async def __del__(self) -> None:
        """Cancel running requests. Ray calls this once the ingress has drained."""
        if hasattr(self, "_loading"):  # otherwise it did not start
            self._loading.cancel()
            await self._backend.close()
            self._app.state.admission.close()

    async def _load(self) -> None:
        """Wait for the first replica, as long as Ray tries to start one. Until then, requests get status 503."""
        while self._backend.info is None:
            try:
                await self._backend.start()
            except PanscanError as error:  # Ray reports the deployment as failed, and may start it again
                log.error("%s", error)
                await asyncio.sleep(_RETRY_SECONDS)


def application(create_app: CreateApp, options: ServeOptions, scale: Scale, *, gpus: int) -> Any:
    """Return the Ray Serve application.

    Args:
        create_app: :func:`panscan.serve.app.create_app`.
        options: server options.
        scale: number of replicas.
        gpus: GPUs per replica, all on one node; 0: the replicas use the CPU.
    """
    from ray import serve

    engines = serve.deployment(DeployedReplica, name="EngineReplica").options(**_engine_options(options, scale, gpus))
    ingress = serve.deployment(serve.ingress()(Ingress), name="Ingress").options(
        # One ingress, so that its queue bound and its router cover all requests.
        num_replicas=1,
        max_ongoing_requests=_HTTP_REQUESTS,
        ray_actor_options={"num_cpus": 1},
        graceful_shutdown_timeout_s=options.drain_timeout + 5,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config={"enable_access_log": False},
    )
    return ingress.bind(engines.bind(options.settings, scale.replicas), create_app, options, scale.bound)


def _engine_options(options: ServeOptions, scale: Scale, gpus: int) -> dict[str, Any]:
    """Return the deployment options of the engine replicas."""
    from ray.serve.config import RequestRouterConfig

    settings = options.settings
    computing = settings.max_num_seqs
    queued = max(computing, ceil(options.max_queued_requests / scale.replicas))
    chosen: dict[str, Any] = {
        "max_ongoing_requests": computing + queued + _QUERIES,
        "max_constructor_retry_count": _STARTS,
        "health_check_period_s": 5.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_timeout_s": options.drain_timeout + 5,
        "graceful_shutdown_wait_loop_s": 0.5,
        "ray_actor_options": {"num_cpus": 1, "num_gpus": gpus},
        "request_router_config": RequestRouterConfig(
            request_router_class="panscan.serve.ray_router.WorkRouter",
            request_router_kwargs={"policy": options.routing},
        ),
        "logging_config": {"enable_access_log": False},
    }
    if gpus > 1:  # tensor parallelism: all GPUs of a replica on one node
        chosen |= {"placement_group_bundles": [{"CPU": 1, "GPU": gpus}], "placement_group_strategy": "STRICT_PACK"}
    if scale.most is None:
        return chosen | {"num_replicas": scale.replicas}
    bounds = {"min_replicas": scale.replicas, "initial_replicas": scale.replicas, "max_replicas": scale.most}
    return chosen | {"autoscaling_config": bounds | {"target_ongoing_requests": computing}}
