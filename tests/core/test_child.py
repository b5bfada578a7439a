"""Child processes: messages of any size, how they end, and that they end with their parent."""

import os
import queue
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.forked_workers import program

from panscan.core import now
from panscan.core.child import Child, ChildEndedError, Inbox

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
SECONDS = 30.0
Start = Callable[[], tuple[Child, Inbox]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts children that keep their output, with two channels; all are closed."""
    monkeypatch.setenv("PYTHONPATH", PATHS)
    children: list[Child] = []

    def start_child() -> tuple[Child, Inbox]:
        child = Child("tests.core.echo_child", keep_output=True, channels=2)
        inbox: Inbox = queue.SimpleQueue()
        children.append(child)
        child.listen_into(inbox)
        return child, inbox

    yield start_child
    for child in children:
        child.close()


def gone(*processes: int) -> bool:
    deadline = time.monotonic() + SECONDS
    while any(map(psutil.pid_exists, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(psutil.pid_exists, processes))


def test_messages_of_any_size_arrive_in_order_on_their_channels(start: Start) -> None:
    child, inbox = start()
    pixels = np.arange(5_000_000, dtype=np.uint8)
    sent: list[Any] = ["short", pixels, b"x" * 300_000, {"views": [1, 2]}]
    for content in sent:
        child.send(("echo", content))
    child.send(("from", 1))
    child.send("over the other channel", 1)
    received = [inbox.get(timeout=SECONDS) for _ in range(len(sent) + 1)]
    assert {sender for sender, _ in received} == {child}
    assert (received[1][1] == pixels).all()
    assert [message for _, message in (received[0], *received[2:])] == [sent[0], *sent[2:], "over the other channel"]
    before = now()
    child.send("time")
    assert before <= inbox.get(timeout=SECONDS)[1] <= now(), "both processes use one time line"


ENDINGS = [
    ("exit", r"exited with code 3: the library is\\x1b broken"),
    ("abort", "was killed by SIGABRT"),
    (None, "was killed by SIGKILL, as the system does when memory runs out"),
]


@pytest.mark.parametrize(("message", "ending"), ENDINGS)
def test_an_ending_is_told_with_the_last_line(start: Start, message: str | None, ending: str) -> None:
    child, inbox = start()
    if message is None:
        os.kill(child.pid, signal.SIGKILL)
    else:
        child.send(message)
    assert inbox.get(timeout=SECONDS) == (child, None)
    assert child.ending() == ending.replace("\\\\", "\\")
    with pytest.raises(ChildEndedError, match=ending.split(":")[0]):
        child.send("more")


def test_kept_output_is_bounded_and_its_end_stays(start: Start) -> None:
    child, inbox = start()
    for _ in range(4):
        child.send(("print", 20_000))
        assert inbox.get(timeout=SECONDS)[1] == "printed"
    child.send(("echo", "bounded after the next message"))
    inbox.get(timeout=SECONDS)  # it waits now: while it starts, files come and go
    descriptors = set(Path(f"/proc/{child.pid}/fd").iterdir()) if Path("/proc/self/fd").exists() else set()
    assert all(path.stat().st_size < 2**22 for path in descriptors if "panscan-child" in str(path.readlink()))
    child.send("exit")
    assert inbox.get(timeout=SECONDS) == (child, None)
    assert child.ending() == r"exited with code 3: the library is\x1b broken"


class Unsendable:
    def __reduce__(self) -> Any:
        raise MemoryError


def test_a_message_that_fails_halfway_ends_the_child(start: Start) -> None:
    child, inbox = start()
    with pytest.raises(MemoryError):
        child.send([b"x" * 200_000, Unsendable()])
    assert inbox.get(timeout=SECONDS) == (child, None)
    assert child.ending() == "was killed by panscan"


def test_closing_kills_a_child_that_hangs_and_what_it_started(start: Start) -> None:
    child, inbox = start()
    child.send("start")
    _, grandchild = inbox.get(timeout=SECONDS)
    child.send("hang")
    child.close()
    assert gone(child.pid, grandchild)
    child.close()  # again


@pytest.mark.parametrize("starting", [False, True], ids=["running", "starting"])
def test_a_child_ends_with_its_killed_parent_even_if_a_forked_copy_keeps_the_connection(starting: bool) -> None:
    code = f"""
import os, queue, signal, time
from panscan.core.child import Child
child, inbox = Child("tests.core.echo_child"), queue.SimpleQueue()
copy = os.fork()
if copy:
    if {starting}:
        os.kill(child.pid, signal.SIGSTOP)  # it goes on when its parent has ended
    else:
        child.listen_into(inbox)
        child.send("hang")
        inbox.get()
    print(child.pid, copy, flush=True)
time.sleep(600)
"""
    with subprocess.Popen(program(code), stdout=subprocess.PIPE, text=True) as parent:
        child, copy = map(int, parent.stdout.readline().split())
        parent.kill()
    os.kill(child, signal.SIGCONT)
    assert gone(child)
    os.kill(copy, signal.SIGKILL)


# Daemon threads at the exit of a program.


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


@pytest.mark.parametrize(("work", "output"), [("prepare", "done\n"), ("hang", "")])
def test_a_program_that_exits_lets_native_work_finish_and_waits_for_no_hanging_thread(work: str, output: str) -> None:
    """Python would end the thread inside PyTorch, which aborts the process."""
    done = subprocess.run(program(EXIT, work), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout + done.stderr) == (0, output)
