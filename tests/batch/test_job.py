"""The job: its requests, with what it may be resumed, what ends it, and its ledger."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tests.batch.shuffling import JOB, ShufflingEngine, backwards, items, opened, run_job, tasks

from panscan.batch.answers import AnswerFile
from panscan.batch.dispatch import answer
from panscan.batch.job import Job, changed_versions, difference
from panscan.batch.jsonl import AnswerRecord
from panscan.batch.ledger import JobStart, Ledger, LedgerWriter, ledger_path, read_ledger
from panscan.core import EngineError, ImageError, PanscanError, RecordsError, Request, Result, SettingError, now
from panscan.core.sampling import REST_OF_CONTEXT
from panscan.settings import ENGINE_AXES, Settings, axes, foreign_settings
from panscan.workload.rows import Row


def test_a_request_has_the_jobs_settings() -> None:
    settings = Settings(runner="engine", do_pan_and_scan=False, max_new_tokens=5, temperature=0.5, sampling_seed=3)
    job = Job(settings=settings, prompt="What?", system="In French.", raw_prompt=False)
    plain, row = Row("0.png", ("0.png",)), Row("7", ("docs/a.pdf",), "Who?", named=("a.pdf",))
    common = {"system": "In French.", "pan_and_scan": settings.pan_and_scan, "sampling": settings.sampling}
    assert job.request(plain) == Request("What?", ("0.png",), id="0.png", **common)
    assert job.request(row) == Request("Who?", ("docs/a.pdf",), id="7", **common)
    assert structs.replace(job, system=None, raw_prompt=True).request(plain).raw


@pytest.mark.parametrize("name", sorted(axes().keys() - {*foreign_settings("engine"), "runner", "max_memory"}))
def test_only_what_changes_no_answer_may_change_on_the_way(name: str) -> None:
    begun = JOB.header()
    changed = structs.replace(begun, settings={**begun.settings, name: "another"})
    assert difference(begun, begun) is None
    for one, other in ((begun, changed), (changed, begun)):
        reason = difference(one, other)
        if name in (*ENGINE_AXES, "device", "device_map", "prefill_chunk_size") and name != "kv_cache_dtype":
            assert reason is None
        else:
            assert reason is not None and reason.startswith(f"was made with --{axes()[name].flag} ")


def test_a_setting_that_is_newer_than_the_file_had_its_default() -> None:
    header = JOB.header()
    older = {name: value for name, value in header.settings.items() if name != "max_new_tokens"}
    begun = structs.replace(header, settings=older)
    assert difference(begun, header) is None
    for field, value, words in (
        ("max_new_tokens", 129, "--max-new-tokens 128, not 129"),
        ("max_new_tokens", REST_OF_CONTEXT, "--max-new-tokens 128, not context"),
        ("do_pan_and_scan", False, "--pan-and-scan true, not false"),
        ("revision", "v1", "--revision none, not v1"),
    ):
        changed = structs.replace(JOB, settings=replace(JOB.settings, **{field: value})).header()
        assert difference(begun, changed) == f"was made with {words}"


OTHER_QUESTIONS = [
    ({"prompt": "Who?"}, "a different --prompt"),
    ({"prompt": None}, "a different --prompt"),
    ({"system": "In French."}, "a different --system"),
    ({"raw_prompt": True}, "a different --raw-prompt"),
    ({"whole_files": True}, "a different --whole-files"),
    ({"json_schema": "{}"}, "a different --json-schema"),
    ({"choice": ("yes", "no")}, "a different --choice"),
    ({"tools": '[{"type": "function", "function": {"name": "a"}}]'}, "a different --tools"),
]


@pytest.mark.parametrize(("change", "reason"), OTHER_QUESTIONS)
def test_another_question_is_another_job(change: dict[str, Any], reason: str) -> None:
    assert reason in (difference(JOB.header(), structs.replace(JOB, **change).header()) or "")


def test_files_of_other_versions_are_known() -> None:
    header = JOB.header()
    assert "another version of panscan" in (difference(structs.replace(header, schema=0), header) or "")
    assert set(header.versions) == {"panscan", "torch", "transformers"}
    assert header.settings == asdict(JOB.settings)
    older = structs.replace(header, versions={**header.versions, "torch": "1.0"})
    assert difference(older, header) is None
    assert changed_versions(older, header) == [f"torch 1.0, now {header.versions['torch']}"]
    assert changed_versions(header, header) == []


def test_a_bundled_model_that_changed_is_another_model() -> None:
    header = JOB.header()
    assert header.settings["model"] == "mini"
    for bundled in ({"mini": "000000000000"}, {}, None):
        assert difference(structs.replace(header, bundled=bundled), header) == (
            "was made with different weights of mini, which have changed since"
        )
    drawn = structs.replace(JOB, settings=Settings(runner="engine", random_weights=True, model_shape="270m")).header()
    assert difference(structs.replace(drawn, bundled=None), drawn) is None


@pytest.fixture
def file(tmp_path: Path) -> Iterator[AnswerFile]:
    with opened(tmp_path / "a.jsonl") as file:
        yield file


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_bytes().splitlines()] if path.exists() else []


def failing(error: PanscanError, *but: str) -> Any:
    """What answers only the ids in ``but``."""

    def result_of(request: Request) -> Result:
        result = backwards(request)
        return result if request.id in but else replace(result, finish_reason="error", error=error)

    return result_of


def test_the_users_bound_on_requests_in_flight_reaches_the_engine(file: AnswerFile) -> None:
    job = structs.replace(JOB, settings=replace(JOB.settings, max_concurrency=2))
    begun: list[int] = []
    engine = ShufflingEngine([], most=9)
    answer(engine, job, tasks(items(5)), file, proven=True, on_answer=lambda _: begun.append(len(engine.seen)))
    assert begun == [2, 3, 4, 5, 5]


def test_a_line_has_what_was_asked_first_and_what_depends_on_the_run_last(file: AnswerFile) -> None:
    row = Row("7", ("docs/a.pdf",), "Who?", named=("a.pdf",))
    wrong = replace(items(1)[0], problem=ImageError("0.png: broken"))
    run_job(file, [row, wrong])
    asked, failed = (record.line.decode() for record in file.records())
    assert asked == (
        '{"id": "7", "image": ["a.pdf"], "question": "Who?", "model": "mini", "answer": "7", "finish_reason": "stop",'
        ' "pixels": [], "views": 3, "crops": 2, "image_tokens": 12, "prompt_tokens": 20, "output_tokens": 2,'
        ' "error": null, "cached_tokens": 4, "ttft_ms": 500.0, "e2el_ms": 1250.0, "retries": 0}\n'
    )
    lines = [json.loads(line) for line in (asked, failed)]
    assert list(lines[1]) == [name for name in lines[0] if name != "question"]
    assert (lines[1]["finish_reason"], lines[1]["error"], lines[1]["ttft_ms"]) == ("error", "0.png: broken", None)


ENDINGS = [("error", EngineError("the engine stopped: a bug")), ("cancelled", None)]


@pytest.mark.parametrize(("reason", "error"), ENDINGS)
def test_what_an_ended_engine_leaves_is_no_failure(file: AnswerFile, reason: Any, error: EngineError | None) -> None:
    def result_of(request: Request) -> Result:
        result = backwards(request)
        return replace(result, finish_reason=reason, error=error) if request.id == "2.png" else result

    with pytest.raises(EngineError, match=r"the engine (stopped: a bug|was closed)"):
        run_job(file, items(5), ShufflingEngine([], 3, result_of))
    assert ids(file.path) == ["0.png", "1.png"]
    engine = ShufflingEngine()
    run_job(file, items(5), engine)
    assert [request.id for request in engine.seen] == ["2.png", "3.png", "4.png"]


SETTING = SettingError("--vision-cache-gb 1e-06 does not hold one encoded view")


@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_a_setting_that_fails_every_document_ends_the_job_and_leaves_nothing(tmp_path: Path, count: int) -> None:
    engine = ShufflingEngine([], 1, failing(SETTING))
    with opened(tmp_path / "a.jsonl") as file, pytest.raises(SettingError, match="vision-cache-gb"):
        run_job(file, items(count), engine)
    assert len(engine.seen) <= 3
    assert list(tmp_path.iterdir()) == []


def test_documents_that_fail_by_themselves_are_lines(file: AnswerFile) -> None:
    # One that is answered, or an answer of before: the setting is not at fault.
    run_job(file, items(6), ShufflingEngine([], 1, failing(SETTING, "2.png")))
    assert [line.error is None for line in file.records()] == [False, False, True, False, False, False]
    run_job(file, items(8), ShufflingEngine([], 1, failing(SETTING)))
    assert ids(file.path) == [item.id for item in items(8)]


@pytest.mark.parametrize(
    ("bad", "error"),
    [((), lambda name: SettingError(f"{name}: too long")), ((0, 1), lambda _: SETTING)],
    ids=["other settings errors", "unreadable documents"],
)
def test_settings_errors_beside_other_errors_are_the_documents_own(
    file: AnswerFile, bad: tuple[int, ...], error: Callable[[str], SettingError]
) -> None:
    engine = ShufflingEngine([], 1, lambda request: failing(error(request.id))(request))
    run_job(file, items(3, bad), engine)
    errors = [str(item.problem or error(item.id)) for item in items(3, bad)]
    assert [(line.id, line.error) for line in file.records()] == [(f"{n}.png", errors[n]) for n in range(3)]


def test_what_needs_no_engine_is_written_without_one(file: AnswerFile) -> None:
    answer(None, JOB, tasks(items(3, bad=[0, 1, 2])), file, proven=False, on_answer=lambda _: None)
    assert ids(file.path) == ["0.png", "1.png", "2.png"]


def line(name: str, error: str | None = None, pages: int = 1, **counts: int) -> AnswerRecord:
    return AnswerRecord(id=name, image=[f"{name}#page={page + 1}" for page in range(pages)], error=error, **counts)


def test_starts_add_up_and_failures_are_counted_by_reason(tmp_path: Path) -> None:
    answers = tmp_path / "a.jsonl"
    first = [
        line("a.pdf", pages=3, prompt_tokens=800, image_tokens=768, output_tokens=5),
        line("b.png", "b.png: truncated"),
        line("c.png", "c.png: truncated"),
        line("d.png", "s3://in/d.png: no such object"),
    ]
    began = now()
    writer = LedgerWriter(answers, resumed=False, cost_per_hour=7.2)
    writer.loaded(2.5)
    for record in first:
        writer.add(record)
    writer.end(first, "stopped")
    more = LedgerWriter(answers, resumed=True, cost_per_hour=None)
    more.retried()
    again = line("b.png", prompt_tokens=300, image_tokens=256, output_tokens=4, retries=2)
    more.add(again)
    ended = more.end([first[0], again, *first[2:]], "finished")
    ledger = read_ledger(ledger_path(answers))
    assert ledger == ended and 0 < ledger.seconds < now() - began
    assert (ledger.requests, ledger.pages, ledger.successful_pages, ledger.failed_pages) == (4, 6, 4, 2)
    assert ledger.reasons == {"truncated": 1, "s3://in/d.png: no such object": 1}
    assert (ledger.prompt_tokens, ledger.image_tokens, ledger.output_tokens) == (1100, 1024, 9)
    assert [start.ending for start in ledger.starts] == ["stopped", "finished"]
    assert (ledger.retries, ledger.replica_retries, ledger.load_seconds, ledger.cost_per_hour) == (3, 2, 2.5, 7.2)


def test_the_price_counts_successful_pages_and_the_time_of_answering() -> None:
    starts = [
        JobStart("2026-01-01T00:00:00+00:00", 100.0, 30.0, 60, 40, 0, "stopped"),
        JobStart("2026-01-01T01:00:00+00:00", 100.0, 20.0, 70, 60, 20, "finished"),
    ]
    ledger = Ledger(starts=starts, cost_per_hour=3.6)
    assert (ledger.seconds, ledger.pages_per_second) == (50.0, 2.0)
    assert ledger.price_per_million_pages == pytest.approx(500.0)  # 1e6 pages at 2/s are 138.9 hours
    assert Ledger(starts=starts).price_per_million_pages is None
    assert Ledger(cost_per_hour=3.6).price_per_million_pages is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": 2}, "not a ledger of schema 1"),
        ({"pages": "many"}, "Expected `int`, got `str` - at `$.pages`"),
        ({"starts": [{"began": "x", "ending": "perhaps"}]}, "Invalid enum value 'perhaps' - at `$.starts[0].ending`"),
        ({"starts": [{"begun": "x"}]}, "missing required field `began`"),
    ],
)
def test_what_is_no_ledger_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    writer = LedgerWriter(tmp_path / "a.jsonl", resumed=False, cost_per_hour=None)
    writer.end([], "finished")
    path = ledger_path(tmp_path / "a.jsonl")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(RecordsError) as caught:
        read_ledger(path)
    assert reason in str(caught.value)
    with pytest.raises(RecordsError, match="No such file"):
        read_ledger(tmp_path / "none")
