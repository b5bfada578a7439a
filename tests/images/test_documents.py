from __future__ import annotations

import re
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panscan.core import PanAndScan
from panscan.images.documents import Document, Text, draw_document
from panscan.images.documents.bill import Bill, Line, item_asks, money, money_answers
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


def test_the_kinds_take_turns() -> None:
    kinds = [document(0, index).kind for index in range(8)]
    assert kinds == ["receipt", "table", "invoice", "chart", "receipt", "table", "letter", "sign"]


def test_the_layouts_of_a_kind_take_turns() -> None:
    receipts, others = [document(0, index) for index in (0, 4, 8, 12)], [document(0, index) for index in (6, 14, 22)]
    places = [next(row[0] for row in rows(d.texts) if row[0] in ("Till", "Counter", "Table")) for d in receipts]
    assert places == ["Till", "Counter", "Table", "Till"]
    subjects = [next(t.text for t in d.texts if "your" in t.text) for d in others]
    assert subjects[0] == subjects[2] != subjects[1]


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
    sums = {label: cents(row[-1]) for label, row in zip(labels, table, strict=True) if MONEY.fullmatch(row[-1])}
    for ask in drawn.asks:
        if ask.type in ("total", "subtotal", "change"):
            label = re.fullmatch(r"What is the (.*)\?", ask.question)[1].capitalize()
            assert {cents(answer) for answer in ask.answers} == {sums[label]}
        elif ask.type in ("date", "number"):
            label = {"date of purchase": "Date"}.get(ask.question[12:-1], ask.question[12:-1].capitalize())
            (value,) = [row[row.index(label) + 1] for row in table if label in row]
            assert value.split("  ")[0] == ask.answers[0]


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


prices = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 12)), min_size=1, max_size=6)


@given(prices, st.integers(0, 2000), st.lists(st.integers(0, 40), max_size=2))
def test_no_question_about_an_item_has_two_answers(
    pieces: list[tuple[int, int]], tax_rate: int, others: list[int]
) -> None:
    bill = Bill(tuple(Line(f"item {i}", count, each) for i, (count, each) in enumerate(pieces)), tax_rate)
    sums = [bill.subtotal, bill.tax, bill.total, *others]
    by_name = {line.name: line for line in bill.lines}
    asked = {ask.question: ask for ask in item_asks(bill, others)}
    for name, line in by_name.items():
        price = asked.pop(f"What is the price of {name}?", None)
        count = asked.pop(f"What is the quantity of {name}?", None)
        assert (price is None, count is None) == (line.count > 1, line.count == 1)
        assert (price or count).answers[0] == (money(line.each) if price else str(line.count))
    for question, ask in asked.items():
        (named,) = [n for n, line in by_name.items() if question == f"Which item costs {money(line.each)}?"]
        assert ask.answers == (named,)
        cost = by_name[named].each
        assert [n for n, line in by_name.items() if cost in (line.each, line.amount)] == [named]
        assert by_name[named].count == 1
        assert cost not in sums


@given(st.integers(0, 10**9))
def test_every_way_to_write_a_sum_means_the_same(amount: int) -> None:
    answers = money_answers(amount)
    assert answers[0] == money(amount)
    assert {cents(answer) for answer in answers} == {amount}
    assert len(set(answers)) == len(answers) == (4 if amount >= 100_000 else 2)


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
        figures = [number[row[0], c] for row in body[:-1] for c in head[1:-1]]
        assert len(set(figures)) == len(figures)
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


@pytest.mark.parametrize("seed", range(40))
def test_values_of_a_chart_are_not_on_its_axis(seed: int) -> None:
    numbers = [t.text for t in document(seed, 3).texts if t.text.isdigit()]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize(("seed", "index"), of_kind("letter", "sign", "invoice"))
def test_answers_of_prose_occur_once(seed: int, index: int) -> None:
    drawn = document(seed, index)
    for ask in drawn.asks:
        if ask.type in ("price", "number", "date", "time", "area", "sign") and drawn.kind != "invoice":
            assert sum(ask.answers[0] in text.text for text in drawn.texts) == 1, ask
        elif ask.type == "hours":
            day = ask.question.split()[-1].removesuffix("?")
            assert row_of(drawn, day) == [day, ask.answers[0]]
