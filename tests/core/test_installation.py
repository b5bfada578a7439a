"""The command that installs this copy again, from the metadata that installers write."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from panscan.core.installation import install_command

GIT = {"url": "https://host/panscan.git", "vcs_info": {"vcs": "git", "commit_id": "0" * 40}}
CHECKOUT = {"url": "file:///home/a%20b/panscan", "dir_info": {"editable": True}}


@pytest.mark.parametrize(
    ("origin", "installer", "extras", "expected"),
    [
        (None, "pip", "serve", "pip install 'panscan[serve]'"),
        (None, "pip", "", "pip install --upgrade panscan"),
        (None, "uv", "serve", "uv pip install 'panscan[serve]'"),
        (CHECKOUT, "pip", "serve,tracing", "pip install -e '/home/a b/panscan[serve,tracing]'"),
        (CHECKOUT, "uv", "", "uv pip install -e '/home/a b/panscan'"),
        ({**CHECKOUT, "dir_info": {}}, "pip", "serve", "pip install '/home/a b/panscan[serve]'"),
        (GIT, "pip", "serve", "pip install 'panscan[serve] @ git+https://host/panscan.git'"),
        (GIT, "pip", "", "pip install 'panscan @ git+https://host/panscan.git'"),
    ],
)
def test_the_command_repeats_how_panscan_was_installed(
    origin: Any, installer: str, extras: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "panscan-9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: panscan\nVersion: 9\n")
    (metadata / "INSTALLER").write_text(f"{installer}\n")
    if origin is not None:
        (metadata / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(tmp_path)
    assert install_command(extras) == expected


def test_a_source_tree_is_installed_from_its_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    root = shlex.split(install_command())[-1]
    assert (Path(root) / "pyproject.toml").is_file()
