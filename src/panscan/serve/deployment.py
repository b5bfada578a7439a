"""The replicas of a command on Ray Serve: how many, their options, and their end with the command."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from panscan.core import SettingError
from panscan.core.access import remote_access
from panscan.serve.ray_session import check_gpus, gpus_per_replica, ray_session
from panscan.serve.replica import LEASES, CommandContext, EngineReplica
from panscan.settings import Settings, range_of

_QUERIES = 16  # concurrent calls to a replica in addition to requests: token counts, statistics
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
        range_of("replicas", "serve").check("--replicas", self.replicas)
        if self.most is not None:
            range_of("max_replicas", "serve").check("--max-replicas", self.most)
            if self.most < self.replicas:
                raise SettingError(f"--max-replicas {self.most}: must be at least --replicas ({self.replicas})")

    @property
    def bound(self) -> int:
        """Maximum number of replicas."""
        return self.replicas if self.most is None else self.most


def replica_deployment(
    settings: Settings,
    scale: Scale,
    gpus: int,
    *,
    queued: int,
    drain_timeout: float,
    routing: str = "affinity",
    actor: type[EngineReplica] = EngineReplica,
) -> Any:
    """Return the Ray Serve deployment of the replicas; bind it to the arguments of :class:`EngineReplica`.

    Args:
        settings: settings of the model.
        scale: number of replicas.
        gpus: GPUs per replica, all on one node; 0: the replicas use the CPU.
        queued: requests that may wait for all replicas together.
        drain_timeout: seconds that a removed replica has to finish its requests.
        routing: routing policy, one of ``--routing``.
        actor: class of the replicas.
    """
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    computing = settings.max_num_seqs
    chosen: dict[str, Any] = {
        "max_ongoing_requests": computing + max(computing, ceil(queued / scale.replicas)) + _QUERIES,
        "max_constructor_retry_count": _STARTS,
        "health_check_period_s": 5.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_timeout_s": drain_timeout + 5,
        "graceful_shutdown_wait_loop_s": 0.5,
        "ray_actor_options": {"num_cpus": 1, "num_gpus": gpus},
        "request_router_config": RequestRouterConfig(
            request_router_class="panscan.serve.ray_router.WorkRouter",
            request_router_kwargs={"policy": routing},
        ),
        "logging_config": {"enable_access_log": False},
    }
    if gpus > 1:  # tensor parallelism: all GPUs of a replica on one node
        chosen |= {"placement_group_bundles": [{"CPU": 1, "GPU": gpus}], "placement_group_strategy": "STRICT_PACK"}
    if scale.most is None:
        chosen |= {"num_replicas": scale.replicas}
    else:
        bounds = {"min_replicas": scale.replicas, "initial_replicas": scale.replicas, "max_replicas": scale.most}
        chosen |= {"autoscaling_config": bounds | {"target_ongoing_requests": computing}}
    return serve.deployment(actor, name="EngineReplica").options(**chosen)


@contextmanager
def deployed_replicas(
    settings: Settings, scale: Scale, ray_address: str | None, *, show_logs: bool, **options: Any
) -> Iterator[Any]:
    """Yield a :class:`panscan.serve.replica_client.ReplicaClient` of replicas that end with this command.

    Args:
        settings: settings of the model.
        scale: number of replicas.
        ray_address: address of a Ray cluster; None: start a cluster on this machine, and shut it down at the end.
        show_logs: whether to print the output of the replicas.
        options: see :func:`replica_deployment`.

    Raises:
        SettingError: there is no cluster at the address, or the machine has too few GPUs.
        UnsupportedError: Ray is not installed.
    """
    shared = ray_address is not None
    with ray_session(ray_address, replicas=scale.bound, show_logs=show_logs):
        import ray
        from ray import serve

        from panscan.serve.replica_client import ReplicaClient

        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # it warns once per request of a replica that died
        gpus = gpus_per_replica(settings)
        check_gpus(scale.bound, gpus, local=not shared)
        app = f"panscan-{secrets.token_hex(4)}"
        if shared:
            lease = ray.remote(num_cpus=0)(Lease).options(name=app, namespace=LEASES).remote()  # noqa: F841 - ends with it
        # Inside a replica, Ray overrides the variable.
        chosen = os.environ.get("OMP_NUM_THREADS", "")
        threads = int(chosen) or None if chosen.isdecimal() else None
        context = CommandContext(threads, str(Path.cwd()), remote_access(), leased=shared)
        serve.start(proxy_location="Disabled")
        deployment = replica_deployment(settings, scale, gpus, **options)
        target = serve.RunTarget(deployment.bind(settings, scale.replicas, context), name=app, route_prefix=None)
        (handle,) = serve.run_many([target], wait_for_applications_running=False)
        try:
            yield ReplicaClient(handle, app=app, most=scale.bound)
        finally:
            if shared:  # otherwise, everything ends with the cluster
                serve.delete(app)
                if not serve.status().applications:
                    serve.shutdown()


class Lease:
    """An actor that ends with the command that started it, however it ends."""

    async def wait(self) -> None:
        """Never return."""
        await asyncio.Event().wait()
