"""``panscan serve``: an OpenAI-compatible server, on one engine or on Ray Serve replicas."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from panscan.cli.console import echo, errors, show_warnings, warn_mini
from panscan.cli.models import DemonstrationWarning, check_checkpoint
from panscan.cli.values import engine_settings
from panscan.cli.verb import verb
from panscan.core import SettingError, UnsupportedError, with_adapters
from panscan.core.installation import install_command
from panscan.model.bundled import is_demonstration
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
    """Serve Gemma 3 with pan and scan over HTTP."""
    show_warnings(errors())
    chosen = _serve_options(options)
    _warn_open(chosen)
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
        errors().print(f"Serving {chosen.model_name} on {url}", soft_wrap=True)

    if chosen.settings.model == "mini" and "model" not in options.given and not chosen.settings.random_weights:
        warn_mini()
    if is_demonstration(chosen.settings):
        DemonstrationWarning(chosen.settings).show()
    if options.ray_address is None:
        check_checkpoint(chosen.settings)
    from panscan.serve.server import run_server

    code = run_server(chosen, on_ready, _deployed(options, chosen) if clustered else _in_child_process(chosen))
    # Python would wait for threads that still download documents of requests that have ended.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _in_child_process(options: ServeOptions) -> AbstractContextManager[EngineClient]:
    from panscan.serve.engine_process import EngineProcess

    return nullcontext(EngineProcess(options.settings))


def _deployed(options: Options, chosen: ServeOptions) -> AbstractContextManager[EngineClient]:
    """Return a context that yields the client of replicas on Ray Serve.

    Raises:
        SettingError: the number of replicas is out of range.
    """
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
    options = _one_model(options)
    return ServeOptions(
        settings=engine_settings(options, "serve"),
        api_keys=ApiKeys.of(keys),
        max_pages=options.max_pages,
        **fields_from(options, ServerTable),
    )


def _one_model(options: Options) -> Options:
    """Return the options with ``--adapter NAME=ADAPTER`` as an adapter and a name in the API.

    Raises:
        SettingError: several names, which would need a copy of the changed weights and a KV cache each.
    """
    parts = [text.partition("=") for text in options.adapter if "=" in text and not Path(text).expanduser().exists()]
    if not parts:
        return options
    if len(options.adapter) > 1:
        from panscan.model.files import checkpoint_files

        files = checkpoint_files(with_adapters(options.settings.get("model"), [parts[0][2]]), weights=False)
        size = sum(stored.bytes for stored in files.tensors.values()) / 1e9  # 0: not downloaded
        need = f"{size:,.2g} GB of weights and a KV cache" if size else "its own weights and KV cache"
        raise SettingError(
            f"--adapter {options.adapter[1]}: a server has one set of merged weights: start a server for each adapter"
            f" with a name, which needs {need}, or leave out the names to sum the adapters"
        )
    name, _, adapter = parts[0]
    if not name or not adapter or options.served_model_name not in (None, name):
        raise SettingError(f"--adapter {options.adapter[0]}: expected NAME=ADAPTER, without --served-model-name")
    return options.changed(adapter=(adapter,), served_model_name=name)


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
        raise UnsupportedError(f"panscan serve needs the extra {extra!r}: {install_command(extra)}")
