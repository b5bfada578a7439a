"""The page of answers beside their pictures: all are there, marked as the scores say, and nothing is fetched."""

import hashlib
from base64 import b64decode
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.records import synthetic
from tests.records.synthetic import record_of, repeat, request
from tests.report.report_page import Element, parse

from panscan.core import SettingError
from panscan.records.quality import empty_answers, metric_of, metrics_in, quality_of, with_metric
from panscan.records.scores import scores_of
from panscan.records.store import Run
from panscan.report import write_gallery
from panscan.report.answers import MOST_GROUPS, SHAPES, breakdowns, shape_of
from panscan.report.gallery import entries_of

CELLS = {"off": {"do_pan_and_scan": False}, "on": {"pan_and_scan_max_num_crops": 3}}


def rows_of(page: Element) -> list[list[str]]:
    """The cells of the rows of all tables that end in a number of views."""
    rows = [[cell.text for cell in row.children if isinstance(cell, Element)] for row in page.all("tr")]
    return [row for row in rows if "view" in row[-1]][1:]


def asked(cell: str, name: str, image: Path, expected: list[str], answer: str | None, **others: Any) -> dict[str, Any]:
    digest = hashlib.sha256(image.read_bytes()).hexdigest() if image.exists() else "00"
    content = {"prompt": f"What is {name}?", "answers": expected, "answer": answer or ""}
    result = {"error": "no memory"} if answer is None else {"scores": scores_of(answer, expected)}
    picture = {"image": [str(image)], "image_sha256": [digest], "image_size": [[40, 30]]}
    views = 1 if cell == "off" else 3
    return synthetic.request(cell, name, 0.0, [1.0], content=content, views=views) | picture | result | others


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    Image.new("RGB", (900, 1500), "#336699").save(tmp_path / "one <b>.png")
    return tmp_path / "one <b>.png"


def run_of(place: Path, records: list[dict[str, Any]]) -> Run:
    repeats = [synthetic.repeat(cell, 0, 0.0, 1.0) for cell in CELLS]
    done = [synthetic.outcome(cell, "done") for cell in CELLS]
    return synthetic.write_run(place, [synthetic.header(CELLS), *records, *repeats, *done])


def test_answers_stand_beside_their_picture_marked_as_they_score(picture: Path, tmp_path: Path) -> None:
    same = [asked(cell, "the same", picture, ["4"], "4") for cell in CELLS]
    accepted = ["$5.00", "5.00"]
    differ = [asked("on", "it", picture, accepted, "5.00"), asked("off", "it", picture, accepted, "<9>")]
    differ += [asked("off", "the date", picture, ["27/05/2026"], "27/05/2028")]
    failed = [asked("on", "lost", picture, [], None), asked("off", "lost", picture, [], "y")]
    write_gallery(run_of(tmp_path / "run", [*same, *differ, *failed]), tmp_path / "gallery.html")
    text = (tmp_path / "gallery.html").read_text("utf-8")
    page = parse(text)
    rows = rows_of(page)
    assert rows[0][1:3] == ["✗", "<9>"]
    assert rows[1][1:3] == ["✓", "5.00"]
    assert [row[1] for row in rows].count("✓") == 3
    assert any("(failed)" in row for row in rows)
    shown, *views = [image.attributes["src"] for image in page.all("img")]
    assert len(views) == 1 + 3, "the whole image without pan and scan; two crops beside it with it"
    assert all(Image.open(BytesIO(b64decode(view.split(",")[1]))).size == (192, 192) for view in views)
    assert '27/05/202<mark title="expected: 6">8</mark>' in text
    small = Image.open(BytesIO(b64decode(shown.removeprefix("data:image/jpeg;base64,"))))
    assert small.width / small.height == pytest.approx(0.6, abs=0.01)
    assert max(small.size) <= 620
    links = [element.attributes.get(name) for element in page.all() for name in ("href", "src")]
    assert all(link.startswith("data:") for link in links if link)
    assert "one &lt;b&gt;.png" in text


def test_documents_on_which_cells_differ_come_first(picture: Path, tmp_path: Path) -> None:
    other = tmp_path / "two.png"
    Image.new("RGB", (40, 30)).save(other)
    alike = [asked(cell, "a", picture, ["1"], "1") for cell in CELLS]
    unlike = [asked("off", "b", other, ["1"], "2"), asked("on", "b", other, ["1"], "1")]
    cells, entries = entries_of(run_of(tmp_path / "run", [*alike, *unlike]))
    assert [one.name for one in entries] == [f"{path.name} (40 x 30)" for path in (other, picture)]
    assert list(cells) == ["off", "on"]
    assert [answer.score for answer in entries[0].questions[0].answers] == [0.0, 1.0]


def test_answers_are_marked_by_the_run_s_metric(picture: Path, tmp_path: Path) -> None:
    """103 is within 5% of 100; "Rye breat" is nearly "Rye bread"."""
    records = [asked("on", "a", picture, ["100"], "103"), asked("on", "b", picture, ["Rye bread"], "Rye breat")]
    run = run_of(tmp_path / "run", records)
    marks = {}
    for metric in ("exact_match", "relaxed_accuracy", "anls"):
        write_gallery(with_metric(run, metric), tmp_path / "gallery.html")
        marks[metric] = [row[1] for row in rows_of(parse((tmp_path / "gallery.html").read_text("utf-8")))]
    assert marks == {"exact_match": ["✗", "✗"], "relaxed_accuracy": ["✓", "✗"], "anls": ["66.7%", "88.9%"]}


def test_repeats_replicas_and_equal_words_are_kept_apart(picture: Path, tmp_path: Path) -> None:
    """The first repeat of the first replica; the same words with other answers are another question."""
    records = [
        asked("on", "a", picture, ["yes"], "yes"),
        asked("on", "a", picture, ["no"], "no", request="b"),
        asked("on", "a", picture, ["yes"], "no", request="c", replica=1),
        asked("on", "a", picture, ["yes"], "no", request="a+1"),
    ]
    _, [one] = entries_of(run_of(tmp_path / "run", records))
    texts = [(question.expected, [answer.text for answer in question.answers]) for question in one.questions]
    assert texts == [(("yes",), ["yes"]), (("no",), ["no"])]


def test_several_pictures_of_a_question_are_all_shown(picture: Path, tmp_path: Path) -> None:
    other = tmp_path / "two.png"
    Image.new("RGB", (40, 30)).save(other)
    record = asked("on", "a", picture, ["1"], "1")
    record["image"].append(str(other))
    record["image_sha256"].append(hashlib.sha256(other.read_bytes()).hexdigest())
    record["image_size"].append([40, 30])
    alone = asked("on", "b", picture, ["1"], "1") | {"image": [], "image_sha256": [], "image_size": []}
    write_gallery(run_of(tmp_path / "run", [record, alone]), tmp_path / "gallery.html")
    text = (tmp_path / "gallery.html").read_text("utf-8")
    assert len(list(parse(text).all("img"))) == 2
    assert "without an image" in text


@pytest.mark.parametrize("how", ["gone", "changed", "elsewhere"])
def test_a_picture_that_is_not_what_the_run_read_is_not_shown(picture: Path, tmp_path: Path, how: str) -> None:
    record = asked("on", "a", picture, ["1"], "1")
    if how == "gone":
        picture.unlink()
    elif how == "changed":
        Image.new("RGB", (40, 30)).save(picture)
    else:
        record["image"] = ["https://example.org/page.png"]
    _, [one] = entries_of(run_of(tmp_path / "run", [record]))
    assert one.pictures == (None,)
    write_gallery(run_of(tmp_path / "run2", [record]), tmp_path / "gallery.html")
    assert "not where the run found it" in (tmp_path / "gallery.html").read_text("utf-8")


# Quality by question type, kind of document and aspect ratio.


def asked_run(*questions: dict[str, Any], cell: str = "c") -> Run:
    requests = [
        request(cell, f"q{row}", 0.0, [1.0], prompt_sha256=str(row), **fields) for row, fields in enumerate(questions)
    ]
    return synthetic.run_of(*requests, repeat(cell, 0, 0.0, 1.0), cells={cell: {}})


def shape(*sizes: Sequence[int]) -> str | None:
    return shape_of(record_of(request("c", "q", 0.0, [1.0], image_size=sizes)))


SHAPED = {
    "square": "100x100 119x100",
    "wide 1.2–2": "120x100 199x100",
    "tall 1.2–2": "100x120",
    "wide 2–3": "200x100",
    "tall 2–3": "100x299",
    "tall over 3": "100x300",
    "wide over 3": "900x100",
}


def test_shapes() -> None:
    for name, sizes in SHAPED.items():
        assert {shape([*map(int, size.split("x"))]) for size in sizes.split()} == {name}
    assert (shape([900, 100], [1, 1]), shape(), shape([0, 5])) == ("several images", None, None)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_every_picture_has_a_shape_and_its_turn_is_its_mirror(width: int, height: int) -> None:
    name, turned = shape([width, height]), shape([height, width])
    assert name in SHAPES
    mirror = {"wide": "tall", "tall": "wide"}
    assert turned == " ".join(mirror.get(word, word) for word in str(name).split())


def test_a_question_of_two_types_counts_in_both() -> None:
    scored = [({"type": ["form"]}, 1.0), ({"type": ["form", "layout"]}, 0.0), ({"type": ["layout"]}, 0.0), ({}, 1.0)]
    run = asked_run(*({"tags": tags, "scores": {"exact_match": score}} for tags, score in scored))
    [breakdown] = breakdowns(run, ["c"])
    assert (breakdown.name, breakdown.groups) == ("question type", (("form", 2), ("layout", 2)))
    form, layout = breakdown.cells["c"]
    assert (form.mean, layout.mean) == (0.5, 0.0)
    assert layout.high > 0, "two wrong answers are no certainty"


def test_groups_are_the_largest_and_a_single_one_is_no_breakdown() -> None:
    kinds = [f"k{number}" for number in range(MOST_GROUPS + 3)]
    run = asked_run(*({"tags": {"kind": [kind]}, "scores": {"exact_match": 1.0}} for kind in [*kinds, *kinds[:2]]))
    [breakdown] = breakdowns(run, ["c"])
    assert breakdown.name == "kind of document"
    assert breakdown.groups[:2] == (("k0", 2), ("k1", 2))
    assert (len(breakdown.groups), breakdown.left_out) == (MOST_GROUPS, 3)
    alone = asked_run(*({"tags": {"kind": ["bill"]}, "scores": {"exact_match": 1.0}} for _ in range(3)))
    assert breakdowns(alone, ["c"]) == []


def test_shapes_are_in_their_order_and_the_runs_metric_counts() -> None:
    sizes = [[100, 400], [100, 100], [400, 100]]
    scores = [{"exact_match": 0.0, "anls": share} for share in (0.25, 0.5, 0.75)]
    run = asked_run(*({"image_size": [size], "scores": score} for size, score in zip(sizes, scores, strict=True)))
    [breakdown] = breakdowns(with_metric(run, "anls"), ["c"])
    assert [name for name, _ in breakdown.groups] == ["tall over 3", "square", "wide over 3"]
    assert [quality and quality.mean for quality in breakdown.cells["c"]] == [0.25, 0.5, 0.75]


def test_a_run_from_before_there_were_other_metrics() -> None:
    """Schema 2 as it was: no metric in the header, exact match alone, no tags."""
    run = asked_run({"scores": {"exact_match": 1.0}}, {"scores": {"exact_match": 0.0}}, {})
    assert (metric_of(run), metrics_in(run)) == ("exact_match", ["exact_match"])
    quality = quality_of(run, "c")
    assert quality.mean == 0.5
    assert breakdowns(run, ["c"]) == []
    assert with_metric(run, None) is run
    assert metric_of(with_metric(run, "exact_match")) == "exact_match"
    with pytest.raises(SettingError, match=r"--quality-metric anls: .* its answers have exact_match"):
        with_metric(run, "anls")
    with pytest.raises(SettingError, match=r"--quality-metric anls: .* its dataset has no answers"):
        with_metric(asked_run({}), "anls")


def test_empty_answers_are_counted_and_failed_requests_are_none() -> None:
    wrong = {"scores": {"exact_match": 0.0}, "empty": True}
    run = asked_run(wrong, {**wrong, "error": "no memory"}, {"scores": {"exact_match": 1.0}})
    assert empty_answers(run, "c") == 1
