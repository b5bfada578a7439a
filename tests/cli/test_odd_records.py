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
