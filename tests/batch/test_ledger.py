"""The ledger of a job: counts of answers, times of all starts, and what another run reads."""

import json
from pathlib import Path
from typing import Any

import pytest

from panscan.batch.jsonl import AnswerRecord
from panscan.batch.ledger import JobStart, Ledger, LedgerWriter, ledger_path, read_ledger
from panscan.core import RecordsError


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
    found = read_ledger(ledger_path(answers))
    assert found == ended
    assert (found.requests, found.pages, found.successful_pages, found.failed_pages) == (4, 6, 4, 2)
    assert found.reasons == {"truncated": 1, "s3://in/d.png: no such object": 1}
    assert (found.prompt_tokens, found.image_tokens, found.output_tokens) == (1100, 1024, 9)
    assert [start.ending for start in found.starts] == ["stopped", "finished"]
    assert (found.retries, found.replica_retries, found.load_seconds, found.cost_per_hour) == (3, 2, 2.5, 7.2)


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
