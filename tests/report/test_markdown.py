"""The markdown of a report, read by a parser of GitHub's dialect."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from tests.records import synthetic
from tests.report.report_known import SECONDS, UNKNOWN, known_run
from tests.report.report_page import Element, page_of, parse, rows_of, settings_of_page

from panscan.core.text import clean
from panscan.records.store import Run
from panscan.report import to_markdown


def rendered(text: str) -> Element:
    """Comments, which keep ``@`` and ``#`` from calling somebody, are nothing in it."""
    return parse(MarkdownIt("gfm-like", {"linkify": False}).render(text))


def test_the_table_is_the_page_s(tmp_path: Path) -> None:
    """Every cell's figures are those of the HTML page, whose test holds them against the records."""
    run = known_run(tmp_path, scores=True)
    document = rendered(to_markdown(run))
    table, details, *_ = document.all("table")
    rows = [row | more for row, more in zip(rows_of(table), rows_of(details), strict=True)]
    page = settings_of_page(page_of(run))
    assert len(rows) == len(SECONDS)
    for row, wanted in zip(rows, page, strict=True):
        for name in ("setting", "id", "views", "image tokens", "GPU GiB"):
            assert row[name].text == wanted[name].text, name
        for name in ("TTFT ms", "TPOT ms", "p95 E2E ms"):
            bounds = wanted[name].of_class("bounds")[0].text
            assert row[name].text == wanted[name].text.removesuffix(bounds)
        for name in ("requests/s", "accuracy (exact match)"):
            bounds = wanted[name].of_class("bounds")[0].text
            assert (
                row[f"{name}, 95%" if name.startswith("accuracy") else f"{name} (95%)"].text
                == f"{wanted[name].text.removesuffix(bounds)} ({bounds.split(' of ')[0]})"
            )
        figures = wanted["distance from the reference"].text
        assert row["verdict"].text == wanted["verdict"].of_class("badge")[0].text[2:]
        assert row["distance from the reference"].text == (UNKNOWN if figures == "-" else figures.replace(", ", "; "))
    assert list(rows_of(table)[0]) == [
        "setting",
        "accuracy (exact match), 95%",
        "accuracy vs exact",
        "requests/s (95%)",
        "TTFT ms",
        "TPOT ms",
        "p95 E2E ms",
        "verdict",
    ]


def test_the_rest_is_there_too(tmp_path: Path) -> None:
    text = rendered(to_markdown(known_run(tmp_path))).text
    for wanted in (
        "tiny on 2 × NVIDIA H200",
        "Use balanced, sdpa attention, batch size 2: 1.95 requests/s; with flash_attention_2 attention, batch size 2",
        "Runner-up: flash_attention_2 attention, batch size 1.",
        f"1 of 5 settings was not compared with the reference: {UNKNOWN}.",
        "1 setting out of memory: tried to get 16 GiB of <memory> (eager attention, batch size 2)",
        "~ has too few samples",
        "These weights are random: times are real, answers are noise.",
        "Some times are below their floor: the machine was busy",
        "Reference: tiny, 5 requests, computed in 12.5 s.",
        "torch 2.11.0",
    ):
        assert wanted in text, wanted
    block = next(rendered(to_markdown(known_run(tmp_path))).all("pre"))
    assert block.text == """panscan bench --images 'docs/a b.png' -p 'What'"'"'s <this> & that?'"""


def hostile(text: str, directory: Path) -> Run:
    cells = {"a": {"model": text, "attention": text}, "b": {"model": text, "attention": "b"}, "c": {"attention": text}}
    header = synthetic.header(cells)
    header |= {"command": [text], "environment": {"cpu": text}}
    header["cells"][0]["preset"] = text
    records = [header, *synthetic.batches_of("a", [1.0, 2.0]), *synthetic.batches_of("b", [1.0, 2.0])]
    records += [synthetic.verdict("b", "unverified", None, reason=text), synthetic.outcome("c", "failed", text)]
    return synthetic.write_run(directory, records)


LETTERS = "ab01|\\`*_[]<>~@#&!-+().{}\n$é\U0001f600 "


@given(st.text(alphabet=st.sampled_from(LETTERS), min_size=1).filter(lambda text: text.strip() not in ("", "b")))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example("| a | b |\n|---|---|")
@example("`x` ```\n``` <script>x</script> <!-- --> &lt; &#35;")
@example("@somebody #12 ![x](http://y) [z](w) **b** ~~s~~ \\")
@example("***")
@example("___")
@example("a__b _ c_d __e")
@example("\\|")
def test_foreign_text_is_no_markdown(tmp_path: Path, text: str) -> None:
    source = to_markdown(hostile(text, tmp_path))
    document = rendered(source)
    main, details, *_ = document.all("table")
    rows = rows_of(main)
    assert len(rows) == 2
    wanted = clean(text)
    assert "".join(rows[0]["setting"].text.split()).startswith("".join(f"{wanted},".split()))
    assert rows_of(details)[1]["distance from the reference"].text == wanted
    allowed = {
        "h3",
        "p",
        "strong",
        "ul",
        "li",
        "blockquote",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "pre",
        "code",
        "details",
        "summary",
    }
    assert {each.tag for each in document.all()} == allowed
    assert len(list(document.all("pre"))) == 1
    prose = source[: source.rindex("\n\n```")]
    assert not re.search(r"[@#]\w", prose), "nobody is called, no issue is linked"
