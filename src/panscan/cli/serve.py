"""``panscan serve``: an OpenAI-compatible server, on one engine or on Ray Serve replicas."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from panscan.cli.options import (
    InRange,
    axis_options,
    chosen_settings,
    common_options,
    echo,
    errors,
    say_mini,
    show_warnings,
)
from panscan.core import SettingError, UnsupportedError
from panscan.core.ranges import Range
from panscan.serve.options import SERVE_RANGES, ApiKeys, ServeOptions, read_api_keys
from panscan.settings import Settings

__all__ = ["command"]

_NOT_HERE = ("equal_views", "max_concurrency")
_DEFAULTS = {"runner": "engine; generate where the engine lacks a setting"}
_REPLICAS = InRange(Range(whole=True, least=1, most=10_000))
_PLAIN = {item.name: item.default for item in fields(ServeOptions)}

EPILOG = """\b
Examples
  panscan serve --model google/gemma-3-4b-it
  panscan serve --model google/gemma-3-27b-it --preset preset.yaml --host 0.0.0.0 --api-key-file keys.txt
  panscan serve --model google/gemma-3-27b-it --replicas 5 --tensor-parallel-size 2
  curl http://127.0.0.1:8000/v1/models

The playground is the server's root page. Sampling and pan-and-scan options set the defaults of requests. The
environment variable PANSCAN_API_KEYS adds API keys, separated by spaces.
"""


_Command = TypeVar("_Command", bound=Callable[..., Any])


def _number(name: str, text: str) -> Callable[[_Command], _Command]:
    """Return an option with the range and default that :class:`ServeOptions` defines."""
    flag = f"--{name.replace('_', '-')}"
    return click.option(flag, type=InRange(SERVE_RANGES[name]), default=_PLAIN[name], show_default=True, help=text)


@click.command("serve", epilog=EPILOG, short_help="Serve an OpenAI-compatible API and a playground.")
@click.option("--host", default=_PLAIN["host"], show_default=True, help="Address to bind.")
@_number("port", "TCP port; 0 selects a free port.")
@click.option("--preset", help="A preset's name, or a YAML file (see panscan recommend).")
@click.option("--served-model-name", help="Model name in the API.")
@click.option("--api-key", "api_keys", multiple=True, help="Require this API key; repeat it for several.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="Require one of the API keys in this file.")
@click.option("--allowed-hosts", multiple=True, help="Accept this host name; repeat it for several.")
@click.option("--allowed-media-domains", multiple=True, help="Fetch images from this domain; repeat it for several.")
@click.option("--allowed-local-media-path", type=click.Path(path_type=Path), help="Allow file: URLs below this path.")
@_number("max_queued_requests", "Maximum queued requests; more get status 429.")
@_number("request_timeout", "Seconds until a request times out (504).")
@_number("drain_timeout", "Seconds to finish requests after SIGTERM.")
@_number("max_body_mb", "Maximum size of a request body, MB.")
@_number("max_images", "Maximum images and documents per request.")
@_number("max_pages", "Maximum pages per document.")
@_number("max_pixels", "Maximum pixels per image or page.")
@_number("max_output_tokens", "Maximum output tokens per answer.")
@_number("max_choices", "Maximum answers per request (n).")
@click.option("--otlp-traces-endpoint", help="Send OpenTelemetry traces to this URL.")
@click.option("--replicas", type=_REPLICAS, help="Run this many replicas on Ray Serve.")
@click.option("--max-replicas", type=_REPLICAS, help="Scale up to this many replicas under load.")
@click.option("--routing", default="affinity", show_default=True, help="Routing policy: affinity, work or random.")
@click.option("--ray-address", help="Join this Ray cluster instead of starting one.")
@click.option("--print-config", is_flag=True, help="Print a Ray Serve config file and exit.")
@axis_options(leave_out=_NOT_HERE, defaults=_DEFAULTS)
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
            chosen, replicas=options["replicas"] or 1, max_replicas=options["max_replicas"],
            api_key_file=options["api_key_file"],
        )  # fmt: skip
        echo(config, nl=False)
        return 0
    _require("fastapi", "serve")
    if clustered:
        _require("ray", "cluster")

    def on_ready(url: str) -> None:
        errors().print(f"Serving {chosen.model_name} on {url}", soft_wrap=True)

    if chosen.settings.model == "mini" and options["model"] is None and not chosen.settings.random_weights:
        say_mini()
    if clustered:
        from panscan.serve.cluster import run_cluster

        return run_cluster(
            chosen, on_ready, replicas=options["replicas"] or 1, max_replicas=options["max_replicas"],
            ray_address=options["ray_address"],
        )  # fmt: skip
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
        SettingError: a runner that cannot serve.
    """
    chosen = chosen_settings(options, "serve", _NOT_HERE)
    if chosen["runner"] not in ("engine", "generate"):
        raise SettingError(f"--runner {chosen['runner']} is not supported by panscan serve; use engine or generate")
    return Settings(**chosen)


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
