"""Engines and processes: forks, exits, and ranks, which have the answers of one process and end every wait."""

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from benchmarks.tensor_parallel import SHAPE, answer, random_questions
from tests.conftest import noise
from tests.core.test_child import gone
from tests.engine.driving import TINY_ENGINE, Reference, requests
from tests.forked_workers import program
from tests.verdict.test_cells import STEPS as VERDICT_STEPS
from tests.verdict.test_cells import Bench

from panscan import Engine, GenerateRunner, Request, Result, Sampling
from panscan.bench.grid import Cell
from panscan.core import EngineError, ModelError, PanscanError, UnsupportedError, View
from panscan.engine import ranks
from panscan.engine.options import EngineOptions
from panscan.engine.ranks import RankGroup
from panscan.engine.scheduling.batch import Chunk, FlatBatch, PromptLayout, flatten
from panscan.engine.scheduling.batch import Sequence as Tokens
from panscan.model.bundled import tiny_directory
from panscan.model.bundled.random_weights import random_model
from panscan.model.load import load_meta_model_for
from panscan.model.observation import ForcedTokens
from panscan.runners.engine import EngineRunner
from panscan.runners.factory import open_runner
from panscan.settings import settings_from

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


SIZE = 2
SIZES = {"tensor_parallel_size": SIZE, "kv_cache_gb": 0.05, "max_new_tokens": 10}
SETTINGS = settings_from({**TINY_ENGINE, **SIZES})
OPTIONS = EngineOptions.of(SETTINGS)
ENDLESS = Sampling(max_new_tokens=20_000, ignore_eos=True)
Opened = Callable[..., Engine]
SOON = 10.0  # seconds in which every wait for a failed rank ends


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    ranks = RankGroup(SETTINGS)
    yield ranks
    assert not ranks.failed
    ranks.close()
    ranks.close()
    assert not running(ranks.processes)


@pytest.fixture
def opened(group: RankGroup) -> Iterator[Opened]:
    """Opens an engine of other options on the same processes."""
    engines = []

    def open_engine(**options: Any) -> Engine:
        engine = Engine(load_meta_model_for(SETTINGS), replace(OPTIONS, **options), SETTINGS, ranks=group)
        engines.append(engine)
        return engine

    yield open_engine
    for engine in engines:
        engine.close()


def running(processes: list[int]) -> list[int]:
    return [pid for pid in processes if psutil.pid_exists(pid)]


def tokens(results: list[Result]) -> list[list[int]]:
    assert [result.error for result in results] == [None] * len(results)
    return [result.token_ids for result in results]


def test_eight_ranks_have_the_tokens_of_one(tmp_path: Path) -> None:
    for part in random_model(SHAPE, dtype=torch.float32, device="cpu"):
        part.save_pretrained(tmp_path)
    asked = random_questions(16, tokens=4)
    (one, _), (eight, _) = (answer(str(tmp_path), size, asked) for size in (1, 8))
    assert len({*map(tuple, one)}) == len(asked), "they depend on the question"
    assert eight == one


@pytest.mark.parametrize("options", [{}, {"kv_cache_gb": 0.004, "vision_cache_gb": 64 * 128 * 4 / 1e9 * 3}], ids=str)
def test_tokens_are_those_of_generate(opened: Opened, reference: Reference, options: dict[str, Any]) -> None:
    results = opened(**options).generate(requests())
    assert tokens(results) == reference.tokens(requests())


def test_views_cut_on_the_device_are_those_of_generate_too(opened: Opened, tiny: GenerateRunner) -> None:
    """PyTorch's rounding instead of Pillow's, by one process and by ranks, which get whole images."""
    asked, before = requests()[3:10], tiny.settings
    tiny.configure(replace(before, preprocess="device"))
    try:
        due = tokens([tiny.run([request])[0] for request in asked])
    finally:
        tiny.configure(before)
    options = replace(OPTIONS, preprocess="device")
    with Engine(tiny.loaded, options, replace(SETTINGS, tensor_parallel_size=1)) as engine:
        assert tokens(engine.generate(asked)) == due
    assert tokens(opened(preprocess="device").generate(asked)) == due


def test_prompts_share_prefixes_and_views(opened: Opened, reference: Reference) -> None:
    engine = opened(prefix_caching=True)
    for cached in (False, True):
        results = engine.generate(requests()[2:5])
        assert tokens(results) == reference.tokens(requests()[2:5])
        assert all(result.cached_tokens for result in results) == cached
    encoded = engine.stats().views_encoded
    engine.reset_caches()
    assert tokens(engine.generate(requests()[2:5])) == tokens(results)
    assert engine.stats().views_encoded == 2 * encoded


@pytest.mark.parametrize(("kind", "close"), [("auto", 1e-4), ("int8", 2e-2)])
def test_observed_rows_are_those_of_one_process(opened: Opened, tiny: GenerateRunner, kind: str, close: float) -> None:
    """With an int8 cache, noise may move a value to the next integer."""
    asked = list(requests()[2:6])
    forced = [ForcedTokens([5 + at, 9, 30], [1, 3], 3) for at in range(len(asked))]
    with Engine(tiny.loaded, replace(OPTIONS, kv_cache_dtype=kind)) as single:
        due = single.observe(asked, forced)
    for actual, expected in zip(opened(kv_cache_dtype=kind).observe(asked, forced), due, strict=True):
        assert actual.tokens == expected.tokens
        torch.testing.assert_close(actual.answer, expected.answer, rtol=close, atol=close)
        torch.testing.assert_close(actual.image, expected.image, rtol=close, atol=close)


def test_views_are_distributed_in_turn(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    session = group.start(OPTIONS)
    size = load_meta_model_for(SETTINGS).reader.pixels.size  # type: ignore[union-attr]  # the model reads images
    levels = torch.zeros(size, size, 3, dtype=torch.uint8).numpy()
    views = dict.fromkeys(range(7, 12), View("whole", (0, 0, size, size)))
    sent: list[list[int]] = []
    for rank in group._ranks:
        send = rank.child.send

        def sending(call: Any, channel: int, send: Callable[..., None] = send) -> None:
            sent.append([*call.__reduce__()[1][2]])
            send(call, channel)

        monkeypatch.setattr(rank.child, "send", sending)
    session.pixels.put(levels, views)
    assert sent == [[8, 10], [7, 9, 11]]
    monkeypatch.undo()
    session.pixels.forget([*views, *views])
    session.stop()
    session.pixels.put(levels, views)  # by a thread that was still preparing a request


def test_dropping_pixels_does_not_wait_while_another_rank_receives_an_image(group: RankGroup) -> None:
    pixels = group.start(OPTIONS).pixels
    image = torch.zeros(4000, 4000, 3, dtype=torch.uint8).numpy()
    sender = threading.Thread(target=pixels.put, args=(image, {8: View("whole", (0, 0, 200, 200))}))
    dropper = threading.Thread(target=pixels.forget, args=([7],))
    os.kill(group.processes[0], signal.SIGSTOP)  # so that the connection holds a part of the image only
    try:
        sender.start()
        sender.join(0.2)
        assert sender.is_alive()
        dropper.start()
        dropper.join(5)
        assert not dropper.is_alive()
    finally:
        os.kill(group.processes[0], signal.SIGCONT)
    sender.join()
    pixels.forget([8])
    group.stop()


def test_options_that_no_rank_accepts_leave_the_processes_usable(opened: Opened, reference: Reference) -> None:
    with pytest.raises(PanscanError, match="--kv-cache-gb"):
        opened(kv_cache_gb=1e-6)
    assert tokens(opened().generate(requests()[:2])) == reference.tokens(requests()[:2])


def test_peaks_of_memory_are_reported_and_reset(group: RankGroup) -> None:
    group.peak_memory()
    by_rank = group.peak_memory()
    assert len(by_rank) == SIZE
    for rank, peaks in zip(group.processes, by_rank, strict=True):
        assert peaks["peak_allocated_bytes"] is None
        if peaks["peak_rss_bytes"] is not None:
            assert peaks["peak_rss_bytes"] == pytest.approx(psutil.Process(rank).memory_info().rss, rel=0.2)


def test_the_verdict_is_exact_and_failed_processes_are_replaced(tmp_path: Path) -> None:
    settings = replace(SETTINGS, max_new_tokens=VERDICT_STEPS)
    runner = open_runner(settings)
    verifier = Bench(tmp_path).verifier()
    verifier.references.prepare(runner, [settings])
    record = verifier.verify(runner, Cell.of(settings))
    assert record.verdict == "exact", record
    runner.reset_peak_memory()
    assert (runner.peak_memory()["peak_rss_bytes"] or 1) > 0
    asked = [engine_request("Hi", runner)]
    due = tokens(runner.answer(asked))
    before = runner._ranks.processes
    os.kill(before[1], signal.SIGKILL)
    with pytest.raises(EngineError, match="rank 1 was killed by SIGKILL"):
        runner.answer(asked)
    assert tokens(runner.answer(asked)) == due
    assert not running(before)
    runner.close()


def engine_request(prompt: str, runner: EngineRunner) -> Request:
    return Request(prompt, sampling=runner.settings.sampling)


FAULTS: dict[str, tuple[Callable[[RankGroup], None], str]] = {
    "stopped": (lambda group: os.kill(group.processes[1], signal.SIGSTOP), "rank 1 has not answered for . s"),
    "raised": (
        lambda group: group._ranks[1].child.send(methodcaller("stop_runner")),
        "rank 1: RuntimeError: a batch came before its model runner was built",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lost_rank_ends_every_request(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    group = RankGroup(SETTINGS)
    engine = Engine(load_meta_model_for(SETTINGS), OPTIONS, SETTINGS, ranks=group)
    monkeypatch.setattr(ranks, "SILENCE_SECONDS", 4.0)
    lose, message = FAULTS[fault]

    async def ask() -> tuple[list[Result], float]:
        asked = [engine.request("Hi", [noise(90, 90, at)], sampling=ENDLESS) for at in range(2)]
        streams = [engine.submit(request) for request in (*asked, engine.request("Hi", sampling=ENDLESS))]
        events = aiter(streams[2])  # dropped, it would cancel its request
        await anext(events)
        lose(group)
        lost = time.monotonic()
        return [await stream.result() for stream in streams], time.monotonic() - lost

    results, seconds = asyncio.run(ask())
    assert seconds < SOON
    started = time.monotonic()
    again = engine.generate([engine.request("Hi"), requests()[3]])
    assert time.monotonic() - started < SOON
    for result in (*results, *again):
        assert isinstance(result.error, EngineError)
    reasons = {str(result.error) for result in (*results, *again)}
    assert len(reasons) == 1
    assert f"--tensor-parallel-size {SIZE}: " in reasons.pop()
    with pytest.raises(EngineError, match=message):
        group.start(OPTIONS)
    engine.close()
    group.close()
    assert group.failed
    assert not running(group.processes)
    assert not list(tmp_path.iterdir())


def test_a_command_that_fails_on_one_rank_ends_the_group() -> None:
    descriptors = psutil.Process().num_fds()
    group = RankGroup(SETTINGS)
    refused = replace(OPTIONS, kv_cache_gb=1e-6)
    with pytest.raises(PanscanError, match="--kv-cache-gb"):  # rank 0 waits for rank 1
        group._command([methodcaller("start_runner", options) for options in (OPTIONS, refused)])
    assert group.failed
    with pytest.raises(EngineError, match=f"--tensor-parallel-size {SIZE}: .*--kv-cache-gb"):
        group.start(OPTIONS)
    group.close()
    assert not running(group.processes)
    assert psutil.Process().num_fds() <= descriptors


def test_closing_ends_the_waits_of_other_threads() -> None:
    before = threading.active_count()
    group = RankGroup(SETTINGS)
    session = group.start(OPTIONS)
    os.kill(group.processes[1], signal.SIGSTOP)
    ended: list[BaseException] = []

    def wait_for(call: Callable[[], Any]) -> None:
        try:
            while True:
                call()
        except EngineError as error:
            ended.append(error)

    levels = torch.zeros(1280, 512, 3, dtype=torch.uint8).numpy()
    views = dict.fromkeys((0, 1), View("whole", (0, 0, 512, 1280)))
    calls = [lambda: session.pixels.put(levels, views), session.execute(one_row()), group.peak_memory]
    threads = [threading.Thread(target=wait_for, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    time.sleep(1)  # the first fills the connection to the stopped rank, the others wait for an answer
    assert all(thread.is_alive() for thread in threads)
    group.close()
    for thread in threads:
        thread.join(SOON)
    assert [str(error) for error in ended] == ["the engine's processes were closed"] * 3
    assert not group.failed
    assert not running(group.processes)
    assert threading.active_count() == before


def test_a_checkpoint_without_weights_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "checkpoint"
    shutil.copytree(tiny_directory(), place, ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    before = psutil.Process().children()
    with pytest.raises(ModelError, match="--model"):
        Engine.from_pretrained(str(place), device="cpu", tensor_parallel_size=SIZE)
    assert psutil.Process().children() == before
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize("model", ["tiny", "mini"])
def test_sizes_that_do_not_divide_start_nothing(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))  # a group would need a folder in it
    with pytest.raises(UnsupportedError, match="--tensor-parallel-size 3 does not divide the model's"):
        Engine.from_pretrained(model, device="cpu", tensor_parallel_size=3)


def one_row() -> FlatBatch:
    blocks = array("i", [0])
    return flatten([Chunk(Tokens(0, [5], 1, PromptLayout(), 2, tables=(blocks, blocks)), 0, 1)], block_size=2, window=2)


def test_ranks_outlive_pauses_and_forks_but_not_their_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = """
import time
from panscan.engine import ranks

engine = opened(tensor_parallel_size=2)
results = engine.stream_results([engine.request("Hi", sampling=Sampling(max_new_tokens=20000, ignore_eos=True))] * 2)
print(*engine._worker.loop.runner.pixels.processes, flush=True)
ranks.SILENCE_SECONDS = 4.0
input()  # all processes are suspended
child = os.fork()
if child == 0:
    sys.exit(3)  # with everything that the interpreter does at its end
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
print(engine.generate([engine.request("Hi")])[0].finish_reason, flush=True)
threading.Thread(target=next, args=(results,), daemon=True).start()
time.sleep(1)  # passes are in flight
sys.exit(5)
"""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(program(BEGIN + code), **pipes) as parent:
        processes = [int(word) for word in parent.stdout.readline().split()]
        for sign, pause in ((signal.SIGSTOP, 6), (signal.SIGCONT, 1)):
            for process in (parent.pid, *processes):
                os.kill(process, sign)
            time.sleep(pause)
        answered, _ = parent.communicate("\n", timeout=200)
    assert parent.returncode == 5
    assert answered in ("length\n", "stop\n")
    assert gone(*processes)
    assert not list(tmp_path.glob("panscan-ranks-*"))
