"""The page itself: foreign text stays text, nothing is fetched, equal records give equal bytes."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.records import synthetic
from tests.report.report_page import Element, page_of, parse, section

from panscan.core.text import clean, percent
from panscan.records.store import Run
from panscan.report import to_document, write_pictures, write_report
from panscan.report.draw import DARK, LIGHT, SERIES
from panscan.report.html import render_html
from panscan.report.sweep import SweepReport

HOSTILE = (
    "<script>alert(1)</script>",
    "\"' onload=x & &amp; <b>",
    "{{ 7 * 7 }} {% raw %}",
    "$x^{2$ \\frac $$",
    "\x00\x1b[31m\ud800\ufffe line\nbreak\r\ttab",
    "a|b `c` \U0001f600 \u202eevil",
    "-->]]></style></svg>",
)


def run_with(text: str, directory: Path) -> Run:
    """Three measured cells and others, with a text wherever records hold foreign text."""
    grid = {cell: {"model": text, "attention": cell.replace("a", text), "odd": [text]} for cell in "abe"}
    header = synthetic.header({**grid, "c": {"model": text, "attention": "c"}, "d": {"model": text}})
    header |= {"run_id": text, "created": text, "command": ["panscan", text]}
    gpus = [{"name": text, "driver": text}]
    header["environment"] = {"cpu": text, "packages": {"torch": text}, text: text, "gpus": gpus}
    header["cells"][0]["preset"] = text
    records = [header, synthetic.load(["a"], None, device=text), synthetic.truth(model=text, source="r", file=text)]
    for cell in grid:
        records += synthetic.batches_of(cell, [1.0, 2.0])
    records += [
        synthetic.verdict("a", "exact", 1.0, 1.0),
        synthetic.verdict("b", "unverified", None, reason=text),
        synthetic.verdict("e", "close", 5.0, 1.0),
        synthetic.outcome("c", "failed", text),
    ]
    return synthetic.write_run(directory, records)


def skeleton(element: Element) -> Iterator[str]:
    """Tags and names of attributes; drawings, whose ticks depend on the width of text, are left out."""
    for child in element.children:
        if isinstance(child, Element):
            yield f"{child.tag} {sorted(child.attributes)}"
            if child.tag != "svg":
                yield from skeleton(child)


@cache
def plain_skeleton() -> list[str]:
    with TemporaryDirectory() as folder:
        return list(skeleton(page_of(run_with("plain", Path(folder)))))


@given(st.text(min_size=1).filter(lambda text: text.strip() and clean(text) not in ("b", "c", "e")))
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example("".join(HOSTILE))
@example(HOSTILE[3])
@example("#010100")  # that charts are drawn with
def test_foreign_text_is_only_ever_text(tmp_path: Path, text: str) -> None:
    run = run_with(text, tmp_path)
    write_report(run, tmp_path / "report.html")
    page = parse((tmp_path / "report.html").read_text("utf-8"))
    assert list(skeleton(page)) == plain_skeleton()
    tags = {each.tag for svg in page.all("svg") for each in svg.all()}
    assert tags <= {"title", "desc", "g", "path", "defs", "clippath", "rect", "use", "text"}
    wanted = " ".join(clean(text).split())
    for name in ("cells", "not-measured", "verdict", "environment", "repeat"):
        place = section(page, name).text
        assert wanted in place or "'" in text, name
    ticks = [each.text for svg in page.all("svg") for each in svg.all("text")]
    assert clean(text) in to_document(run)["decision"] or "'" in text
    if len(wanted) <= 20:
        assert wanted in ticks


def test_nothing_is_fetched(tmp_path: Path) -> None:
    html = render_html(SweepReport(run_with("https://example.com/x.png", tmp_path)))
    page = parse(html)
    for element in page.all():
        for name, value in element.attributes.items():
            if name in ("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
                assert value.startswith("#") or value == "data:,", (element.tag, name, value)
    for link in re.findall(r"url\(([^)]*)\)", html):
        assert link.startswith("#")
    styles_and_scripts = " ".join(each.text for tag in ("style", "script") for each in page.all(tag))
    for word in ("http", "@import", "fetch(", "XMLHttpRequest", "import("):
        assert word not in styles_and_scripts
    policy = [each for each in page.all("meta") if each.attributes.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in (policy[0].attributes["content"] or "")


def test_every_reference_has_its_one_target(known: tuple[Run, Element]) -> None:
    elements = list(known[1].all())
    ids = [element.attributes["id"] for element in elements if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    values = [f"{name}={value}" for element in elements for name, value in element.attributes.items()]
    references = set(re.findall(r"(?:href=|url\()#([\w.-]+)", " ".join(values)))
    assert len(references) > 10
    assert references <= set(ids)


def test_every_drawing_and_table_says_what_it_is(known: tuple[Run, Element]) -> None:
    page = known[1]
    charts = page.of_class("chart")
    assert len(charts) == 9
    for chart in charts:
        names = [each.tag for each in chart.children if isinstance(each, Element)]
        assert names[:2] == ["title", "desc"]
        assert chart.attributes["role"] == "img"
        assert next(chart.all("title")).text.count(" by ") <= 1, "the axis is named once"
        assert "requests/s" in next(chart.all("desc")).text or "ms" in next(chart.all("desc")).text
    for table in page.all("table"):
        assert all(cell.attributes.get("scope") for cell in table.all("th"))
    levels = [int(each.tag[1]) for each in page.all() if re.fullmatch(r"h[1-6]", each.tag)]
    assert levels[0] == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))


MADE_ELSEWHERE = """
import sys
from pathlib import Path
from panscan.records.store import read_run
from panscan.report import write_pictures, write_report
run = read_run(Path(sys.argv[1]))
write_report(run, Path(sys.argv[2]) / "report.html")
write_pictures(run, Path(sys.argv[2]))
"""


def test_equal_records_give_equal_bytes(tmp_path: Path) -> None:
    """Elsewhere: another directory, another order of hashing, and a user's own style of matplotlib."""
    here, there = tmp_path / "here", tmp_path / "there"
    run = run_with("plain", here)
    write_report(run, here / "report.html")
    pictures = write_pictures(run, here)
    run_with("plain", there)
    (there / "matplotlibrc").write_text("font.size: 30\nlines.linewidth: 9\naxes.grid: True\nsvg.fonttype: path\n")
    env = os.environ | {"PYTHONHASHSEED": "77", "MATPLOTLIBRC": str(there / "matplotlibrc"), "TZ": "Asia/Tokyo"}
    subprocess.run([sys.executable, "-c", MADE_ELSEWHERE, str(there), str(there)], env=env, check=True)
    assert (there / "report.html").read_bytes() == (here / "report.html").read_bytes()
    assert len(pictures) == 5
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert (there / picture.name).read_bytes() == picture.read_bytes()


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast(palette: dict[str, str]) -> None:
    def contrast(one: str, other: str) -> float:
        high, low = sorted((luminance(palette[one]), luminance(palette[other])), reverse=True)
        return (high + 0.05) / (low + 0.05)

    for text in ("ink", "muted", "link", "good", "fair", "bad"):
        for ground in ("page", "panel"):
            assert contrast(text, ground) >= 4.5, (text, ground)
    for mark in (*SERIES, "rule"):
        assert contrast(mark, "page") >= 3, mark


@given(st.floats(0, 1))
def test_only_all_of_it_is_100_percent(share: float) -> None:
    text = percent(share)
    assert (text == "100%") == (share == 1)
    assert float(text.rstrip("%")) == pytest.approx(100 * share, abs=0.11)


@given(st.text())
@example("".join(HOSTILE))
def test_clean_text_is_one_line_that_xml_can_hold(text: str) -> None:
    line = clean(text)
    assert len(line.splitlines()) <= 1
    assert line.isprintable() or not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", line)
    ElementTree.fromstring(f"<a>{escape(line)}</a>".encode())
    assert clean(line) == line
