"""A Ray cluster for the duration of a command: joined, or started on this machine."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from panscan.core import SettingError, UnsupportedError
from panscan.core.installation import install_command
from panscan.settings import Settings

log = logging.getLogger("panscan.serve")

_OBJECT_STORE_BYTES = 1 << 30  # for request bodies in transit to replicas; Ray spills the rest to disk
_CONNECT_SECONDS = 10.0
_WATCH_SECONDS = 2.0
_GCS_GONE = (
    "Ray's control process (GCS) at %s is gone (%s): unless it comes back within 60 s, Ray ends this process; start the"
    " command again, a batch job with --resume"
)
_LOCAL_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no telemetry
    "RAY_AUTH_MODE": "token",  # other users of this machine cannot submit work to Ray's ports
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # one per process: Ray remembers the first
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # binds Ray's ports to the loopback interface, on every platform
    "RAY_SERVE_LOG_TO_STDERR": "0",  # Ray's own messages stay in its log directory
}


@contextmanager
def ray_session(ray_address: str | None, *, replicas: int, show_logs: bool) -> Iterator[None]:
    """Join a Ray cluster, or start one on this machine and shut it down afterwards.

    Args:
        ray_address: address of a Ray cluster; None: start one.
        replicas: maximum number of replicas.
        show_logs: whether to print the output of Ray's processes, which goes to Ray's log directory in any case.

    Raises:
        SettingError: there is no cluster at the address.
        UnsupportedError: Ray is not installed.
    """
    if ray_address is None:
        _set_environment()
    try:
        import ray
        from ray import serve  # noqa: F401 - ray can be installed without it
    except ImportError as error:
        raise UnsupportedError(f"--replicas needs Ray Serve: {install_command('cluster')} ({error})") from error
    if ray_address is None:
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=replicas + 2,  # for placement only, but Ray starts a worker process for each
            object_store_memory=_OBJECT_STORE_BYTES,
            logging_level=logging.WARNING,
            log_to_driver=show_logs,
        )
    else:
        _join(ray_address, show_logs=show_logs)
    ended = threading.Event()
    if not (ray_address or "").startswith("ray://"):  # a client cannot reach the process itself
        watched = ray.get_runtime_context().gcs_address
        threading.Thread(target=_watch_gcs, args=(watched, ended), name="panscan-ray-gcs", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        ray.shutdown()


def _set_environment() -> None:
    """Set Ray's variables for a cluster on this machine, also for a program that has imported or used Ray already."""
    os.environ.update(_LOCAL_ENVIRONMENT)
    if "ray" in sys.modules:  # it has read the mode when it was imported, and the token at its first use
        with suppress(ImportError, AttributeError):  # private: without them, Ray refuses the token with its own error
            from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # not in its stub

            Config.initialize("")
            AuthenticationTokenLoader.instance().reset_cache()


def _watch_gcs(address: str, ended: threading.Event) -> None:
    """Log at once that Ray's control process is gone: Ray itself is silent, and after 60 s ends this process.

    Args:
        address: host and port of the process.
        ended: stops the watch.
    """
    gone = False
    while not ended.wait(_WATCH_SECONDS):
        problem = _connection_problem(address)
        if problem is not None and not gone and not ended.is_set():
            log.error(_GCS_GONE, address, problem)
        if problem is None and gone:
            log.warning("Ray's control process at %s is back", address)
        gone = problem is not None


def _connection_problem(address: str) -> object:
    """Return why nothing answers at an address with a port; None if something does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        return getattr(error, "strerror", None) or error
    return None


def gpus_per_replica(settings: Settings) -> int:
    """Return the number of GPUs per replica. With ``--device auto``, Ray must be connected.

    Raises:
        SettingError: ``--device`` names one GPU, although Ray assigns GPUs.
    """
    if settings.device.startswith("cuda:"):
        raise SettingError(f"--device {settings.device}: Ray assigns GPUs to replicas; use --device cuda")
    if settings.device in ("cpu", "mps"):
        return 0
    import ray

    on_gpu = settings.device == "cuda" or ray.cluster_resources().get("GPU", 0) > 0
    return settings.tensor_parallel_size if on_gpu else 0


def check_gpus(replicas: int, gpus: int, *, local: bool) -> None:
    """Check that this machine has enough GPUs; other clusters may still grow.

    Args:
        replicas: maximum number of replicas.
        gpus: GPUs per replica.
        local: whether the cluster is this machine.

    Raises:
        SettingError: the machine has too few GPUs.
    """
    import ray

    available = int(ray.cluster_resources().get("GPU", 0))
    if replicas * gpus <= available:
        return
    if local:
        raise SettingError(
            f"--replicas: {replicas} replicas need {replicas * gpus} GPUs, but this machine has {available};"
            " use fewer, or join a cluster with --ray-address"
        )
    log.warning(
        "%d replicas need %d GPUs, but the cluster has %d: waiting for more", replicas, replicas * gpus, available
    )


def _join(address: str, *, show_logs: bool) -> None:
    """Connect to a running cluster.

    Raises:
        SettingError: there is no cluster at the address, or it runs another version of Ray or Python.
    """
    import ray

    host, _, port = address.removeprefix("ray://").rpartition(":")
    # Ray itself would try for minutes.
    if host and port.isdecimal() and (problem := _connection_problem(f"{host}:{port}")) is not None:
        raise SettingError(f"--ray-address {address}: no Ray cluster answers there: {problem}")
    try:
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=show_logs)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].partition(". ")[0] or type(error).__name__
        raise SettingError(f"--ray-address {address}: cannot join a Ray cluster: {reason}") from error
