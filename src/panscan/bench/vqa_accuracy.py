"""TextVQA's metric: the share of ten people who gave the same answer, three being enough. Pure.

The VQA evaluation (visualqa.org/evaluation) with the answer processing that TextVQA's challenge uses (EvalAI, MMF):
its rules are followed to the letter, slips included, because its scores are what is published.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

__all__ = ["ANNOTATORS", "plain_answer", "vqa_accuracy"]

ANNOTATORS = 10
"""People who answered each question."""
_ENOUGH = 3  # of the others
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NUMBERS = {"none": "0"} | {word: str(number) for number, word in enumerate(_WORDS)}
_ARTICLES = frozenset(("a", "an", "the"))
_SIGNS = ';/[]"{}()=+\\_-><@`,?!'
_LAST_DOTS = re.compile(r"\.(?!\d)")
_MOST_DOTS = 32  # the evaluation hands a flag where the number of replacements goes
_CONTRACTIONS = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've he's
how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've o'clock
oughtn't shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's someone'd someone'd've
someone'll someone's something'd something'd've something'll that's there'd there'd've there're there's they'd
they'd've they'll they're they've wasn't we'd've we've weren't what'll what're what's what've when's where'd where's
where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't wouldn't've y'all y'all'll
y'all'd've you'd you'd've you'll you're you've
"""
"""With their apostrophes. Without them, or without one of two, they are read as these."""


def vqa_accuracy(answer: str, answers: Sequence[str]) -> float:
    """The mean over all sets of answers that leave one person out of min(1, people who say the same / 3).

    Args:
        answer: to be judged.
        answers: one of each person.
    """
    given = plain_answer(answer)
    same = sum(plain_answer(each) == given for each in answers)
    others = len(answers) - same
    # Who said the same is missing from the others' count in turn.
    total = same * min(1.0, (same - 1) / _ENOUGH) + others * min(1.0, same / _ENOUGH)
    return total / len(answers) if same else 0.0


def plain_answer(text: str) -> str:
    """An answer as the evaluation compares it: lower case, no punctuation or articles, digits for small numbers."""
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    text = text.replace("\n", " ").replace("\t", " ").strip()
    found = text
    for sign in _SIGNS:
        found = found.replace(sign, "" if f"{sign} " in text or f" {sign}" in text else " ")
    words = (_NUMBERS.get(word, word) for word in _LAST_DOTS.sub("", found, count=_MOST_DOTS).lower().split())
    return " ".join(_contractions().get(word, word) for word in words if word not in _ARTICLES)


@cache
def _contractions() -> dict[str, str]:
    found = {"twas": "'twas", "somebody'd": "somebodyd", "y'allll": "y'all'll", "y'alld've": "y'all'd've"}
    found |= dict.fromkeys(("ow's'at", "'ows'at", "'ow'sat"), "'ow's'at")
    for word in _CONTRACTIONS.split():
        parts = word.split("'")
        if len(parts) == 2:
            found["".join(parts)] = word
        else:
            found |= {"'".join(parts[:i]) + "'".join(parts[i:]): word for i in range(1, len(parts))}
    return found
