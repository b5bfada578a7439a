import json
import re
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import panscan
from panscan.core import SettingError
from panscan.workload.documents import draw_document
from panscan.workload.samples import sample_dataset, write_samples


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


def test_fewer_documents_are_the_beginning_of_more(tmp_path: Path) -> None:
    few, more = write_samples(tmp_path / "few", count=2), write_samples(tmp_path / "more", count=3)
    assert more.read_bytes().startswith(few.read_bytes())


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
    write_samples(tmp_path, count=2, overwrite=True)
    assert (tmp_path / name).read_bytes() != b"not ours"
    assert len(list(tmp_path.iterdir())) == 4


def test_samples_of_another_count_or_seed_are_not_mixed(tmp_path: Path) -> None:
    path = write_samples(tmp_path, count=2)
    for other in ({"count": 3}, {"count": 2, "seed": 1}, {"count": 2, "columns": 60}):
        with pytest.raises(SettingError, match=re.escape(str(path))):
            write_samples(tmp_path, **other)


def test_another_recipe_draws_into_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANSCAN_CACHE", str(tmp_path / "cache"))
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
