"""Unfinished checkpoints: ``OUT.partial`` holds finished files and is renamed to ``OUT`` at the end.

Each file is written under a temporary name, synced and renamed, so a killed process leaves only complete files.
``config.json`` is the last file that loading needs: a directory without it does not load. ``panscan-quantize.json``
holds the job's fingerprint, so that only the same job resumes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from panscan.core import InputError, SettingError
from panscan.core.files import WriteLock, publish_file, replace_file, sync_directory
from panscan.core.foreign import parse_json
from panscan.model.files import COMPANIONS

JOB_FILE = "panscan-quantize.json"
CARD_FILE = "README.md"
INDEX_FILE = "model.safetensors.index.json"
_LOCK = ".lock"
_KEPT = "--force does not replace it: move it away"
_MOST_JOB = 65_536  # bytes of the job's file, which has a few hundred
_WEIGHTS = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_OTHERS = frozenset({JOB_FILE, CARD_FILE, INDEX_FILE, "config.json", *COMPANIONS})


class PartialCheckpoint:
    """The directory of an unfinished checkpoint, locked while in the ``with`` block.

    Args:
        out: the finished checkpoint's directory.
        job: what decides the checkpoint's contents, as JSON values.
        overwrite: replace an existing checkpoint of this command, and discard another job's partial work.

    Raises:
        SettingError: for the reasons of :func:`resolved_output`; or partial work of another job exists.
        InputError: another process works on it, or the directory cannot be written.
    """

    def __init__(self, out: Path, job: Mapping[str, Any], *, overwrite: bool = False) -> None:
        self.out, self.job, self._overwrite = resolved_output(out, overwrite=overwrite), dict(job), overwrite
        self.path = self.out.with_name(f"{self.out.name}.partial")
        self._lock = WriteLock(
            self.path / _LOCK,
            lambda holder: InputError(f"{self.out}: {holder} is writing this checkpoint: wait for it"),
        )

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written: {error.strerror}") from error
        try:
            self._continue_or_begin()
        except BaseException:  # interruptions included
            self._lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def has(self, name: str) -> bool:
        """Return whether a file is finished."""
        return (self.path / name).exists()

    def write_tensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a safetensors file, in one step.

        Raises:
            InputError: the file cannot be written, for example because the disk is full.
        """
        temporary = self.path / f".{name}"
        with self._writable(name):
            save_file({key: tensors[key].contiguous() for key in sorted(tensors)}, temporary, {"format": "pt"})
            temporary.chmod((self.path / JOB_FILE).stat().st_mode)  # safetensors lets only the owner read them
            publish_file(temporary, self.path / name)

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file, in one step.

        Raises:
            InputError: for the reasons of :meth:`write_tensors`.
        """
        with self._writable(name), replace_file(self.path / name) as file:
            file.write(data)

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file, in one step."""
        self.write_bytes(name, json.dumps(value, indent=2).encode() + b"\n")

    def check_space(self, size: int) -> None:
        """Check that the disk has room for the checkpoint; its finished files count as room.

        Args:
            size: bytes of the whole checkpoint.

        Raises:
            InputError: the disk does not have enough space.
        """
        finished = sum(entry.stat().st_size for entry in self.path.iterdir() if entry.is_file())
        free = shutil.disk_usage(self.path).free
        if size > finished + free:
            raise InputError(
                f"{self.out} needs {(size - finished) / 1e9:.1f} GB of disk space, {free / 1e9:.1f} GB are free: free"
                " some, or choose an OUT on another disk"
            )

    def publish(self) -> None:
        """Rename the directory to its final name, after removing an existing checkpoint if ``overwrite`` is set.

        If the process is killed in between, the same command finishes with the complete directory.

        Raises:
            SettingError: the output directory was created or changed in the meantime.
            InputError: it cannot be renamed.
        """
        resolved_output(self.out, overwrite=self._overwrite)
        try:
            for leftover in self.path.glob(".*"):  # the lock, and files of killed processes
                leftover.unlink()
            if self.out.exists():
                for entry in sorted(self.out.iterdir(), key=lambda entry: entry.name == JOB_FILE):
                    entry.unlink()  # the job's file last: it shows whose directory this is
                self.out.rmdir()
            self.path.rename(self.out)
            sync_directory(self.out.parent)
        except OSError as error:
            raise InputError(f"{error.filename}: cannot be renamed or removed: {error.strerror}") from error

    def _continue_or_begin(self) -> None:
        stored = None
        with contextlib.suppress(OSError, ValueError):
            stored = parse_json((self.path / JOB_FILE).read_bytes(), most=_MOST_JOB)
        if stored == self.job:
            return
        entries = [entry for entry in self.path.iterdir() if entry.name != _LOCK]
        if stored is None and not all(entry.name.startswith(f".{JOB_FILE}") for entry in entries):
            raise SettingError(f"{self.path} was not written by panscan quantize: move it, or choose another OUT")
        if stored is not None and not self._overwrite:
            before = stored if isinstance(stored, dict) else {}
            changed = [key for key in {**before, **self.job} if before.get(key) != self.job.get(key)]
            raise SettingError(
                f"{self.path} holds another job's partial work (different: {', '.join(changed)}): use that job's"
                " options to resume it, or --force to discard it"
            )
        for entry in entries:
            if entry.is_file() and entry.name != JOB_FILE:  # which shows until the end whose work this is
                entry.unlink()
        self.write_json(JOB_FILE, self.job)

    @contextlib.contextmanager
    def _writable(self, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise InputError(
                f"{self.path / name} cannot be written: {reason}: repeat the command to resume when it can"
            ) from error


def resolved_output(out: Path, *, overwrite: bool) -> Path:
    """Return the absolute path of an output directory, without symbolic links, after checking that it may be written.

    Args:
        out: output path as the user gave it.
        overwrite: an existing checkpoint of this command may be replaced.

    Raises:
        SettingError: ``out`` names no directory, or exists and must not be replaced, or a directory that this command
            did not write has the name of a temporary one.
    """
    try:
        resolved = out.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before Python 3.13
        raise SettingError(f"{out} cannot be resolved: {error}") from error
    if not out.name or not resolved.name:
        raise SettingError(f"{out}: give a directory for the checkpoint, not the root or the current directory")
    if os.path.lexists(resolved):
        if not overwrite:
            raise SettingError(f"{out} exists: choose another directory, or replace it with --force")
        if resolved.is_symlink() or not (resolved / JOB_FILE).is_file():
            raise SettingError(f"{resolved} was not written by this command, so {_KEPT}")
        for entry in sorted(resolved.iterdir()):
            known = entry.name in _OTHERS or _WEIGHTS.fullmatch(entry.name)
            if not known or entry.is_symlink() or not entry.is_file():
                raise SettingError(f"{entry} was not written by this command, so {_KEPT}")
    if (partial := resolved.with_name(f"{resolved.name}.partial")).is_symlink():
        raise SettingError(f"{partial} is a symbolic link: move it, or choose another OUT")
    return resolved
