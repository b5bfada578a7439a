"""``panscan serve``: an OpenAI-compatible server, on one engine or on Ray Serve replicas."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from panscan.cli.console import echo, errors, show_warnings, warn_mini
from panscan.cli.models import DemonstrationWarning, check_checkpoint
from panscan.cli.options import (
    ENGINE_ONLY,
    InRange,
    axis_options,
    common_options,
    engine_settings,
    preset_option,
)
from panscan.cli.verb import option, verb
from panscan.core import SettingError, UnsupportedError
from panscan.core.ranges import Range
from panscan.engine.options import SERVED_TPOT_MS
from panscan.model.bundled import is_demonstration
from panscan.serve.options import SERVE_RANGES, ApiKeys, ServeOptions, read_api_keys
from panscan.settings import VLLM_AXES, Settings

__all__ = ["command"]

_NOT_HERE = (*VLLM_AXES, "equal_views", "max_concurrency")
_TEXTS = {**ENGINE_ONLY, "max_new_tokens": "Output tokens of a request without max_tokens."}
_DEFAULTS = {"runner": "engine", "tpot_target_ms": f"{SERVED_TPOT_MS:g}"}
_REPLICAS = InRange(Range(integer=True, ge=1, le=10_000))
_PLAIN = {item.name: item.default for item in fields(ServeOptions)}

EPILOG = """\
The playground is the server's root page. Sampling and pan-and-scan options set the
defaults of requests. PANSCAN_API_KEYS adds API keys, separated by spaces.

\b
Examples
  panscan serve --model google/gemma-3-4b-it
  panscan serve --model google/gemma-3-27b-it --preset preset.yaml --host 0.0.0.0 --api-key-file keys.txt
  panscan serve --model google/gemma-3-27b-it --replicas 5 --tensor-parallel-size 2
  curl http://127.0.0.1:8000/v1/models
"""


_Command = TypeVar("_Command", bound=Callable[..., Any])


def _number(name: str, text: str, *, rare: bool = False) -> Callable[[_Command], _Command]:
    """Return an option with the range and default that :class:`ServeOptions` defines."""
    flag = f"--{name.replace('_', '-')}"
    return option(
        "Server",
        flag,
        type=InRange(SERVE_RANGES[name]),
        default=_PLAIN[name],
        show_default=True,
        metavar="NUMBER",
        rare=rare,
        help=text,
    )


@verb("serve", EPILOG)
@option("Server", "--host", default=_PLAIN["host"], show_default=True, metavar="ADDRESS", help="Address to bind.")
@_number("port", "TCP port; 0 selects a free port.")
@option("Server", "--served-model-name", metavar="NAME", help="Model name in the API.")
@option("Server", "--api-key", "api_keys", multiple=True, metavar="KEY", help="API key to require; repeatable.")
@option(
    "Server", "--api-key-file", type=click.Path(path_type=Path), metavar="FILE", help="File with API keys to require."
)
@option("Server", "--allowed-hosts", multiple=True, metavar="NAME", rare=True, help="Host name to accept; repeatable.")
@option(
    "Server",
    "--allowed-media-domains",
    multiple=True,
    metavar="DOMAIN",
    rare=True,
    help="Domain to fetch images from; repeatable.",
)
@option(
    "Server",
    "--allowed-local-media-path",
    type=click.Path(path_type=Path),
    metavar="DIR",
    rare=True,
    help="Directory that file: URLs may read.",
)
@_number("max_queued_requests", "Maximum queued requests; more get status 429.")
@_number("request_timeout", "Seconds until a request fails with status 504.")
@_number("drain_timeout", "Time to finish requests after SIGTERM, seconds.", rare=True)
@_number("max_body_mb", "Maximum size of a request body, MB.", rare=True)
@_number("max_images", "Maximum images and documents per request.")
@_number("max_pages", "Maximum pages per document.", rare=True)
@_number("max_pixels", "Maximum pixels per image or page.", rare=True)
@_number("max_output_tokens", "Hard limit of output tokens per answer.")
@_number("max_choices", "Maximum answers per request (n).", rare=True)
@option("Server", "--otlp-traces-endpoint", metavar="URL", rare=True, help="Endpoint for OpenTelemetry traces.")
@option("Server", "--replicas", type=_REPLICAS, metavar="INT", help="Replicas on Ray Serve; none: this process.")
@option("Server", "--max-replicas", type=_REPLICAS, metavar="INT", rare=True, help="Maximum replicas under load.")
@option(
    "Server",
    "--routing",
    default="affinity",
    show_default=True,
    metavar="NAME",
    rare=True,
    help="Routing policy: affinity, work or random.",
)
@option("Server", "--ray-address", metavar="URL", rare=True, help="Ray cluster to join instead of starting one.")
@option("Output", "--print-config", is_flag=True, rare=True, help="Print a Ray Serve config file and exit.")
@preset_option
@axis_options(leave_out=_NOT_HERE, defaults=_DEFAULTS, texts=_TEXTS)
@common_options
def command(**options: Any) -> int:
    """Serve Gemma 3 with pan and scan over HTTP."""
    show_warnings(errors())
    chosen = _serve_options(options)
    _warn_open(chosen)
    clustered = any(options[name] is not None for name in ("replicas", "max_replicas", "ray_address"))
    if options["print_config"]:
        from panscan.serve.cluster import print_config

        _require("ray", "cluster")
        config = print_config(
            chosen,
            replicas=options["replicas"] or 1,
            max_replicas=options["max_replicas"],
            api_key_file=options["api_key_file"],
        )
        echo(config, nl=False)
        return 0
    _require("fastapi", "serve")
    if clustered:
        _require("ray", "cluster")

    def on_ready(url: str) -> None:
        errors().print(f"Serving {chosen.model_name} on {url}", soft_wrap=True)

    if chosen.settings.model == "mini" and options["model"] is None and not chosen.settings.random_weights:
        warn_mini()
    if is_demonstration(chosen.settings):
        DemonstrationWarning(chosen.settings).show()
    if options["ray_address"] is None:
        check_checkpoint(chosen.settings)
    if clustered:
        from panscan.serve.cluster import run_cluster

        return run_cluster(
            chosen,
            on_ready,
            replicas=options["replicas"] or 1,
            max_replicas=options["max_replicas"],
            ray_address=options["ray_address"],
        )
    from panscan.serve.server import run_server

    code = run_server(chosen, on_ready)
    # Python would wait for threads that still download documents of requests that have ended.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve_options(options: dict[str, Any]) -> ServeOptions:
    """Return the server's options.

    Raises:
        SettingError: an option is invalid, or conflicts with another one.
    """
    keys = [*options["api_keys"], *os.environ.get("PANSCAN_API_KEYS", "").split()]
    if options["api_key_file"] is not None:
        keys += read_api_keys(options["api_key_file"])
    media = options["allowed_local_media_path"]
    if media is not None and not media.is_dir():
        raise SettingError(f"--allowed-local-media-path {media}: not a directory")
    if options["max_replicas"] is not None and options["max_replicas"] < (options["replicas"] or 1):
        raise SettingError(f"--max-replicas {options['max_replicas']} is below --replicas {options['replicas']}")
    names = {item.name for item in fields(ServeOptions)} - {"settings", "api_keys"}
    plain = {name: tuple(value) if isinstance(value, list | tuple) else value for name, value in options.items()}
    given: dict[str, Any] = {name: value for name, value in plain.items() if name in names}
    return ServeOptions(settings=_settings(options), api_keys=ApiKeys.of(keys), **given)


def _settings(options: dict[str, Any]) -> Settings:
    """Return the settings.

    Raises:
        SettingError: as :func:`panscan.cli.options.engine_settings`.
    """
    return Settings(**{"tpot_target_ms": SERVED_TPOT_MS, **engine_settings(options, "serve", _NOT_HERE)})


def _warn_open(options: ServeOptions) -> None:
    """Warn if other machines can reach a server without API keys."""
    if options.host not in ("127.0.0.1", "::1", "localhost") and not options.api_keys:
        message = f"warning: --host {options.host} without --api-key: anyone who can connect can use this server"
        errors().print(message, style="yellow", soft_wrap=True)


def _require(module: str, extra: str) -> None:
    """Refuse to start without an optional dependency.

    Raises:
        UnsupportedError: the dependency is not installed.
    """
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise UnsupportedError(f"panscan serve needs the extra {extra!r}: pip install 'panscan[{extra}]'")
