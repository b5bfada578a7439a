"""How well the mini model reads what training never showed it.

    python -m training.evaluate                                     # the bundled model, on this machine's CPU
    python -m training.evaluate --check benchmarks/records/mini-quality.json

Documents have held-out seeds; a quarter each also held-out fonts, held-out layouts, and both. Each answers four
questions, with pan and scan (256 / 4 / 1.2) and without; tall and wide ones also with other numbers of crops. Intervals
draw whole documents, since questions about one share its fate. Answers are compared by exact match.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from rich.progress import track

from panscan import Engine, PanAndScan
from panscan.records.intervals import cluster_intervals, wilson_interval
from panscan.records.scores import exact_match
from panscan.workload.documents import Question
from training.fonts import held_out_faces, training_faces
from training.pages import Page, a_page

WITH = PanAndScan(min_crop_size=256, max_num_crops=4, min_ratio_to_activate=1.2)
WITHOUT = PanAndScan(enabled=False)
SETTINGS: dict[str, PanAndScan] = {"with": WITH, "without": WITHOUT} | {
    f"crops-{count}": PanAndScan(min_crop_size=256, max_num_crops=count, min_ratio_to_activate=1.2)
    for count in (2, 3, 6)
}
_SHAPES = ("tall", "wide", "square")
_NEW = ("seed", "fonts", "layouts", "fonts and layouts")
_QUESTIONS = 4
_POINT = 1e-9


@dataclass(frozen=True, slots=True)
class Held:
    """A held-out document: its number, shape, what is new beside the seed, the page and its questions."""

    number: int
    shape: str
    new: str
    page: Page
    questions: tuple[Question, ...]


def documents(count: int, seed: int) -> Iterator[Held]:
    """``count`` documents, 448 to 900 pixels on the short side; shapes, and what is new, take turns."""
    for number in range(count):
        rng = Random(f"evaluate-{seed}-{number}")
        shape, new = _SHAPES[number % 3], _NEW[number // 3 % len(_NEW)]
        ratio = {"tall": rng.uniform(2, 4.4), "wide": rng.uniform(2, 4), "square": rng.uniform(0.9, 1.15)}[shape]
        kinds = {"tall": ("receipt", "receipt", "notes", "form", "invoice"), "wide": ("board", "board", "table")}.get(
            shape, ("receipt", "chart", "notes", "table", "form", "sign", "board")
        )
        faces = held_out_faces() if "fonts" in new else training_faces()
        page = a_page(
            rng,
            ratio,
            faces,
            columns=rng.uniform(27, 35),
            kinds=kinds,
            held_out_layouts="layouts" in new,
            shorts=(448, 900),
        )
        by_type: dict[str, list[Question]] = defaultdict(list)
        for ask in page.document.questions:
            by_type[ask.type].append(ask)
        questions = list(dict.fromkeys(rng.choice(by_type[rng.choice(list(by_type))]) for _ in range(12)))
        yield Held(number, shape, new, page, tuple(questions[:_QUESTIONS]))


def evaluate(engine: Engine, held: Iterable[Held]) -> list[dict[str, Any]]:
    """One row a question: what it is about, and answer and verdict under each setting."""
    rows: list[dict[str, Any]] = []
    for document in held:
        named = (
            SETTINGS if document.shape != "square" else {k: v for k, v in SETTINGS.items() if k in ("with", "without")}
        )
        requests = [
            engine.request(ask.question, [document.page.image], pan_and_scan=setting)
            for setting in named.values()
            for ask in document.questions
        ]
        results = iter(engine.generate(requests))
        by_setting = {name: [next(results) for _ in document.questions] for name in named}
        for place, ask in enumerate(document.questions):
            answers = {name: results[place].text for name, results in by_setting.items()}
            rows.append(
                {
                    "document": document.number,
                    "shape": document.shape,
                    "new": document.new,
                    "kind": document.page.document.kind,
                    "type": ask.type,
                    "size": list(document.page.image.size),
                    "question": ask.question,
                    "expected": list(ask.answers),
                    "answers": answers,
                    "right": {name: exact_match(text, ask.answers) for name, text in answers.items()},
                    "views": {name: results[place].views for name, results in by_setting.items()},
                }
            )
    return rows


def _share(rows: list[dict[str, Any]], setting: str) -> dict[str, float]:
    """Exact match of some rows, with its 95% interval: a bootstrap of documents, or Wilson's over documents where all
    rows agree, which a bootstrap would take for certainty."""
    values, held = [row["right"][setting] for row in rows], [row["document"] for row in rows]
    mean = sum(values) / len(values)
    [(low, high)] = cluster_intervals(values, held, ()) or [(mean, mean)]
    if high - low < _POINT:
        low, high = wilson_interval(mean, len(set(held)))
    views = sum(row["views"][setting] for row in rows) / len(rows)
    return {
        "exact_match": round(mean, 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "questions": len(rows),
        "views": round(views, 2),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Exact match by shape and setting, and of the setting "with" by print, kind and type of question."""
    parts: dict[str, dict[str, float]] = {}
    groups = {"tall and wide": ("tall", "wide"), "square": ("square",), "tall": ("tall",), "wide": ("wide",)}
    for name, shapes in groups.items():
        chosen = [row for row in rows if row["shape"] in shapes]
        for setting in SETTINGS:
            if chosen and all(setting in row["right"] for row in chosen):
                parts[f"{name}, {setting}"] = _share(chosen, setting)
    for key in ("new", "kind", "type"):
        for shapes, called in ((("tall", "wide"), "tall and wide"), (("square",), "square")):
            by_value: dict[str, list[dict[str, Any]]] = defaultdict(list)
            for row in rows:
                if row["shape"] in shapes:
                    by_value[str(row[key])].append(row)
            for value, chosen in sorted(by_value.items()):
                parts[f"{called}, with, {key} {value}"] = _share(chosen, "with")
    return parts


def check(scores: dict[str, dict[str, float]], record: dict[str, Any]) -> list[str]:
    """The figures by shape and setting that are not in the record's interval, in words; a missing one is not."""
    outside = []
    for name, known in record["summary"].items():
        if name.count(",") != 1:
            continue
        value = scores[name]["exact_match"] if name in scores else None
        if value is None or not known["low"] <= value <= known["high"]:
            outside.append(f"{name}: {value} is not in {known['low']:.3f} to {known['high']:.3f}")
    return outside


def main() -> int:
    args = _arguments()
    known = json.loads(args.check.read_text()) if args.check else None
    if known is not None:  # the same documents, and their own questions
        args.documents, args.seed = known["documents"], known["seed"]
    began = time.perf_counter()
    with Engine.from_pretrained(args.model, dtype=args.dtype, device=args.device, max_new_tokens=48) as engine:
        held = track(documents(args.documents, args.seed), "reading", total=args.documents)
        rows = evaluate(engine, held)
    scores = summary(rows)
    for name, part in scores.items():
        print(f"{name:48} {part['exact_match']:6.1%}  ({part['low']:.1%}-{part['high']:.1%})  n={part['questions']}")
    record = {
        "about": "exact match of the mini model on held-out documents",
        "command": f"python -m training.evaluate --documents {args.documents} --seed {args.seed}",
        "model": args.model,
        "dtype": args.dtype,
        "device": args.device,
        "documents": args.documents,
        "seed": args.seed,
        "seconds": round(time.perf_counter() - began),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "summary": scores,
    }
    if args.output:
        args.output.write_text(json.dumps(record, indent=1) + "\n")
    if args.rows:
        args.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if known is None:
        return 0
    outside = check(scores, known)
    print("\n".join(outside) or "every figure lies in the record's interval")
    return 1 if outside else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--documents", type=int, default=480)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, help="write the record there")
    parser.add_argument("--rows", type=Path, help="write every question and answer there, as JSON lines")
    parser.add_argument("--check", type=Path, help="a record: exit with 1 if a figure is not in its interval")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
