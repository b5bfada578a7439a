"""An engine in a forked child: a clear error at once, whatever the parent's threads were doing, and a prompt exit."""

import os
import subprocess

import pytest
from tests.forked_workers import program

BEGIN = """
import asyncio, gc, os, sys, threading
from panscan import Engine, Request, Sampling
from panscan.core import EngineError
import panscan.engine.engine, panscan.model.load

gc.freeze()  # or each exit would visit all objects of the imports

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


CODE = """
endless = Sampling(max_new_tokens=4000, ignore_eos=True)

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
print(engine.generate([engine.request("Hi")])[0].finish_reason, flush=True)

# A lock that a thread of the parent holds keeps no child.
engine._worker._lock.acquire()
def leave():
    refused(engine.stats)
    refused(engine.close)
    with engine:
        pass
child(leave)
engine._worker._lock.release()

# An iterator and a stream that a child takes along.
results = engine.stream_results([engine.request("Hi"), engine.request("Hi", sampling=endless)])
print(next(results)[0], flush=True)  # or the child would print it once more
child(lambda: refused(lambda: next(results)))
results.close()
streams = []
async def stream(): streams.append(engine.submit(engine.request("Hi", sampling=endless)))
asyncio.run(stream())
async def read(): return [event async for event in streams[0]]
child(lambda: (refused(lambda: asyncio.run(read())), refused(lambda: asyncio.run(streams[0].result()))))
engine.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_an_engine_is_refused_in_a_child_and_works_in_the_parent() -> None:
    """Every method, under a lock that a thread of the parent holds, and what the child took along."""
    done = subprocess.run(program(BEGIN + CODE), capture_output=True, text=True, timeout=200, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(line.startswith(MESSAGE) for line in lines[:8])
    said = [line.split(":")[0] for line in lines]
    refused = ["refused"]
    assert said[:10] == [*refused * 8, "exit 3", "length"]
    assert said[10:13] == [*refused * 2, "exit 3"]
    assert said[13:] == ["0", "refused", "exit 3", *refused * 2, "exit 3"]
