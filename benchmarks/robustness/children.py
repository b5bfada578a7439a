"""Commands as forked children: one process has imported PyTorch and panscan once, and each child runs one command line.

A fork keeps only the thread that forks, so the parent stays single-threaded; `preload` checks that it is.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from panscan.cli.main import VERBS, main

_ERROR_BYTES = 20_000
_LATE = ("panscan.engine.engine", "panscan.batch.dispatch", "panscan.bench.run", "panscan.report.html")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended.

    Args:
        code: exit code, None if a signal ended it.
        killed: it was killed at the requested moment.
        hung: it was killed at its deadline.
        seconds: from fork to end.
        peak_mb: peak resident memory, the parent's pages included.
        out: the beginning and the end of standard output.
        err: the same of standard error.
    """

    code: int | None
    killed: bool
    hung: bool
    seconds: float
    peak_mb: float
    out: str
    err: str

    @property
    def traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.err + self.out

    @property
    def message(self) -> str:
        """Return panscan's last message on standard error; empty without one."""
        return next((line for line in reversed(self.err.splitlines()) if line.startswith("panscan: ")), "")


def panscan(arguments: Sequence[str]) -> Callable[[], None]:
    """Return the work of a child that runs a command line."""
    return lambda: main(list(arguments))


@cache
def preload(*, probe: bool) -> None:
    """Import what commands import, so that children need not.

    Args:
        probe: let a child run complete commands and report what else they import.

    Raises:
        RuntimeError: an import has started a thread, so that children could inherit its locks.
    """
    import torch

    torch.set_num_threads(1)
    for verb in VERBS:
        import_module(f"panscan.cli.{verb}")
    for name in _LATE:
        import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder) / "names"

        def answer() -> None:
            with contextlib.suppress(SystemExit):
                main(["samples", "s", "--count", "1"])
            with contextlib.suppress(SystemExit):
                main(
                    [
                        "bench",
                        "--dataset",
                        "s/questions.jsonl",
                        "--num-samples",
                        "1",
                        "--max-new-tokens",
                        "1",
                        "--no-verify",
                    ]
                )
            names.write_text("\n".join(sys.modules))

        if probe:
            run_child(answer, Path(folder), deadline=300)
        for name in names.read_text().split() if probe else ():
            with contextlib.suppress(Exception):
                import_module(name)
    if len([*Path("/proc/self/task").iterdir()]) > 1:
        raise RuntimeError("an import started a thread: children could not be forked safely")


def run_child(
    work: Callable[[], None],
    folder: Path,
    *,
    deadline: float,
    kill_after: float | None = None,
    memory: int | None = None,
) -> Ended:
    """Fork a child that does some work in a folder, and wait for its end.

    Args:
        work: what the child does; a `SystemExit` is its exit code.
        folder: its working directory.
        deadline: seconds until it counts as hung.
        kill_after: seconds until SIGKILL, None for a child that may finish.
        memory: bytes of address space, None for no limit.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.perf_counter()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _child(work, folder, out.fileno(), err.fileno(), memory)
        handle = os.pidfd_open(pid)
        try:
            waiter = select.poll()
            waiter.register(handle, select.POLLIN)
            timeout = deadline if kill_after is None else min(kill_after, deadline)
            late = not waiter.poll(1000 * timeout)
            with contextlib.suppress(ProcessLookupError):  # its own children, too
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):  # before it made its group
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
        _, status, usage = os.wait4(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return Ended(
            code=None if code < 0 else code,
            killed=late and kill_after is not None,
            hung=late and kill_after is None,
            seconds=time.perf_counter() - start,
            peak_mb=usage.ru_maxrss / 1024,
            out=_text(out.fileno()),
            err=_text(err.fileno()),
        )


def _child(work: Callable[[], None], folder: Path, out: int, err: int, memory: int | None) -> None:
    """Run the work in the child process; never return."""
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for ours, theirs in ((nothing, 0), (out, 1), (err, 2)):
            os.dup2(ours, theirs)
        sys.stdin, sys.stdout, sys.stderr = (open(n, mode, closefd=False) for n, mode in ((0, "r"), (1, "w"), (2, "w")))  # noqa: SIM115
        if memory is not None:
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        try:
            work()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:
            traceback.print_exc()
            code = 1
        import threading

        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does: a thread that stays is a hang
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
    finally:
        os._exit(code)


def _text(file: int) -> str:
    size = os.fstat(file).st_size
    head = os.pread(file, _ERROR_BYTES, 0)
    tail = os.pread(file, _ERROR_BYTES, max(len(head), size - _ERROR_BYTES))
    return (head + tail).decode("utf-8", "replace")
