"""An engine in a forked child: a clear error at once, whatever the parent's threads were doing, and a prompt exit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

BEGIN = """
import asyncio, os, sys, threading
from panscan import Engine, Request, Sampling
from panscan.core import EngineError

engine = Engine.from_pretrained("tiny", dtype="fp32", device="cpu", kv_cache_gb=0.05, max_new_tokens=4)

def refused(call):
    try:
        call()
    except EngineError as error:
        print("refused:", error, flush=True)
    else:
        print("answered", flush=True)

def child(function):
    pid = os.fork()
    if pid == 0:
        function()
        sys.exit(3)  # an exit with everything that the interpreter does at its end
    _, status = os.waitpid(pid, 0)
    print("exit", os.waitstatus_to_exitcode(status), flush=True)
"""
MESSAGE = "refused: the engine was created in another process: create the Engine after the fork"


def run(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code], capture_output=True, text=True, timeout=200, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def test_every_method_is_refused_in_a_child_and_works_in_the_parent() -> None:
    code = """
async def submit(): engine.submit(engine.request("Hi"))
def all_of_them():
    refused(lambda: engine.generate([engine.request("Hi")]))
    refused(lambda: engine.stream_results([engine.request("Hi")]))
    refused(lambda: asyncio.run(submit()))
    refused(lambda: engine.cancel("x"))
    refused(lambda: engine.observe([], []))
    refused(engine.stats)
    refused(engine.reset_caches)
    refused(engine.close)
child(all_of_them)
print(engine.generate([engine.request("Hi")])[0].finish_reason)
engine.close()
"""
    *refusals, exited, answered = run(code)
    assert len(refusals) == 8
    assert all(line.startswith(MESSAGE) for line in refusals)
    assert (exited, answered) == ("exit 3", "length")


def test_a_lock_that_a_thread_of_the_parent_holds_keeps_no_child() -> None:
    code = """
engine._worker._lock.acquire()
def leave():
    refused(engine.stats)
    refused(engine.close)
    with engine:
        pass
child(leave)
engine._worker._lock.release()
"""
    assert [line.split(":")[0] for line in run(code)] == ["refused", "refused", "exit 3"]


def test_an_iterator_and_a_stream_that_a_child_takes_along_are_refused() -> None:
    code = """
endless = Sampling(max_new_tokens=4000, ignore_eos=True)
results = engine.stream_results([engine.request("Hi"), engine.request("Hi", sampling=endless)])
print(next(results)[0], flush=True)  # or the child would print it once more
child(lambda: refused(lambda: next(results)))
results.close()
streams = []
async def submit(): streams.append(engine.submit(engine.request("Hi", sampling=endless)))
asyncio.run(submit())
async def read(): return [event async for event in streams[0]]
child(lambda: (refused(lambda: asyncio.run(read())), refused(lambda: asyncio.run(streams[0].result()))))
engine.close()
"""
    first, *rest = run(code)
    assert first == "0"
    assert [line.split(":")[0] for line in rest] == ["refused", "exit 3", "refused", "refused", "exit 3"]
