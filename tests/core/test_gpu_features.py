"""What GPU generations can do: the table, its messages, and that no other module knows."""

import re
from pathlib import Path

import pytest

import panscan
from panscan.core.gpu_features import Capability, refusal, runs_on, supports


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


WHEELS: dict[str | None, str] = {
    "binary": "sm_80,sm_90 9.0|sm_80 8.9|sm_90a 9.0|sm_100 10.3",
    "PTX": "sm_90,compute_90 12.0",
    None: "sm_90 8.0|sm_80 9.0|sm_100a 10.3|compute_90a 12.0",
}


@pytest.mark.parametrize("how", WHEELS)
def test_wheels_run_on_their_architectures(how: str | None) -> None:
    for wheel in WHEELS[how].split("|"):
        architectures, capability = wheel.split()
        major, minor = map(int, capability.split("."))
        assert runs_on(architectures.split(","), (major, minor)) == how, wheel
