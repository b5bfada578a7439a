import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import file_size_limit
from tests.records.load_runs import CLIENT, level, load_header, load_request, load_run, probe, steady
from tests.records.synthetic import header, outcome, record_of, records_of, repeat, request, stamps, write_run

from panscan.core import RecordsError
from panscan.images.fetch import ConcealedUrl
from panscan.records import store
from panscan.records.request_records import ClientFigures, LevelLoad
from panscan.records.schema import RecordedCell
from panscan.records.store import FILE_NAME, RecordWriter, read_run

CELLS = {"a": {"batch_size": 1}, "b": {"batch_size": 2}}


def block(cell: str, number: int, size: int = 2, at: float = 0.0) -> list[dict]:
    lines = [request(cell, f"q{i}", at, [at + 1, at + 2], repeat=number) for i in range(size)]
    return [*lines, repeat(cell, number, at, at + 3)]


def write_all(directory: Path, *blocks: list[dict]) -> None:
    with RecordWriter(directory) as writer:
        for lines in blocks:
            writer.write(records_of(lines))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    lines = [*block("a", 0), *block("a", 1, at=5.0)]
    write_all(tmp_path / "new" / "run", [header(CELLS)], lines, [outcome("b", "skipped", "no GPU")])
    run = read_run(tmp_path / "new" / "run")
    assert run.header == record_of(header(CELLS))
    assert run.cells == {id: RecordedCell(id, settings) for id, settings in CELLS.items()}
    assert run.outcomes == {"b": record_of(outcome("b", "skipped", "no GPU"))}
    assert run.requests == {("a", 0): records_of(lines[:2]), ("a", 1): records_of(lines[3:5])}
    assert run.repeats == {("a", 0): record_of(lines[2]), ("a", 1): record_of(lines[5])}
    assert run.finished() == {("a", 0), ("a", 1)}
    assert run.notes == []
    assert read_run(tmp_path / "new" / "run" / FILE_NAME) == run


def test_odd_values_are_written_and_read_back(tmp_path: Path) -> None:
    """Texts and numbers of other classes, an undecodable byte as ``os.fsdecode`` gives it, the largest seed."""
    names, seed = ["https://host/page.png?sig=***", "r\udce9sum\u2028\n.png"], 2**64 - 1
    lines = records_of(block("a", 0))
    lines[0].image, lines[0].due = [ConcealedUrl(names[0]), names[1]], np.float64(1.5)
    lines[-1].sampling_seed = seed
    with RecordWriter(tmp_path) as writer:
        writer.write([record_of({**header(CELLS), "settings": {"seed": seed}}), *lines])
    run = read_run(tmp_path)
    assert (run.requests["a", 0][0].image, run.requests["a", 0][0].due) == (names, 1.5)
    assert (run.header.settings.seed, run.repeats["a", 0].sampling_seed) == (seed, seed)


@settings(max_examples=60)
@given(cut=st.floats(0, 1))
def test_a_file_cut_anywhere_keeps_whole_repeats(tmp_path_factory: pytest.TempPathFactory, cut: float) -> None:
    directory = tmp_path_factory.mktemp("run")
    blocks = [block("a", 0), block("b", 0), block("a", 1)]
    write_all(directory, [header(CELLS)], *blocks)
    path = directory / FILE_NAME
    data = path.read_bytes()
    first = data.index(b"\n") + 1
    data = data[: first + round(cut * (len(data) - first))]
    path.write_bytes(data)
    complete_lines = [json.loads(line) for line in data.split(b"\n")[:-1]]
    complete = {(r["cell"], r["repeat"]) for r in complete_lines if r["type"] == "repeat"}
    tail = data[data.rfind(b"\n") + 1 :]

    run = read_run(directory)
    assert run.finished() == run.requests.keys() == complete
    assert all(len(run.requests[key]) == 2 for key in complete)
    assert any("torn" in note for note in run.notes) == bool(tail)

    with RecordWriter(directory) as writer:
        assert writer.previous == run
        assert (writer.torn is not None) == bool(tail)
        assert writer.torn is None or writer.torn.read_bytes() == tail + b"\n"
        for lines in blocks:
            if (lines[-1]["cell"], lines[-1]["repeat"]) not in run.finished():
                writer.write(records_of(lines))
    again = read_run(directory)
    assert again.finished() == {("a", 0), ("b", 0), ("a", 1)}
    assert all(len(requests) == 2 for requests in again.requests.values())
    assert again.notes == []


def test_a_last_line_that_is_not_json_is_torn_even_with_its_newline(tmp_path: Path) -> None:
    write_all(tmp_path, [header(CELLS)], block("a", 0))
    path = tmp_path / FILE_NAME
    content = path.read_bytes()
    for number in (1, 2):
        path.write_bytes(content + b"\0\0\0\n")
        assert "torn" in read_run(tmp_path).notes[0]
        with RecordWriter(tmp_path) as writer:
            assert writer.torn.read_bytes() == b"\0\0\0\n" * number  # appended: nothing is lost

        assert path.read_bytes() == content


def test_of_two_complete_repeats_the_last_counts(tmp_path: Path) -> None:
    later = block("a", 0, size=1, at=50.0)
    run = write_run(tmp_path, [header(CELLS), *block("a", 0), *later])
    assert run.requests["a", 0] == records_of(later[:1])
    assert run.repeats["a", 0] == record_of(later[1])


def test_the_last_outcome_of_a_cell_counts(tmp_path: Path) -> None:
    run = write_run(tmp_path, [header(CELLS), outcome("a", "oom", "no room"), outcome("a", "done")])
    assert run.outcomes["a"].outcome == "done"


@pytest.mark.parametrize("begun", [False, True])
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, begun: bool) -> None:
    with RecordWriter(tmp_path) as writer:
        if begun:
            writer.write([record_of(header(CELLS))])
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        written = before.get(tmp_path / FILE_NAME, b"")
        part = file_size_limit(len(written) + 100)
        with part, pytest.raises(RecordsError, match=rf"\A.*{FILE_NAME}.*\Z"):
            writer.write(records_of(block("a", 0) if begun else [header(CELLS)]))
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
        with pytest.raises(RecordsError, match="another panscan"):
            RecordWriter(tmp_path)
        writer.write(records_of(block("a", 1) if begun else [header(CELLS), *block("a", 1)]))
    assert read_run(tmp_path).finished() == {("a", 1)}


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordsError, match="could not be written"):
        RecordWriter(tmp_path / "file" / "run")


UNWRITABLE = [
    (block("a", 0), {}, "run line comes first"),
    ([header(CELLS), header(CELLS)], {}, "run line comes first"),
    ([header(CELLS), outcome("a", "done")], {"outcome": "fine"}, "field 'outcome' of a cell record"),
    ([header(CELLS), outcome("a", "done")], {"time": float("nan")}, "not JSON"),
    ([header(CELLS), outcome("a", "done")], {"time": Path()}, "not JSON"),
]


@pytest.mark.parametrize(("lines", "changes", "message"), UNWRITABLE)
def test_the_writer_refuses_what_could_not_be_read(
    tmp_path: Path, lines: list[dict], changes: dict[str, Any], message: str
) -> None:
    *first, last = records_of(lines)
    with RecordWriter(tmp_path) as writer, pytest.raises(RecordsError, match=message):
        writer.write([*first, msgspec.structs.replace(last, **changes)])
    assert not (tmp_path / FILE_NAME).exists()


ASKED, MEASURED = block("a", 0, size=1)
GARBLED = [
    ("{not json", "line 3: not a JSON object"),
    ("[1]", "line 3: not a JSON object"),
    ('{"type":"span"}', "line 3: unknown type of record 'span'"),
    (json.dumps(header(CELLS)), "line 3: a second run line"),
    (json.dumps(outcome("z", "done")), "line 3: the run has no cell 'z'"),
    (json.dumps(MEASURED | {"ended": "x"}), "line 3: field 'ended' of a repeat record: exp"),
    (json.dumps(ASKED | {"stamps": {"tokens": []}}), "line 3: field 'stamps' of a request record: .* `accepted`"),
    ('{"type":"verdict","cell":"a","verdict":"exact"}', "line 3: .* `reason`"),
    (json.dumps(MEASURED | {"tokens": {"requests": 3}}), "line 3: field 'tokens' of a repeat record: .* `tokens`"),
    (json.dumps(MEASURED | {"sampling_seed": 2**64}), "line 3: not a JSON object of 64-bit numbers"),
    ('{"type":[]}', r"line 3: unknown type of record \[\]"),
    (json.dumps(ASKED | {"views": True}), "field 'views' .* expected `int | null`, got `bool`"),
    (json.dumps(ASKED | {"image_size": [1]}), r"field 'image_size\[0\]' .* expected `array`, got `int`"),
    (json.dumps(ASKED | {"stamps": stamps(0.0, [1.0], future=1.0)}), "contains unknown field `future`"),
]


@pytest.mark.parametrize(("line", "message"), GARBLED)
def test_a_garbled_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    lines = [json.dumps(header(CELLS)), json.dumps(outcome("a", "done")), line, json.dumps(outcome("b", "done"))]
    (tmp_path / FILE_NAME).write_text("\n".join(lines) + "\n")
    with pytest.raises(RecordsError, match=message):
        read_run(tmp_path)
    with pytest.raises(RecordsError, match=message):
        RecordWriter(tmp_path)
    assert (tmp_path / FILE_NAME).read_text() == "\n".join(lines) + "\n"


@pytest.mark.parametrize(("schema", "fix"), [(4, "upgrade panscan"), (0, "measure again"), (None, "measure again")])
def test_another_schema_says_which_and_what_to_do(tmp_path: Path, schema: int | None, fix: str) -> None:
    with pytest.raises(RecordsError, match=f"schema {schema}, this panscan reads schemas 1, 2, 3: {fix}"):
        write_run(tmp_path, [{**header(CELLS), "schema": schema}, {"type": "of the future"}])


@pytest.mark.parametrize("content", [None, "", "no newline"])
def test_without_records_there_is_no_run(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / FILE_NAME).write_text(content)
    with pytest.raises(RecordsError, match=FILE_NAME):
        read_run(tmp_path)
    with pytest.raises(RecordsError, match="does not exist"):
        read_run(tmp_path / "nowhere")


def test_the_first_line_is_the_run(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match="line 1"):
        write_run(tmp_path, [outcome("a", "done"), header(CELLS)])
    for cells, message in (
        (header(CELLS)["cells"] * 2, "line 1: there are two cells"),
        ([{"cell": "a", "settings": []}], r"field 'cells\[0\].settings' of a run record: expected `object`"),
        ([{"cell": "a", "settings": {"runner": ["engine"]}}], "has an unexpected 'runner'"),
    ):
        with pytest.raises(RecordsError, match=message):
            write_run(tmp_path, [header(CELLS) | {"cells": cells}])


LIMITS = [
    ("_MOST_BYTES", 400, "larger than 400 bytes: measure fewer requests"),
    ("_LONGEST_LINE", 100, "a line of .* bytes, at most 100"),
    ("_MOST_PARTS", 10, "more than 10 lists and objects"),
]


@pytest.mark.parametrize(("limit", "most", "message"), LIMITS)
def test_records_beyond_a_limit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int, message: str
) -> None:
    write_run(tmp_path, [header(CELLS), *block("a", 0)])
    read_run(tmp_path)
    monkeypatch.setattr(store, limit, most)
    with pytest.raises(RecordsError, match=message):
        read_run(tmp_path)


PROBE = probe(image_prompt_tokens=270)
SEARCH = {"type": "search", "rate": 6.0, "attainment": 0.97, "note": "", "levels": [{"rate": 6.0, "attainment": 0.97}]}


def test_levels_that_a_search_adds_are_read_after_those_of_the_run(tmp_path: Path) -> None:
    more = {"type": "cells", "cells": [{"cell": "rate-6", "settings": level(6.0)}]}
    with RecordWriter(tmp_path) as writer:
        for lines in (load_run()[:1], load_run()[1:], [PROBE], [more, *steady("rate-6", 6.0, 0.07)], [SEARCH]):
            writer.write(records_of(lines))
    run = read_run(tmp_path)
    assert list(run.cells) == ["rate-4", "rate-8", "rate-16", "rate-6"]
    assert run.cells["rate-6"] == RecordedCell("rate-6", level(6.0))
    assert len(run.requests["rate-6", 0]) == 20
    assert [run.probe, run.search] == records_of([PROBE, SEARCH])


def test_a_level_is_added_once_and_before_its_requests(tmp_path: Path) -> None:
    more = {"type": "cells", "cells": [{"cell": "rate-4", "settings": level(4.0)}]}
    with pytest.raises(RecordsError, match="line 2: there are two cells 'rate-4'"):
        write_run(tmp_path, [load_run()[0], more])
    with pytest.raises(RecordsError, match="line 2: the run has no cell 'rate-6'"):
        write_run(tmp_path, [load_run()[0], load_request("rate-6", 0, 1.0, 0.1, 0.1)])


UNKNOWN_MEANINGS = [
    ({"arrival": "weekly"}, "field 'settings.load.arrival'"),
    ({"goodput": {"p99": 5.0}}, "field 'key in settings.load.goodput' of a run record: expected one of ttft, tpot"),
    ({"percentile_metrics": ["ttft", "speed"]}, r"settings.load.percentile_metrics\[1\]"),
    ({"metric_percentiles": [50, 100]}, r"settings.load.metric_percentiles\[1\]"),
    ({"attainment": "most"}, "settings.load.attainment"),
]


@pytest.mark.parametrize(("settings", "message"), UNKNOWN_MEANINGS)
def test_load_settings_of_unknown_meaning_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordsError, match=message):
        write_run(tmp_path, [load_header({}, **settings)])


def test_only_a_request_of_an_endpoint_may_lack_counts(tmp_path: Path) -> None:
    run = write_run(tmp_path, [load_header({"c": level(1.0)}), *steady("c", 1.0, 0.1)])
    assert run.requests["c", 0][0].views is None
    assert run.repeats["c", 0].load == LevelLoad(ClientFigures(**CLIENT))
    with pytest.raises(ValueError, match="only a request of an endpoint may lack 'views'"):
        record_of(request("c", "q", 1.0, [2.0], views=None))
