"""The typical mistakes of a first session: each ends with one line that names the option or file, and the fix."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import noise

from panscan.cli.main import run
from panscan.core import weight_formats

ASK = ["ask", "doc.png", "-p", "What?"]
BATCH = ["batch", "doc.png", "-p", "What?", "-o", "answers.jsonl"]
BENCH = ["bench", "--repeats", "1", "doc.png", "-p", "What?"]
SERVE = ["serve", "--port", "0"]

MISTAKES = {
    "verb: typo": (["bnech"], 2, "'bnech'", "did you mean 'bench'"),
    "verb: another tool's": (["run", "doc.png"], 2, "'run'", "did you mean 'ask'"),
    "verb: chat": (["chat"], 2, "'chat'", "(did you mean 'ask'?); panscan --help lists the commands"),
    "verb: evaluate": (["eval", "--dataset", "q.jsonl"], 2, "'eval'", "did you mean 'bench'"),
    "option: typo": ([*BENCH, "--bach-size", "2"], 2, "--bach-size", "--batch-size"),
    "option: of another verb": ([*ASK, "--max-concurrency", "2"], 2, "--max-concurrency", "panscan ask --help"),
    "option: value missing": ([*ASK, "--model"], 2, "--model", "requires an argument"),
    "value: not a number": (["bench", "--batch-size", "1,x"], 2, "--batch-size", "a whole number from 1 to 65536"),
    "value: empty": (["bench", "--batch-size", "1,,2"], 2, "--batch-size", "empty value"),
    "value: out of range": ([*ASK, "--gpu-memory-utilization", "92"], 2, "--gpu-memory-utilization", "0.92 is 92%"),
    "value: typo of a choice": ([*ASK, "--dtype", "bf17"], 2, "--dtype", "did you mean 'bf16'"),
    "value: another tool's": ([*ASK, "--quantization", "awq"], 2, "--quantization", "fp8, int8, int4"),
    "value: model without owner": ([*ASK, "--model", "gemma-3-27b-it"], 3, "gemma-3-27b-it:", "google/gemma-3-27b-it"),
    "value: Ollama's model": ([*BENCH, "--model", "mini,gemma3:4b"], 3, "--model gemma3:4b", "google/gemma-3-4b-it"),
    "value: model in a dry run": ([*BENCH, "--model", "gemma-3-4b-pt", "--dry-run"], 3, "-4b-pt", "--model-shape 4b"),
    "value: preset": ([*ASK, "--preset", "balancd"], 2, "--preset", "did you mean 'balanced'"),
    "vLLM: max-model-len": ([*SERVE, "--max-model-len", "8192"], 2, "--max-model-len", "--kv-cache-gb"),
    "vLLM: batched tokens": ([*BATCH, "--max-num-batched-tokens=1"], 2, "--max-num-batched-tokens", "--prefill-chunk"),
    "vLLM: limit-mm": ([*SERVE, "--limit-mm-per-prompt", '{"image": 2}'], 2, "--limit-mm-per-prompt", "--max-images"),
    "vLLM: processor": ([*ASK, "--mm-processor-kwargs", "{}"], 2, "--mm-processor-kwargs", "--max-num-crops"),
    "vLLM: eager": ([*BENCH, "--enforce-eager"], 2, "--enforce-eager", "--runner generate"),
    "vLLM: remote code": ([*ASK, "--trust-remote-code"], 2, "--trust-remote-code", "leave it out"),
    "Transformers: do_sample": ([*ASK, "--do_sample", "true"], 2, "--do-sample", "--temperature above 0"),
    "Transformers: load_in_4bit": ([*ASK, "--load-in-4bit"], 2, "--load-in-4bit", "use --quantization bnb-4bit"),
    "removed: again": (["samples", "s", "--again"], 2, "--again", "use --force"),
    "contradiction: ranks": ([*ASK, "--quantization", "bnb-4bit", "-tp", "2"], 2, "bnb-4bit", "fp8, int8"),
    "contradiction: crops": ([*BENCH, "--no-pan-and-scan", "--max-num-crops", "2"], 2, "--max-num-crops", "leave out"),
    "contradiction: devices": ([*ASK, "--device-map", "auto", "--device", "cpu"], 2, "--device cpu", "leave out one"),
    "contradiction: random": ([*ASK, "--random-weights"], 2, "--random-weights", "add --model-shape"),
    "contradiction: batch": ([*BATCH, "--retry-failed"], 2, "--retry-failed", "--resume"),
    "file: missing": (["ask", "none.png", "-p", "What?"], 3, "none.png", "no such file"),
    "file: not an image": (["ask", "notes.txt", "-p", "What?"], 3, "notes.txt", "not"),
    "file: grid": ([*BENCH, "--grid", "none.yaml"], 2, "none.yaml", "No such file"),
    "file: grid key": ([*BENCH, "--grid", "grid.yaml"], 2, "grid.yaml", "did you mean 'batch_size'"),
    "file: another tool's grid key": ([*BENCH, "--grid", "vllm.yaml"], 2, "vllm.yaml: max_model_len", "--kv-cache-gb"),
    "file: answers": (BATCH, 3, "answers.jsonl", "--resume, or replace them with --force"),
    "file: run directory": (["report", "nowhere"], 3, "nowhere", "not a run directory"),
    "prompt: none": (["ask", "doc.png"], 2, "-p", "no prompt is given"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_with_the_fix(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    noise(60, 60).save("doc.png")
    Path("notes.txt").write_text("no picture")
    Path("answers.jsonl").write_text("{}\n")
    Path("grid.yaml").write_text("bach_size: [1, 2]\n")
    Path("vllm.yaml").write_text("max_model_len: 8192\n")
    words, code, named, fix = MISTAKES[name]
    assert run(words) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("panscan: ")
    assert named in line
    assert fix in line


@pytest.mark.parametrize("words", [ASK, BATCH, SERVE])
def test_a_missing_package_is_one_line_with_the_fix(
    words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(weight_formats, "find_spec", lambda _: None)
    noise(60, 60).save("doc.png")
    assert run([*words, "--quantization", "bnb-8bit" if words is BATCH else "bnb-4bit"]) == 4
    assert "bitsandbytes: pip install bitsandbytes" in capsys.readouterr().err.splitlines()[-1]


def test_mistakes_are_found_before_pytorch_is_imported(tmp_path: Path) -> None:
    noise(60, 60).save(tmp_path / "doc.png")
    (tmp_path / "answers.jsonl").write_text("{}\n")
    names = ("verb: chat", "value: model without owner", "value: model in a dry run", "file: answers", "vLLM: eager")
    code = (
        "import json, sys; from panscan.cli.main import run; from panscan.core import weight_formats;"
        " weight_formats.find_spec = lambda name: None;"
        " print(*map(run, json.loads(sys.argv[1])), 'torch' in sys.modules)"
    )
    commands = json.dumps([*(MISTAKES[name][0] for name in names), [*ASK, "--quantization", "bnb-4bit"]])
    done = subprocess.run([sys.executable, "-c", code, commands], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == [*(str(MISTAKES[name][1]) for name in names), "4", "False"], done.stderr
