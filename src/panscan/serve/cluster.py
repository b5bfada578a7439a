"""``panscan serve --replicas N``: the server on Ray Serve, on this machine or on a Ray cluster."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from panscan.core import EngineError, ModelError, PanscanError, SettingError
from panscan.images.pool import decode_in_children
from panscan.serve.backend import ServeBackend
from panscan.serve.options import ApiKeys, ServeOptions, read_api_keys
from panscan.serve.ray_session import check_gpus, gpus_per_replica, ray_session
from panscan.serve.replica import DeployedReplica
from panscan.settings import nearest, range_of, settings_from

log = logging.getLogger("panscan.serve")

API_KEYS_VARIABLE = "PANSCAN_API_KEYS"
"""Environment variable with API keys, separated by spaces. Configuration files contain no keys."""

_APP = "panscan"  # name of the application on a Ray cluster
_HTTP_REQUESTS = 65_536  # concurrent requests on the ingress; far above the queue bound, which returns 429
_QUERIES = 16  # concurrent calls to a replica in addition to requests: token counts, statistics
_REPLY_SECONDS = 0.5  # until Ray's proxy has sent the last error response
_RETRY_SECONDS = 2.0  # between attempts to reach the first replica
_STARTS = 1  # failed starts until the deployment fails: a model that cannot be loaded fails at once
_POLL_SECONDS = 0.25
_WATCH_SECONDS = 5.0
_STOP_SECONDS = 3.0  # for the error responses of all requests
_DRAIN_MARGIN_SECONDS = 5.0  # the ingress enforces the drain timeout; this margin covers its reply


CreateApp = Callable[[ServeOptions, ServeBackend], Any]


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
        self._backend = ReplicaBackend(engines, app=name, replicas=replicas)
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


def build(args: Mapping[str, Any]) -> Any:
    """Return the application of a configuration file, which names this function as its ``import_path``.

    Args:
        args: arguments, as :func:`print_config` writes them.

    Raises:
        SettingError: an argument is unknown or invalid, or the required API keys are missing.
    """
    from panscan.serve.app import create_app

    options, scale = _options_of(args)
    return application(create_app, options, scale, gpus=gpus_per_replica(options.settings))


def print_config(
    options: ServeOptions, *, replicas: int, max_replicas: int | None = None, api_key_file: Path | None = None
) -> str:
    """Return a Ray Serve configuration file (YAML) of the server, for ``serve deploy`` or KubeRay.

    The file contains no API keys: the nodes read them from ``api_key_file`` or from ``PANSCAN_API_KEYS``.
    """
    scale = Scale(replicas, max_replicas)
    args: dict[str, Any] = {"settings": options.settings.changed(), "replicas": scale.replicas}
    if scale.most is not None:
        args["max_replicas"] = scale.most
    if options.api_keys:
        args["api_keys"] = f"env:{API_KEYS_VARIABLE}" if api_key_file is None else f"file:{api_key_file}"
    for item in fields(options):
        value = getattr(options, item.name)
        if item.name not in ("settings", "api_keys") and value != item.default:
            args[item.name] = _yaml_value(value)
    config = {
        "proxy_location": "EveryNode",
        "http_options": {"host": options.host, "port": options.port},
        "applications": [
            {"name": _APP, "route_prefix": "/", "import_path": f"{__name__}:build", "args": args},
        ],
    }
    text: str = yaml.safe_dump(config, sort_keys=False)
    return text


def run_cluster(
    options: ServeOptions,
    on_ready: Callable[[str], None],
    *,
    replicas: int,
    max_replicas: int | None = None,
    ray_address: str | None = None,
) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP, and return the exit code.

    The first signal drains: new requests are refused, running ones have ``options.drain_timeout`` seconds to finish.
    Those that run longer, or until a second signal, end with an error.

    Args:
        options: server options.
        on_ready: called with the server's URL once a request can be answered.
        replicas: minimum number of replicas.
        max_replicas: maximum number of replicas; None: always ``replicas``.
        ray_address: address of a Ray cluster; None: start a cluster on this machine for the duration of this call.

    Raises:
        SettingError: the port is in use, or the machine has too few GPUs.
        ModelError: the replicas cannot load the model.
        EngineError: the cluster was lost, or the application was removed from it.
        UnsupportedError: Ray is not installed.
    """
    scale = Scale(replicas, max_replicas)
    local = ray_address is None
    if local:
        with options.bound_socket() as probe:  # Ray reports a port conflict in its log only
            options = replace(options, port=probe.getsockname()[1])
        os.environ.pop(API_KEYS_VARIABLE, None)  # Ray's processes need only the digests that the options have
    elif options.port == 0:
        raise SettingError("--port 0: a Ray cluster needs the same port on every node; use a fixed port")
    with ray_session(ray_address, replicas=scale.bound, show_logs=True), _signals() as stop:
        gpus = gpus_per_replica(options.settings)
        check_gpus(scale.bound, gpus, local=local)
        ingress = _deploy(options, scale, gpus, local=local)
        try:
            if _wait_until_ready(url := options.url(options.port), stop):
                on_ready(url)
                _watch(stop)
                _drain(ingress, options.drain_timeout, stop)
        finally:
            _remove(local=local, at_once=stop.second.is_set())
    return 0


class _StopSignals(NamedTuple):
    """Set by the first and by the second signal to stop."""

    first: threading.Event
    second: threading.Event


@contextmanager
def _signals() -> Iterator[_StopSignals]:
    """Collect signals. Call it after starting Ray, which installs handlers that exit the process."""
    stop = _StopSignals(threading.Event(), threading.Event())

    def handle(*_signal: object) -> None:
        (stop.second if stop.first.is_set() else stop.first).set()

    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _deploy(options: ServeOptions, scale: Scale, gpus: int, *, local: bool) -> Any:
    """Start the proxies and the application, and return the ingress handle without waiting until it is ready."""
    from ray import serve

    from panscan.serve.app import create_app

    location = "HeadOnly" if local else "EveryNode"
    serve.start(proxy_location=location, http_options={"host": options.host, "port": options.port})
    target = serve.RunTarget(application(create_app, options, scale, gpus=gpus), name=_APP, route_prefix="/")
    (handle,) = serve.run_many([target], wait_for_applications_running=False)
    return handle


def _wait_until_ready(url: str, stop: _StopSignals) -> bool:
    """Wait until the server is ready; return False if a signal arrives first.

    Raises:
        ModelError: the deployment has failed.
    """
    from ray import serve

    while not stop.first.wait(_POLL_SECONDS):
        status = serve.status().applications.get(_APP)
        if status is not None and status.status == "DEPLOY_FAILED":
            raise ModelError(f"the replicas cannot start: {_failure_message(status)}")
        if _is_ready(url):
            return True
    return False


def _watch(stop: _StopSignals) -> None:
    """Wait for a signal, and log status changes of the deployment.

    Raises:
        EngineError: the cluster was lost, or the application was removed from it.
    """
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    before = "RUNNING"
    while not stop.first.wait(_WATCH_SECONDS):
        try:
            status = serve.status().applications.get(_APP)
        except (RayError, RayServeException) as error:
            raise EngineError(f"lost the connection to the Ray cluster: {type(error).__name__}") from error
        if status is None:
            raise EngineError(f"the application {_APP!r} was removed from the Ray cluster")
        if status.status != before:
            log.warning("replicas: %s %s", status.status, _failure_message(status))
        before = status.status


def _failure_message(status: Any) -> str:
    """Return the exception message from the traceback that Ray reports for a failed deployment."""
    messages = [deployment.message for deployment in status.deployments.values()]
    lines = [line.strip() for text in (*messages, status.message) for line in text.splitlines() if "Error" in line]
    return str(lines[-1].rpartition("Error: ")[2] if lines else status.message)


def _is_ready(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy for requests to this machine
    with suppress(urllib.error.URLError, OSError), opener.open(f"{url}/ready", timeout=2.0) as reply:
        return bool(reply.status == 200)
    return False


def _drain(ingress: Any, seconds: float, stop: _StopSignals) -> None:
    """Refuse new requests, and wait until none is in flight, the timeout expires, or a second signal arrives.

    What is in flight then ends with an error, which its client receives.
    """
    from ray.exceptions import RayError

    drained = ingress.drain.remote()
    deadline = time.monotonic() + seconds + _DRAIN_MARGIN_SECONDS
    while not stop.second.is_set() and time.monotonic() < deadline:
        try:
            if drained.result(timeout_s=_POLL_SECONDS):
                return
            log.warning("requests were still running after %g s (--drain-timeout)", seconds)
            break
        except TimeoutError:
            continue
        except RayError as error:  # the ingress died, so its requests have failed
            log.warning("the ingress was lost: %s", type(error).__name__)
            return
    with suppress(RayError, TimeoutError):
        ingress.stop.remote().result(timeout_s=_STOP_SECONDS + 2)


def _remove(*, local: bool, at_once: bool) -> None:
    """Remove the application; on a local cluster, shut down Ray Serve too."""
    from ray import serve

    if not local:
        serve.delete(_APP, _blocking=not at_once)
    elif not at_once:  # otherwise, shutting down Ray stops everything
        serve.shutdown()


def _yaml_value(value: Any) -> Any:
    """Return an option's value as a type that YAML supports."""
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


def _options_of(args: Mapping[str, Any]) -> tuple[ServeOptions, Scale]:
    """Return the options of a configuration file.

    Raises:
        SettingError: an unknown name or value.
    """
    known = {item.name for item in fields(ServeOptions)} | {"replicas", "max_replicas"}
    for name in args:
        if name not in known:
            raise SettingError(f"args: unknown option {name!r}{nearest(name, known)}")
    values = dict(args)
    scale = Scale(values.pop("replicas", 1), values.pop("max_replicas", None))
    values["settings"] = settings_from(values.get("settings", {}))
    values["api_keys"] = _keys_of(values.get("api_keys"))
    for name in ("allowed_hosts", "allowed_media_domains"):
        values[name] = tuple(values.get(name, ()))
    if values.get("allowed_local_media_path") is not None:
        values["allowed_local_media_path"] = Path(values["allowed_local_media_path"])
    return ServeOptions(**values), scale


def _keys_of(source: str | None) -> ApiKeys:
    """Return the API keys from the source that a configuration file names.

    Raises:
        SettingError: the source is invalid, or contains no keys.
    """
    if source is None:
        return ApiKeys()
    kind, _, name = source.partition(":")
    if kind == "file":
        return ApiKeys.of(read_api_keys(Path(name)))
    if kind == "env" and os.environ.get(name):
        return ApiKeys.of(os.environ[name].split())
    raise SettingError(f"args: api_keys: expected file:PATH, or env:NAME of a variable that is set, got {source!r}")
