"""The formats that ``--dataset`` reads: one table of them, how a file's format is found, and the readers of JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from panscan.core import DatasetError, SettingError
from panscan.core.groups import grouped
from panscan.records.fields import EXACT_MATCH
from panscan.records.schema import DatasetFacts
from panscan.settings import nearest
from panscan.workload.rows import (
    MOST_ROWS,
    Boundary,
    LoadedDataset,
    Pictures,
    answer_texts,
    beside,
    is_unicode,
    parse_json,
    read_json,
    read_text,
)
from panscan.workload.tables import OTHER_TABLES, read_tables


def _read_questions(
    files: Sequence[Path],
    loaded: LoadedDataset,
    *,
    folders: Sequence[str],
    id: str = "questionId",
    image: str = "image",
    suffix: str = "",
    kind: str = "",
    people: bool = False,
) -> None:
    """Take the rows of files of DocVQA and InfographicVQA (rrc.cvc.uab.es, task 17) or TextVQA (textvqa.org).

    One file per split, ``{"data": [{"questionId", "question", "answers", ...}]}``; test splits have no answers. The
    pictures of TextVQA's validation split are among the training split's.

    Args:
        files: the files.
        loaded: takes the rows.
        folders: folders of images.
        id: key of a question's id.
        image: key of a path such as ``documents/x.png``, or of a file name.
        suffix: end of the file name, if the rows leave it out.
        kind: key of the types of a question, in files that have them.
        people: the answers are one per annotator.

    Raises:
        DatasetError: a file cannot be read or is not such a file.
    """
    for path in files:
        called = f"{loaded.called}: {path.name}"
        content = read_json(path, called)
        rows: Any = content.get("data") if isinstance(content, dict) else None
        if not _are_objects(rows):
            raise DatasetError(f"{called}: expected an object with a list 'data' of questions")
        siblings = sorted(path for path in path.parent.iterdir() if path.is_dir() and not path.name.startswith("."))
        pictures = Pictures((path.parent, path.parent.parent, *siblings), folders)
        for row in rows:
            name = row.get(image)
            file = pictures.find(f"{name}{suffix}" if suffix and name is not None else name)
            tags = [("type", row.get(kind))]
            loaded.add(row.get(id), file, row.get("question") or None, row.get("answers"), tags, people=people)


def _are_objects(rows: Any) -> bool:
    return isinstance(rows, list) and all(isinstance(row, dict) for row in rows)


_SPLIT_FOLDERS = ("train/documents", "val/documents", "test/documents")
_read_docvqa = partial(
    _read_questions,
    folders=("documents", "spdocvqa_images", "images", *_SPLIT_FOLDERS),
    kind="question_types",
)
_read_infographicvqa = partial(
    _read_questions,
    folders=("infographicsvqa_images", "images", "infographicVQA_images", "infographicvqa_images"),
    image="image_local_name",
    kind="answer_type",
)
_read_textvqa = partial(
    _read_questions,
    folders=(
        "train_images",
        "test_images",
        "train_val_images/train_images",
        "train_val_images",
        "val_images",
        "images",
    ),
    id="question_id",
    image="image_id",
    suffix=".jpg",
    people=True,
)


def read_chartqa(files: Sequence[Path], loaded: LoadedDataset) -> None:
    """Take the rows of ChartQA's files: ``test/test_human.json``, ``test/test_augmented.json`` and ``test/png/``.

    Each is a list of ``{"imgname", "query", "label"}``. Questions by people and questions made from summaries are two
    files, and so two types. Rows have no ids: theirs are the type and the number in its file.

    Raises:
        DatasetError: a file cannot be read or is not ChartQA's.
    """
    for path in files:
        called = f"{loaded.called}: {path.name}"
        rows = read_json(path, called)
        if not _are_objects(rows):
            raise DatasetError(f"{called}: expected a list of questions")
        kind = path.stem.rpartition("_")[2]
        pictures = Pictures((path.parent,), ("png", "images"))
        for number, row in enumerate(rows):
            file, label = pictures.find(row.get("imgname")), row.get("label")
            plain = not isinstance(label, list | dict)
            loaded.add(f"{kind}-{number:05d}", file, row.get("query") or None, label, [("type", kind)], plain=plain)


_JSONL_KEYS = {"image", "question", "answers", "kind", "type", "id"}


def read_json_lines(files: Sequence[Path], loaded: LoadedDataset) -> None:
    """Take the rows of JSON Lines files; pictures are relative to them.

    Raises:
        DatasetError: see :func:`dataset_rows`.
    """
    for path in files:
        for row in dataset_rows(path, loaded.called):
            tags = [(key, row[key]) for key in ("kind", "type") if key in row]
            loaded.add(row.get("id"), beside(path, row["image"]), row["question"], row.get("answers"), tags)


def dataset_rows(path: Path, called: str) -> list[dict[str, Any]]:
    """Read a JSON Lines file of ``{image, question}`` and optionally ``answers``, ``kind``, ``type`` and ``id``.

    In the rows, ``image`` is a list of names.

    Args:
        path: the file; empty lines in it are skipped.
        called: name in messages.

    Raises:
        DatasetError: the file cannot be read, or a line is not such a row; the message has its number.
    """
    lines = read_text(path, called).split("\n")
    if sum(bool(line.strip()) for line in lines) > MOST_ROWS:
        raise DatasetError(f"{called}: more than {MOST_ROWS:,} lines: split it, or use Parquet")
    return [_json_line(line, f"{called}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def _json_line(line: str, where: str) -> dict[str, Any]:
    try:
        row = parse_json(line)
        valid = is_unicode(json.dumps(row, ensure_ascii=False))
    except json.JSONDecodeError as error:
        raise DatasetError(f"{where}: not JSON: {error.msg}") from error
    except ValueError as error:
        raise DatasetError(f"{where}: {error}") from error
    if not valid:
        raise DatasetError(f"{where}: half of a surrogate pair is no text")
    if not isinstance(row, dict):
        raise DatasetError(f"{where}: expected an object with image, question and answers")
    for key in ("image", "question"):
        if key not in row:
            raise DatasetError(f"{where}: {key!r} is missing")
    for key in row.keys() - _JSONL_KEYS:
        raise DatasetError(f"{where}: unknown key {key!r}{nearest(key, _JSONL_KEYS)}")
    names = [row["image"]] if isinstance(row["image"], str) else row["image"]
    if not isinstance(names, list) or not names or not all(type(name) is str and name for name in names):
        raise DatasetError(f"{where}: 'image' must be a file name or a list of them")
    if type(row["question"]) is not str:
        raise DatasetError(f"{where}: 'question' must be text")
    if isinstance(row.get("answers"), dict) and not answer_texts(row["answers"])[0]:
        raise DatasetError(f"{where}: 'answers' must be texts or numbers, or a list of them")
    return {**row, "image": names}


_ALIASES = {"val": "validation", "valid": "validation", "dev": "validation"}
_TABLE_SPLIT = re.compile(r"(?:^|[-_.])(train|validation|valid|val|dev|test)(?=[-_.]|$)")
_DEPTH = 2  # folders below the one that is named


@dataclass(frozen=True, slots=True)
class DatasetFormat:
    """A way in which questions are stored.

    Args:
        metric: the dataset's own.
        pattern: pattern of its file names; the group ``split`` is the split.
        read: takes the rows of files.
        splits: which one is taken where the user names none, the first that is there.
        folder: whether a folder of it may be named.
        beside: whether its images may be in folders beside that of its files.
    """

    metric: str
    pattern: str
    read: Callable[[Sequence[Path], LoadedDataset], None]
    splits: tuple[str, ...] = ("validation", "test", "train")
    folder: bool = True
    beside: bool = False


FORMATS: Mapping[str, DatasetFormat] = {
    "jsonl": DatasetFormat(EXACT_MATCH, r".*\.jsonl", read_json_lines, folder=False),
    "docvqa": DatasetFormat("anls", r"(?P<split>train|val|test)_v\d.*\.json", _read_docvqa, beside=True),
    "infographicvqa": DatasetFormat(
        "anls", r"infographics?VQA_(?P<split>train|val|test)_v\d.*\.json", _read_infographicvqa, beside=True
    ),
    "chartqa": DatasetFormat(
        "relaxed_accuracy",
        r"(?P<split>train|val|test)_(human|augmented)\.json",
        read_chartqa,
        ("test", "validation", "train"),
    ),
    "textvqa": DatasetFormat(
        "vqa_accuracy", r"TextVQA_\d.*_(?P<split>train|val|test)\.json", _read_textvqa, beside=True
    ),
    "table": DatasetFormat(EXACT_MATCH, r"(?!cache-).*\.(parquet|arrow)", read_tables),
}
"""By name, as in ``--dataset-format``. The last is of Hugging Face ``datasets``: parquet, its cache, save_to_disk."""


def load_dataset(
    path: Path, *, layout: str | None = None, split: str | None = None, external: bool = False
) -> LoadedDataset:
    """Read the rows of a local dataset; nothing is downloaded.

    Args:
        path: a file of one of :data:`FORMATS`, or a folder that has such files.
        layout: name of the layout; None: detect it.
        split: which of several; None for the one that the layout prefers.
        external: whether rows may name URLs, and files outside the dataset's folder.

    Raises:
        DatasetError: no such file or folder, no known layout in it (or several), no such split, unreadable files.
        SettingError: an unknown layout.
        UnsupportedError: a table without pyarrow.
    """
    called = f"--dataset {path}"
    if layout is not None and layout not in FORMATS:
        raise SettingError(f"--dataset-format takes {', '.join(FORMATS)}; got {layout!r}{nearest(layout, FORMATS)}")
    try:
        exists, is_folder = path.exists(), path.is_dir()
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise DatasetError(f"{called}: {error.strerror}") from error
    if is_folder:
        name, by_split = _in_folder(path, layout, called)
    else:
        if not exists:
            raise DatasetError(f"{called}: No such file or directory")
        name = layout or _of_file(path, called)
        by_split = {_split_of(name, path): [path]}
    chosen = _chosen(by_split, split, FORMATS[name].splits, called)
    files = by_split[chosen]
    owners = list(dict.fromkeys(path.parent for path in files))
    if len(owners) > 1:  # files of one split that lie in several folders are several datasets; ChartQA's are not
        listed = ", ".join(map(str, owners[:4]))
        raise DatasetError(f"{called}: several datasets of layout {name}: name one of the folders {listed}")
    others = ", ".join(other for other in by_split if other not in (chosen, ""))
    unsplit = len(by_split.get("", ())) if chosen else 0
    facts = DatasetFacts(name, chosen, other_splits=others, files_without_split=unsplit)
    folders = [path] if is_folder else []
    folders += [folder for file in files for folder in (file.parent, file.parent.parent)[: 1 + FORMATS[name].beside]]
    loaded = LoadedDataset(facts, FORMATS[name].metric, called, Boundary(folders, external=external))
    try:
        FORMATS[name].read(files, loaded)
    except RecursionError as error:  # answers within answers: the parser goes deeper than Python's functions
        raise DatasetError(f"{called}: nested too deeply") from error
    return loaded


def _in_folder(folder: Path, layout: str | None, called: str) -> tuple[str, dict[str, list[Path]]]:
    current = folder / "refs" / "main"  # of a repository in the hub's cache: its current snapshot counts
    if (folder / "snapshots").is_dir() and current.is_file():
        snapshot = folder / "snapshots" / current.read_text("utf-8").strip()
        folder = snapshot if snapshot.is_dir() else folder
    names = [layout] if layout is not None else [name for name, layout in FORMATS.items() if layout.folder]
    layouts = {name: by_split for name in names if (by_split := _files(folder, name))}
    if not layouts:
        wanted = f"files of layout {layout}" if layout else f"known layout ({', '.join(FORMATS)})"
        raise DatasetError(f"{called}: no {wanted} in this folder; see docs/quality.md")
    if len(layouts) > 1:
        raise DatasetError(f"{called}: the folder has {' and '.join(layouts)}: choose with --dataset-format")
    [(name, by_split)] = layouts.items()
    return name, by_split


def _files(folder: Path, name: str) -> dict[str, list[Path]]:
    """Return a layout's files below a folder, by split. Files with question types replace those without."""
    pattern = re.compile(FORMATS[name].pattern, re.IGNORECASE)
    levels = ("/".join(["*"] * depth) for depth in range(1, _DEPTH + 2))
    every = folder.rglob("*") if name == "table" else (path for level in levels for path in folder.glob(level))
    paths = sorted(path for path in every if pattern.fullmatch(path.name) and path.is_file())
    if any(path.suffix == ".parquet" for path in paths):
        paths = [path for path in paths if path.suffix == ".parquet"]  # the others were made of these
    by_split = grouped((_split_of(name, path), path) for path in paths)
    with_types = {split: [path for path in paths if "withQT" in path.name] for split, paths in by_split.items()}
    return {split: with_types[split] or paths for split, paths in by_split.items()}


def _split_of(name: str, path: Path) -> str:
    if name == "table":
        match = _TABLE_SPLIT.search(path.stem.lower()) or _TABLE_SPLIT.fullmatch(path.parent.name.lower())
        split = match[1] if match else ""
    else:
        match = re.fullmatch(FORMATS[name].pattern, path.name, re.IGNORECASE)
        split = (match.groupdict().get("split") or "").lower() if match else ""
    return _ALIASES.get(split, split)


def _chosen(by_split: Mapping[str, object], split: str | None, preferred: Sequence[str], called: str) -> str:
    known = [name for name in by_split if name]
    if split is None:
        return next((name for name in (*preferred, *by_split) if name in by_split), "")
    wanted = _ALIASES.get(split.lower(), split.lower())
    if wanted not in known:
        has = f"it has {', '.join(known)}" if known else "it has no splits"
        raise DatasetError(f"--dataset-split {split}: not in {called.removeprefix('--dataset ')}: {has}")
    return wanted


def _of_file(path: Path, called: str) -> str:
    """Detect the layout of a file by its name, else by its content."""
    for name, layout in FORMATS.items():
        if re.fullmatch(layout.pattern, path.name, re.IGNORECASE):
            return name
    if path.suffix.lower() in OTHER_TABLES:
        raise DatasetError(f"{called}: tables are read as Parquet (.parquet) or JSON Lines (.jsonl): convert it")
    if path.suffix.lower() != ".json":
        return "jsonl"  # as ever: any name is taken for lines
    try:
        content = read_json(path, called)
    except DatasetError:
        return "jsonl"  # which says what is wrong with it, line by line
    rows = content.get("data") if isinstance(content, dict) else content
    first = next((row for row in rows if isinstance(row, dict)), {}) if isinstance(rows, list) else {}
    for name, keys in (
        ("infographicvqa", {"questionId", "image_local_name"}),
        ("docvqa", {"questionId", "image"}),
        ("textvqa", {"question_id", "image_id"}),
        ("chartqa", {"imgname", "query"}),
    ):
        if keys <= first.keys():
            return name
    raise DatasetError(f"{called}: not a known layout ({', '.join(FORMATS)}): see docs/quality.md")
