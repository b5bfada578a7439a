"""Daemon threads at the exit of a program."""

import subprocess

from tests.forked_workers import program

EXIT = """
import sys, threading
import torch
from panscan.core.daemons import DaemonThreads, native_work

inside, never = threading.Event(), threading.Event()

def prepare():
    with native_work():
        inside.set()
        multiply()
        print("done", flush=True)

def multiply():
    values = torch.ones(300, 300)  # freed as this function returns, for which PyTorch takes the lock, too
    for _ in range(300):
        values = (values @ values).clamp(max=1.0)  # takes Python's lock after each operation

def hang():
    inside.set()
    never.wait()

DaemonThreads(1, "work").submit({"prepare": prepare, "hang": hang}[sys.argv[1]])
inside.wait()
"""


def exit_during(work: str) -> tuple[int, str]:
    done = subprocess.run(program(EXIT, work), capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_a_program_that_exits_lets_native_work_finish() -> None:
    """Python would end the thread inside PyTorch, which aborts the process."""
    code, said = exit_during("prepare")
    assert (code, said) == (0, "done\n")


def test_a_program_exits_while_a_thread_hangs() -> None:
    assert exit_during("hang") == (0, "")
