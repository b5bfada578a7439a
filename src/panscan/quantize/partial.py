"""Unfinished checkpoints: ``OUT.partial`` holds finished files and is renamed to ``OUT`` at the end.

Each file is written under a temporary name, synced and renamed, so a killed process leaves only complete files.
``config.json`` is the last file that loading needs: a directory without it does not load. ``panscan-quantize.json``
holds the job's fingerprint, so that only the same job resumes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from filelock import FileLock, Timeout
from safetensors.torch import load_file, save_file

from panscan.core import SettingError
from panscan.core.process import create_file

__all__ = ["JOB_FILE", "PartialCheckpoint"]

JOB_FILE = "panscan-quantize.json"
_LOCK = ".lock"


class PartialCheckpoint:
    """The directory of an unfinished checkpoint, locked while in the ``with`` block.

    Args:
        out: the finished checkpoint's directory.
        job: what decides the checkpoint's contents, as JSON values.
        overwrite: replace an existing checkpoint of this command, and discard another job's partial work.

    Raises:
        SettingError: ``out`` exists, another job's partial work is there, another process works on it, or the
            directory cannot be written.
    """

    def __init__(self, out: Path, job: Mapping[str, Any], *, overwrite: bool = False) -> None:
        self.out, self.job, self._overwrite = out, dict(job), overwrite
        self.path = out.with_name(f"{out.name}.partial")
        self._lock = FileLock(self.path / _LOCK, timeout=0, thread_local=False)
        _check_out(out, overwrite=overwrite)
        self.resumed = False

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout as error:
            raise SettingError(f"{self.out}: another process is writing this checkpoint: wait for it") from error
        except OSError as error:
            raise SettingError(f"{self.path}: cannot be written: {error.strerror}") from error
        try:
            self._continue_or_begin()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def has(self, name: str) -> bool:
        """Return whether a file is finished."""
        return (self.path / name).exists()

    def read_tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a finished file."""
        return load_file(self.path / name)

    def write_tensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a safetensors file, in one step."""
        temporary = self.path / f".{name}"
        save_file({key: tensors[key].contiguous() for key in sorted(tensors)}, temporary, {"format": "pt"})
        temporary.chmod((self.path / JOB_FILE).stat().st_mode)  # safetensors lets only the owner read them
        self._finish(temporary, name)

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file, in one step."""
        temporary = self.path / f".{name}"
        with create_file(temporary) as file:
            file.write(data)
        self._finish(temporary, name)

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file, in one step."""
        self.write_bytes(name, json.dumps(value, indent=2).encode() + b"\n")

    def publish(self) -> None:
        """Rename the directory to its final name, replacing an existing checkpoint if ``overwrite`` is set.

        Raises:
            SettingError: the output directory was created in the meantime.
        """
        _check_out(self.out, overwrite=self._overwrite)
        for left in self.path.glob(".*.safetensors"):
            left.unlink()
        (self.path / _LOCK).unlink(missing_ok=True)
        replaced = self.out.with_name(f"{self.out.name}.replaced")
        if self.out.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            self.out.rename(replaced)
        self.path.rename(self.out)
        _sync(self.out.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def _continue_or_begin(self) -> None:
        file = self.path / JOB_FILE
        found = None
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(file.read_text("utf-8"))
        if found == self.job:
            self.resumed = True
            return
        entries = [entry for entry in self.path.iterdir() if entry.name != _LOCK]
        if found is None and any(entry.name != f".{JOB_FILE}" for entry in entries):
            raise SettingError(f"{self.path} was not written by panscan quantize: move it, or choose another OUT")
        if found is not None and not self._overwrite:
            keys = {**found, **self.job} if isinstance(found, dict) else self.job
            changed = [key for key in keys if not isinstance(found, dict) or found.get(key) != self.job.get(key)]
            raise SettingError(
                f"{self.path} holds another job's partial work (different: {', '.join(changed)}): use that job's"
                " options to resume it, or --overwrite to discard it"
            )
        for entry in entries:
            if entry.is_file():
                entry.unlink()
        self.write_json(JOB_FILE, self.job)

    def _finish(self, temporary: Path, name: str) -> None:
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(self.path / name)
        _sync(self.path)


def _check_out(out: Path, *, overwrite: bool) -> None:
    """Raise unless the output is new, or is a checkpoint of this command that may be overwritten."""
    if not out.name:
        raise SettingError(f"{out}: give a directory for the checkpoint, not the root or the current directory")
    if not out.exists() and not out.is_symlink():
        return
    if not overwrite:
        raise SettingError(f"{out} exists: choose another directory, or replace it with --overwrite")
    if not (out / JOB_FILE).is_file():
        raise SettingError(f"{out} was not written by this command, so --overwrite does not replace it: move it away")


def _sync(directory: Path) -> None:
    """Sync the entries of a directory to disk. Only POSIX systems support and need this."""
    if os.name != "posix":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
