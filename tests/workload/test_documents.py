import json
import re
import shutil
from collections import defaultdict
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import panscan
from panscan.core import PanAndScan, SettingError
from panscan.images.views import plan_views
from panscan.workload.documents import COLUMNS, KINDS, Document, Print, Sheet, Text, draw_document
from panscan.workload.documents.invoice import Bill, Line, ask_lines, money, money_answers
from panscan.workload.samples import sample_dataset, write_samples

SEEDS = (0, 7)
COUNT = 27  # three turns of the nine places of the cycle, so every layout but the held-out ones appears
MONEY = re.compile(r"\$?[\d,]+\.\d\d")

document = cache(draw_document)
every_document = pytest.mark.parametrize(("seed", "index"), [(s, i) for s in SEEDS for i in range(COUNT)])
every_layout = pytest.mark.parametrize(
    ("kind", "layout"), [(kind, layout) for kind, (_, layouts) in KINDS.items() for layout in range(layouts)]
)


def drawn(kind: str, layout: int, seed: int, size: tuple[int, int] = (600, 600), invented: float = 0.3) -> Document:
    style = Print(size=Print.size_for(Print().face, min(size), COLUMNS))
    return KINDS[kind][0](Random(seed), Sheet(*size, style, invented), layout)


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


def test_the_kinds_take_turns() -> None:
    kinds = [document(0, index).kind for index in range(10)]
    assert kinds == ["receipt", "board", "invoice", "chart", "receipt", "table", "notes", "sign", "form", "receipt"]


@every_document
def test_a_document_has_crops_distinct_text_and_questions_that_it_answers(seed: int, index: int) -> None:
    shown = document(seed, index)
    width, height = shown.image.size
    crops = plan_views(width, height, PanAndScan()).crops
    assert shown.image.mode == "RGB"
    assert 448 <= min(width, height) <= 900
    if shown.kind in ("receipt", "notes", "invoice"):
        assert width < height <= 4 * width + 1
        assert 2 <= crops <= 4
    elif shown.kind in ("board", "table"):
        assert height < width <= 3.5 * height + 1
        assert 2 <= crops <= 4
    else:
        assert width == height
        assert crops == 0
    for text in shown.texts:
        left, top, right, bottom = text.box
        assert 2 <= left < right <= width - 2, text
        assert 2 <= top < bottom <= height - 2, text
        dark, light = shown.image.crop(text.box).convert("L").getextrema()
        assert light - dark > 60, text
    ordered = sorted(shown.texts, key=lambda t: t.box[1])
    for place, one in enumerate(ordered):
        for other in ordered[place + 1 :]:
            if other.box[1] >= one.box[3] - 2:  # the foot of a "g" may touch the next line's box
                break
            assert one.box[2] <= other.box[0] or other.box[2] <= one.box[0], (one, other)
    letters = sum(len(text.text) for text in shown.texts)
    advance = sum(text.box[2] - text.box[0] for text in shown.texts) / letters
    assert 0.6 < advance / (min(shown.image.size) / COLUMNS) < 1.9
    assert 2 <= len(shown.questions) <= 4
    assert len({ask.question for ask in shown.questions}) == len(shown.questions)
    for ask in shown.questions:
        assert len(set(ask.answers)) == len(ask.answers) > 0
        assert any(ask.answers[0] in text.text for text in shown.texts), ask


@pytest.mark.timeout(60)
@pytest.mark.parametrize("columns", [12, 16, 20, 24, COLUMNS, 110, 200])
def test_any_print_ends_and_asks_what_can_be_seen(columns: int) -> None:
    """Small print uses up every list of names; large print leaves room for little; the usual one is never cut off."""
    for seed, index in product(range(100, 125), range(9)) if columns == COLUMNS else product([5], range(18)):
        shown = draw_document(seed, index, columns=columns)
        width, height = shown.image.size
        inside = [t.text for t in shown.texts if min(t.box) >= 0 and t.box[2] <= width and t.box[3] <= height]
        assert columns != COLUMNS or len(inside) == len(shown.texts), (seed, index)
        assert 2 <= len(shown.questions) <= 4
        assert all(any(ask.answers[0] in text for text in inside) for ask in shown.questions)


def test_more_columns_are_smaller_print() -> None:
    coarse, fine = draw_document(0, 0), draw_document(0, 0, columns=100)
    assert coarse.image.size == fine.image.size
    assert len(fine.texts) > 2 * len(coarse.texts)


@every_layout
def test_every_layout_asks_unambiguous_questions(kind: str, layout: int) -> None:
    for seed, size in product(range(4), [(600, 600), (500, 1500), (1300, 520)]):
        shown = drawn(kind, layout, seed, size)
        answers: dict[str, tuple[str, ...]] = {}
        for ask in shown.questions:
            assert answers.setdefault(ask.question, ask.answers) == ask.answers, (seed, size)
            assert any(ask.answers[0] in text.text for text in shown.texts), (seed, size, ask)
        assert len(answers) >= 2, (seed, size)


@pytest.mark.parametrize(("seed", "index"), [(s, i) for s in SEEDS for i in range(COUNT) if i % 9 in (0, 2, 4)])
def test_sums_are_right(seed: int, index: int) -> None:
    shown = document(seed, index)
    assert shown.kind in ("receipt", "invoice"), "as they take turns"
    table = rows(shown.texts)
    labels = [row[0] for row in table]
    end = labels.index("Subtotal")
    pieces = sum(cents(row[-1]) for row in table[:end] if MONEY.fullmatch(row[-1]) and len(row) > 1)
    subtotal, tax = cents(table[end][-1]), cents(table[end + 1][-1])
    rate = float(re.fullmatch(r"Tax ([\d.]+)%", labels[end + 1])[1])
    total = cents(table[end + 2][-1])
    assert labels[end + 2].startswith("Total")
    assert pieces == subtotal > 0
    assert abs(tax - subtotal * rate / 100) <= 0.5 + 1e-6
    assert total == subtotal + tax
    sums = {label: cents(row[-1]) for label, row in zip(labels, table, strict=True) if MONEY.fullmatch(row[-1])}
    if "Change" in sums:
        assert sums["Change"] == sums["Cash"] - total >= 0
    for ask in shown.questions:
        if ask.type in ("total", "subtotal", "change", "cash"):
            label = re.fullmatch(r"What is the (.*)\?", ask.question)[1].capitalize()
            assert {cents(answer) for answer in ask.answers} == {sums[label]}


prices = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 12)), min_size=1, max_size=6)


@given(prices, st.integers(0, 2000), st.lists(st.integers(0, 40), max_size=2), st.sampled_from(["$", ""]))
def test_no_question_about_an_item_has_two_answers(
    pieces: list[tuple[int, int]], tax_rate: int, others: list[int], sign: str
) -> None:
    bill = Bill(tuple(Line(f"item {i}", count, price) for i, (count, price) in enumerate(pieces)), tax_rate, sign)
    sums = [bill.subtotal, bill.tax, bill.total, *others]
    by_name = {line.name: line for line in bill.lines}
    sheet = Sheet(1, 1, Print())
    ask_lines(sheet, bill, *others)
    asked = {ask.question: ask for ask in sheet.questions}
    for name, line in by_name.items():
        price = asked.pop(f"What is the price of {name}?", None)
        count = asked.pop(f"What is the quantity of {name}?", None)
        assert (price is None, count is None) == (line.count > 1, line.count == 1)
        assert (price or count).answers[0] == (money(line.each, sign) if price else str(line.count))
    for question, ask in asked.items():
        (named,) = [n for n, line in by_name.items() if question == f"Which item costs {money(line.each, sign)}?"]
        assert ask.answers == (named,)
        cost = by_name[named].each
        assert [n for n, line in by_name.items() if cost in (line.each, line.amount)] == [named]
        assert by_name[named].count == 1
        assert cost not in sums


@given(st.integers(0, 10**9), st.sampled_from(["$", ""]))
def test_every_way_to_write_a_sum_means_the_same(amount: int, sign: str) -> None:
    answers = money_answers(amount, sign)
    assert answers[0] == money(amount, sign)
    assert {cents(answer) for answer in answers} == {amount}
    assert len(set(answers)) == len(answers) == (2 if sign else 1) * (2 if amount >= 100_000 else 1)


@pytest.mark.parametrize("layout", range(KINDS["table"][1]))
@pytest.mark.parametrize("seed", range(6))
def test_a_table_s_cell_stands_where_its_row_and_column_cross(layout: int, seed: int) -> None:
    shown = drawn("table", layout, seed, (1200, 560))
    for ask in shown.questions[1:]:
        label, head = re.fullmatch(r"What is the value of (.*) in (.*)\?", ask.question).groups()
        (row,) = [t for t in shown.texts if t.text == label and t.box[0] < 80]
        columns = [t for t in shown.texts if t.text == head and t.box[3] < row.box[1]]
        crossing = [
            t.text
            for t in shown.texts
            for column in columns
            if abs(t.box[2] - column.box[2]) <= 3 and t.box[1] < row.box[3] and t.box[3] > row.box[1]
        ]
        assert crossing == [ask.answers[0]], ask


@pytest.mark.parametrize("layout", range(KINDS["chart"][1]))
@pytest.mark.parametrize("seed", range(6))
def test_bars_are_as_long_as_their_values(layout: int, seed: int) -> None:
    """Seen in the picture, of layouts with lying bars: the run of one colour at the height of a label."""
    shown = drawn("chart", layout, seed)
    questions = {ask.question: ask.answers[0] for ask in shown.questions}
    values = {ask.question[21:-1]: int(ask.answers[0]) for ask in shown.questions if ask.type == "value"}
    longest = max(values, key=values.__getitem__)
    assert len(set(values.values())) == len(values) >= 2
    assert questions["Which bar is the highest?"] == longest
    assert questions["Which bar is the lowest?"] == min(values, key=values.__getitem__)
    lengths = {}
    for label, value in values.items():
        assert questions[f"Which bar has the value {value}?"] == label
        (text,) = [t for t in shown.texts if t.text == label]
        y = (text.box[1] + text.box[3]) // 2
        row = [shown.image.getpixel((x, y)) for x in range(text.box[2], shown.image.width)]
        coloured = [pixel for pixel in row if max(pixel) - min(pixel) > 60]
        lengths[label] = max(map(coloured.count, set(coloured)), default=0)
    if layout in (0, 1, 4):
        due = {label: lengths[longest] * value / values[longest] for label, value in values.items()}
        assert lengths == pytest.approx(due, abs=4)


def test_numbered_lines_say_what_is_asked() -> None:
    for layout in range(KINDS["notes"][1]):
        shown = drawn("notes", layout, 5, (500, 1200))
        lines = [row for row in rows(shown.texts) if len(row) == 2]
        by_number = {re.search(r"\d+", row[0])[0]: row[1] for row in lines}
        assert len(by_number) > 10
        for ask in shown.questions:
            if ask.type == "line":
                assert by_number[re.search(r"\d+", ask.question)[0]] == ask.answers[0]
            elif ask.type == "which line":
                assert by_number[ask.answers[0]] in ask.question


def snapshot(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_rows_are_questions_about_pictures_beside_them(tmp_path: Path) -> None:
    path = write_samples(tmp_path / "new" / "samples", count=5, seed=3)
    assert path == tmp_path / "new" / "samples" / "questions.jsonl"
    per_image: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert list(row) == ["image", "question", "answers", "kind", "type"]
        per_image[row["image"]].append(row)
    assert len(per_image) == 5
    asked = [row["question"] for rows in per_image.values() for row in rows]
    assert (path.parent / "prompts.txt").read_text("utf-8").splitlines() == list(dict.fromkeys(asked))
    for index, (name, questions) in enumerate(per_image.items()):
        drawn = draw_document(3, index)
        assert [(row["question"], tuple(row["answers"]), row["type"]) for row in questions] == [
            (ask.question, ask.answers, ask.type) for ask in drawn.questions
        ]
        assert {row["kind"] for row in questions} == {drawn.kind}
        with Image.open(path.parent / name) as image:
            assert image.size == drawn.image.size
            assert image.format == ("JPEG" if name.endswith("jpg") else "PNG")


def test_a_second_call_completes_the_first_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    questions = write_samples(tmp_path, count=3)
    before = snapshot(tmp_path)
    assert before["mine.txt"] == b"keep"
    for missing in ([], [questions, next(tmp_path.glob("board*"))]):  # as an interrupted call leaves them
        for path in missing:
            path.unlink()
        assert write_samples(tmp_path, count=3) == tmp_path / "questions.jsonl"
        assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["questions.jsonl", "receipt-00.png"])
def test_foreign_files_are_replaced_only_on_demand(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not ours")
    with pytest.raises(SettingError, match=re.escape(str(tmp_path / name))):
        write_samples(tmp_path, count=2)
    assert snapshot(tmp_path) == {name: b"not ours"}
    (tmp_path / "mine.txt").write_bytes(b"mine")
    write_samples(tmp_path, count=2, overwrite=True)
    assert (tmp_path / name).read_bytes() != b"not ours"
    assert (tmp_path / "mine.txt").read_bytes() == b"mine"
    assert len(list(tmp_path.iterdir())) == 5


def test_another_recipe_draws_into_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANSCAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("panscan.workload.samples.draw_document", document)  # each is drawn once
    before = sample_dataset().parent
    assert before.parent == tmp_path / "cache"
    times = {path: path.stat().st_mtime_ns for path in before.iterdir()}
    assert sample_dataset().parent == before
    assert {path: path.stat().st_mtime_ns for path in before.iterdir()} == times, "drawn once"
    (before / "receipt-99.png").write_bytes(b"of the older recipe")
    for room in ("images", "workload"):
        shutil.copytree(Path(panscan.__file__).parent / room, tmp_path / room)
    monkeypatch.setattr("panscan.workload.samples.files", lambda package: tmp_path / package.rpartition(".")[2])
    assert sample_dataset().parent == before, "the same source elsewhere"
    for changed in ("workload/documents/receipt.py", "images/ink.py", "workload/samples.py"):
        with (tmp_path / changed).open("a") as source:
            source.write("# changed\n")
        after = sample_dataset().parent
        assert after != before and after.parent == before.parent
        assert not (after / "receipt-99.png").exists()
        before = after


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("PANSCAN_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    questions = sample_dataset()
    assert tmp_path / "temporary" in questions.parents
    assert sample_dataset() == questions, "the same place again, so that a run can resume"
