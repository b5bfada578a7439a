"""Replicas in step: whichever fails wherever, and in whatever order their messages come, nobody waits for ever."""

import pickle
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from tests.bench.observing import RecordingWriter
from tests.records import synthetic
from tests.records.synthetic import load, record_of, records_of, repeat, verdict

from panscan.bench.grid import Cell
from panscan.bench.plan import SweepPlan
from panscan.bench.replicas import Message, Progress, Ready, ReplicaSignal, ReplicaSync, merged_repeat
from panscan.core import PanscanWarning, RecordsError
from panscan.records.request_records import RepeatRecord, RequestRecord
from panscan.records.schema import CellRecord, LoadRecord
from panscan.records.store import AnyRecord
from panscan.records.verdict_records import VerdictRecord
from panscan.settings import Settings
from panscan.workload.requests import Source


def outcome(cell: str, word: str, reason: str | None = None) -> CellRecord:
    return record_of(synthetic.outcome(cell, word, reason))


def request(cell: str, name: str, accepted: float, tokens: Sequence[float], **fields: Any) -> RequestRecord:
    return record_of(synthetic.request(cell, name, accepted, tokens, **fields))


GROUPS = (("a0", "a1"), ("b0",))
"""Cells that share a load."""
REPEATS = 2
Faults = Mapping[tuple[str, int | None], str]
"""Where a replica fails: at (cell, repeat) "before" it is ready or "measuring"; at (first cell of a load, None)."""
Script = Generator[Message, ReplicaSignal | None, None]


def plan() -> SweepPlan:
    cells = [Cell(name, Settings()) for group in GROUPS for name in group]
    return SweepPlan(cells=cells, items=[], source=Source(no_images=True, prompt="x"), repeats=REPEATS)


def replica(number: int, faults: Faults) -> Script:
    """What a replica says in the course of a sweep, in the order of :func:`panscan.bench.sweep.run_sweep`."""
    for group in GROUPS:
        if (group[0], None) in faults:
            for cell in group:
                yield ([outcome(cell, "failed", "load")])
            continue
        broken = set()
        for turn in range(REPEATS):
            for cell in group:
                if cell in broken:
                    continue
                fault = faults.get((cell, turn))
                go = fault != "before" and (yield Ready(cell, turn)) == ReplicaSignal.PROCEED
                if go and fault is None:
                    done = [outcome(cell, "done")] if turn == REPEATS - 1 else []
                    yield ([request(cell, "q", 0.0, [1.0], repeat=turn), line(cell, turn, number), *done])
                else:
                    broken.add(cell)
                    yield ([outcome(cell, "failed", fault or "told to give up")])


def line(cell: str, turn: int, number: int, **fields: Any) -> RepeatRecord:
    return record_of(repeat(cell, turn, 1.0 + number, 9.0 - number, **{"device": "cpu", **fields}))


def play(faults: Sequence[Faults], data: st.DataObject) -> RecordingWriter:
    """Let replicas speak in a drawn order until all are through."""
    desk = RecordingWriter()
    scripts = [replica(number, each) for number, each in enumerate(faults)]
    saying: dict[int, Message | None] = {number: next(script, None) for number, script in enumerate(scripts)}
    waiting: dict[int, Ready] = {}

    def answer(number: int, answer: ReplicaSignal) -> None:
        if answer == ReplicaSignal.PROCEED:
            assert len({*waiting.values()}) <= 1, "some started another visit than the others"
        visit = waiting.pop(number)
        assert answer == ReplicaSignal.ABORT or (visit.cell, visit.repeat) == desk.starts[-1]
        saying[number] = send(scripts[number], pickled(answer))

    step = ReplicaSync(plan(), set(), [""] * len(faults), writer=desk, observer=desk, answer=answer)
    while speakers := [number for number, message in saying.items() if message is not None]:
        number = data.draw(st.sampled_from(speakers))
        message = saying[number]
        if isinstance(message, Ready):
            waiting[number], saying[number] = message, None
        else:
            saying[number] = send(scripts[number], None)
        step.take(number, pickled(message))
    assert waiting == {}, "somebody waits for ever"
    return desk


def pickled(message: Any) -> Any:
    """Return the message as the other process receives it."""
    return pickle.loads(pickle.dumps(message))


def ignore(number: int, answer: ReplicaSignal) -> None: ...


def send(script: Script, answer: ReplicaSignal | None) -> Message | None:
    try:
        return script.send(answer)
    except StopIteration:
        return None


PLACES = [(cell, turn) for group in GROUPS for cell in group for turn in range(REPEATS)]
FAULTS = st.dictionaries(st.sampled_from(PLACES), st.sampled_from(["before", "measuring"]), max_size=3)
LOADS = st.dictionaries(st.sampled_from([(group[0], None) for group in GROUPS]), st.just("load"), max_size=1)


@settings(max_examples=300)
@given(faults=st.lists(st.builds(lambda a, b: {**a, **b}, FAULTS, LOADS), min_size=1, max_size=4), data=st.data())
def test_every_cell_gets_one_outcome_and_the_repeats_that_all_replicas_did(
    faults: list[Faults], data: st.DataObject
) -> None:
    desk = play(faults, data)
    for group in GROUPS:
        for cell in group:
            culprits, good = first_failure(faults, group[0], cell)
            lines = [record for record in desk.records if record.cell == cell]
            assert [record.repeat for record in lines if isinstance(record, RepeatRecord)] == list(range(good))
            asked = [(record.repeat, record.replica) for record in lines if isinstance(record, RequestRecord)]
            assert asked == [(turn, number) for turn in range(good) for number in range(len(faults))]
            [last] = [record for record in lines if isinstance(record, CellRecord)]
            assert [name for name, _, _ in desk.problems].count(cell) == bool(culprits)
            assert last.outcome == ("failed" if culprits else "done")
            if len(culprits) == len(faults) and len(set(culprits.values())) == 1:
                assert last.reason == next(iter(culprits.values())), "all agree: nobody need be named"
            elif culprits:
                assert last.reason in [f"replica {number}: {why}" for number, why in culprits.items()]


def first_failure(faults: Sequence[Faults], load: str, cell: str) -> tuple[dict[int, str], int]:
    """Which replicas are the first to fail in a cell and why, and how many repeats went well before."""
    for turn in range(REPEATS):
        culprits = {
            number: "load" if (load, None) in each else each[cell, turn]
            for number, each in enumerate(faults)
            if (load, None) in each or (cell, turn) in each
        }
        if culprits:
            return culprits, turn
    return {}, REPEATS


def test_the_first_replica_alone_speaks_of_loads_and_answers() -> None:
    desk = RecordingWriter()
    step = ReplicaSync(plan(), {("a0", 0), ("a0", 1)}, ["", ""], writer=desk, observer=desk, answer=ignore)
    for number in (0, 1):
        step.take(number, (records_of([load(["a0"], None)])))
    step.take(0, (records_of([verdict("a0", "exact", 1.0)])))
    step.take(0, ([outcome("a0", "failed", "while answers were compared")]))
    assert [type(record) for record in desk.records] == [LoadRecord, VerdictRecord, CellRecord]


def test_a_failure_after_the_last_repeat_takes_no_measurement_away() -> None:
    desk = RecordingWriter()
    step = ReplicaSync(plan(), {("a0", 0)}, ["", ""], writer=desk, observer=desk, answer=ignore)
    last = [[*asked, structs.replace(whole, repeat=1), done] for *asked, whole, done in (part(0), part(1))]
    step.take(0, (last[0]))
    step.take(0, ([outcome("a0", "failed", "while answers were compared")]))
    step.take(1, (last[1]))
    assert [record.repeat for record in desk.records if isinstance(record, RepeatRecord)] == [1]
    assert [record.outcome for record in desk.records if isinstance(record, CellRecord)] == ["failed", "done"]


def test_what_else_a_replica_says() -> None:
    desk = RecordingWriter()
    step = ReplicaSync(plan(), set(), ["", ""], writer=desk, observer=desk, answer=ignore)
    step.take(0, Progress("loading", (Settings(),)))
    step.take(0, Progress("stage", ("computing the reference",)))
    step.take(0, Progress("batch_done"))
    assert (desk.loads, desk.stages, desk.batches) == (["mini"], ["computing the reference"], 1)
    with pytest.warns(PanscanWarning, match="overflow"):
        step.take(1, "overflow")
    with pytest.raises(RecordsError, match=r"^replica 1: --reference"):
        step.take(1, RecordsError("--reference x"))


def part(number: int, **fields: Any) -> list[AnyRecord]:
    asked = [request("a0", f"q{batch}", 0.0, [1.0], batch=batch) for batch in range(3)]
    return [*asked, line("a0", 0, number, **fields), outcome("a0", "done")]


def test_merged_records_are_those_of_one_run() -> None:
    first = part(0, warmup_s=1.0, peak_allocated_bytes=5, peak_rss_bytes=None)
    *asked, whole, last = merged_repeat([first, part(1, warmup_s=2.0, peak_allocated_bytes=6)], ["", ""])
    assert [(record.replica, record.request) for record in asked] == [(n, f"q{b}") for n in (0, 1) for b in range(3)]
    assert [record.batch for record in asked] == [0, 1, 2, 3, 4, 5]
    assert (whole.started, whole.ended, whole.warmup_s) == (2.0, 8.0, 2.0), "the common window"
    assert (whole.peak_allocated_bytes, whole.peak_rss_bytes) == (11, None)
    shares = [(share.started, share.ended, share.device) for share in whole.replicas]
    assert shares == [(1.0, 9.0, "cpu"), (2.0, 8.0, "cpu")]
    assert last == outcome("a0", "done")


def test_gpus_have_the_names_that_they_have_outside_of_their_process() -> None:
    *_, whole, _ = merged_repeat([part(0), part(1, device="cuda:0")], ["cuda:0,1", "cuda:2,3"])
    assert [each.device for each in whole.replicas] == ["cpu", "cuda:2,3"]
