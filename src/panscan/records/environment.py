"""Environment of a run: hardware and versions needed to assess or repeat its figures; no data about the user."""

from __future__ import annotations

import os
import platform
import subprocess
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

import panscan
from panscan.core import BUNDLED
from panscan.records.schema import SCHEMA, RecordedCell, RunRecord, RunSettings
from panscan.records.store import Run

_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "triton",
    "flash-attn",
    "kernels",
    "bitsandbytes",
    "torchao",
    "torchvision",
    "numpy",
    "pillow",
    "vllm",
)


def environment() -> dict[str, Any]:
    """Return hardware, driver, library versions, and panscan's version and commit."""
    from panscan.model.machine import cuda_version, gpu_facts, thread_count

    packages = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "panscan": panscan.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "torch_threads": thread_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "packages": packages,
        "cuda": cuda_version(),
        "gpus": gpu_facts(),
    }


def new_run_record(
    command: Sequence[str], settings: RunSettings, cells: list[RecordedCell], bundled: Mapping[str, str]
) -> RunRecord:
    """Return the run line of a run that begins now on this machine.

    Args:
        command: command line, without secrets.
        settings: what the run is asked to do.
        cells: its cells.
        bundled: fingerprints of the bundled models in use, by name.
    """
    return RunRecord(
        schema=SCHEMA,
        run_id=uuid.uuid4().hex,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=list(command),
        settings=settings,
        environment={**environment(), **({"bundled": dict(bundled)} if bundled else {})},
        cells=cells,
    )


def _commit() -> str | None:
    """Return the commit of a source checkout, with ``+`` if it has changes; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def bundled_weights(run: Run) -> dict[str, str | None]:
    """Return fingerprints of the bundled models and adapters in a run's cells; None in runs older than fingerprints."""
    used = {_model(cell) for cell in run.cells.values()}
    stored = run.header.machine.bundled
    return {name: stored.get(name) for name in dict.fromkeys((*BUNDLED, *stored)) if name in used}


def has_random_weights(cells: Iterable[RecordedCell], weights: Mapping[str, str | None]) -> bool:
    """Return whether all cells have random weights; ``mini`` was random before runs had fingerprints."""
    random = {None, "tiny", *(["mini"] if weights.get("mini") is None else [])}
    return all(_model(cell) in random for cell in cells)


def _model(cell: RecordedCell) -> str | None:
    """Return the name of a cell's checkpoint; None if its weights are random."""
    return None if cell.settings.get("random_weights") else str(cell.settings.get("model", "unknown"))
