"""What receipts and invoices have in common: lines that sum to a total, in whole cents, and questions about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from panscan.images.documents.sheet import Question

__all__ = ["Bill", "Line", "item_questions", "money", "money_answers"]


@dataclass(frozen=True, slots=True)
class Line:
    """``count`` pieces at ``each`` cents."""

    name: str
    count: int
    each: int

    @property
    def amount(self) -> int:
        """Cents."""
        return self.count * self.each


@dataclass(frozen=True, slots=True)
class Bill:
    """Lines, a tax rate in hundredths of a percent, and the sign before sums. All sums are cents."""

    lines: tuple[Line, ...]
    tax_rate: int
    sign: str = "$"

    @property
    def subtotal(self) -> int:
        return sum(line.amount for line in self.lines)

    @property
    def tax(self) -> int:
        """Rounded half up to whole cents."""
        return (self.subtotal * self.tax_rate + 5000) // 10000

    @property
    def total(self) -> int:
        return self.subtotal + self.tax

    @property
    def tax_label(self) -> str:
        return f"Tax {self.tax_rate / 100:g}%"


def money(cents: int, sign: str = "$") -> str:
    """As in "$1,248.20"."""
    return f"{sign}{cents // 100:,}.{cents % 100:02d}"


def money_answers(cents: int, sign: str = "$") -> tuple[str, ...]:
    """The sum as drawn, and the same without its sign and without the thousands comma."""
    shown, bare = money(cents, sign), money(cents, "")
    return tuple(dict.fromkeys((shown, bare, shown.replace(",", ""), bare.replace(",", ""))))


def item_questions(bill: Bill, other_sums: Iterable[int] = ()) -> list[Question]:
    """Every unambiguous question about a line.

    A price is asked for, or named, only where it is that of one piece; it is named only if no other sum in the
    picture, ``other_sums`` included, is the same.
    """
    sums = Counter([bill.subtotal, bill.tax, bill.total, *other_sums])
    for line in bill.lines:
        sums.update({line.amount, line.each})
    questions = []
    for line in bill.lines:
        if line.count > 1:
            questions.append(Question(f"What is the quantity of {line.name}?", (str(line.count),), "quantity"))
            continue
        questions.append(Question(f"What is the price of {line.name}?", money_answers(line.each, bill.sign), "price"))
        if sums[line.each] == 1:
            questions.append(Question(f"Which item costs {money(line.each, bill.sign)}?", (line.name,), "item"))
    return questions
