"""Reports as HTML and markdown: foreign text stays text, nothing is fetched, equal records give equal bytes."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from PIL import Image
from tests.analysis.test_recommend import Cell
from tests.analysis.test_recommend import run_with as run_of_cells
from tests.records import synthetic
from tests.report.report_known import known_run
from tests.report.report_page import Element, page_of, parse, rows_of, section
from tests.report.test_gallery import asked, run_of
from tests.report.test_load_report import broken_records
from tests.report.test_terminal import shown

from panscan.analysis.recommend import preset_text, recommend
from panscan.core import RecordsError
from panscan.core.text import clean, percent
from panscan.records.store import Run
from panscan.report import to_document, to_markdown, write_gallery, write_pictures, write_report
from panscan.report.draw import DARK, LIGHT, SERIES
from panscan.report.html import render_html
from panscan.report.sweep import SweepReport
from panscan.report.table import plain_text
from panscan.report.terminal import print_decision

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
    tags = {element.tag for svg in page.all("svg") for element in svg.all()}
    assert tags <= {"title", "desc", "g", "path", "defs", "clippath", "rect", "use", "text"}
    wanted = " ".join(clean(text).split())
    for name in ("cells", "not-measured", "verdict", "environment", "repeat"):
        place = section(page, name).text
        assert wanted in place or "'" in text, name
    ticks = [element.text for svg in page.all("svg") for element in svg.all("text")]
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
    styles_and_scripts = " ".join(element.text for tag in ("style", "script") for element in page.all(tag))
    for word in ("http", "@import", "fetch(", "XMLHttpRequest", "import("):
        assert word not in styles_and_scripts
    policy = [tag for tag in page.all("meta") if tag.attributes.get("http-equiv") == "Content-Security-Policy"]
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
        names = [element.tag for element in chart.children if isinstance(element, Element)]
        assert names[:2] == ["title", "desc"]
        assert chart.attributes["role"] == "img"
        assert next(chart.all("title")).text.count(" by ") <= 1, "the axis is named once"
        assert "requests/s" in next(chart.all("desc")).text or "ms" in next(chart.all("desc")).text
    for table in page.all("table"):
        assert all(cell.attributes.get("scope") for cell in table.all("th"))
    levels = [int(element.tag[1]) for element in page.all() if re.fullmatch(r"h[1-6]", element.tag)]
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


# The markdown of a report, read by a parser of GitHub's dialect.


def rendered(text: str) -> Element:
    """Comments, which keep ``@`` and ``#`` from calling somebody, are nothing in it."""
    return parse(MarkdownIt("gfm-like", {"linkify": False}).render(text))


LETTERS = "ab01|\\`*_[]<>~@#&!-+().{}\n$é\U0001f600 "


@given(
    st.text(alphabet=st.sampled_from(LETTERS), min_size=1).filter(lambda text: text.strip() not in ("", "b", "c", "e"))
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example("| a | b |\n|---|---|")
@example("`x` ```\n``` <script>x</script> <!-- --> &lt; &#35;")
@example("@somebody #12 ![x](http://y) [z](w) **b** ~~s~~ \\")
@example("***")
@example("___")
@example("a__b _ c_d __e")
@example("\\|")
def test_foreign_text_is_no_markdown(tmp_path: Path, text: str) -> None:
    source = to_markdown(run_with(text, tmp_path))
    document = rendered(source)
    main, details, *_ = document.all("table")
    rows = rows_of(main)
    assert len(rows) == 3
    wanted = clean(text)
    assert "".join(rows[0]["setting"].text.split()).startswith("".join(f"{wanted},".split()))
    assert rows_of(details)[1]["distance from the reference"].text == wanted
    allowed = {"h3", "p", "strong", "ul", "li", "blockquote", "pre", "code", "details", "summary"}
    allowed |= {"table", "thead", "tbody", "tr", "th", "td"}
    assert {element.tag for element in document.all()} == allowed
    assert len(list(document.all("pre"))) == 1
    prose = source[: source.rindex("\n\n```")]
    assert not re.search(r"[@#]\w", prose), "no person is mentioned, no issue is linked"


# One decision: the terminal, the page, markdown and the preset name the same cell in the same sentence.


cells = st.builds(
    Cell,
    seconds=st.sampled_from([0.25, 0.5, 0.505, 1.0]),
    word=st.sampled_from(["exact", "exact", "close", "different", "unverified"]),
    views=st.sampled_from([1, 3]),
    crops=st.sampled_from([1, 4]),
    scores=st.sampled_from([(), (1.0,) * 12, (1.0,) * 10 + (0.0,) * 2, (0.0,) * 12]),
)


@pytest.mark.usefixtures("without_charts")
@example([Cell(word="different")])
@given(st.lists(cells, min_size=1, max_size=4))
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_form_names_the_same_cell(drawn: list[Cell]) -> None:
    run = run_of_cells(**{f"owner/c{number}": cell for number, cell in enumerate(drawn)})
    page, markdown, terminal = page_of(run), to_markdown(run), shown(print_decision, run, 400).strip()
    headline = next(section(page, "recommendation").all("h1")).text
    rows = [row.text for row in section(page, "cells").of_class("chosen")]
    try:
        recommendation = recommend(run)
    except RecordsError:
        assert terminal.startswith("No recommendation: ") and headline.startswith("No recommendation: ")
        assert "**No recommendation:**" in markdown and rows == []
        return
    assert terminal == headline == recommendation.decision
    assert f"**{plain_text(recommendation.decision)}**" in markdown
    assert len(rows) == 1 and recommendation.name in rows[0]
    preset = preset_text(run, recommendation)
    assert f"# decision: {recommendation.decision}\n# cell: {recommendation.cell}\n" in preset
    assert f"attention: {recommendation.cell}\n" in preset, "the settings of that cell"


# Reports in a browser, on a desktop and on a phone: nothing is clipped or off-screen, and the decision comes first.


SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
OFF_SCREEN = """
    () => [...document.querySelectorAll("h1, h2, h3, p, li, dt, dd, td, th, figcaption, summary, img, svg.chart")]
        .filter((each) => !each.closest(".wide, .hidden") || (innerWidth < 640 && each.closest(".stack td")))
        .filter((each) => { const box = each.getBoundingClientRect();
            return box.width > 1 && (box.left < 0 || box.right > innerWidth + 1); })
        .map((each) => each.outerHTML.slice(0, 200))
"""
CLIPPED = """
    () => [...document.querySelectorAll("svg.chart text")].filter((text) => {
        const frame = text.closest("svg").getBoundingClientRect(), box = text.getBoundingClientRect();
        return box.width > 0 && (box.left < frame.left - 1 || box.right > frame.right + 1
            || box.top < frame.top - 1 || box.bottom > frame.bottom + 1);
    }).map((text) => text.textContent)
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    files = {name: folder / f"{name}.html" for name in ("labelled", "unlabelled", "many", "load", "gallery")}
    write_report(known_run(folder / "labelled", scores=True), files["labelled"])
    write_report(known_run(folder / "unlabelled"), files["unlabelled"])
    cells = {f"c{n}": {"batch_size": n, "attention": f"an_attention_with_a_long_name/{n}"} for n in range(1, 13)}
    records = [synthetic.header(cells)]
    for number, cell in enumerate(cells, 1):
        records += [*synthetic.batches_of(cell, [1.0 + number, 1.1 + number]), synthetic.verdict(cell, "exact", 1.0)]
    write_report(synthetic.write_run(folder / "many", records), files["many"])
    write_report(synthetic.write_run(folder / "load", broken_records()), files["load"])
    image = folder / "a-long-name-of-a-document.png"
    Image.new("RGB", (600, 2400), "#336699").save(image)
    answers = [asked("off", "the date", image, ["27/05/2026"], "27/05/2028"), asked("on", "it", image, ["a" * 90], "b")]
    write_gallery(run_of(folder / "gallery", [*answers, asked("on", "that", image, [], None)]), files["gallery"])
    return files


@pytest.mark.parametrize("device", SIZES)
@pytest.mark.parametrize("name", ["labelled", "unlabelled", "many", "load", "gallery"])
def test_nothing_is_clipped_or_off_screen(browser: Any, pages: dict[str, Path], name: str, device: str) -> None:
    width, height = SIZES[device]
    page = browser.new_page(viewport={"width": width, "height": height})
    try:
        page.goto(pages[name].as_uri())
        first = page.locator("#recommendation h1, #result h2, h1").first.bounding_box()
        assert first["y"] + first["height"] <= height, "the decision is in the first view"
        if name in ("labelled", "unlabelled"):
            chart = page.locator("#recommendation svg.chart").first.bounding_box()
            assert chart["y"] + chart["height"] <= height, "and so is its picture"
        page.evaluate("document.querySelectorAll('details').forEach((each) => each.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(OFF_SCREEN) == []
        assert page.evaluate(CLIPPED) == []
    finally:
        page.close()
