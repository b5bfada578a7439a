"""Print the table of broken engines and what caught each."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.mutations.broken import MUTATIONS
from tests.mutations.harness import documents, verdict_under


def main() -> int:
    """Return the number of mutations that were caught by other parts than expected."""
    surprises = 0
    wanted = [name.lower() for name in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        pages = documents(Path(folder))
        sys.stdout.write("| broken engine | verdict | caught by |\n| --- | --- | --- |\n")
        for number, mutation in enumerate(MUTATIONS):
            if wanted and not any(name in mutation.name for name in wanted):
                continue
            found = verdict_under(mutation, pages, Path(folder) / f"run-{number}")
            parts = ", ".join(sorted(found.caught_by)) or f"nothing: {mutation.why_invisible}"
            surprise = bool(mutation.caught_by - found.caught_by) or bool(found.caught_by) != bool(mutation.caught_by)
            surprises += surprise
            mark = f" (EXPECTED {', '.join(sorted(mutation.caught_by)) or 'nothing'})" if surprise else ""
            sys.stdout.write(f"| {mutation.name} | {found.verdict.word} | {parts}{mark} |\n")
            sys.stdout.flush()
    return surprises


if __name__ == "__main__":
    sys.exit(main())
