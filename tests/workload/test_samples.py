from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest
from PIL import Image

from panscan.core import InputError, SettingError
from panscan.workload.documents import draw_document
from panscan.workload.samples import QuestionRow, write_samples


def snapshot(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


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
    per_image: dict[str, list[QuestionRow]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert list(row) == ["image", "question", "answers", "kind", "type"]
        question = QuestionRow(**{**row, "answers": tuple(row["answers"])})
        per_image[question.image].append(question)
    assert len(per_image) == 10
    for index, (name, questions) in enumerate(per_image.items()):
        drawn = draw_document(3, index)
        assert [(q.question, q.answers, q.type) for q in questions] == [
            (a.question, a.answers, a.type) for a in drawn.questions
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
    next(tmp_path.glob("board*")).unlink()
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
    for other in ({"count": 3}, {"count": 2, "seed": 1}, {"count": 2, "columns": 60}):
        with pytest.raises(SettingError, match=re.escape(str(path))):
            write_samples(tmp_path, **other)


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="file"):
        write_samples(tmp_path / "file", count=1)
