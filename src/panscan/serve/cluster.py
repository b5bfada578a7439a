"""The server as an application of Ray Serve: a configuration file for ``serve deploy`` or KubeRay."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from panscan.core import PanscanError, SettingError
from panscan.core.foreign import JsonObject
from panscan.images.pool import decode_in_children
from panscan.serve.deployment import Scale, replica_deployment
from panscan.serve.options import ApiKeys, ServeOptions, read_api_keys
from panscan.serve.ray_session import gpus_per_replica
from panscan.settings import default_of, nearest, settings_from

log = logging.getLogger("panscan.serve")

API_KEYS_VARIABLE = "PANSCAN_API_KEYS"
"""Environment variable with API keys, separated by spaces. Configuration files contain no keys."""

_HTTP_REQUESTS = 65_536  # concurrent requests on the ingress; far above the queue bound, which returns 429
_RETRY_SECONDS = 2.0  # between attempts to reach the first replica


class Ingress:
    """The HTTP server of a deployed configuration: the application of ``panscan serve`` behind Ray Serve's proxies.

    Args:
        replicas: Ray's handle of the engine replicas.
        options: server options.
        most: maximum number of replicas.
    """

    def __init__(self, replicas: Any, options: ServeOptions, most: int) -> None:
        from ray import serve

        from panscan.serve.app import create_app
        from panscan.serve.replica_client import ReplicaClient

        # A configuration file may use another application name: one cluster can serve several models.
        self._client = ReplicaClient(replicas, app=serve.get_replica_context().app_name, most=most)
        decode_in_children()
        self._app = create_app(options, self._client)
        self._loading = asyncio.get_running_loop().create_task(self._load())

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application. Ray calls this once."""
        return self._app

    async def __del__(self) -> None:
        """Cancel running requests. Ray calls this once the ingress has drained."""
        if hasattr(self, "_loading"):  # otherwise it did not start
            self._loading.cancel()
            await self._client.close()
            self._app.state.admission.close()

    async def _load(self) -> None:
        """Wait for the first replica, as long as Ray tries to start one. Until then, requests get status 503."""
        while self._client.info is None:
            try:
                await self._client.start()
            except PanscanError as error:  # Ray reports the deployment as failed, and may start it again
                log.error("%s", error)
                await asyncio.sleep(_RETRY_SECONDS)


def build(args: Mapping[str, Any]) -> Any:
    """Return the application of a configuration file, which names this function as its ``import_path``.

    Args:
        args: arguments, as :func:`print_config` writes them.

    Raises:
        SettingError: an argument is unknown or invalid, or the required API keys are missing.
    """
    from ray import serve

    known = {item.name for item in fields(ServeOptions)} | {"replicas", "max_replicas"}
    for name in args:
        if name not in known:
            raise SettingError(f"args: unknown option {name!r}{nearest(name, known)}")
    values = dict(args)
    scale = Scale(values.pop("replicas", 1), values.pop("max_replicas", None))
    answers = {"max_new_tokens": default_of("max_new_tokens", "serve")}
    settings = values["settings"] = settings_from(answers | values.get("settings", {}))
    values["api_keys"] = _keys_of(values.get("api_keys"))
    for name in ("allowed_hosts", "allowed_media_domains", "allowed_origins"):
        values[name] = tuple(values.get(name, ()))
    if values.get("allowed_local_media_path") is not None:
        values["allowed_local_media_path"] = Path(values["allowed_local_media_path"])
    options = ServeOptions(**values)
    replicas = replica_deployment(
        settings,
        scale,
        gpus_per_replica(settings),
        queued=options.max_queued_requests,
        drain_timeout=options.drain_timeout,
        routing=options.routing,
    )
    ingress = serve.deployment(serve.ingress()(Ingress), name="Ingress").options(
        # One ingress, so that its queue bound and its router cover all requests.
        num_replicas=1,
        max_ongoing_requests=_HTTP_REQUESTS,
        ray_actor_options={"num_cpus": 1},
        graceful_shutdown_timeout_s=options.drain_timeout + 5,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config={"enable_access_log": False},
    )
    return ingress.bind(replicas.bind(settings, scale.replicas), options, scale.bound)


def print_config(
    options: ServeOptions, *, replicas: int, max_replicas: int | None = None, api_key_file: Path | None = None
) -> str:
    """Return a Ray Serve configuration file (YAML) of the server, for ``serve deploy`` or KubeRay.

    The file contains no API keys: the nodes read them from ``api_key_file`` or from ``PANSCAN_API_KEYS``.
    """
    scale = Scale(replicas, max_replicas)
    args: JsonObject = {"settings": options.settings.changed(), "replicas": scale.replicas}
    if scale.most is not None:
        args["max_replicas"] = scale.most
    if options.api_keys:
        args["api_keys"] = f"env:{API_KEYS_VARIABLE}" if api_key_file is None else f"file:{api_key_file}"
    for item in fields(options):
        value = getattr(options, item.name)
        if item.name not in ("settings", "api_keys") and value != item.default:
            args[item.name] = str(value) if isinstance(value, Path) else list(value) if type(value) is tuple else value
    config = {
        "proxy_location": "EveryNode",
        "http_options": {"host": options.host, "port": options.port},
        "applications": [
            {"name": "panscan", "route_prefix": "/", "import_path": f"{__name__}:build", "args": args},
        ],
    }
    text: str = yaml.safe_dump(config, sort_keys=False)
    return text


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
