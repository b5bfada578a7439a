"""Reports in a browser, on a desktop and on a phone: nothing is clipped or off-screen, and the decision comes first."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.records import synthetic
from tests.report.report_known import known_run
from tests.report.test_gallery import CELLS, asked, run_of
from tests.report.test_load_report import broken_records

from panscan.report import write_gallery, write_report

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
    found = {name: folder / f"{name}.html" for name in ("labelled", "unlabelled", "many", "load", "gallery")}
    write_report(known_run(folder / "labelled", scores=True), found["labelled"])
    write_report(known_run(folder / "unlabelled"), found["unlabelled"])
    cells = {f"c{n}": {"batch_size": n, "attention": f"an_attention_with_a_long_name/{n}"} for n in range(1, 13)}
    records = [synthetic.header(cells), *(record for n in range(1, 13) for record in batches(n))]
    write_report(synthetic.write_run(folder / "many", records), found["many"])
    write_report(synthetic.write_run(folder / "load", broken_records()), found["load"])
    image = folder / "a-long-name-of-a-document.png"
    Image.new("RGB", (600, 2400), "#336699").save(image)
    answers = [asked("off", "the date", image, ["27/05/2026"], "27/05/2028"), asked("on", "it", image, ["a" * 90], "b")]
    write_gallery(run_of(folder / "gallery", [*answers, asked("on", "that", image, [], None)]), found["gallery"])
    assert set(CELLS) == {"off", "on"}
    return found


def batches(number: int) -> list[dict[str, Any]]:
    times = [1.0 + number, 1.1 + number]
    return [*synthetic.batches_of(f"c{number}", times), synthetic.verdict(f"c{number}", "exact", 1.0)]


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
