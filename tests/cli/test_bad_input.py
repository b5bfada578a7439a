"""Bad input on the real command line: one line that names the option or file and the fix, and the documented code.

Nothing is written, whatever the mistake; and before PyTorch is imported, if no model is needed to find it.
"""

import gzip
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from tests.analysis.noisy_runs import noisy_records
from tests.conftest import Panscan, noise
from tests.forked_workers import program
from tests.inspect.trace.kineto import decode_trace
from tests.records.load_runs import load_run
from tests.records.synthetic import batches_of, header, load, outcome, truth, verdict, write_run

from panscan.cli.main import run
from panscan.core import weight_formats

pytestmark = pytest.mark.usefixtures("without_charts")

ANSWERED = {"image": "documents/a.png", "answers": ["x"]}
TOOLS = [{"type": "function", "function": {"name": "pay", "parameters": {"type": "object"}}}]
FILES = {
    "notes.txt": "no picture",
    "torn.png": "not a picture",
    "prompts.txt": "What is it?\n",
    "answers.jsonl": "{}\n",
    "grid.yaml": "bach_size: [1, 2]\n",
    "vllm.yaml": "max_model_len: 8192\n",
    "generate.yaml": "runner: generate\n",
    "two.yaml": "max_num_crops: [2, 4]\n",
    "sice.yaml": "batch_sice: 2\n",
    "table.csv": "image,question\n0.png,What?\n",
    "docs/q.jsonl": json.dumps({"image": "0.png", "question": "What?"}),
    "tools.json": json.dumps(TOOLS),
    "DocVQA/val_v1.0_withQT.json": json.dumps({"data": [{"questionId": 1, "question": "What?", **ANSWERED}]}),
    "open.json": "{",
    "list.json": "[1]",
    "banana.json": '{"type": "banana"}',
    "long.json": '{"const": "' + "x" * 70_000,
    "any.json": "{}",
    "cut.json": decode_trace().text()[:5000],
    "header/records.jsonl": json.dumps(header({"c": {}})) + "\n",
    "schema/records.jsonl": '{"type": "run", "schema": 99}\n',
    "mine/questions.jsonl": "not ours",
    "trace.jsonl": '{"timestamp": 1}',
    "half/records.jsonl": '{"type": "ru',
    "garbled/records.jsonl": json.dumps(header({"c": {}})) + "\n{]\n{}\n",
}
ROWS = {"{": "not JSON", '{"answer": ["x"]}': "did you mean 'answers'", '{"image": 3}': "'image' must be"}
ROWS |= {'{"answers": {"a": "x"}}': "'answers' must be texts or numbers", '{"question": 3}': "'question' must be text"}
"""Second lines of a dataset, and what is wrong with them."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with everything that the lines below name."""
    place = tmp_path_factory.mktemp("bad-input")
    for name in ("docs/0.png", "DocVQA/documents/a.png", "doc.png"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        noise(60, 60).save(place / name)
    noise(40, 40).save(place / "three.tif", save_all=True, append_images=[noise(40, 40, 1), noise(40, 40, 2)])
    for number, row in enumerate(ROWS):
        good = {"image": "doc.png", "question": "What?"}
        bad = row if row == "{" else json.dumps(good | json.loads(row))
        (place / f"bad{number}.jsonl").write_text(f"{json.dumps(good)}\n{bad}\n")
    write_run(place / "run", noisy_records(5))
    write_run(place / "loaded", load_run())
    swept = [header({"c1": {"attention": "sdpa"}, "c3": {}}), *batches_of("c1", [0.5, 0.51, 0.52] * 4)]
    write_run(place / "swept", [*swept, verdict("c1", "close", 3.1), outcome("c3", "oom", "no\nroom")])
    for name, text in FILES.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    (place / "latin.json").write_bytes(b"\xff")
    for name in ("t.parquet", "other.parquet"):
        parquet.write_table(pa.table({"image": [(place / "doc.png").read_bytes()]}), place / name)
    (place / "trace.json.gz").write_bytes(gzip.compress(decode_trace().text().encode()))
    return place


@pytest.fixture
def stocked(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, without a terminal and without keys."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("sys.stdin", None)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return place


@pytest.fixture
def folder(folder: Path) -> Path:
    """An empty working directory but for a picture."""
    noise(60, 60).save("doc.png")
    return folder


LONG = "n" * 5000
ASKING = ("ask doc.png -p x", "batch doc.png -p x -o a", "bench doc.png -p x")
TAKE_A_PATH = ("samples", "demo", "report", "recommend", "ask -p x", "bench --resume", "bench --dataset")
TAKE_A_PATH += (
    "bench doc.png --prompts",
    "bench doc.png -p x --output-dir",
    "batch doc.png -p x -o",
    f"compare {LONG}",
)
NEED_TORCH = ("attention", "verify", "profile", "quantize", "--replicas ", "--raw-prompt", "--measure")
NEED_TORCH += ("--regex", "--tool-choice", "--vision-cache-gb 1e-9")
TABLE = (Path(__file__).parent / "mistakes.txt").read_text("utf-8").splitlines()
MISTAKES: list[list[Any]] = [row.split(" | ") for row in TABLE if row and not row.startswith("#")]
"""Exit code, command line, parts of the message."""
MISTAKES += [
    *([2, f"{line} --max-model-len 4096", "--max-model-len: ", "--kv-cache-gb"] for line in (*ASKING, "serve")),
    *([2, f"bench {words}", "prompt"] for words in ("-p ''", "docs -p ''", "docs -p ' \n'", "docs -p \udcff")),
    [2, "bench docs --system \udcff", "--system is not UTF-8 text"],
    [2, "batch docs -p x -o a --regex (", "--regex: "],
    *([3, f"bench --dataset bad{number}.jsonl", "line 2", fault] for number, fault in enumerate(ROWS.values())),
    [2, f"compare {'run ' * 27}", "got 27"],
    [3, "ask 'a\nb\x1b[31m.png' -p x", "panscan: a\\nb\\x1b[31m.png: no such file or directory"],
    [2, f"trace {'trace.json.gz ' * 9}", "trace takes 1 to 8 files, got 9"],
    *([3, f"{line} {LONG}", "too long"] for line in TAKE_A_PATH),
    [3, f"crops doc.png -o {LONG}.png", "too long"],
    [2, f"bench doc.png --grid {LONG}", "too long"],
]


def contents(folder: Path) -> dict[Path, int]:
    """Every path below a folder, with when it changed."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[1][:60])
def test_a_mistake_is_one_line_and_changes_nothing(mistake: list[Any], stocked: Path, panscan: Panscan) -> None:
    before = contents(stocked)
    code, line, *parts = mistake
    said = panscan(line, code=int(code))
    shown = [line for line in said.err.splitlines() if line.startswith(("panscan: ", "skipped: ", "left out: "))]
    assert [line[:7] for line in shown].count("panscan") == 1
    assert [part for part in parts if part not in "\n".join(shown)] == []
    assert (said.out, "Traceback" in said.err) == ("", False) and max(map(len, shown)) < 1200
    assert contents(stocked) == before


def test_mistakes_and_help_are_quick_and_import_no_torch(stocked: Path) -> None:
    code = """if True:
        import json, sys
        from panscan.cli.main import run
        from panscan.core import weight_formats
        weight_formats.find_spec = lambda name: None
        for line in json.loads(sys.argv[1]):
            run(line)
            slow = {"torch", "transformers"} | ({"PIL", "matplotlib"} if line[-1] == "--help" else set())
            if slow & {*sys.modules}:
                sys.exit(f"{line} {slow & {*sys.modules}}")
    """
    lines = [f"{verb} --help" for verb in ("", "bench", "ask", "crops", "samples", "report")]
    lines += [line for code, line, *_ in MISTAKES if int(code) == 2 and not any(word in line for word in NEED_TORCH)]
    lines += [f"ask doc.png -p x {words}" for words in ("--model gemma-3-27b-it", "--quantization bnb-4bit")]
    lines += [
        "bench --resume nowhere",
        "verify ftp://x --model tiny",
        "bench doc.png -p x --model gemma-3-4b-pt --dry-run",
        "batch doc.png -p x -o answers.jsonl",
    ]
    lines += [f"{line} --model docs" for line in ("verify http://127.0.0.1:1", "profile doc.png", "attention -p x")]
    lines += ["quantize docs out --quantization int8", "quantize --audit docs"]
    words = json.dumps([shlex.split(line) for line in lines])
    done = subprocess.run([sys.executable, "-c", code, words], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr.splitlines()[-1]


@pytest.mark.parametrize("line", ["ask doc.png -p x", "batch doc.png -p x -o a", "serve --port 0"])
def test_missing_package_and_fix(line: str, stocked: Path, panscan: Panscan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_formats, "find_spec", lambda _: None)
    said = panscan(line, "--quantization", "bnb-8bit" if "batch" in line else "bnb-4bit", code=4).err
    assert "bitsandbytes: pip install bitsandbytes" in said.splitlines()[-1]


def test_a_compiler_that_fails_is_a_failed_cell(folder: Path) -> None:
    """And one line in commands that run once: neither is a bug of panscan's."""
    job = ["doc.png", "-p", "x", "--model", "tiny", "--device", "cpu", "--attention", "flex_attention"]
    code = """
import json, os, sys, tempfile
from panscan.cli.main import run
from torch._inductor import config
config.cpp.cxx = ("/bin/false",)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=".")
print(*map(run, json.loads(sys.argv[1])))
"""
    commands = json.dumps([["bench", *job, "--no-verify"], ["ask", *job]])
    done = subprocess.run(program(code, commands), capture_output=True, text=True, cwd=folder)
    assert done.stdout.splitlines()[-1] == "4 4", done.stderr
    for message in ("failed: ", "panscan: PyTorch cannot compile for this machine"):
        assert any(line.startswith(message) for line in done.stderr.splitlines())
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback(folder: Path, panscan: Panscan) -> None:
    assert "Traceback" in panscan("ask none.png -p", "What?", "--debug", code=3).err


def test_a_missing_model_is_a_failed_cell(folder: Path, panscan: Panscan) -> None:
    assert "no such directory" in panscan("bench doc.png --model ./nowhere", code=4).out


def test_bad_documents_are_left_out_and_the_run_goes_on(folder: Path, panscan: Panscan) -> None:
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.png").write_text("no picture")
    (folder / "cut.png").write_bytes((folder / "doc.png").read_bytes()[:2000])
    quick = ["--model", "tiny", "--device", "cpu", "--max-new-tokens", "2"]
    said = panscan("bench --repeats 1 --images *.png -p x", *quick).err
    for name in ("empty.png", "text.png", "cut.png"):
        assert said.count(f"skipped: {name}") == 1


def test_a_reader_that_has_seen_enough_is_no_failure(folder: Path) -> None:
    command = [sys.executable, "-m", "panscan", "crops", "doc.png"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    _, said = process.communicate()
    assert process.returncode == 0, said.decode()
    assert b"Traceback" not in said and b"BrokenPipe" not in said


# Records from anywhere: whatever JSON stands in whatever place, commands answer or refuse it in one line.


CELLS = {"a": {"batch_size": 1}, "b": {"batch_size": 2}}
LINES: list[dict[str, Any]] = [header(CELLS)]
for cell in CELLS:
    LINES += [*batches_of(cell, [1.0, 2.0]), outcome(cell, "done"), verdict(cell, "exact", 1.0)]
LINES += [load([*CELLS], {"text": {"layers": 2}}), truth()]
ODD = [None, True, 0, -1, 1.5, 1e308, 10**40, float("nan"), "", "x", "\ud83d", [], [1], ["x"], [{}], {}, {"x": 1}]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything inside a JSON value, and to a new key of each object."""
    if not isinstance(value, dict | list):
        return
    for key, inside in [*value.items(), ("new", None)] if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        yield from places(inside, (*path, key))


def changed(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    if not path:
        return odd
    copy = value.copy()
    inside = copy.get(path[0]) if isinstance(copy, dict) else copy[path[0]]
    copy[path[0]] = changed(inside, path[1:], odd)
    return copy


PLACES = [(number, path) for number, line in enumerate(LINES) for path in places(line)]


@pytest.fixture(scope="module")
def odd_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    write_run(path / "good", LINES)
    (path / "odd").mkdir()
    return path


@settings(max_examples=60)
@given(place=st.sampled_from(PLACES), odd=st.sampled_from(ODD))
def test_any_json_in_any_place_is_read_or_refused(odd_runs: Path, place: tuple[int, Any], odd: Any) -> None:
    lines = [changed(line, place[1], odd) if number == place[0] else line for number, line in enumerate(LINES)]
    good, bad = str(odd_runs / "good"), str(odd_runs / "odd")
    (odd_runs / "odd" / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for words in (["report", bad, "--format", "md"], ["compare", good, bad], ["recommend", bad, "--json"]):
        output = ["-o", str(odd_runs / "preset.yaml"), "--force"] if words[0] == "recommend" else []
        assert run([*words, *output]) in (0, 3), words
