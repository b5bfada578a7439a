"""How this copy of panscan was installed, and the command that installs it again with more packages."""

from __future__ import annotations

import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from panscan.core.foreign import parse_json


def install_command(extras: str = "") -> str:
    """Return the command that installs this copy again, from its checkout, repository or index.

    Args:
        extras: extras to install, separated by commas; empty: none, but the newest version from an index.
    """
    try:
        installed = distribution("panscan")
    except PackageNotFoundError:  # run from its source tree
        return f"pip install -e {_quoted(str(Path(__file__).parents[3]), extras)}"
    origin = parse_json(installed.read_text("direct_url.json") or "{}")
    target = _quoted("panscan", extras) if extras else "--upgrade panscan"
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        target = editable + _quoted(unquote(urlsplit(origin["url"]).path), extras)
    elif "url" in origin:
        version_control = f"{origin['vcs_info']['vcs']}+" if "vcs_info" in origin else ""
        target = shlex.quote(f"panscan{extras and f'[{extras}]'} @ {version_control}{origin['url']}")
    uv = "uv " if (installed.read_text("INSTALLER") or "").strip() == "uv" else ""
    return f"{uv}pip install {target}"


def _quoted(target: str, extras: str) -> str:
    return shlex.quote(f"{target}[{extras}]" if extras else target)
