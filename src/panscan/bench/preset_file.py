"""A recommended cell as a preset: a YAML file that says where it comes from."""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml

from panscan.bench.candidates import cell_name
from panscan.bench.recommend import Recommendation
from panscan.bench.records import Run, write_atomically
from panscan.bench.rows import label
from panscan.bench.verdict import verdict_of
from panscan.core import RecordsError, SettingError
from panscan.settings import Settings

__all__ = ["preset_text", "write_preset"]

_MARK = "# Written by panscan recommend, which may replace it."
_OF_THE_MACHINE = ("device", "device_map", "max_memory", "tp_plan")
_OF_THE_MEASUREMENT = ("ignore_eos",)


def preset_text(run: Run, chosen: Recommendation) -> str:
    """The chosen cell's settings that differ from the defaults, under comments of where they come from.

    Left out, and named in a comment: where the model was placed on that machine, and ``ignore_eos``, which measurements
    use and answers do not want.

    Raises:
        RecordsError: the cell's settings are another version's.
    """
    try:
        settings = Settings(**run.cells[chosen.cell]).changed()
    except (TypeError, SettingError) as error:
        raise RecordsError(f"{run.path}: cell {chosen.cell} has another version's settings ({error})") from error
    left_out = {name: settings.pop(name) for name in (*_OF_THE_MACHINE, *_OF_THE_MEASUREMENT) if name in settings}
    facts = {
        "cell": cell_name(run, chosen.cell),
        "preset": run.presets.get(chosen.cell, ""),
        "run": f"{run.header['run_id']}, {run.header['created']}, {run.path}",
        "command": shlex.join(map(str, run.header["command"])),
        "verdict": verdict_of(run, chosen.cell).word,
        "reason": chosen.reason,
        "left out": label(left_out),
    }
    lines = [_MARK, *(f"# {name}: {_one_line(text)}" for name, text in facts.items() if text)]
    return "\n".join([*lines, yaml.safe_dump(settings, sort_keys=False)])


def write_preset(text: str, path: Path, *, force: bool = False) -> None:
    """Write a preset.

    Raises:
        SettingError: a file is there that :func:`preset_text` did not make, and not ``force``; or its name would not be
            taken for a preset's.
        RecordsError: the file cannot be written.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise SettingError(f"-o {path}: a preset's name ends in .yaml")
    if path.exists() and not force and not _ours(path):
        raise SettingError(f"{path} is there and was not written by panscan recommend: choose another -o, or --force")
    write_atomically(path, text.encode())


def _ours(path: Path) -> bool:
    try:
        return path.read_bytes().startswith(_MARK.encode())
    except OSError:
        return False


def _one_line(text: str) -> str:
    """Whatever names and paths hold, a comment stays one line of ASCII."""
    return " ".join(text.split()).encode("ascii", "backslashreplace").decode()
