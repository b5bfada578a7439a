"""``panscan serve --replicas N``: the server on Ray Serve, on this machine or on a Ray cluster."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from panscan.core import EngineError, ModelError, SettingError
from panscan.serve.deployments import APP, Scale, application
from panscan.serve.options import ApiKeys, ServeOptions, read_api_keys
from panscan.serve.ray_session import check_gpus, gpus_per_replica, ray_session
from panscan.settings import nearest, settings_from

__all__ = ["API_KEYS_VARIABLE", "build", "print_config", "run_cluster"]

log = logging.getLogger("panscan.serve")

API_KEYS_VARIABLE = "PANSCAN_API_KEYS"
"""Environment variable with API keys, separated by spaces. Configuration files contain no keys."""

_POLL_SECONDS = 0.25
_WATCH_SECONDS = 5.0
_STOP_SECONDS = 5.0  # for the error responses of all requests
_DRAIN_MARGIN_SECONDS = 5.0  # the ingress enforces the drain timeout; this margin covers its reply


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
            args[item.name] = _plain(value)
    found = {
        "proxy_location": "EveryNode",
        "http_options": {"host": options.host, "port": options.port},
        "applications": [
            {"name": APP, "route_prefix": "/", "import_path": f"{__name__}:build", "args": args},
        ],
    }
    text: str = yaml.safe_dump(found, sort_keys=False)
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
        options = replace(options, port=_usable_port(options))
        os.environ.pop(API_KEYS_VARIABLE, None)  # Ray's processes need only the digests that the options have
    elif options.port == 0:
        raise SettingError("--port 0: a Ray cluster needs the same port on every node; use a fixed port")
    with ray_session(ray_address, replicas=scale.bound, show_logs=True), _signals() as stop:
        gpus = gpus_per_replica(options.settings)
        check_gpus(scale.bound, gpus, local=local)
        ingress = _deploy(options, scale, gpus, local=local)
        try:
            if _wait_until_ready(url := _url(options), stop):
                on_ready(url)
                _watch(stop)
                _drain(ingress, options.drain_timeout, stop)
        finally:
            _remove(local=local, at_once=stop.second.is_set())
    return 0


class _Stop:
    """The shutdown signals received so far."""

    def __init__(self) -> None:
        self.first, self.second = threading.Event(), threading.Event()

    def handle(self, *_signal: object) -> None:
        """Handle a signal."""
        (self.second if self.first.is_set() else self.first).set()


@contextmanager
def _signals() -> Iterator[_Stop]:
    """Collect signals. Call it after starting Ray, which installs handlers that exit the process."""
    stop = _Stop()
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop.handle) for number in numbers}
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
    target = serve.RunTarget(application(create_app, options, scale, gpus=gpus), name=APP, route_prefix="/")
    (handle,) = serve.run_many([target], wait_for_applications_running=False)
    return handle


def _wait_until_ready(url: str, stop: _Stop) -> bool:
    """Wait until the server is ready; return False if a signal arrives first.

    Raises:
        ModelError: the deployment has failed.
    """
    from ray import serve

    while not stop.first.wait(_POLL_SECONDS):
        status = serve.status().applications.get(APP)
        if status is not None and status.status == "DEPLOY_FAILED":
            raise ModelError(f"the replicas cannot start: {_reason(status)}")
        if _answers(f"{url}/ready"):
            return True
    return False


def _watch(stop: _Stop) -> None:
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
            status = serve.status().applications.get(APP)
        except (RayError, RayServeException) as error:
            raise EngineError(f"lost the connection to the Ray cluster: {type(error).__name__}") from error
        if status is None:
            raise EngineError(f"the application {APP!r} was removed from the Ray cluster")
        if status.status != before:
            log.warning("replicas: %s %s", status.status, _reason(status))
        before = status.status


def _reason(status: Any) -> str:
    """Return the exception message from the traceback that Ray reports for a failed deployment."""
    messages = [deployment.message for deployment in status.deployments.values()]
    lines = [line.strip() for text in (*messages, status.message) for line in text.splitlines() if "Error" in line]
    return str(lines[-1].rpartition("Error: ")[2] if lines else status.message)


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy for requests to this machine
    with suppress(urllib.error.URLError, OSError), opener.open(url, timeout=2.0) as reply:
        return bool(reply.status == 200)
    return False


def _drain(ingress: Any, seconds: float, stop: _Stop) -> None:
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
        ingress.stop.remote().result(timeout_s=_STOP_SECONDS)


def _remove(*, local: bool, at_once: bool) -> None:
    """Remove the application; on a local cluster, shut down Ray Serve too."""
    from ray import serve

    if not local:
        serve.delete(APP, _blocking=not at_once)
    elif not at_once:  # otherwise, shutting down Ray stops everything
        serve.shutdown()


def _url(options: ServeOptions) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(options.host, options.host)
    return f"http://{f'[{shown}]' if ':' in shown and shown[0] != '[' else shown}:{options.port}"


def _usable_port(options: ServeOptions) -> int:
    """Return the port, or a free one for 0. Ray reports a port conflict in its log only.

    Raises:
        SettingError: the port cannot be bound.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((options.host, options.port))
        except OSError as error:
            raise SettingError(f"--host {options.host} --port {options.port}: {error.strerror or error}") from error
        return int(probe.getsockname()[1])


def _plain(value: Any) -> Any:
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
