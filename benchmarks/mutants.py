"""Mutants of the source: does the test suite notice when a line is wrong?

Each mutant changes one expression or statement of ``src/panscan``, chosen at random: a comparison, a constant, a
condition, a call that is left out. The tests of its package run against it; then, if none fails, the other tests that
mention it. A mutant that all of them accept survived; a person decides whether a user would notice, and writes
the missing test. Tests that fail without any mutation are left out, so that the script works on any machine.

    python -m benchmarks.mutants --count 100 --seed 1 --jobs 2 --output mutants.jsonl [src/panscan/load ...]
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = Path("src/panscan")
SKIPPED = ("*kernels.py", "jit.py", "triton_attention.py", "vision_attention.py")
"""Triton's interpreter runs these on CPUs for minutes; ``pytest -m gpu`` tests them."""
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_DID_NOT_RUN = "(pytest did not run)"  # as after a mutation that breaks an import of conftest.py
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
}


@dataclass(frozen=True)
class Mutant:
    """One changed place of the source: lines from 1, columns in bytes from 0, both as :mod:`ast` counts them."""

    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    before: str
    after: str

    def apply(self, text: str) -> str:
        """Return the file's text with the change."""
        lines = text.encode().splitlines(keepends=True)
        start = sum(map(len, lines[: self.line - 1])) + self.column
        end = sum(map(len, lines[: self.end_line - 1])) + self.end_column
        source = text.encode()
        return (source[:start] + self.after.encode() + source[end:]).decode()


@dataclass(frozen=True)
class Outcome:
    """What the tests said: ``killed`` by ``test``, ``timeout`` or ``survived``; seconds of wall-clock time."""

    mutant: Mutant
    status: str
    test: str
    seconds: float


def mutants(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file that still parses and differs from the original."""
    text = (ROOT / path).read_text("utf-8")
    tree = ast.parse(text)
    fixed = {id(part) for node in ast.walk(tree) for part in _without_behaviour(node)}
    for node in ast.walk(tree):
        if id(node) in fixed or not isinstance(node, ast.expr | ast.stmt):
            continue
        for changed in _changes(node):
            before = ast.get_source_segment(text, node) or ""
            after = ast.unparse(changed)
            if isinstance(node, ast.expr):
                after = f"({after})"
            assert node.end_lineno is not None and node.end_col_offset is not None
            place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
            mutant = Mutant(str(path), *place, before, after)
            try:
                ast.parse(mutant.apply(text))
            except SyntaxError:  # inside an f-string, for example
                continue
            yield mutant


def _without_behaviour(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes inside annotations, docstrings, ``__all__`` and blocks for type checkers."""
    roots: list[ast.AST | None] = []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = node.args
        roots += [arg.annotation for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        roots += [node.returns, *node.decorator_list]
    elif isinstance(node, ast.AnnAssign):
        roots.append(node.annotation)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        roots.append(node)
    elif isinstance(node, ast.If):
        roots += [node] if "TYPE_CHECKING" in ast.unparse(node.test) else []
    elif isinstance(node, ast.JoinedStr):
        roots += node.values
    for root in roots:
        if root is not None:
            yield from ast.walk(root)


def _changes(node: ast.expr | ast.stmt) -> Iterator[ast.AST]:
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[operator, *_]) if type(operator) in COMPARISONS:
            changed.ops[0] = COMPARISONS[type(operator)]()
            yield changed
        case ast.BoolOp():
            changed.op = ast.And() if isinstance(changed.op, ast.Or) else ast.Or()
            yield changed
        case ast.UnaryOp(op=ast.Not()):
            yield changed.operand
        case ast.Constant(value=bool()):
            changed.value = not changed.value
            yield changed
        case ast.Constant(value=int() | float() as number):
            changed.value = number + 1
            yield changed
        case ast.BinOp() if type(changed.op) in ARITHMETIC and not _is_text(changed):
            changed.op = ARITHMETIC[type(changed.op)]()
            yield changed
        case ast.IfExp():
            yield changed.orelse
        case ast.Raise() | ast.Expr(value=ast.Call() | ast.Await()):
            yield ast.Pass()
        case ast.Return(value=ast.expr()):
            changed.value = ast.Constant(None)
            yield changed
        case _:
            pass


def _is_text(sum_: ast.BinOp) -> bool:
    """Whether an operand is a string: such sums raise TypeError in any other form."""
    operands = (sum_.left, sum_.right)
    return any(isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", 0), str) for node in operands)


def draw(count: int, seed: int, folders: Sequence[str]) -> list[Mutant]:
    """Return mutants drawn without repetition, each place equally likely."""
    paths = sorted(path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py"))
    every = [mutant for path in paths if not any(map(path.match, SKIPPED)) for mutant in mutants(path)]
    return random.Random(seed).sample(every, min(count, len(every)))


def stages(path: Path) -> list[list[str]]:
    """Return the test files to run against a mutant of a file: its package's, then others that may reach the file.

    Those import it, mention a public name of it, or test a command with the name of the package.
    """
    package = path.relative_to(SOURCE).parent
    folder = ROOT / "tests" / package
    while not (near := sorted(folder.glob("test_*.py"), key=lambda test: path.stem not in test.stem)):
        folder = folder.parent
    nodes = ast.parse((ROOT / path).read_text("utf-8")).body
    public = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"]
    words = re.compile(
        "|".join((re.escape(".".join(path.with_suffix("").parts[1:])), *(rf"\b{name}\b" for name in public)))
    )
    others = [
        test
        for test in sorted((ROOT / "tests").rglob("test_*.py"))
        if test not in near
        and (
            words.search(test.read_text("utf-8"))
            or (test.parent.name == "cli" and package.name in test.stem.split("_"))
        )
    ]
    return [[str(test.relative_to(ROOT)) for test in tests] for tests in (near, others) if tests]


def pytest(source: Path, tests: Sequence[str], skipped: Sequence[str], seconds: float) -> list[str]:
    """Run tests against the source up to the first failure, and return the id of the test that failed.

    Raises:
        TimeoutError: when they take longer than ``seconds``.
    """
    options = ["-q", "-m", "not gpu", "-p", "no:cacheprovider", "-rfE", "--tb=no", "-x"]
    options += [part for test in skipped if "::" in test for part in ("--deselect", test)]
    tests = [test for test in tests if test not in skipped]
    if not tests:
        return []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(source), os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, "-m", "pytest", *options, *tests]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # servers and workers that a failed test left behind
    lines = output.decode("utf-8", "replace").splitlines()
    failed = [line.split(" ", 1)[1].split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return failed or ([] if process.returncode in (0, 5) else [_DID_NOT_RUN])


def judge(mutant: Mutant, broken: set[str], seconds: float) -> Outcome:
    """Run the tests of a mutant in a copy of the source.

    Args:
        mutant: the change.
        broken: tests that fail without a mutation, which grows by those that turn out to.
        seconds: limit of each stage.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        path = Path(folder) / Path(mutant.path).relative_to("src")
        text = path.read_text("utf-8")
        mutated = mutant.apply(text)
        path.write_text(mutated, "utf-8")
        status, test = "survived", ""
        try:
            for tests in stages(Path(mutant.path)):
                while failed := pytest(Path(folder), tests, sorted(broken), seconds):
                    test = failed[0]
                    path.write_text(text, "utf-8")  # does it fail in the copy without the mutation too?
                    if test == _DID_NOT_RUN or not pytest(Path(folder), [test], [], seconds):
                        return Outcome(mutant, "killed", test, round(time.monotonic() - start, 1))
                    path.write_text(mutated, "utf-8")
                    broken.add(test)
        except TimeoutError:
            status = "timeout"
    return Outcome(mutant, status, "", round(time.monotonic() - start, 1))


def main() -> int:
    """Draw mutants, run their tests and write one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*", default=[str(SOURCE)], help="parts of the source")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="per stage of a mutant")
    parser.add_argument("--left-out", type=Path, metavar="FILE", help="tests and files that fail here, one per line")
    parser.add_argument("--output", type=Path, required=True, help="JSONL; written as mutants finish")
    options = parser.parse_args()
    drawn = draw(options.count, options.seed, options.folders)
    broken = set(options.left_out.read_text("utf-8").splitlines()) if options.left_out else set[str]()
    with ThreadPoolExecutor(options.jobs) as pool, options.output.open("w", encoding="utf-8") as lines:
        judged = [pool.submit(judge, mutant, broken, options.timeout) for mutant in drawn]
        for outcome in (future.result() for future in as_completed(judged)):
            lines.write(json.dumps(asdict(outcome)) + "\n")
            lines.flush()
            mutant = outcome.mutant
            print(f"{outcome.status:9} {mutant.path}:{mutant.line} {mutant.before!r} -> {mutant.after!r}", flush=True)
    print(f"{len(broken)} tests fail without a mutation and were left out: {' '.join(sorted(broken))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
