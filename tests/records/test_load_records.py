from pathlib import Path
from typing import Any

import pytest
from tests.records.load_runs import CLIENT, level, load_header, load_request, load_run, probe, steady
from tests.records.synthetic import record_of, records_of, request, write_run

from panscan.core import RecordsError
from panscan.records.request_records import ClientFigures, LevelLoad
from panscan.records.store import RecordWriter, read_run

PROBE = probe(image_prompt_tokens=270)
SEARCH = {"type": "search", "rate": 6.0, "attainment": 0.97, "note": "", "levels": [{"rate": 6.0, "attainment": 0.97}]}


def test_levels_that_a_search_adds_are_read_after_those_of_the_run(tmp_path: Path) -> None:
    more = {"type": "cells", "cells": [{"cell": "rate-6", "settings": level(6.0)}]}
    with RecordWriter(tmp_path) as writer:
        for lines in (load_run()[:1], load_run()[1:], [PROBE], [more, *steady("rate-6", 6.0, 0.07)], [SEARCH]):
            writer.write(records_of(lines))
    run = read_run(tmp_path)
    assert list(run.cells) == ["rate-4", "rate-8", "rate-16", "rate-6"]
    assert run.cells["rate-6"] == level(6.0)
    assert len(run.requests["rate-6", 0]) == 20
    assert [run.probe, run.search] == records_of([PROBE, SEARCH])


def test_a_level_is_added_once_and_before_its_requests(tmp_path: Path) -> None:
    more = {"type": "cells", "cells": [{"cell": "rate-4", "settings": level(4.0)}]}
    with pytest.raises(RecordsError, match="line 2: there are two cells 'rate-4'"):
        write_run(tmp_path, [load_run()[0], more])
    with pytest.raises(RecordsError, match="line 2: the run has no cell 'rate-6'"):
        write_run(tmp_path, [load_run()[0], load_request("rate-6", 0, 1.0, 0.1, 0.1)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arrival": "weekly"}, "field 'settings.load.arrival'"),
        ({"goodput": {"p99": 5.0}}, "field 'key in settings.load.goodput' of a run record: expected one of ttft, tpot"),
        ({"percentile_metrics": ["ttft", "speed"]}, r"settings.load.percentile_metrics\[1\]"),
        ({"metric_percentiles": [50, 100]}, r"settings.load.metric_percentiles\[1\]"),
        ({"attainment": "most"}, "settings.load.attainment"),
    ],
)
def test_load_settings_of_unknown_meaning_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordsError, match=message):
        write_run(tmp_path, [load_header({}, **settings)])


def test_only_a_request_of_an_endpoint_may_lack_counts(tmp_path: Path) -> None:
    run = write_run(tmp_path, [load_header({"c": level(1.0)}), *steady("c", 1.0, 0.1)])
    assert run.requests["c", 0][0].views is None
    assert run.repeats["c", 0].load == LevelLoad(ClientFigures(**CLIENT))
    with pytest.raises(ValueError, match="only a request of an endpoint may lack 'views'"):
        record_of(request("c", "q", 1.0, [2.0], views=None))
