"""``panscan serve``: an OpenAI-compatible server, on one engine or on Ray Serve replicas."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from panscan.cli.console import echo, note
from panscan.cli.models import check_checkpoint, warn_demonstration, warn_mini
from panscan.cli.values import engine_settings
from panscan.cli.verb import verb
from panscan.core import SettingError, UnsupportedError, with_adapters
from panscan.core.installation import install_command
from panscan.serve.client import EngineClient
from panscan.serve.options import ApiKeys, ServeOptions, read_api_keys
from panscan.settings import Options, ServerTable, fields_from

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


@verb("serve", EPILOG)
def command(options: Options) -> int:
    """Serve Gemma 3 with pan and scan over HTTP, with the API of OpenAI."""
    chosen = _serve_options(options)
    if chosen.host not in ("127.0.0.1", "::1", "localhost") and not chosen.api_keys:
        message = f"warning: --host {chosen.host} without --api-key: anyone who can connect can use this server"
        note(message, "yellow")
    clustered = any(item is not None for item in (options.replicas, options.max_replicas, options.ray_address))
    if options.print_config:
        from panscan.serve.cluster import print_config

        _require("ray", "cluster")
        config = print_config(
            chosen,
            replicas=options.replicas or 1,
            max_replicas=options.max_replicas,
            api_key_file=options.api_key_file,
        )
        echo(config, nl=False)
        return 0
    _require("uvicorn", "serve")
    if clustered:
        _require("ray", "cluster")

    def on_ready(url: str) -> None:
        note(f"Serving {', '.join(chosen.models)} on {url}")

    warn_mini(options, chosen.settings)
    warn_demonstration(chosen.settings)
    if options.ray_address is None:
        for model in (chosen.settings.model, *chosen.adapters.values()):
            check_checkpoint(replace(chosen.settings, model=model))
    from panscan.serve.server import run_server

    code = run_server(chosen, on_ready, _client(options, chosen, clustered=clustered))
    # Python would wait for threads that still download documents of requests that have ended.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _client(options: Options, chosen: ServeOptions, *, clustered: bool) -> AbstractContextManager[EngineClient]:
    """Return a context that yields the client of an engine in a child process, or of replicas on Ray Serve.

    Raises:
        SettingError: the number of replicas is out of range.
    """
    if not clustered:
        from panscan.serve.engine_process import EngineProcess

        return nullcontext(EngineProcess(chosen.settings, chosen.adapters))
    from panscan.serve.deployment import Scale, deployed_replicas

    os.environ.pop("PANSCAN_API_KEYS", None)  # Ray's processes need no keys
    return deployed_replicas(
        chosen.settings,
        Scale(options.replicas or 1, options.max_replicas),
        options.ray_address,
        show_logs=True,
        queued=chosen.max_queued_requests,
        drain_timeout=chosen.drain_timeout,
        routing=chosen.routing,
    )


def _serve_options(options: Options) -> ServeOptions:
    """Return the server's options.

    Raises:
        SettingError: an option is invalid, or conflicts with another one.
    """
    keys = [*options.api_keys, *os.environ.get("PANSCAN_API_KEYS", "").split()]
    if options.api_key_file is not None:
        keys += read_api_keys(options.api_key_file)
    media = options.allowed_local_media_path
    if media is not None and not media.is_dir():
        raise SettingError(f"--allowed-local-media-path {media}: not a directory")
    options, adapters = _named_adapters(options)
    return ServeOptions(
        settings=engine_settings(options, "serve"),
        adapters=adapters,
        api_keys=ApiKeys.of(keys),
        max_pages=options.max_pages,
        **fields_from(options, ServerTable),
    )


def _named_adapters(options: Options) -> tuple[Options, dict[str, str]]:
    """Return the options without ``--adapter NAME=ADAPTER``, and the models with these adapters by name.

    Raises:
        SettingError: a name is missing or stands twice, or the options allow only one model.
        ModelError: an adapter is not available.
    """
    unnamed = [text for text in options.adapter if "=" not in text or Path(text).expanduser().exists()]
    if len(unnamed) == len(options.adapter):
        return options, {}
    if unnamed:
        raise SettingError(f"--adapter {unnamed[0]}: name each adapter (NAME=ADAPTER), or none to merge them all")
    named: dict[str, str] = {}
    for text in options.adapter:
        name, _, adapter = text.partition("=")
        if not name or not adapter:
            raise SettingError(f"--adapter {text}: expected NAME=ADAPTER")
        if name in named:
            raise SettingError(f"--adapter {text}: another model has the name {name}")
        named[name] = adapter
    for flag in ("replicas", "max_replicas", "ray_address", "print_config"):
        if getattr(options, flag):
            raise SettingError(f"--{flag.replace('_', '-')}: not supported with --adapter NAME=ADAPTER")
    settings = dict(options.settings)
    if "model" not in settings:
        from panscan.model.hub import base_of, named_adapter

        first = next(iter(named.values()))
        settings["model"], revision = base_of(named_adapter(first), first)
        settings |= {} if revision is None else {"revision": revision}
    if (name := options.served_model_name or settings["model"]) in named:
        raise SettingError(f"--adapter {name}={named[name]}: another model has the name {name}")
    models = {name: with_adapters(settings["model"], [adapter]) for name, adapter in named.items()}
    return Options.parsed({**vars(options), "adapter": ()}, settings, options.given | {"model"}), models


def _require(module: str, extra: str) -> None:
    """Refuse to start without an optional dependency.

    Raises:
        UnsupportedError: the dependency is not installed.
    """
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise UnsupportedError(f"panscan serve needs the extra {extra!r}: {install_command(extra)}")
