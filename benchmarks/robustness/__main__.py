"""Run parts of the robustness job and put their sums into the record; see the package."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent.parent / "records" / "robustness.json"
TOTALS = {
    "files": 10_000,
    "bombs": 68,
    "checkpoints": 172,
    "endpoints": 96,
    "commands": 500,
    "kills": 100,
    "enospc": 40,
}
_PROBED_FROM = 5  # cases; finding out what else children import takes a while
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.robustness", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(TOTALS)}  [default: all]")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the cases  [default: 1.0]")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other cases  [default: 0]")
    parser.add_argument("--only", type=int, metavar="CASE", help="one case of one part, again; writes no record")
    parser.add_argument("--workers", type=int, default=2, help="processes that decode files  [default: 2]")
    parser.add_argument("--output", type=Path, default=RECORD, help="the record; other parts in it stay")
    parser.add_argument("--keep", type=Path, default=Path("robustness-cases"), help="every case, and failed inputs")
    options = parser.parse_args()
    if unknown := [part for part in options.parts if part not in TOTALS]:
        parser.error(f"there is no part {unknown[0]!r}; choose from {', '.join(TOTALS)}")
    if options.only is not None and len(options.parts) != 1:
        parser.error("--only takes one part")
    return options


def _run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.robustness.cases import Part

    (options.keep / f"{name}.jsonl").unlink(missing_ok=True)
    total = max(1, round(TOTALS[name] * options.scale))
    part = Part(name, range(total) if options.only is None else (options.only,), options.keep)
    start = time.monotonic()
    skipped = ""
    with tempfile.TemporaryDirectory(prefix="panscan-robustness-") as scratch:
        folder = Path(scratch)
        if name == "files":
            from benchmarks.robustness.files import run_files

            run_files(part, options.seed, folder, options.workers)
        else:
            from benchmarks.robustness import children, commands, stops

            children.preload(probe=len(part.cases) >= _PROBED_FROM)
            if name == "bombs":
                from benchmarks.robustness.bombs import run_bombs

                run_bombs(part, options.seed, folder)
            elif name == "commands":
                commands.run_commands(part, options.seed, folder)
            elif name == "endpoints":
                from benchmarks.robustness.endpoints import run_endpoints

                run_endpoints(part, folder)
            elif name == "kills":
                stops.run_kills(part, options.seed, folder)
            elif name == "checkpoints":
                from benchmarks.robustness.checkpoints import run_checkpoints

                run_checkpoints(part, folder)
            else:
                skipped = stops.run_enospc(part, options.seed, folder)
    return {
        "seed": options.seed,
        "minutes": round((time.monotonic() - start) / 60, 1),
        "skipped": skipped,
        **part.record(),
    }


def main() -> int:
    """Run the parts one after another; return 1 if a case failed."""
    options = _options()
    options.keep.mkdir(parents=True, exist_ok=True)
    parts = options.parts or list(TOTALS)
    if len(parts) > 1:
        # One process per part: children of a process that ran other parts inherit its thread pools, which break them.
        rest = [argument for argument in sys.argv[1:] if argument not in TOTALS]
        command = [sys.executable, "-m", "benchmarks.robustness", *rest]
        codes = [subprocess.run([*command, name], check=False).returncode for name in parts]
        return int(any(codes))
    failed = 0
    for name in parts:
        result = _run(name, options)
        failed += result["failed"]
        if options.only is not None:
            print(json.dumps(result, indent=1))
            continue
        _store(options.output, name, result)
        print(
            f"{name}: {result['cases']} cases, {result['failed']} failed, {result['lost']} results lost"
            f" {result['skipped']}"
        )
    print(f"record: {options.output}; cases and failed inputs: {options.keep}")
    return bool(failed)


def _store(path: Path, name: str, result: dict[str, Any]) -> None:
    from panscan.records.environment import environment

    record = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    facts = environment()
    where = {key: facts[key] for key in ("cpu", "cpu_count", "python", "packages")}
    record["parts"][name] = {**result, "environment": where}
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    os.environ.update(_ONE_THREAD, HF_HUB_OFFLINE="1")  # before NumPy and PyTorch are imported
    sys.exit(main())
