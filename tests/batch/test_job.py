"""The job: answers in order whatever finishes first, within a bounded window; what may be resumed with what."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panscan.batch.answers import AnswerFile
from panscan.batch.items import Item
from panscan.batch.asking import answer
from panscan.batch.job import Job, changed_versions, difference
from panscan.batch.left import Answered, tally
from panscan.core import ImageError, RecordsError, Request, Result, Stamps
from panscan.settings import ENGINE_AXES, ENGINE_LIMITS, Settings, axes

JOB = Job(settings=Settings(runner="engine"), prompt="What?")


class Shuffling:
    """Answers as an engine does, in an order that the test draws: each result is one of those in flight.

    A request's text is its id backwards. ``most``: requests in flight.
    """

    def __init__(self, choices: Iterable[int], most: int) -> None:
        self.choices, self.most = iter(choices), most
        self.seen: list[Request] = []

    def stream_results(
        self, requests: Iterable[Request], *, max_concurrency: int | None = None
    ) -> Iterator[tuple[int, Result]]:
        source = enumerate(requests)
        flying: dict[int, Request] = {}
        while True:
            for index, request in islice(source, (max_concurrency or self.most) - len(flying)):
                flying[index] = request
                self.seen.append(request)
            if not flying:
                return
            index = sorted(flying)[next(self.choices, 0) % len(flying)]
            yield index, backwards(flying.pop(index))


def backwards(request: Request) -> Result:
    stamps = Stamps(1.0, tokens=[1.5, 2.25])
    return Result(request.id, request.id[::-1], [5, 6], "stop", 3, 2, 12, 20, stamps, cached_tokens=4)


def items(count: int, bad: Iterable[int] = ()) -> list[Item]:
    names = [f"{number}.png" for number in range(count)]
    problems = {number: ImageError(f"{number}.png: broken") for number in bad}
    return [Item(name, (name,), (name,), problem=problems.get(number)) for number, name in enumerate(names)]


@given(
    count=st.integers(0, 25),
    bad=st.sets(st.integers(0, 24)),
    choices=st.lists(st.integers(0, 50), max_size=25),
    most=st.integers(1, 9),
    window=st.none() | st.integers(1, 9),
)
def test_every_item_is_answered_once_in_order_and_within_the_window(
    count: int, bad: set[int], choices: list[int], most: int, window: int | None
) -> None:
    lines: list[dict[str, Any]] = []
    finished: list[str] = []
    pulled = 0

    def source() -> Iterator[Item]:
        nonlocal pulled
        for item in items(count, bad):
            pulled += 1
            assert window is None or pulled - len(lines) <= window
            yield item

    engine = Shuffling(choices, most)
    answer(engine, JOB, source(), lines.append, window=window, on_answer=lambda line: finished.append(line["id"]))
    asked = items(count, bad)
    assert [line["id"] for line in lines] == (finished if window is None else [item.id for item in asked])
    assert sorted(finished) == sorted(item.id for item in asked)
    assert [request.id for request in engine.seen] == [item.id for item in asked if item.problem is None]
    for line in lines:
        problem = asked[int(line["id"].removesuffix(".png"))].problem
        assert line["answer"] == (line["id"][::-1] if problem is None else None)
        assert line["error"] == (None if problem is None else str(problem))


def test_the_window_is_no_smaller_than_it_says() -> None:
    held: list[int] = []
    engine = Shuffling([5, 4, 3, 2, 1], most=6)
    answer(engine, JOB, items(6), lambda line: held.append(len(engine.seen)), window=6, on_answer=lambda _: None)
    assert held == [6] * 6


def test_the_users_bound_on_requests_in_flight_reaches_the_engine() -> None:
    job = replace(JOB, settings=replace(JOB.settings, max_concurrency=2))
    begun: list[int] = []
    engine = Shuffling([], most=9)
    answer(engine, job, items(5), lambda _: begun.append(len(engine.seen)), window=None, on_answer=lambda _: None)
    assert begun == [2, 3, 4, 5, 5]


def test_a_line_has_what_was_asked_first_and_what_depends_on_the_run_last() -> None:
    lines: list[dict[str, Any]] = []
    row = Item("7", ("docs/a.pdf",), ("a.pdf",), "Who?")
    wrong = replace(items(1)[0], problem=ImageError("0.png: broken"))
    answer(Shuffling([], 1), JOB, [row, wrong], lines.append, window=None, on_answer=lambda _: None)
    assert list(lines[0].items()) == [
        ("id", "7"), ("image", ["a.pdf"]), ("question", "Who?"), ("answer", "7"), ("finish_reason", "stop"),
        ("views", 3), ("crops", 2), ("prompt_tokens", 20), ("output_tokens", 2), ("error", None),
        ("cached_tokens", 4), ("ttft_ms", 500.0), ("e2el_ms", 1250.0),
    ]  # fmt: skip
    assert list(lines[1]) == [name for name in lines[0] if name != "question"]
    assert (lines[1]["finish_reason"], lines[1]["error"], lines[1]["ttft_ms"]) == ("error", "0.png: broken", None)


def test_a_request_has_the_jobs_settings() -> None:
    settings = Settings(runner="engine", do_pan_and_scan=False, max_new_tokens=5, temperature=0.5, sampling_seed=3)
    job = Job(settings=settings, prompt="What?", system="In French.", raw_prompt=False)
    plain, row = items(1)[0], Item("7", ("docs/a.pdf",), ("a.pdf",), "Who?")
    common = {"system": "In French.", "pan_and_scan": settings.pan_and_scan, "sampling": settings.sampling}
    assert job.request(plain) == Request("What?", ("0.png",), id="0.png", **common)
    assert job.request(row) == Request("Who?", ("docs/a.pdf",), id="7", **common)
    assert replace(job, system=None, raw_prompt=True).request(plain).raw


OTHER = {
    "model": "google/gemma-3-4b-it", "revision": "main", "dtype": "bf16", "quantization": "torchao-int8",
    "device": "cpu", "device_map": "auto", "preprocess": "device", "sampling_seed": 1, "top_k": 5, "top_p": 0.5,
    "min_p": 0.1, "repetition_penalty": 1.5, "temperature": 0.7, "kv_cache_gb": 1.0, "prefill_chunk_size": 64,
    "max_concurrency": 2, "pan_and_scan_min_ratio_to_activate": 2.0,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(axes().keys() - ENGINE_LIMITS.keys() - {"runner", "max_memory"}))
def test_only_what_changes_no_answer_may_change_on_the_way(name: str) -> None:
    base = Settings(runner="engine", random_weights=True, model_shape="270m") if name == "model_shape" else None
    base = base or Settings(runner="engine", temperature=0.5 if name in ("top_k", "top_p", "min_p") else 0.0)
    if name in ("model_shape", "random_weights"):
        changed = replace(base, random_weights=True, model_shape="1b")
    else:
        old = getattr(base, name)
        changed = replace(base, **{name: OTHER[name] if name in OTHER else (not old if old in (0, 1) else old + 1)})
    begun, header = (json.loads(json.dumps(replace(JOB, settings=each).header())) for each in (base, changed))
    assert difference(begun, begun) is None
    if name in (*ENGINE_AXES, "device", "device_map", "prefill_chunk_size"):
        assert difference(begun, header) is None
    else:
        assert "was made with --" in (difference(begun, header) or "")
        assert "was made with --" in (difference(header, begun) or "")


def test_a_setting_that_is_newer_than_the_file_had_its_default() -> None:
    header = JOB.header()
    begun = {**header, "settings": {**header["settings"]}}
    del begun["settings"]["max_new_tokens"]
    assert difference(begun, header) is None
    longer = replace(JOB, settings=replace(JOB.settings, max_new_tokens=129)).header()
    assert difference(begun, longer) == "was made with --max-new-tokens 128, not 129"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt": "Who?"}, "another --prompt"),
        ({"prompt": None}, "another --prompt"),
        ({"system": "In French."}, "another --system"),
        ({"raw_prompt": True}, "another --raw-prompt"),
        ({"whole_files": True}, "another --whole-files"),
    ],
)
def test_another_question_is_another_job(change: dict[str, Any], reason: str) -> None:
    assert reason in (difference(JOB.header(), replace(JOB, **change).header()) or "")


def test_files_of_other_versions_are_known() -> None:
    header = JOB.header()
    assert "another version of panscan" in (difference({**header, "schema": 0}, header) or "")
    assert set(header["versions"]) == {"panscan", "torch", "transformers"}
    assert header["settings"] == asdict(JOB.settings)
    older = {**header, "versions": {**header["versions"], "torch": "1.0"}}
    assert difference(older, header) is None
    assert changed_versions(older, header) == [f"torch 1.0, now {header['versions']['torch']}"]
    assert changed_versions(header, header) == []


def begun_file(path: Path, asked: list[Item]) -> AnswerFile:
    """A file with the answers of these items, held open."""
    file = AnswerFile(path, JOB.header(), "resume", difference)
    answer(Shuffling([], 1), JOB, asked, file.write, window=None, on_answer=lambda _: None)
    return file


def test_what_is_answered_is_not_asked_again(tmp_path: Path) -> None:
    every = items(6, bad=[1, 4])
    with begun_file(tmp_path / "a.jsonl", [every[number] for number in (0, 1, 3)]) as file:
        answered = Answered(file, retry_failed=False)
        assert list(answered.left(every)) == [every[number] for number in (2, 4, 5)]
        assert answered.skipped == 3
        again = Answered(file, retry_failed=True)
        assert list(again.left(every)) == [every[number] for number in (1, 2, 4, 5)]
        assert [record["id"] for record in file.records()] == ["0.png", "3.png"]


@pytest.mark.parametrize("change", [{"named": ("b.png",)}, {"question": "Why?"}, {"question": None}])
def test_an_id_that_now_means_something_else_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    row = Item("00000", ("docs/a.png",), ("a.png",), "Who?")
    with begun_file(tmp_path / "a.jsonl", [row]) as file:
        answered = Answered(file, retry_failed=False)
        assert list(answered.left([row])) == []
        with pytest.raises(RecordsError, match=r"'00000' was another image or question when it was answered"):
            list(answered.left([replace(row, **change)]))


def test_failures_are_counted_and_the_first_ones_named(tmp_path: Path) -> None:
    with begun_file(tmp_path / "a.jsonl", items(6, bad=[1, 4, 5])) as file:
        found = tally(file.records(), reasons=2)
    assert (found.answered, found.failed) == (3, 3)
    assert found.reasons == [("1.png", "1.png: broken"), ("4.png", "4.png: broken")]
