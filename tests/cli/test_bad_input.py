"""Bad input on the real command line: one line that names the knob, and the documented exit code."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import noise
from tests.forked_workers import program

from panscan.cli.main import run
from panscan.records.store import SCHEMA

pytestmark = pytest.mark.usefixtures("without_charts")


@pytest.fixture
def folder(folder: Path) -> Path:
    """A working directory with a picture and a prompt file."""
    noise(300, 900).save(folder / "doc.png")
    noise(40, 40).save(folder / "three.tif", save_all=True, append_images=[noise(40, 40, 1), noise(40, 40, 2)])
    (folder / "prompts.txt").write_text("What is it?\n")
    return folder


CASES = [
    ("bench doc.png --no-verify --reference truth.pt", 2, "exclude each other"),
    ("bench doc.png -p x --prompts prompts.txt", 2, "exclude each other"),
    ("bench doc.png --dataset q.jsonl", 2, "--dataset has its own images"),
    ("bench doc.png --no-images -p x", 2, "--no-images contradicts"),
    ("bench --no-images", 2, "--no-images needs"),
    ("bench doc.png --repeats 0", 2, "--repeats"),
    ("bench three.tif -p x --max-pages 2", 3, "three.tif: has more than 2 pages: raise --max-pages"),
    ("ask three.tif -p x --max-pages 2", 3, "three.tif: has more than 2 pages: raise --max-pages"),
    ("crops three.tif --max-pages 2", 3, "three.tif: has more than 2 pages: raise --max-pages"),
    ("ask three.tif#page=3 -p x --max-pages 2", 3, "page 3 is beyond the first 2: raise --max-pages"),
    ("bench --resume nowhere", 3, "nowhere"),
    ("bench --resume nowhere --batch-size 2", 2, "--resume takes the run's own settings"),
    ("bench --images none*.png", 3, "no readable image is left"),
    ("bench doc.png --prompts none.txt", 3, "--prompts none.txt: No such file"),
    ("bench --dataset none.jsonl", 3, "--dataset none.jsonl: No such file"),
    ("bench doc.png --model ./nowhere", 4, "no such directory"),
    ("ask doc.png -p What? --model ./nowhere", 3, "--model ./nowhere: there is no such directory"),
    ("ask none.png -p What? --model ./nowhere", 3, "none.png: no such file"),
    ("ask doc.png -p ' '", 2, "the prompt is empty; give a question with -p"),
    ("ask doc.png 'What is the total?'", 2, "-p: 'What is the total?' was taken as an image; give the question"),
    ("ask doc.png -p What? --runner engine --attention eager", 4, "--attention must stay at"),
    ("ask doc.png -p What? --runner engine --device_map auto", 4, "use --tensor-parallel-size"),
    ("ask doc.png -p What? --cache_implementation static", 2, "use --cache static or dynamic"),
    ("ask doc.png -p What? --runner generate --kv-cache-gb 1", 4, "--kv-cache-gb is for"),
    ("ask doc.png -p What? --attention eager --kv-cache-gb 1", 4, "--kv-cache-gb is for"),
    ("ask doc.png -p What? --vision-cache-gb 0 --model ./nowhere", 2, "got 0.0 (it holds"),
    ("ask doc.png -p What? --kv-cache-gb 1e-6", 4, "raise it to at least"),
    ("ask doc.png -p What? --quantization fp8 --device cpu", 4, "on a CPU use int8 or int4"),
    (
        "ask doc.png -p What? --quantization int4 --quantization-group-size 128 --device cpu",
        4,
        "--quantization-group-size 128: groups of 128 do not divide 576 input channels",
    ),
    ("ask doc.png -p What? --raw-prompt", 2, "0 image placeholder(s)"),
    ("ask doc.png -p What? --device cuda:99", 4, "NVIDIA GPU(s)"),
    ("crops none.png", 3, "no readable image is left"),
    ("crops doc.png -o doc.png/x.png", 3, "doc.png/x.png could not be written: "),
    ("samples out --count 0", 2, "count"),
]


@pytest.mark.parametrize(("line", "code", "message"), CASES, ids=lambda value: str(value)[:60])
def test_bad_input_is_one_line_and_a_code(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, code: int, message: str
) -> None:
    assert run(shlex.split(line)) == code
    captured = capsys.readouterr()
    said = " ".join((captured.err + captured.out).split())
    assert message in said
    assert "Traceback" not in said


def test_wrong_options_are_refused_before_torch_is_imported(folder: Path) -> None:
    script = (
        "import json, sys\n"
        "from panscan.cli.main import run\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    run(arguments)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(' '.join(arguments))\n"
    )
    # The number of images that a raw prompt needs depends on the model's tokens.
    wrong = json.dumps([shlex.split(line) for line, code, _ in CASES if code == 2 and "--raw-prompt" not in line])
    done = subprocess.run([sys.executable, "-c", script, wrong], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["batch", "doc.png", "-p", "x", "-o", "n" * 5000],
        ["bench", "doc.png", "-p", "x", "--output-dir", "n" * 5000],
        ["crops", "doc.png", "-o", "n" * 5000 + ".png"],
        ["samples", "n" * 5000],
        ["demo", "n" * 5000],
        ["report", "n" * 5000],
        ["recommend", "n" * 5000],
        ["compare", "n" * 5000, "n" * 5000],
        ["bench", "--resume", "n" * 5000],
        ["bench", "doc.png", "--grid", "n" * 5000],
        ["bench", "doc.png", "--prompts", "n" * 5000],
        ["bench", "--dataset", "n" * 5000],
        ["ask", "n" * 5000, "-p", "x"],
    ],
    ids=lambda arguments: " ".join(arguments)[:30],
)
def test_a_path_that_no_file_system_takes_is_one_short_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run(arguments) in (2, 3)
    said = capsys.readouterr().err.splitlines()[-1]
    assert "file name too long" in said.lower() or "no readable image" in said
    assert len(said) < 1200


def test_a_message_is_one_printable_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ask", "a\nb\x1b[31m.png", "-p", "x"]) == 3
    assert capsys.readouterr().err == "panscan: a\\nb\\x1b[31m.png: no such file or directory\n"


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


def test_debug_shows_the_traceback(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ask", "none.png", "-p", "What?", "--debug"]) == 3
    assert "Traceback" in capsys.readouterr().err


def test_an_unwritable_output_is_said_before_anything_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "runs").write_text("a file, not a folder")
    assert run(["bench", "doc.png", "-p", "x"]) == 3
    assert "runs" in capsys.readouterr().err


def test_torn_and_foreign_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = shlex.split("bench doc.png --repeats 1 -p x --max-new-tokens 2 --device cpu --model tiny")
    assert run(arguments) == 0
    [records] = folder.glob("runs/*/records.jsonl")
    whole = records.read_bytes()
    records.write_bytes(whole + b'{"type":"repeat","cell":"to')
    assert run(["bench", "--resume", str(records.parent)]) == 0
    assert records.read_bytes() == whole
    assert b"repeat" in records.with_name("records.jsonl.torn").read_bytes()
    records.write_bytes(whole.replace(f'"schema":{SCHEMA}'.encode(), b'"schema":99', 1))
    capsys.readouterr()
    assert run(["bench", "--resume", str(records.parent)]) == 3
    assert "99" in capsys.readouterr().err


def test_bad_documents_are_left_out_and_the_run_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.png").write_text("no picture")
    (folder / "cut.png").write_bytes((folder / "doc.png").read_bytes()[:2000])
    quick = ["--model", "tiny", "--device", "cpu", "--max-new-tokens", "2"]
    assert run(["bench", "--repeats", "1", "--images", "*.png", "-p", "x", *quick]) == 0
    said = capsys.readouterr().err
    for name in ("empty.png", "text.png", "cut.png"):
        assert said.count(f"skipped: {name}") == 1


def test_bad_datasets_name_the_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"image": "doc.png", "question": "What?"}
    for bad, message in [
        ("{", "line 2: not JSON"),
        (json.dumps({**row, "answer": ["x"]}), "did you mean 'answers'"),
        (json.dumps({**row, "image": 3}), "'image' must be"),
        (json.dumps({**row, "answers": {"right": "x"}}), "'answers' must be texts or numbers"),
        (json.dumps({**row, "question": 3}), "'question' must be text"),
    ]:
        (folder / "q.jsonl").write_text(json.dumps(row) + "\n" + bad + "\n")
        assert run(["bench", "--dataset", "q.jsonl"]) == 3
        assert message in " ".join(capsys.readouterr().err.split())


def test_help_is_quick_and_imports_no_torch() -> None:
    code = (
        "import sys; from panscan.cli.main import run\n"
        "for verb in sys.argv[1:]: run([*verb.split(), '--help'])\n"
        "print([m for m in ('torch', 'transformers', 'PIL', 'matplotlib') if m in sys.modules])"
    )
    verbs = ("", "bench", "ask", "crops", "samples", "report")
    done = subprocess.run([sys.executable, "-c", code, *verbs], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    _, *pages = done.stdout.split("Usage: ")
    assert ["Example" in page for page in pages] == [True] * len(verbs)


def test_a_reader_that_has_seen_enough_is_no_failure(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "panscan", "crops", "doc.png"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    _, said = process.communicate()
    assert process.returncode == 0, said.decode()
    assert b"Traceback" not in said
    assert b"BrokenPipe" not in said
