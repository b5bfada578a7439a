"""Panscan's commands, worker processes and programs, forked from a copy of the test process instead of started.

A started one spends five seconds of CPU time on importing PyTorch and Transformers. A copy of the test process,
forked once all tests are imported and no thread runs, forks it instead, and adds it to the children of the test
process, so that pids, signals, exit codes and ``wait()`` are those of a started one. A forked command does the same for
its own workers. What has another environment, which could change what is imported, is started as users start it, and
so are its workers. Programs are what :func:`program` makes; they end as an interpreter does.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

import panscan
from panscan.core import daemons

_COMMAND = "panscan.cli.main"
_SCRIPTS = {"panscan": _COMMAND, "tests.verify.faulty_server": "tests.verify.faulty_server"}
_WORKERS = ("panscan.engine.rank_worker", "panscan.bench.replica_worker", "panscan.serve.engine_worker")
_LEAVES = ("panscan.engine.rank_worker", "panscan.bench.replica_worker")  # start no such workers
_FORKABLE = "# What this imports, the tests import.\n"
_PROGRAM = re.compile(r"from panscan\.core\.process import run_worker; run_worker\('([\w.]+)'\)")
_IMPORT_VARIABLES = ("PYTHON", "LD_", "TRITON", "TORCH", "HF_", "OMP_", "CUDA_")  # read while modules are imported
_NAME, _SUBREAPER = 15, 36  # of prctl()
_LIMIT = 2**20

_connection: socket.socket | None = None
_variables_at_fork: dict[str, str] = {}
_lock = threading.Lock()


def runs(process: psutil.Process, module: str) -> bool:
    """Return whether a process is a worker of a module, forked or started."""
    return process.name() == module.rpartition(".")[2] or module in " ".join(process.cmdline())


def program(code: str, *arguments: str) -> list[str]:
    """Return the command of a Python program that does not ask how, or when, modules are imported."""
    return [sys.executable, "-c", _FORKABLE + code, *arguments]


class Popen(subprocess.Popen[Any]):
    """:class:`subprocess.Popen` that forks panscan's workers."""

    def _execute_child(self, args: Any, *more: Any) -> None:
        module, arguments = _module_and_arguments(args)
        _, _, _, passed, folder, environment, *_ = more
        environment = os.environ if environment is None else environment
        if module is None or _connection is None or not _imports_alike(environment):
            super()._execute_child(args, *more)  # type: ignore[misc]
            return
        pipes = more[9:15]
        child_ends = (pipes[0], pipes[3], pipes[5])
        streams = [number if file == -1 else file for number, file in enumerate(child_ends)]
        order = pickle.dumps((module, arguments, dict(environment), str(folder or Path.cwd()), list(passed)))
        with _lock:  # the copy answers once the worker has lost its first parent, and this process has adopted it
            _adopt_orphans(True)
            try:
                socket.send_fds(_connection, [order], [*streams, *passed])
                self.pid = int(_connection.recv(64))
            finally:
                _adopt_orphans(False)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def prepare() -> None:
    """Fork the copy. Call this once, when everything is imported and no other thread of Python runs tests."""
    global _connection, _variables_at_fork
    if sys.platform != "linux" or _connection is not None:
        return
    _connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        _connection.setsockopt(socket.SOL_SOCKET, buffer, _LIMIT)
        other.setsockopt(socket.SOL_SOCKET, buffer, _LIMIT)
    _variables_at_fork = _import_variables(os.environ)
    if os.fork():
        other.close()
        subprocess.Popen = Popen  # type: ignore[misc]
        atexit.register(_connection.close)
        return
    try:
        _serve(other.detach())
    finally:
        os._exit(1)


def _serve(descriptor: int) -> None:
    """Fork workers until the test process ends."""
    atexit._clear()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.detach()  # the tests' own, and what PyTorch would report as it ends
    atexit.register(daemons._work.finish)  # as its import did
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # the next one registers itself
    os.setpgid(0, 0)  # Ctrl-C is for the tests
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    connection = socket.socket(fileno=descriptor)
    for module in (*_SCRIPTS.values(), *_WORKERS):
        importlib.import_module(module)
    # The first use after a fork replaces PyTorch's thread pool, and two threads at once can find it missing.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
    gc.freeze()
    ctypes.CDLL(None).malloc_trim(0)  # what a program allocates is new to its footprint
    while True:
        order, files, _, _ = socket.recv_fds(connection, _LIMIT, 16)
        if not order:
            os._exit(0)
        reader, writer = os.pipe()
        if (parent := os.fork()) == 0:
            if (worker := os.fork()) == 0:
                connection.close()
                os.close(reader)
                os.close(writer)
                _run(order, files)
            os.write(writer, str(worker).encode())
            os._exit(0)
        os.waitpid(parent, 0)
        connection.send(os.read(reader, 64))
        for file in (reader, writer, *files):
            os.close(file)


def _run(order: bytes, files: Sequence[int]) -> None:
    """Run the ``main()`` of a module, or a program, as a new interpreter would, and exit."""
    global _connection
    module, arguments, environment, folder, passed = pickle.loads(order)
    code = 1
    try:
        os.setsid()
        high = [os.dup(file) for file in files if file >= 0]  # the numbers below may be those of ``passed``
        base = max([*high, *passed, 3]) + 1
        high = [os.dup2(file, base + number) for number, file in enumerate(high)]
        for file, number in zip(high, (0, 1, 2, *passed), strict=True):
            os.dup2(file, number)
        for number in range(3, base + len(high)):
            if number not in passed:
                with contextlib.suppress(OSError):
                    os.close(number)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        # Open until the process ends, as an interpreter's own streams are.
        sys.stdin, sys.stdout = (open(number, mode, closefd=False) for number, mode in enumerate("rw"))  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        faulthandler.enable(sys.stderr)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__  # pytest's own
        logging.getLogger().handlers.clear()
        warnings.resetwarnings()
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        tempfile.tempdir = None  # as TMPDIR says
        random.seed()
        sys.argv = arguments
        sys.modules["__main__"] = types.ModuleType("__main__")
        _connection = None
        if module not in _LEAVES:
            prepare()
        if module in _WORKERS:
            _prctl(_NAME, module.rpartition(".")[2].encode())
        if module.startswith(_FORKABLE):
            exec(compile(module, "<string>", "exec"), sys.modules["__main__"].__dict__)
        else:
            sys.modules[module].main()
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    if module.startswith(_FORKABLE):
        ctypes.pythonapi.Py_Exit(code)
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _module_and_arguments(args: Any) -> tuple[str | None, list[str]]:
    """Return the module, or the program, of a command that can be forked, and what is ``sys.argv`` in it."""
    match args:
        case [sys.executable, "-m", name, *words] if name in _SCRIPTS and not _starts_ray(words):
            return _SCRIPTS[name], [str(Path(panscan.__file__).with_name("__main__.py")), *words]
        case [sys.executable, "-c", str(code), *words] if code.startswith(_FORKABLE):
            return code, ["-c", *words]
        case [sys.executable, "-P", "-c", str(code), *words] if worker := _PROGRAM.fullmatch(code):
            return (worker[1] if worker[1] in _WORKERS else None), ["-c", *words]
    return None, []


def _starts_ray(words: Sequence[str]) -> bool:
    """Return whether a command uses Ray, whose core reads its token once, when it is imported."""
    return words[:1] in (["serve"], ["batch"]) and not {"--replicas", "--ray-address"}.isdisjoint(words)


def _import_variables(environment: Any) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_IMPORT_VARIABLES)}


def _imports_alike(environment: Any) -> bool:
    """Return whether modules would be imported as they were imported here."""
    return _import_variables(environment) == _variables_at_fork


def _adopt_orphans(adopt: bool) -> None:
    _prctl(_SUBREAPER, int(adopt))


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
