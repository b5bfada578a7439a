"""Print the table of broken engines and what caught each; the exit code counts surprises.

python -m tests.mutations [--output RECORD.json] [WORDS OF A NAME ...]
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.mutations.broken import INTACT, MUTATIONS, Mutation
from tests.mutations.harness import documents, verdict_under

from panscan.records.environment import environment


def main() -> int:
    """Return the number of broken engines that were not caught as expected."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description="Broken engines and their verdicts.")
    parser.add_argument("words", nargs="*", help="Only broken engines whose name has one of these.")
    parser.add_argument("--output", type=Path, help="Also write a record, as JSON.")
    chosen = parser.parse_args()
    rows = []
    mutations = [m for m in MUTATIONS if not chosen.words or any(word.lower() in m.name for word in chosen.words)]
    with tempfile.TemporaryDirectory() as folder:
        pages = documents(Path(folder))
        _line(["broken engine", "precision", "verdict", "caught by"])
        _line(["---"] * 4)
        for dtype in ("fp32", "bf16"):
            intact = Path(folder) / f"intact-{dtype}"
            verdict_under(INTACT, pages, intact, dtype)
            for number, mutation in enumerate(mutations):
                rows.append(_row(mutation, pages, Path(folder) / f"run-{dtype}-{number}", dtype, intact))
    if chosen.output is not None:
        record = {"environment": environment(), "command": "python -m tests.mutations", "rows": rows}
        chosen.output.write_text(json.dumps(record, indent=1) + "\n")
    return sum(bool(row["surprise"]) for row in rows)


def _row(mutation: Mutation, pages: list[Path], directory: Path, dtype: str, intact: Path) -> dict[str, object]:
    outcome, expected = verdict_under(mutation, pages, directory, dtype, intact), mutation.expected(dtype)
    surprise = not expected <= outcome.caught_by or bool(outcome.caught_by) != bool(expected)
    caught = sorted(outcome.caught_by)
    missing = " (EXPECTED: " + (", ".join(sorted(expected)) or "nothing") + ")" if surprise else ""
    why = (", ".join(caught) or f"nothing: {mutation.why_invisible}") + missing
    _line([mutation.name, dtype, outcome.verdict.word, why])
    return {
        "name": mutation.name,
        "dtype": dtype,
        "verdict": outcome.verdict.word,
        "caught_by": caught,
        "why_invisible": mutation.why_invisible,
        "surprise": surprise,
    }


def _line(cells: list[str]) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
