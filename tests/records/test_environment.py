"""The environment of a run: what a reader needs, and nothing that names the user."""

import json
import platform
import shutil
import socket
import subprocess
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
import torch

import panscan
from panscan.model.machine import peak_memory, reset_peak_memory
from panscan.records.environment import environment

ROOT = Path(panscan.__file__).resolve().parents[2]


def test_versions_and_hardware_are_this_machines() -> None:
    facts = environment()
    assert (facts["panscan"], facts["python"]) == (panscan.__version__, platform.python_version())
    for name in ("torch", "transformers", "accelerate", "pillow", "numpy"):
        assert facts["packages"][name] == version(name)
    assert all(facts["packages"].values())
    assert facts["memory_bytes"] == psutil.virtual_memory().total
    assert len(facts["gpus"]) == torch.cuda.device_count()
    assert facts["cpu"]


def test_it_can_be_recorded_and_names_nobody() -> None:
    text = json.dumps(environment(), allow_nan=False)
    for private in (str(Path.home()), socket.gethostname(), str(ROOT)):
        assert private not in text


def test_the_commit_is_the_checkouts() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a checkout")
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("git does not read this checkout")
    commit = environment()["commit"]
    assert done.stdout.startswith(commit.removesuffix("+"))
    assert len(commit.removesuffix("+")) >= 12


@pytest.mark.gpu
def test_a_gpus_peak_starts_anew() -> None:
    held = torch.ones(2**28, dtype=torch.uint8, device="cuda")
    del held
    torch.cuda.empty_cache()
    reset_peak_memory()
    others = torch.cuda.memory_allocated()  # of fixtures that are still alive
    small = torch.ones(2**20, dtype=torch.uint8, device="cuda")
    peak = peak_memory()["peak_allocated_bytes"]
    assert small.numel() <= peak - others < 2**28
