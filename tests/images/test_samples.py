from __future__ import annotations

import json
import re
from collections import defaultdict
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image

from panscan.core import PanAndScan, SettingError
from panscan.images.documents import Document, Text, draw_document
from panscan.images.samples import Question, write_samples
from panscan.images.views import plan_views

SEEDS = (0, 7)
COUNT = 24  # three turns of the eight kinds, so every layout of each appears
MONEY = re.compile(r"\$[\d,]+\.\d\d")

document = cache(draw_document)
every_document = pytest.mark.parametrize(("seed", "index"), [(s, i) for s in SEEDS for i in range(COUNT)])


def of_kind(*kinds: str) -> list[tuple[int, int]]:
    return [(s, i) for s in SEEDS for i in range(COUNT) if document(s, i).kind in kinds]


def cents(text: str) -> int:
    return int(re.sub(r"[$,.]", "", text))


def rows(texts: tuple[Text, ...]) -> list[list[str]]:
    """Strings by line, from what was drawn: neighbours whose boxes share the height of their middle."""
    lines: list[list[Text]] = []
    for text in sorted(texts, key=lambda t: (t.box[1] + t.box[3]) / 2):
        last = lines[-1][-1].box if lines else (0, 0, 0, 0)
        if (text.box[1] + text.box[3]) / 2 < last[3] - 2:
            lines[-1].append(text)
        else:
            lines.append([text])
    return [[t.text for t in sorted(line, key=lambda t: t.box[0])] for line in lines]


def row_of(drawn: Document, label: str) -> list[str]:
    (row,) = [row for row in rows(drawn.texts) if row[0] == label]
    return row


def snapshot(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# --- files ---


def test_same_seed_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_samples(tmp_path / name, seed=seed)
    a, b, c = (snapshot(tmp_path / name) for name in "abc")
    assert a == b
    assert not set(a.values()) & set(c.values())
    assert {Path(name).suffix for name in a} == {".png", ".jpg", ".jsonl"}


def test_rows_are_questions_about_pictures_beside_them(tmp_path: Path) -> None:
    path = write_samples(tmp_path / "new" / "samples", count=10, seed=3)
    assert path == tmp_path / "new" / "samples" / "questions.jsonl"
    per_image: dict[str, list[Question]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert list(row) == ["image", "question", "answers", "kind", "type"]
        question = Question(**{**row, "answers": tuple(row["answers"])})
        per_image[question.image].append(question)
    assert len(per_image) == 10
    for index, (name, questions) in enumerate(per_image.items()):
        drawn = document(3, index)
        assert [(q.question, q.answers, q.type) for q in questions] == [
            (a.question, a.answers, a.type) for a in drawn.asks
        ]
        assert {q.kind for q in questions} == {drawn.kind}
        with Image.open(path.parent / name) as image:
            assert image.size == drawn.image.size
            assert image.format == ("JPEG" if name.endswith("jpg") else "PNG")


def test_fewer_documents_are_the_beginning_of_more(tmp_path: Path) -> None:
    few, more = write_samples(tmp_path / "few", count=2), write_samples(tmp_path / "more", count=3)
    assert more.read_bytes().startswith(few.read_bytes())


@pytest.mark.parametrize("count", [0, -3])
def test_no_documents_is_an_error(tmp_path: Path, count: int) -> None:
    with pytest.raises(SettingError, match="count"):
        write_samples(tmp_path, count=count)
    assert not list(tmp_path.iterdir())


def test_other_files_stay_and_a_second_call_is_fine(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    write_samples(tmp_path, count=2)
    before = snapshot(tmp_path)
    assert write_samples(tmp_path, count=2) == tmp_path / "questions.jsonl"
    assert snapshot(tmp_path) == before
    assert before["mine.txt"] == b"keep"


def test_an_interrupted_call_is_completed(tmp_path: Path) -> None:
    whole = snapshot(write_samples(tmp_path, count=3).parent)
    (tmp_path / "questions.jsonl").unlink()
    next(tmp_path.glob("table*")).unlink()
    write_samples(tmp_path, count=3)
    assert snapshot(tmp_path) == whole


@pytest.mark.parametrize("name", ["questions.jsonl", "receipt-00.png"])
def test_foreign_files_are_replaced_only_on_demand(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not ours")
    with pytest.raises(SettingError, match=re.escape(str(tmp_path / name))):
        write_samples(tmp_path, count=2)
    assert snapshot(tmp_path) == {name: b"not ours"}
    write_samples(tmp_path, count=2, overwrite=True)
    assert (tmp_path / name).read_bytes() != b"not ours"
    assert len(list(tmp_path.iterdir())) == 3


def test_samples_of_another_count_or_seed_are_not_mixed(tmp_path: Path) -> None:
    path = write_samples(tmp_path, count=2)
    for other in ({"count": 3}, {"count": 2, "seed": 1}):
        with pytest.raises(SettingError, match=re.escape(str(path))):
            write_samples(tmp_path, **other)


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SettingError, match="file"):
        write_samples(tmp_path / "file", count=1)


# --- pictures ---


def test_the_kinds_take_turns() -> None:
    kinds = [document(0, index).kind for index in range(8)]
    assert kinds == ["receipt", "table", "invoice", "chart", "receipt", "table", "letter", "sign"]


@every_document
def test_sizes_and_whether_pan_and_scan_crops(seed: int, index: int) -> None:
    drawn = document(seed, index)
    width, height = drawn.image.size
    crops = plan_views(width, height, PanAndScan()).crops
    assert drawn.image.mode == "RGB"
    if drawn.kind == "receipt":
        assert 448 <= width <= 900
        assert 2 <= height / width <= 4
        assert 2 <= crops <= 4
    elif drawn.kind == "table":
        assert 448 <= height <= 900
        assert width <= 2700
        assert 2 <= width / height <= 3.5
        assert 2 <= crops <= 4
    elif drawn.kind in ("invoice", "letter"):
        assert (width, height) in {(900, 1273), (848, 1200)}
        assert crops == 2
    else:
        assert 448 <= width == height <= 900
        assert crops == 0


@every_document
def test_text_lies_inside_the_picture_and_apart(seed: int, index: int) -> None:
    drawn = document(seed, index)
    width, height = drawn.image.size
    for text in drawn.texts:
        left, top, right, bottom = text.box
        assert 10 <= left < right <= width - 10, text
        assert 10 <= top < bottom <= height - 10, text
    ordered = sorted(drawn.texts, key=lambda t: t.box[1])
    for place, one in enumerate(ordered):
        for other in ordered[place + 1 :]:
            if other.box[1] >= one.box[3]:
                break
            assert one.box[2] <= other.box[0] or other.box[2] <= one.box[0], (one, other)


@every_document
def test_most_text_is_small_print_and_really_drawn(seed: int, index: int) -> None:
    drawn = document(seed, index)
    heights = sorted(bottom - top for _, top, _, bottom in (t.box for t in drawn.texts))
    assert heights[len(heights) // 2] <= 16
    for text in drawn.texts:
        dark, light = drawn.image.crop(text.box).convert("L").getextrema()
        assert light - dark > 60, text


@every_document
def test_every_question_has_an_answer_in_the_picture(seed: int, index: int) -> None:
    drawn = document(seed, index)
    assert 2 <= len(drawn.asks) <= 4
    assert len({ask.question for ask in drawn.asks}) == len(drawn.asks)
    for ask in drawn.asks:
        assert len(set(ask.answers)) == len(ask.answers) > 0
        assert any(ask.answers[0] in text.text for text in drawn.texts), ask


@pytest.mark.parametrize(("seed", "index"), of_kind("receipt", "invoice"))
def test_sums_are_right(seed: int, index: int) -> None:
    drawn = document(seed, index)
    table = rows(drawn.texts)
    labels = [row[0] for row in table]
    end = labels.index("Subtotal")
    pieces = 0
    for place, row in enumerate(table[:end]):
        if not MONEY.fullmatch(row[-1]):
            continue
        pieces += cents(row[-1])
        below = re.fullmatch(r"(\d+) x (\$.*)", table[place + 1][0])
        prices = [cents(p) for text in row[:-1] for p in MONEY.findall(text)]
        counts = [int(text) for text in row if text.isdigit()]
        if below:
            counts, prices = [int(below[1])], [cents(below[2])]
        if prices:
            assert counts[-1] * prices[0] == cents(row[-1]), row
    subtotal, tax = cents(table[end][-1]), cents(table[end + 1][-1])
    rate = float(re.fullmatch(r"Tax ([\d.]+)%", labels[end + 1])[1])
    total = cents(table[end + 2][-1])
    assert labels[end + 2].startswith("Total")
    assert pieces == subtotal > 0
    assert abs(tax - subtotal * rate / 100) <= 0.5 + 1e-6
    assert total == subtotal + tax
    if drawn.kind == "receipt":
        assert cents(row_of(drawn, "Change")[1]) == cents(row_of(drawn, "Cash")[1]) - total >= 0
    asked = [ask for ask in drawn.asks if ask.type == "total"]
    assert all(cents(answer) == total for ask in asked for answer in ask.answers)


@pytest.mark.parametrize(("seed", "index"), of_kind("receipt", "invoice"))
def test_questions_about_items_have_one_answer(seed: int, index: int) -> None:
    drawn = document(seed, index)
    table = rows(drawn.texts)
    for ask in drawn.asks:
        if ask.type == "item":
            price = MONEY.search(ask.question)[0]
            (row,) = [row for row in table if any(price in MONEY.findall(text) for text in row)]
            assert ask.answers == (next(text for text in row if text in ask.answers),)
        elif ask.type in ("price", "quantity"):
            name = re.fullmatch(r"What is the \w+ of (.*)\?", ask.question)[1]
            (place,) = [place for place, row in enumerate(table) if any(name in text for text in row)]
            near = " ".join((*table[place], *table[place + 1]) if ask.type == "quantity" else table[place])
            assert re.search(rf"(?<![\d.,]){re.escape(ask.answers[0])}(?![\d.,])", near), (ask, near)


@pytest.mark.parametrize(("seed", "index"), of_kind("table"))
def test_tables_say_what_the_answers_say(seed: int, index: int) -> None:
    drawn = document(seed, index)
    (title, *_), _, head, *body = rows(drawn.texts)
    cells = {(row[0], column): text for row in body for column, text in zip(head[1:], row[1:], strict=True)}
    assert len(cells) == len(body) * (len(head) - 1)
    if title.startswith("Timetable"):
        assert title == f"Timetable {body[0][0]} to {body[-1][0]}"
        for times in (*(row[1:] for row in body), *list(zip(*body, strict=True))[1:]):
            assert all(early < late for early, late in pairwise(times))
    else:
        number = {place: int(text.replace(",", "")) for place, text in cells.items()}
        for row in body:
            assert sum(number[row[0], c] for c in head[1:-1]) == number[row[0], "Total"]
        for column in head[1:]:
            assert sum(number[row[0], column] for row in body[:-1]) == number["Total", column]
    for ask in drawn.asks:
        named = [(r, c) for r, c in cells if r in ask.question and c in ask.question]
        if ask.type == "cell":
            assert [cells[place] for place in named] == [ask.answers[0]]
        elif ask.type == "column":
            row, time = re.fullmatch(r"Which train is at (.*) at ([\d:]+)\?", ask.question).groups()
            assert tuple(c for c in head[1:] if cells[row, c] == time) == ask.answers
        elif ask.type == "highest":
            column = next(c for c in head if c in ask.question)
            best = max(body[:-1], key=lambda row: int(cells[row[0], column].replace(",", "")))
            assert ask.answers == (best[0],)
        else:
            name = ask.question.removeprefix("What is the total of ").removesuffix("?")
            place = (name, "Total") if ask.type == "row total" else ("Total", name)
            assert cells[place] == ask.answers[0]


@pytest.mark.parametrize(("seed", "index"), of_kind("chart"))
def test_bars_are_as_high_as_their_values(seed: int, index: int) -> None:
    drawn = document(seed, index)
    foot = max(t.box[3] for t in drawn.texts)
    ticks = {int(t.text): (t.box[1] + t.box[3]) / 2 for t in drawn.texts if t.text.isdigit() and t.box[2] < 74}
    scale = (ticks[0] - ticks[max(ticks)]) / max(ticks)
    values = {}
    for label in (t for t in drawn.texts if t.box[3] >= foot - 6):
        middle = (label.box[0] + label.box[2]) / 2
        (value,) = [t for t in drawn.texts if t.text.isdigit() and t.box[0] <= middle <= t.box[2]]
        values[label.text] = int(value.text)
        top = ticks[0] - scale * values[label.text]
        assert value.box[3] <= top <= value.box[3] + 10
        bar = drawn.image.getpixel((middle, round(top) + 2))
        assert bar == drawn.image.getpixel((middle, round(ticks[0]) - 2))
        assert bar != drawn.image.getpixel((middle, round(top) - 3))
    assert len(set(values.values())) == len(values) >= 3
    for ask in drawn.asks:
        label = ask.question.removeprefix("What is the value of ").removesuffix("?")
        if ask.type == "value":
            assert ask.answers == (str(values[label]),)
        else:
            choose = max if ask.type == "highest" else min
            assert ask.answers == (choose(values, key=values.__getitem__),)
        assert ask.type in ("value", "highest", "lowest")


@pytest.mark.parametrize(("seed", "index"), of_kind("letter", "sign", "invoice"))
def test_answers_of_prose_occur_once(seed: int, index: int) -> None:
    drawn = document(seed, index)
    for ask in drawn.asks:
        if ask.type in ("price", "number", "date", "time", "area", "sign") and drawn.kind != "invoice":
            assert sum(ask.answers[0] in text.text for text in drawn.texts) == 1, ask
        elif ask.type == "hours":
            day = ask.question.split()[-1].removesuffix("?")
            assert row_of(drawn, day) == [day, ask.answers[0]]
