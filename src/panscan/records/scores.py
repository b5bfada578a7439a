"""Scores of one answer: the metrics of DocVQA, InfographicVQA, ChartQA and TextVQA, and two plain ones. Pure.

Each is a number from 0 to 1, the best over the accepted answers. Sources and examples: ``docs/quality.md``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import isfinite
from unicodedata import normalize

from rapidfuzz.distance import Levenshtein

from panscan.records.fields import EXACT_MATCH
from panscan.records.quality import metrics_for

ANLS_THRESHOLD = 0.5
"""Similarities below this count as none: another answer, not a misread one."""
RELAXED = 0.05
"""Largest relative distance of a right number."""


def exact_match(answer: str, answers: Sequence[str]) -> float:
    """Return 1.0 if the answer is one of the accepted ones, else 0.0.

    As in DocVQA's accuracy, case and surrounding space do not count; nor do runs of white space, composed or decomposed
    letters, or one final full stop, which chat models add to bare answers. Everything else does: "$5.00" is not "5.00",
    and a sentence around the answer makes it wrong.
    """
    return float(_plain(answer) in {_plain(accepted) for accepted in answers})


def anls(answer: str, answers: Sequence[str]) -> float:
    """Return the normalised Levenshtein similarity (ANLS; Biten et al., ICCV 2019) of one answer.

    As in the evaluation script of DocVQA and InfographicVQA (rrc.cvc.uab.es, challenge 17): texts are compared in lower
    case, runs of white space as one space; the edit distance is divided by the length of the longer text as it was
    given; scores below :data:`ANLS_THRESHOLD` are 0. Surrounding space is ignored here.
    """
    similarity = max((_similarity(answer.strip(), accepted.strip()) for accepted in answers), default=0.0)
    return similarity if similarity >= ANLS_THRESHOLD else 0.0


def _similarity(answer: str, accepted: str) -> float:
    length = max(len(answer.upper()), len(accepted.upper()))  # of upper case, as the script has it: "ß" counts twice
    distance = Levenshtein.distance(" ".join(answer.lower().split()), " ".join(accepted.lower().split()))
    return 1 - distance / length if length else 1.0


def relaxed_accuracy(answer: str, answers: Sequence[str]) -> float:
    """Return 1.0 if the answer is within :data:`RELAXED` of an accepted number, or equals a text in any case.

    ChartQA's metric (Masry et al., ACL Findings 2022, 5.1) as in pix2struct's ``relaxed_correctness``: "12%" is 0.12,
    and "1,000" or "$5" are texts. Against an accepted 0 no distance is relative, so there texts are compared.
    """
    return float(any(_relaxed(answer.strip(), accepted.strip()) for accepted in answers))


def _relaxed(answer: str, accepted: str) -> bool:
    value, target = _number(answer), _number(accepted)
    if value is not None and target:
        return abs(value - target) / abs(target) <= RELAXED
    return answer.lower() == accepted.lower()


def _number(text: str) -> float | None:
    try:
        value = float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None
    return value if isfinite(value) else None


def contains_answer(answer: str, answers: Sequence[str]) -> float:
    """Return 1.0 if the answer contains an accepted one as separate words, else 0.0.

    For models that answer in sentences. Texts are compared as by :func:`exact_match`. A match must end at a boundary:
    "5" is neither in "15" nor in "5.30", "cat" not in "cats". Scripts without case, such as Chinese, put no spaces
    between words, so a match may be anywhere.
    """
    text = _plain(answer)
    return float(exact_match(answer, answers) or any(_holds(text, _plain(accepted)) for accepted in answers))


def _holds(text: str, accepted: str) -> bool:
    at = text.find(accepted) if accepted else -1
    while at >= 0:
        end = at + len(accepted)
        if not _goes_on(text[:at][::-1], accepted[0]) and not _goes_on(text[end:], accepted[-1]):
            return True
        at = text.find(accepted, at + 1)
    return False


def _goes_on(beyond: str, edge: str) -> bool:
    """Return whether a word or number continues beyond ``edge``; ``beyond`` is read outward from it."""
    if edge.isdigit() and beyond[:1] in (".", ",") and beyond[1:2].isdigit():
        return True
    return _is_glued(edge) and _is_glued(beyond[:1])


def _is_glued(letter: str) -> bool:
    return letter.isdigit() or letter.lower() != letter.upper()


def _plain(text: str) -> str:
    return " ".join(normalize("NFC", text.casefold()).split()).removesuffix(".").rstrip()


_SCORES: Mapping[str, Callable[[str, Sequence[str]], float]] = {
    EXACT_MATCH: exact_match,
    "anls": anls,
    "relaxed_accuracy": relaxed_accuracy,
    "contains_answer": contains_answer,
}


def scores_of(text: str, answers: Sequence[str]) -> dict[str, float]:
    """Return the ``scores`` of a request record by metric; empty without accepted answers.

    ``vqa_accuracy`` is defined for :data:`panscan.records.quality.ANNOTATORS` annotators, so only questions with that
    many answers have it; it alone counts annotators who gave none. An empty answer is always wrong.
    """
    names = metrics_for(answers)
    if not text.strip():
        return dict.fromkeys(names, 0.0)
    given = [accepted for accepted in answers if accepted.strip()]
    return {name: _SCORES[name](text, given) if name in _SCORES else vqa_accuracy(text, answers) for name in names}


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
    """Return the mean of min(1, matching answers / 3) over all sets of answers that leave one annotator out.

    TextVQA's metric: the VQA evaluation (visualqa.org/evaluation) with the answer processing of TextVQA's challenge
    (EvalAI, MMF). Its rules are followed exactly, including its errors, because published scores use them.

    Args:
        answer: answer to score.
        answers: one per annotator.
    """
    given = plain_answer(answer)
    same = sum(plain_answer(annotation) == given for annotation in answers)
    others = len(answers) - same
    # Who said the same is missing from the others' count in turn.
    total = same * min(1.0, (same - 1) / _ENOUGH) + others * min(1.0, same / _ENOUGH)
    return total / len(answers) if same else 0.0


def plain_answer(text: str) -> str:
    """Normalise an answer as the evaluation does: lower case, no punctuation or articles, digits for small numbers."""
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    text = text.replace("\n", " ").replace("\t", " ").strip()
    cleaned = text
    for sign in _SIGNS:
        cleaned = cleaned.replace(sign, "" if f"{sign} " in text or f" {sign}" in text else " ")
    words = (_NUMBERS.get(word, word) for word in _LAST_DOTS.sub("", cleaned, count=_MOST_DOTS).lower().split())
    return " ".join(_contractions().get(word, word) for word in words if word not in _ARTICLES)


@cache
def _contractions() -> dict[str, str]:
    contractions = {"twas": "'twas", "somebody'd": "somebodyd", "y'allll": "y'all'll", "y'alld've": "y'all'd've"}
    contractions |= dict.fromkeys(("ow's'at", "'ows'at", "'ow'sat"), "'ow's'at")
    for word in _CONTRACTIONS.split():
        parts = word.split("'")
        if len(parts) == 2:
            contractions["".join(parts)] = word
        else:
            contractions |= {"'".join(parts[:i]) + "'".join(parts[i:]): word for i in range(1, len(parts))}
    return contractions
