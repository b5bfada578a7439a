"""The playground in a browser, against a real server with the mini model."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import pytest
from PIL import Image
from tests.serve.serving import Server, saved

from panscan.core import PanAndScan
from panscan.images.views import plan_views
from panscan.report.draw import DARK, LIGHT

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
expect = playwright.expect

FILES = files("panscan.serve") / "playground"
TOTAL = "$188.90"  # what the sample receipt says
DEADLINE_MS = 30_000
UNLABELLED = """
    () => [...document.querySelectorAll("input, textarea, button, [role=img], [role=group], fieldset")]
        .filter((each) => !each.labels?.length && !each.getAttribute("aria-label") && !each.textContent.trim()
            && !document.getElementById(each.getAttribute("aria-labelledby")))
        .map((each) => each.outerHTML)
"""


@contextmanager
def opened(browser: Any, url: str, **settings: Any) -> Iterator[Any]:
    """Open the playground, and yield the page once it has reached the server."""
    context = browser.new_context(**settings)
    context.set_default_timeout(DEADLINE_MS)
    try:
        page = context.new_page()
        page.goto(url)
        expect(page.locator("[data-state=ok]")).to_be_visible(timeout=DEADLINE_MS)
        yield page
    finally:
        context.close()


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    with opened(browser, server.url) as page:
        yield page


def png(width: int, height: int) -> dict[str, Any]:
    """Return an image for Playwright's file chooser."""
    content = saved(Image.new("RGB", (width, height), "#d0d8e0"))
    return {"name": "page.png", "mimeType": "image/png", "buffer": content}


def drawn_views(page: Any, count: int) -> list[tuple[int, ...]]:
    """Return the boxes of the outlines in the picture, once there are ``count``."""
    rects = page.locator("#views rect[data-view]")
    expect(rects).to_have_count(count, timeout=DEADLINE_MS)
    attributes = "['x', 'y', 'width', 'height'].map(name => Number(r.getAttribute(name)))"
    boxes = rects.evaluate_all(f"all => all.map(r => {attributes})")
    return [(x, y, x + width, y + height) for x, y, width, height in boxes]


def test_answers_the_sample_without_errors_or_foreign_requests(browser: Any, server: Server) -> None:
    problems: list[str] = []
    hosts: set[str] = set()
    with opened(browser, server.url) as page:
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
        page.reload()
        page.get_by_role("button", name="Try the sample receipt").click()
        drawn_views(page, 4)
        page.get_by_role("switch", name="Compare").check()
        page.get_by_role("button", name="Ask").click()
        stages = page.locator(".stages:visible")
        expect(stages).to_have_count(2, timeout=DEADLINE_MS)
        without, with_crops = page.locator(".card").all()
        expect(without.get_by_text("Without crops", exact=True)).to_be_visible()
        expect(without.locator("dd").first).to_have_text("1")
        expect(with_crops.locator(".answer")).to_have_text(TOTAL)
        expect(with_crops.locator("dd").first).to_have_text("4")
        expect(with_crops.locator(".stages")).to_contain_text("decode")
        expect(page.locator("#caution")).to_contain_text("mini is a demonstration model")
    assert not problems
    assert hosts - {""} == {urlsplit(server.url).netloc}  # data: and blob: URLs have no host


def test_settings_move_the_views(page: Any) -> None:
    page.locator("#file").set_input_files(png(400, 1600))
    for crops in (4, 3):
        page.get_by_label("Max crops", exact=False).first.fill(str(crops))
        plan = plan_views(400, 1600, PanAndScan(max_num_crops=crops))
        assert drawn_views(page, crops + 1) == [view.box for view in plan.views]
    page.get_by_role("switch", name="Pan and scan").uncheck()
    assert drawn_views(page, 1) == [(0, 0, 400, 1600)]
    expect(page.locator("#plan-figures")).to_contain_text("144")


def test_dropped_document_has_pages(page: Any) -> None:
    first, second = Image.new("RGB", (300, 300), "white"), Image.new("RGB", (300, 900), "white")
    content = saved(first, "TIFF", save_all=True, append_images=[second], compression="tiff_deflate")
    transfer = page.evaluate_handle(
        """(bytes) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(bytes)], "scan.tif", {type: "image/tiff"}));
            return transfer;
        }""",
        list(content),
    )
    page.dispatch_event("#drop", "drop", {"dataTransfer": transfer})
    expect(page.locator("#page-text")).to_have_text("Page 1 of 2")
    assert drawn_views(page, 1) == [(0, 0, 300, 300)]
    page.get_by_role("button", name="Next page").click()
    assert drawn_views(page, 4)[1] == (0, 0, 300, 300)
    expect(page.get_by_role("button", name="Next page")).to_be_disabled()


def test_keyboard_alone_is_enough(page: Any) -> None:
    for _ in range(3):
        page.keyboard.press("Tab")
        if page.locator("#sample:focus").count():
            break
    page.keyboard.press("Enter")
    drawn_views(page, 4)
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.locator("#question:focus").count():
            break
    page.keyboard.press("Control+a")
    page.keyboard.type("What is the total?")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".answer")).to_have_text(TOTAL, timeout=DEADLINE_MS)
    expect(page.locator(".answer")).to_have_attribute("aria-busy", "false")


def test_refused_values_are_shown_at_their_fields(page: Any) -> None:
    ask = page.get_by_role("button", name="Ask")
    ask.click()
    expect(page.locator("#question-error")).to_be_visible()
    page.locator("#question").fill("What is the total?")
    page.locator("#max_tokens").fill("0")
    ask.click()
    expect(page.locator("#max_tokens-error")).to_contain_text("got 0")
    expect(page.locator("#max_tokens")).to_be_focused()
    page.locator("#max_tokens").fill("8")
    expect(page.locator("#max_tokens-error")).to_have_count(0)
    page.locator("#file").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": b"not a picture"})
    expect(page.locator("#document-error")).to_contain_text("PNG")
    ask.click()
    expect(page.locator("#ask-error")).to_contain_text("nothing was asked")
    expect(page.locator(".card")).to_have_count(0)
    page.get_by_role("button", name="Go on without a document").click()
    expect(page.locator("#ask-error, #document-error").locator("visible=true")).to_have_count(0)
    ask.click()
    expect(page.locator(".answer")).to_have_attribute("aria-busy", "false")
    page.locator("#file").set_input_files(png(400, 1600))
    drawn_views(page, 5)
    page.locator("#pan_and_scan_min_crop_size").fill("0")
    expect(page.locator("#pan_and_scan_min_crop_size-error")).to_contain_text("pan_and_scan_min_crop_size")


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
def test_fits_the_window_and_has_labels(browser: Any, server: Server, width: int, scheme: str) -> None:
    with opened(browser, server.url, viewport={"width": width, "height": 740}, color_scheme=scheme) as page:
        page.get_by_role("button", name="Try the sample receipt").click()
        drawn_views(page, 4)
        page.get_by_text("JSON schema").click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(UNLABELLED) == []
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map((each) => each.id)")
        assert len(ids) == len(set(ids))


def json_error(message: str) -> bytes:
    return f'{{"error": {{"message": "{message}", "type": "server_error", "param": null, "code": null}}}}'.encode()


CHUNK = b'data: {"choices": [{"index": 0, "delta": {"content": "<b>$18"}, "finish_reason": null}]}\n\n'
STREAM = {"Content-Type": "text/event-stream"}


FAILED_ANSWERS = [
    pytest.param((429, {"Retry-After": "7"}, json_error("the queue is full")), "Try again in 7 s", id="queue full"),
    pytest.param((200, STREAM, CHUNK), "closed before the answer was complete", id="cut off"),
    pytest.param((200, STREAM, CHUNK + b"data: " + json_error("it died") + b"\n\n"), "it died", id="error event"),
]


@pytest.mark.parametrize(("answer", "shown"), FAILED_ANSWERS)
def test_failed_answers_are_explained(page: Any, answer: Any, shown: str) -> None:
    status, headers, body = answer
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=status, headers=headers, body=body))
    page.locator("#question").fill("What is the total?")
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("#ask .field-error:visible")).to_contain_text(shown)
    expect(page.get_by_role("button", name="Ask")).to_be_enabled()
    if status == 200:
        expect(page.locator(".answer")).to_have_text("<b>$18")


def test_asks_for_a_key_and_reports_an_unreachable_server(browser: Any, server: Server) -> None:
    refusal = {"status": 401, "body": json_error("a valid API key is required")}
    with browser.new_context() as context:
        context.route("**/v1/models", lambda route: route.fulfill(**refusal))
        page = context.new_page()
        page.goto(server.url)
        expect(page.locator("[data-state=fair]")).to_be_visible(timeout=DEADLINE_MS)
        page.get_by_label("API key").fill("secret")
        context.unroute("**/v1/models")
        with page.expect_request("**/v1/models") as asked:
            page.keyboard.press("Enter")
        expect(page.locator("[data-state=ok]")).to_be_visible()
        assert asked.value.headers["authorization"] == "Bearer secret"
        context.set_offline(True)
        page.locator("#question").fill("What is the total?")
        page.get_by_role("button", name="Ask").click()
        expect(page.locator("#connection")).to_contain_text("cannot be reached")


def test_palette_matches_the_report() -> None:
    style = (FILES / "style.css").read_text("utf-8")
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    palettes = [dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", block)) for block in blocks]
    assert palettes == [LIGHT, DARK]
