"""Records from anywhere: whatever JSON stands in whatever place, commands answer or refuse it in one line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.records.synthetic import batches_of, header, load, outcome, truth, verdict, write_run

from panscan.cli.main import run

pytestmark = pytest.mark.usefixtures("without_charts")

CELLS = {"a": {"batch_size": 1}, "b": {"batch_size": 2}}
LINES: list[dict[str, Any]] = [header(CELLS)]
for cell in CELLS:
    LINES += [*batches_of(cell, [1.0, 2.0]), outcome(cell, "done"), verdict(cell, "exact", 1.0)]
LINES += [load([*CELLS], {"text": {"layers": 2}}), truth()]
ODD = [None, True, 0, -1, 1.5, 1e308, 10**40, float("nan"), "", "x", "\ud83d", [], [1], ["x"], [{}], {}, {"x": 1}]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything inside a JSON value, and to a new key of each object."""
    if not isinstance(value, dict | list):
        return
    for key, inside in [*value.items(), ("new", None)] if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        yield from places(inside, (*path, key))


def changed(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    if not path:
        return odd
    copy = value.copy()
    inside = copy.get(path[0]) if isinstance(copy, dict) else copy[path[0]]
    copy[path[0]] = changed(inside, path[1:], odd)
    return copy


PLACES = [(number, path) for number, line in enumerate(LINES) for path in places(line)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    write_run(path / "good", LINES)
    (path / "odd").mkdir()
    return path


@settings(max_examples=60)
@given(place=st.sampled_from(PLACES), odd=st.sampled_from(ODD))
def test_any_json_in_any_place_is_read_or_refused(folder: Path, place: tuple[int, Any], odd: Any) -> None:
    lines = [changed(line, place[1], odd) if number == place[0] else line for number, line in enumerate(LINES)]
    good, bad = str(folder / "good"), str(folder / "odd")
    (folder / "odd" / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for words in (["report", bad, "--format", "md"], ["compare", good, bad], ["recommend", bad, "--json"]):
        output = ["-o", str(folder / "preset.yaml"), "--force"] if words[0] == "recommend" else []
        assert run([*words, *output]) in (0, 3), words


@pytest.mark.parametrize(
    ("number", "path", "odd", "message"),
    [
        (0, ("cells", 0, "settings"), [], "field 'cells[0].settings' of a run record: expected `object`"),
        (0, ("cells", 0, "cell"), [], "field 'cells[0].cell' of a run record: expected `str`, got `array`"),
        (0, ("cells", 0, "settings", "runner"), ["engine"], "has an unexpected 'runner'"),
        (0, ("settings",), [], "field 'settings' of a run record: expected `object`, got `array`"),
        (0, ("settings", "quality_metric"), {}, "field 'settings.quality_metric' of a run record: expected `str"),
        (0, ("schema",), {}, "has schema {}"),
        (1, ("stamps", "future"), 1.0, "field 'stamps' of a request record: object contains unknown field `future`"),
        (1, ("stamps", "end"), "x", "field 'stamps.end' of a request record: expected `float | null`, got `str`"),
        (1, ("views",), True, "field 'views' of a request record: expected `int | null`, got `bool`"),
        (1, ("views",), 10**40, "not a JSON object of 64-bit numbers"),
        (1, ("image_size",), [1], "field 'image_size[0]' of a request record: expected `array`, got `int`"),
        (1, ("type",), [], "unknown type of record []"),
    ],
)
def test_the_refusal_names_the_line_and_the_field(
    folder: Path, capsys: pytest.CaptureFixture[str], number: int, path: tuple[Any, ...], odd: Any, message: str
) -> None:
    lines = [changed(line, path, odd) if at == number else line for at, line in enumerate(LINES)]
    (folder / "odd" / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(["report", str(folder / "odd")]) == 3
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
