"""An engine in a forked child is refused at once, whatever the parent's threads do; programs exit promptly."""

import os
import subprocess

import pytest
from tests.forked_workers import program

BEGIN = """
import asyncio, gc, os, sys, threading
from panscan import Engine, Sampling
from panscan.core import EngineError
import panscan.engine.engine, panscan.model.load

gc.freeze()  # or each exit would visit all objects of the imports

def opened(**given):
    return Engine.from_pretrained("tiny", dtype="fp32", device="cpu", kv_cache_gb=0.05, max_new_tokens=4, **given)

def refused(call):
    try:
        call()
    except EngineError as error:
        print("refused:", error, flush=True)
    else:
        print("answered", flush=True)

def child(function, code):
    if not (pid := os.fork()):
        function()
        sys.exit(code)  # an exit with everything that the interpreter does at its end
    print("exit", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
MESSAGE = "refused: the engine was created in another process: create the Engine after the fork"


def printed(code: str) -> list[str]:
    """Run a program that must not fail; return the lines that it prints."""
    done = subprocess.run(program(code), capture_output=True, text=True, timeout=240, check=False)
    assert "Traceback" not in done.stderr and done.returncode == 0, done.stderr
    return done.stdout.splitlines()


CODE = """
engine = opened()
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
child(all_of_them, 3)
print(engine.generate([engine.request("Hi")])[0].finish_reason, flush=True)

# A lock that a thread of the parent holds keeps no child.
engine._worker._lock.acquire()
def leave():
    refused(engine.stats)
    refused(engine.close)
    with engine:
        pass
child(leave, 3)
engine._worker._lock.release()

# An iterator and a stream that a child takes along.
results = engine.stream_results([engine.request("Hi"), engine.request("Hi", sampling=endless)])
print(next(results)[0], flush=True)  # or the child would print it once more
child(lambda: refused(lambda: next(results)), 3)
results.close()
streams = []
async def stream(): streams.append(engine.submit(engine.request("Hi", sampling=endless)))
asyncio.run(stream())
async def read(): return [event async for event in streams[0]]
child(lambda: (refused(lambda: asyncio.run(read())), refused(lambda: asyncio.run(streams[0].result()))), 3)
engine.close()
"""


def test_an_engine_is_refused_in_a_child_and_works_in_the_parent() -> None:
    """Every method, under a lock that a thread of the parent holds, and what the child took along."""
    lines = printed(BEGIN + CODE)
    assert all(line.startswith(MESSAGE) for line in lines[:8])
    said = [line.split(":")[0] for line in lines]
    refused = ["refused"]
    assert said[:10] == [*refused * 8, "exit 3", "length"]
    assert said[10:13] == [*refused * 2, "exit 3"]
    assert said[13:] == ["0", "refused", "exit 3", *refused * 2, "exit 3"]


# Each ending has a fork of a process that has imported everything and started no thread: imports take seconds.
ENDINGS = """
class Stuck:
    def __array__(self, *_, **__):
        started.set()
        threading.Event().wait()

def late():
    started.set()
    threading.main_thread().join()
    print([result.finish_reason for result in engine.generate([engine.request("Hi")])], flush=True)

def end():
    global engine, results, started
    engine, started = opened(), threading.Event()
    if ending == "late":
        threading.Thread(target=late).start()
        started.wait()
    else:
        results = engine.stream_results([engine.request("What?", [Stuck()]), engine.request("Hi")])
        print(next(results)[0], started.wait(60), flush=True)
        exec(ending)

for ending in ("", "engine.close()", "raise SystemExit(0)", "late"):
    child(end, 0)
"""


def test_a_program_ends_while_a_page_hangs_and_answers_a_thread_that_outlives_it() -> None:
    """However its engine is left: nothing waits for an image that never comes, such as a download without an answer.

    Python has shut its pools down when the thread asks; the engine says so instead of leaving it waiting.
    """
    *hangs, late, ended = printed(BEGIN + ENDINGS)
    assert (hangs, ended) == (["1 True", "exit 0"] * 3, "exit 0")
    assert late in ("['error']", "['length']")
