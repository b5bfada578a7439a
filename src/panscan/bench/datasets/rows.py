"""Rows of questions whatever they were stored as, and the count of what was wrong with others. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from panscan.bench.datasets.answer_texts import answer_texts, is_unicode

__all__ = ["DatasetFacts", "Embedded", "Loaded", "Row", "counted", "facts_of_header", "unique_id"]

Tags = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Embedded:
    """The pictures of row ``row`` (from 0) of a table ``file``: bytes that become files when they are asked about."""

    file: str
    row: int


@dataclass(frozen=True, slots=True)
class Row:
    """One question.

    Args:
        id: its own within the dataset.
        images: paths and URLs of its pictures, or where they are embedded.
        question: as it is.
        answers: accepted ones; none where they are not known. Of people who were all asked, one each, so with repeats.
        tags: (name, value): ``type`` of the question, ``kind`` of the document; a name may have several values.
    """

    id: str
    images: tuple[str, ...] | Embedded
    question: str
    answers: tuple[str, ...] = ()
    tags: Tags = ()


@dataclass(slots=True)
class DatasetFacts:
    """Where a run's questions came from and what became of them; kept in the run's header. Counts are of questions.

    Args:
        layout: its name in :data:`panscan.bench.datasets.LAYOUTS`.
        split: such as "validation"; empty where a dataset has none.
        questions: in its files.
        used: different ones that the run asks.
        without_image: left out, because a picture is missing or could not be read.
        without_question: left out, because nothing is asked.
        repeated_ids: kept under an id of their own, because another question had theirs before.
        converted_answers: whose answers were numbers or nested lists, and were read as texts.
        unscored: of the used ones, without accepted answers.
        broken_text: left out, because the question has half a surrogate pair, which no tokenizer takes.
        other_splits: that were there and not chosen, separated by ", ".
        files_without_split: that were not read, because their names say no split and those of others do.
    """

    layout: str
    split: str = ""
    questions: int = 0
    used: int = 0
    without_image: int = 0
    without_question: int = 0
    repeated_ids: int = 0
    converted_answers: int = 0
    unscored: int = 0
    broken_text: int = 0
    other_splits: str = ""
    files_without_split: int = 0

    @property
    def text(self) -> str:
        """One line with every count that is not 0."""
        left_out = self.without_image + self.without_question + self.broken_text
        parts = [
            f"{self.used:,} used",
            *(
                f"{count:,} {what}"
                for count, what in (
                    (self.questions - self.used - left_out, "not drawn"),
                    (self.without_image, "without a readable image"),
                    (self.without_question, "without a question"),
                    (self.broken_text, "with half a surrogate pair, which is no text"),
                    (self.unscored, "without answers (unscored)"),
                    (self.repeated_ids, "with an id seen before (renamed)"),
                    (self.converted_answers, "with answers that are no list of texts (read as texts)"),
                )
                if count > 0
            ),
        ]
        if (files := self.files_without_split) > 0:
            parts.append(f"{files:,} file{'' if files == 1 else 's'} of no split not read")
        name = f"{self.layout}, {self.split}" if self.split else self.layout
        return f"{name}, {self.questions:,} question{'' if self.questions == 1 else 's'}: {', '.join(parts)}"


@dataclass(slots=True)
class Loaded:
    """What a dataset's files hold: usable rows in their order, and the count of all others.

    Args:
        facts: of which dataset, and what became of its rows so far.
        metric: the dataset's own metric of quality.
    """

    facts: DatasetFacts
    metric: str
    rows: list[Row] = field(default_factory=list)
    _ids: set[str] = field(default_factory=set)

    def add(
        self,
        given: Any,
        images: Sequence[str] | Embedded,
        question: Any,
        answers: Any,
        tags: Iterable[tuple[str, Any]] = (),
        *,
        plain: bool = False,
        people: bool = False,
    ) -> None:
        """Take a row, or count why not.

        Args:
            given: its id; None for the number of the row.
            images: none where a picture is missing.
            question: a text that is not blank, else it is missing. Half a surrogate pair, which JSON's escapes
                can write, is none; ids, tags and answers with one are left out.
            answers: see :func:`panscan.bench.datasets.answer_texts.answer_texts`.
            tags: values that are None or empty are left out; a list is several values.
            plain: numbers and single texts are how this layout stores answers, so they are not counted.
            people: one answer of each person who was asked, blank ones too.
        """
        facts = self.facts
        number = facts.questions
        facts.questions += 1
        if not isinstance(question, str) or not question.strip():
            facts.without_question += 1
            return
        if not isinstance(images, Embedded) and not images:
            facts.without_image += 1
            return
        if not is_unicode(question):
            facts.broken_text += 1
            return
        row_id = f"{number:05d}" if given is None or not is_unicode(str(given)) else str(given)
        if row_id in self._ids:
            facts.repeated_ids += 1
            row_id = unique_id(row_id, self._ids)
        self._ids.add(row_id)
        texts, flat = answer_texts(answers, people=people)
        facts.converted_answers += not flat and not plain
        places = images if isinstance(images, Embedded) else tuple(images)
        self.rows.append(Row(row_id, places, question, tuple(filter(is_unicode, texts)), _tags(tags)))


def unique_id(wanted: str, taken: Collection[str]) -> str:
    """``wanted#2``, or the next number that is free."""
    number = 2
    while f"{wanted}#{number}" in taken:
        number += 1
    return f"{wanted}#{number}"


def counted(loaded: Loaded, used: Sequence[Row], unreadable: int) -> DatasetFacts:
    """The facts of a workload that uses some of a dataset's rows; the pictures of ``unreadable`` others failed."""
    return replace(
        loaded.facts,
        used=len(used),
        without_image=loaded.facts.without_image + unreadable,
        unscored=sum(not row.answers for row in used),
    )


def facts_of_header(header: Mapping[str, Any]) -> DatasetFacts | None:
    """What a run's header says of its dataset; None where it had none, or another version kept something else."""
    kept = header["settings"].get("dataset")
    if not isinstance(kept, dict):
        return None
    known = {each.name: type(each.default) if each.name != "layout" else str for each in fields(DatasetFacts)}
    found = {name: kept[name] for name, kind in known.items() if isinstance(kept.get(name), kind)}
    return DatasetFacts(**found) if "layout" in found else None


def _tags(pairs: Iterable[tuple[str, Any]]) -> Tags:
    found = []
    for name, value in pairs:
        values = value if isinstance(value, list | tuple) else [value]
        found += [(name, str(each)) for each in values if each is not None and str(each).strip()]
    found = [(name, text) for name, text in found if is_unicode(text)]
    return tuple(dict.fromkeys(found))
