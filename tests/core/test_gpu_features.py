"""What GPU generations can do: the table, its messages, and that no other module knows."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import panscan
from panscan.core.gpu_features import Capability, refusal, runs_on, supports
from panscan.core.installation import install_command


def test_features_begin_with_a_generation_and_may_end_with_it() -> None:
    assert not supports("bf16", (7, 5)) and supports("bf16", (8, 0)) and supports("bf16", None)
    assert not supports("fp8", (8, 6)) and supports("fp8", (8, 9)) and not supports("fp8", None)
    assert supports("tensor_memory_accelerator", (12, 0))
    assert supports("warpgroup_products", (9, 0)) and not supports("warpgroup_products", (10, 0))


GPU_REFUSALS = [
    ("fp8", (8, 0), "x needs compute capability 8.9 or later; this GPU has 8.0: use int8 or int4"),
    ("fp8", (7, 5), "x needs compute capability 8.9 or later; this GPU has 7.5: use bnb-8bit or bnb-4bit"),
    ("fp8", None, "x needs an NVIDIA GPU of compute capability 8.9 or later; on a CPU use int8 or int4"),
    ("fp8_cache", (8, 0), "x needs compute capability 8.9 or later; this GPU has 8.0: use --kv-cache-dtype int8"),
    ("triton", (7, 5), "x needs compute capability 8.0 or later; this GPU has 7.5"),
    ("fp8", (8, 9), None),
]


@pytest.mark.parametrize(("feature", "capability", "reason"), GPU_REFUSALS)
def test_a_refusal_names_the_gpus_alternatives(feature: str, capability: Capability | None, reason: str | None) -> None:
    assert refusal("x needs", feature, capability) == reason


STATED = re.compile(
    r"(capability|\.major)[\w\[\]().]* *([<>]=?|[!=]=)|([<>]=?|[!=]=) *[\w.]*(capability|major)"
    r"|\((7|8|9|10|12), \d+\)|compute capability [89]"
)
"""A comparison of compute capabilities, or the first of a feature or a limit."""


def facts(path: Path) -> list[int]:
    source = path.read_text("utf-8")
    return [
        number
        for number, line in enumerate(source.splitlines(), 1)
        if STATED.search(line) and ("capability" in source or ".major" in source)
    ]


def test_no_other_module_compares_capabilities() -> None:
    root = Path(panscan.__file__).parent
    known = root / "core" / "gpu_features.py"
    stated = {path: facts(path) for path in root.rglob("*.py")}
    assert stated.pop(known)
    assert {str(path.relative_to(root)): lines for path, lines in stated.items() if lines} == {}


WHEELS = [
    (["sm_80", "sm_90"], (9, 0), "binary"),
    (["sm_80"], (8, 9), "binary"),
    (["sm_90"], (8, 0), None),
    (["sm_80"], (9, 0), None),
    (["sm_90a"], (9, 0), "binary"),
    (["sm_100a"], (10, 3), None),
    (["sm_100"], (10, 3), "binary"),
    (["sm_90", "compute_90"], (12, 0), "PTX"),
    (["compute_90a"], (12, 0), None),
]


@pytest.mark.parametrize(("architectures", "capability", "how"), WHEELS)
def test_wheels_run_on_their_architectures(
    architectures: list[str], capability: tuple[int, int], how: str | None
) -> None:
    assert runs_on(architectures, capability) == how


# The command that installs this copy again, from the metadata that installers write.


GIT = {"url": "https://host/panscan.git", "vcs_info": {"vcs": "git", "commit_id": "0" * 40}}
CHECKOUT = {"url": "file:///home/a%20b/panscan", "dir_info": {"editable": True}}


INSTALLATIONS = [
    (None, "pip", "serve", "pip install 'panscan[serve]'"),
    (None, "pip", "", "pip install --upgrade panscan"),
    (None, "uv", "serve", "uv pip install 'panscan[serve]'"),
    (CHECKOUT, "pip", "serve,tracing", "pip install -e '/home/a b/panscan[serve,tracing]'"),
    (CHECKOUT, "uv", "", "uv pip install -e '/home/a b/panscan'"),
    ({**CHECKOUT, "dir_info": {}}, "pip", "serve", "pip install '/home/a b/panscan[serve]'"),
    (GIT, "pip", "serve", "pip install 'panscan[serve] @ git+https://host/panscan.git'"),
    (GIT, "pip", "", "pip install 'panscan @ git+https://host/panscan.git'"),
]


@pytest.mark.parametrize(("origin", "installer", "extras", "expected"), INSTALLATIONS)
def test_the_command_repeats_how_panscan_was_installed(
    origin: dict[str, Any] | None,
    installer: str,
    extras: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
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
