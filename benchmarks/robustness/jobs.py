"""Jobs that are stopped and resumed: their command lines, and the results that they left on the disk."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

from panscan.core import PanscanError
from panscan.records.store import FILE_NAME, read_run

SMALL = ("--max-new-tokens", "2", "--do-pan-and-scan", "false", "--device", "cpu")
"""Settings under which the bundled mini model answers quickly."""

Results = dict[str, Any]
"""Finished results by name: what a stopped job must not lose. Times are left out, so equal work has equal results."""

_TIMES = ("ttft_ms", "e2el_ms", "cached_tokens")
_REQUEST = ("request", "views", "crops", "prompt_tokens", "output_tokens", "finish_reason", "error", "scores")


class Job(Protocol):
    """A command that can be stopped at any moment, and resumed."""

    def start(self, where: Path, samples: Path) -> list[str]:
        """Return the command line that starts the job."""

    def resume(self, where: Path, samples: Path) -> list[str]:
        """Return the command line that resumes the job, or the first one if nothing was written yet."""

    def results(self, where: Path) -> Results:
        """Return the finished results on the disk."""

    def duplicates(self, where: Path) -> int:
        """Return the number of results that are on the disk twice."""


class _Batch:
    def start(self, where: Path, samples: Path) -> list[str]:
        job = ["batch", str(samples), "-p", "What is the total?", "-o", str(where / "answers.jsonl")]
        return [*job, "--max-num-seqs", "2", *SMALL]

    def resume(self, where: Path, samples: Path) -> list[str]:
        begun = (where / "answers.jsonl").exists()
        return [*self.start(where, samples), *(["--resume"] if begun else [])]

    def results(self, where: Path) -> Results:
        return {line["id"]: {k: v for k, v in line.items() if k not in _TIMES} for line in self._lines(where)}

    def duplicates(self, where: Path) -> int:
        return len(self._lines(where)) - len(self.results(where))

    def _lines(self, where: Path) -> list[dict[str, Any]]:
        path = where / "answers.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # what follows the last newline is torn
        return [line for line in map(json.loads, lines) if line["error"] is None]


class _Bench:
    def start(self, where: Path, samples: Path) -> list[str]:
        job = ["bench", "--dataset", str(samples / "questions.jsonl"), "--num-samples", "3", "--batch-size", "1,2"]
        return [*job, "--repeats", "2", "--warmup", "0", "--output-dir", str(where / "runs"), *SMALL]

    def resume(self, where: Path, samples: Path) -> list[str]:
        begun = self._records(where)
        return ["bench", "--resume", str(begun[0].parent)] if begun else self.start(where, samples)

    def results(self, where: Path) -> Results:
        results: Results = {}
        for path in self._records(where):
            run = read_run(path)
            for (cell, repeat), requests in run.requests.items():
                kept = [{name: getattr(request, name) for name in _REQUEST} for request in requests]
                results[f"{cell} {repeat}"] = sorted(kept, key=lambda request: str(request["request"]))
            results |= {f"{cell} verdict": verdict.verdict for cell, verdict in run.verdicts.items()}
        return results

    def duplicates(self, where: Path) -> int:
        keys: Counter[str] = Counter()
        for path in self._records(where):
            for line in path.read_bytes().split(b"\n")[:-1]:
                record = json.loads(line)
                if record["type"] == "repeat" or (record["type"] == "verdict" and record.get("concluded", True)):
                    keys[f"{record['type']} {record['cell']} {record.get('repeat')}"] += 1
        return sum(count - 1 for count in keys.values())

    def _records(self, where: Path) -> list[Path]:
        return sorted((where / "runs").glob(f"*/{FILE_NAME}"))


JOBS: dict[str, Job] = {
    "batch, in order": _Batch(),
    "bench": _Bench(),
}
"""The jobs by name."""


def lost(before: Results, after: Results) -> list[str]:
    """Return the names of earlier results that are missing or different now."""
    return [name for name, result in before.items() if after.get(name) != result]


def results_of(job: Job, where: Path) -> tuple[Results, str]:
    """Return the finished results, and the reason if they cannot be read, else an empty string."""
    try:
        return job.results(where), ""
    except (PanscanError, ValueError, KeyError) as error:
        return {}, f"unreadable after the stop: {error}"
