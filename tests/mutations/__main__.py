"""Print the table of broken engines and what caught each; the exit code counts surprises.

python -m tests.mutations [--output RECORD.json] [WORDS OF A NAME ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.mutations.broken import MUTATIONS, Mutation
from tests.mutations.harness import documents, verdict_under

from panscan.records.environment import environment


def main() -> int:
    """Return the number of broken engines that were not caught as expected."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description="Broken engines and their verdicts.")
    parser.add_argument("words", nargs="*", help="Only broken engines whose name has one of these.")
    parser.add_argument("--output", type=Path, help="Also write a record, as JSON.")
    chosen = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        pages = documents(Path(folder))
        _line(["broken engine", "verdict", "caught by"])
        _line(["---"] * 3)
        for number, mutation in enumerate(MUTATIONS):
            if not chosen.words or any(word.lower() in mutation.name for word in chosen.words):
                rows.append(_row(mutation, pages, Path(folder) / f"run-{number}"))
    if chosen.output is not None:
        record = {"environment": environment(), "command": "python -m tests.mutations", "rows": rows}
        chosen.output.write_text(json.dumps(record, indent=1) + "\n")
    return sum(row["surprise"] for row in rows)


def _row(mutation: Mutation, pages: list[Path], directory: Path) -> dict[str, object]:
    found = verdict_under(mutation, pages, directory)
    surprise = not mutation.caught_by <= found.caught_by or bool(found.caught_by) != bool(mutation.caught_by)
    caught = sorted(found.caught_by)
    missing = " (EXPECTED: " + (", ".join(sorted(mutation.caught_by)) or "nothing") + ")" if surprise else ""
    _line([mutation.name, found.verdict.word, (", ".join(caught) or f"nothing: {mutation.why_invisible}") + missing])
    return {
        "name": mutation.name,
        "verdict": found.verdict.word,
        "caught_by": caught,
        "why_invisible": mutation.why_invisible,
        "surprise": surprise,
    }


def _line(cells: list[str]) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
