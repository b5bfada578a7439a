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

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.analysis.noisy_runs import noisy_records
from tests.cli.conftest import Panscan
from tests.conftest import noise
from tests.forked_workers import program
from tests.inspect.trace.kineto import decode_trace
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
    swept = [header({"c1": {"attention": "sdpa"}, "c3": {}}), *batches_of("c1", [0.5, 0.51, 0.52] * 4)]
    write_run(place / "swept", [*swept, verdict("c1", "close", 3.1), outcome("c3", "oom", "no\nroom")])
    for name, text in FILES.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    (place / "latin.json").write_bytes(b"\xff")
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
TAKE_A_PATH += ("bench doc.png --prompts", "bench doc.png -p x --output-dir")
REPLICATED = "bench doc.png --runner engine --device cuda --replicas"
INT4 = "quantize tiny out --quantization int4"
AS_JSON = "ask doc.png -p x --model no/such --json-schema"
NEED_TORCH = ("attention", "load", "verify", "profile", "quantize", "--replicas ", "--raw-prompt", "--measure")
NEED_TORCH += ("--regex", "--tool-choice")
MISTAKES: list[tuple[Any, ...]] = [
    # Commands, and options of another command or tool
    ("bnech", 2, "'bnech'", "did you mean 'bench'"),
    ("run doc.png", 2, "'run'", "did you mean 'ask'"),
    ("chat", 2, "'chat'", "(did you mean 'ask'?); panscan --help lists the commands"),
    ("eval --dataset q.jsonl", 2, "'eval'", "did you mean 'bench'"),
    ("bench doc.png -p x --bach-size 2", 2, "--bach-size", "--batch-size"),
    ("ask doc.png -p x --max-concurrency 2", 2, "--max-concurrency", "panscan ask --help"),
    ("ask doc.png -p x --model", 2, "--model", "requires an argument"),
    *((f"{line} --max-model-len 4096", 2, "--max-model-len: ", "--kv-cache-gb") for line in (*ASKING, "serve")),
    ("batch doc.png -p x -o a --max-num-batched-tokens=1", 2, "--max-num-batched-tokens", "--prefill-chunk"),
    ("serve --limit-mm-per-prompt '{\"image\": 2}'", 2, "--limit-mm-per-prompt", "--max-images"),
    ("ask doc.png -p x --mm-processor-kwargs {}", 2, "--mm-processor-kwargs", "--max-num-crops"),
    ("bench doc.png -p x --enforce-eager", 2, "--enforce-eager", "--runner generate"),
    ("ask doc.png -p x --trust-remote-code", 2, "--trust-remote-code", "leave it out"),
    ("ask doc.png -p x --do_sample true", 2, "--do-sample", "--temperature above 0"),
    ("ask doc.png -p x --load-in-4bit", 2, "--load-in-4bit", "use --quantization bnb-4bit"),
    ("ask doc.png -p x --seed 3", 2, "--seed: use --sampling-seed"),
    ("samples s --again", 2, "--again", "use --force"),
    ("batch doc.png -p x -o a --no-images", 2, "No such option"),
    ("bench --no-prefix-caching=true", 2, "--no-prefix-caching takes no value; use --prefix-caching=true"),
    # Values
    ("bench --batch-size 1,x", 2, "--batch-size", "a whole number from 1 to 65536"),
    ("bench --batch-size 1,,2", 2, "--batch-size", "empty value"),
    ("bench doc.png --repeats 0", 2, "--repeats"),
    ("samples out --count 0", 2, "count"),
    ("samples notes.txt", 3, "samples cannot be written to notes.txt"),
    ("bench --num-prompts 0", 2, "--num-prompts is out of range: it must be a whole number from 1 to 1000000, got 0"),
    ("samples sets --format genai", 2, "--format"),
    ("ask doc.png -p x --gpu-memory-utilization 92", 2, "--gpu-memory-utilization", "0.92 is 92%"),
    ("ask doc.png -p x --vision-cache-gb 0 --model ./nowhere", 2, "got 0.0 (it holds"),
    ("ask doc.png -p x --dtype bf17", 2, "--dtype", "did you mean 'bf16'"),
    ("ask doc.png -p x --quantization awq", 2, "--quantization", "fp8, int8, int4"),
    ("ask doc.png -p x --preset balancd", 2, "--preset", "did you mean 'balanced'"),
    ("ask doc.png -p x --preset two.yaml", 2, "one pan_and_scan_max_num_crops"),
    ("ask doc.png -p x --preset sice.yaml", 2, "did you mean 'batch_size'"),
    ("ask doc.png -p x --cache_implementation static", 2, "use --cache static or dynamic"),
    ("ask doc.png -p x --model gemma-3-27b-it", 3, "gemma-3-27b-it:", "google/gemma-3-27b-it"),
    ("ask doc.png -p x --model ./nowhere", 3, "--model ./nowhere: there is no such directory"),
    ("bench doc.png -p x --model mini,gemma3:4b", 3, "--model gemma3:4b", "google/gemma-3-4b-it"),
    ("bench doc.png -p x --model gemma-3-4b-pt --dry-run", 3, "-4b-pt", "--model-shape 4b"),
    # Prompts, answers and their forms
    ("ask doc.png", 2, "-p: no prompt is given"),
    ("ask doc.png -p ' '", 2, "the prompt is empty; give a question with -p"),
    ("batch docs -p ' ' -o a", 2, "the prompt is empty"),
    *((f"bench {words}", 2, "prompt") for words in ("-p ''", "docs -p ''", "docs -p ' \n'", "docs -p \udcff")),
    ("bench docs --system \udcff", 2, "--system"),
    ("ask doc.png 'What is the total?'", 2, "-p: 'What is the total?' was taken as an image; give the question"),
    ("ask doc.png -p x --raw-prompt", 2, "0 image placeholder(s)"),
    (f"{AS_JSON} open.json", 2, "--json-schema open.json: is not valid JSON"),
    (f"{AS_JSON} list.json", 2, "--json-schema list.json: must be a JSON object"),
    (f"{AS_JSON} banana.json", 2, "banana.json: Invalid type: banana"),
    (f"{AS_JSON} long.json", 3, "--json-schema long.json: larger than 65,536 bytes"),
    (f"{AS_JSON} latin.json", 3, "--json-schema latin.json: not UTF-8 text"),
    (f"{AS_JSON} none.json", 3, "--json-schema none.json: cannot be read: No such file"),
    (f"{AS_JSON} any.json --ignore-eos", 2, "exclude each other"),
    (f"{AS_JSON} any.json --attention eager", 2, "runner generate: use --runner engine without --attention"),
    (f"{AS_JSON} any.json --runner pipeline", 2, "--json-schema is not supported by runner pipeline: use --run"),
    ("batch docs -p x -o a --choice b --regex a", 2, "regex and choice exclude each other"),
    ("batch docs -p x -o a --regex (", 2, "--regex: "),
    ("batch docs -p x -o a --tools tools.json --tool-choice fly", 2, "no tool has the name 'fly'"),
    ("batch docs -p x -o a --tools doc.png", 3, "--tools doc.png: not UTF-8"),
    # Contradictions
    ("bench doc.png --no-verify --reference truth.pt", 2, "exclude each other"),
    ("bench doc.png -p x --prompts prompts.txt", 2, "exclude each other"),
    ("bench doc.png --dataset q.jsonl", 2, "--dataset has its own images"),
    ("batch docs/q.jsonl -p x -o a", 2, "a dataset has its own questions: remove -p"),
    ("bench --dataset q.jsonl -p x", 2, "has its own"),
    (
        "bench doc.png --raw-prompt -p x --template-kwargs '{\"a\": 1}'",
        2,
        "--template-kwargs: a raw prompt has no templ",
    ),
    ("bench --no-images -p x doc.png", 2, "--no-images contradicts"),
    ("bench --no-images", 2, "--no-images needs"),
    ("bench --resume nowhere --batch-size 2", 2, "--resume takes the run's own settings"),
    ("bench --resume runs/x --grid x", 2, "'--grid'"),
    ("bench --resume runs/x x.png", 2, "[IMAGE]"),
    ("bench --resume runs/x -p x", 2, "'--prompt'"),
    ("bench doc.png -p x --no-pan-and-scan --max-num-crops 2", 2, "--max-num-crops", "leave out"),
    ("ask doc.png -p x --quantization bnb-4bit -tp 2", 2, "bnb-4bit", "fp8, int8"),
    ("ask doc.png -p x --device-map auto --device cpu", 2, "--device cpu", "leave out one"),
    ("ask doc.png -p x --random-weights", 2, "--random-weights", "add --model-shape"),
    ("batch docs -p x -o a --retry-failed", 2, "--retry-failed needs --resume"),
    ("batch docs -p x -o a --resume --force", 2, "use only one"),
    ("batch -p x -o a", 2, "Missing argument"),
    ("batch docs -p x -o a --attention eager", 2, "--attention: not supported by panscan batch, which runs on the eng"),
    ("batch docs -p x -o a --runner pipeline", 2, "--runner pipeline: not supported by panscan batch", "panscan ask"),
    ("serve --preset generate.yaml", 2, "--preset generate.yaml: runner generate: not supported by panscan serve"),
    ("serve --print-config --runner generate", 2, "--runner generate: not supported", "use panscan ask or panscan ben"),
    ("bench doc.png --tp-plan auto", 2, "--tp-plan: removed; use --tensor-parallel-size with the engine"),
    ("bench doc.png --replicas 2 --device cuda:0", 2, "--device cuda:0: --replicas chooses the GPUs"),
    ("bench doc.png --replicas 2 --gpus-per-replica 2 --device cpu", 2, "--gpus-per-replica 2: this runs on"),
    ("bench doc.png --replicas 2 --gpus-per-replica 2 --device cuda", 2, "needs --device-map or --tensor-p"),
    ("bench doc.png --replicas 0", 2, "--replicas"),
    (f"{REPLICATED} 2 -tp 4 --gpus-per-replica 2", 2, "--gpus-per-replica 2 is less than --tensor-parallel-size 4"),
    (f"{REPLICATED} 2 -tp 1 --gpus-per-replica 2", 2, "2 needs --device-map or --tensor-parallel-size 2"),
    # Files
    ("ask none.png -p x", 3, "none.png: no such file"),
    ("ask none.png -p x --model ./nowhere", 3, "none.png: no such file"),
    ("ask notes.txt -p x", 3, "notes.txt", "not"),
    ("ask three.tif -p x --max-pages 2", 3, "three.tif: has more than 2 pages: raise --max-pages"),
    ("ask three.tif#page=3 -p x --max-pages 2", 3, "page 3 is beyond the first 2: raise --max-pages"),
    ("bench --images none*.png", 3, "no readable image is left"),
    ("bench doc.png --prompts none.txt", 3, "--prompts none.txt: cannot be read: No such file"),
    ("bench --dataset none.jsonl", 3, "--dataset none.jsonl: No such file"),
    *((f"bench --dataset bad{number}.jsonl", 3, "line 2", fault) for number, fault in enumerate(ROWS.values())),
    ("bench --dataset DocVQA --dataset-split train", 3, "--dataset-split train: not in DocVQA: it has validation"),
    ("bench --dataset DocVQA --dataset-format chartqa", 3, "no files of layout chartqa"),
    ("bench --dataset DocVQA --quality-metric vqa_accuracy", 2, "requires questions with 10 answers each"),
    ("bench doc.png -p x --grid none.yaml", 2, "none.yaml", "No such file"),
    ("bench doc.png -p x --grid grid.yaml", 2, "grid.yaml", "did you mean 'batch_size'"),
    ("bench doc.png -p x --grid vllm.yaml", 2, "vllm.yaml: max_model_len", "--kv-cache-gb"),
    ("bench --resume nowhere", 3, "nowhere"),
    ("bench --resume schema", 3, "schema 99"),
    ("bench doc.png -p x --output-dir notes.txt", 3, "--output-dir notes.txt: cannot be written"),
    ("crops none.png", 3, "no readable image is left"),
    ("crops doc.png -o ./doc.png", 2, "is the image itself"),
    ("batch doks -p x -o a", 3, "doks: no such file or directory"),
    ("batch docs doks* -p x -o a", 3, "doks*: no image or PDF file matches"),
    ("batch doc.png -p x -o answers.jsonl", 3, "answers.jsonl", "--resume, or replace them with --force"),
    ("batch docs -p x -o -", 3, "-o -: not a regular file: use a separate regular file, so that the job can be res"),
    ("batch table.csv -o a", 2, "table.csv: tables are read as Parquet (.parquet) or JSON Lines (.jsonl)"),
    ("batch docs -p x -o docs/0.png --force", 3, "-o docs/0.png would overwrite docs/0.png, a source of this job"),
    ("batch docs -p x -o any.json --force --json-schema any.json", 3, "-o any.json would overwrite any.json"),
    ("batch docs/q.jsonl -o docs/q.jsonl --force", 3, "-o docs/q.jsonl would overwrite docs/q.jsonl"),
    ("batch docs -p x -o docs/0.png/x.jsonl", 3, "-o docs/0.png/x.jsonl: docs/0.png is a file, not a directory"),
    ("batch docs -p x -o deep/er/a.jsonl --model ./nowhere", 3, "nowhere"),
    ("batch docs -p x -o deep/er/a.jsonl --force --model ./nowhere", 3, "nowhere"),
    ("attention doc.png -p x --model tiny --attention flash_atention_2", 2, "did you mean 'flash_attention_2'"),
    ("attention doc.png -p x --model tiny -o picture.jpg", 2, "ends in .png"),
    ("attention doc.png -p x --model tiny -o doc.png", 2, "is one of the images"),
    ("attention absent.png -p x --model tiny", 3, "absent.png: no such file"),
    ("attention torn.png -p x --model tiny", 3, "torn.png"),
    # Runs
    ("report nowhere", 3, "nowhere", "not a run directory"),
    ("report schema", 3, "schema 99"),
    ("report garbled", 3, "not a JSON object"),
    ("report half", 3, "holds no records"),
    ("report header --format png", 3, "no curve to draw"),
    ("report header --format pdf", 2, "got 'pdf'"),
    ("report header -o .", 2, "--output . is a folder"),
    ("report run -o run/records.jsonl", 2, "would replace the records of the run"),
    ("report header -o nowhere/x.html", 3, "nowhere/x.html could not be written"),
    ("report header --format png -o notes.txt/x", 3, "--output notes.txt/x"),
    ("report run --quality-metric anlz", 2, "did you mean 'anls'"),
    ("compare run", 2, "compare takes 2 to 26 runs, got 1"),
    (f"compare {'run ' * 27}", 2, "got 27"),
    ("compare run nowhere", 3, "does not exist: not a run directory"),
    ("compare run schema", 3, "has schema 99"),
    ("compare run garbled", 3, "line 2: not a JSON object"),
    ("compare run run --strict", 2, "--fail-on, which is missing"),
    ("compare run run --format xml", 2, "xml"),
    ("recommend swept --max-p95-ms 100", 3, "has p95 E2E <= 100 ms: the lowest is 520 ms with sdpa attention"),
    ("recommend nowhere", 3, "nowhere does not exist"),
    ("recommend swept -o preset.txt", 2, "a preset's name ends in .yaml"),
    ("recommend swept -o no/folder/preset.yaml", 3, "could not be written"),
    # Endpoints
    ("load", 2, "Missing argument 'URL'"),
    ("load http://a:1 http://b:pw@c:1", 2, "unexpected extra argument (http://***@c:1)"),
    ("load ftp://a", 2, "expected the URL of an endpoint"),
    ("load http://a:1 tpot:50", 2, "unexpected extra argument (tpot:50)"),
    ("load http://a:1 --find-max-rate", 2, "--find-max-rate needs limits"),
    ("load http://a:1 --max-concurrency 2.5", 2, "--max-concurrency takes a whole number"),
    ("load http://a:1 --ramp-up-strategy linear", 2, "--ramp-up-strategy: removed; use --trace"),
    ("load http://a:1 --scenario w3", 2, "--scenario: expected distinct-documents"),
    ("load http://a:1 --scenario mixed-documents --images x", 2, "draws its documents"),
    ("load http://a:1 --header nonsense", 2, "--header: expected NAME:VALUE"),
    ("load http://a:1 --trace none.jsonl", 2, "--trace none.jsonl: cannot be read"),
    ("load http://a:1 --max-num-crops 0", 2, "out of range"),
    ("load http://127.0.0.1:9 --ready-check-timeout-sec 0", 3, "connection refused; is the server running?"),
    ("verify", 2, "URL is missing"),
    ("verify http://127.0.0.1:9", 2, "--model is missing"),
    ("verify http://127.0.0.1:9 --export-kit kit --max-requests 4", 2, "remove --max-requests, URL"),
    ("verify --export-kit .", 2, "--export-kit .: the directory is not empty"),
    ("verify http://127.0.0.1:9 --model tiny --images x.png", 2, "--images and --prompt go together"),
    ("verify ftp://x --model tiny", 2, "expected the URL of an endpoint"),
    ("verify http://127.0.0.1:9 --model tiny --max-requests 33", 2, "--max-requests"),
    ("verify http://127.0.0.1:9 --model tiny", 3, "GET /v1/models: connection refused"),
    # Adapters
    *((f"{line} --adapter tiny", 3, "--adapter tiny: not an adapter") for line in ASKING),
    ("serve --port 0 --model tiny --adapter=a=x --adapter=b", 2, "--adapter b: name each adapter"),
    ("serve --port 0 --model tiny --adapter=a=x --adapter=a=y", 2, "--adapter a=y: another model has the name a"),
    ("serve --port 0 --model tiny --adapter=tiny=x", 2, "--adapter tiny=x: another model has the name tiny"),
    ("serve --port 0 --model tiny --adapter=a=x --replicas=2", 2, "--replicas: not supported with --adapter NAME"),
    ("serve --port 0 --model tiny --adapter=a=/nowhere/x", 3, "--adapter /nowhere/x: there is no such directory"),
    *((f"serve --adapter={word}", 2, f"--adapter {word}: expected NAME=ADAPTER") for word in ("a=", "=x")),
    # Plans, profiles, traces and checks
    ("plan --model 27b", 2, "--gpu is missing"),
    ("plan --model 27b --gpu a100-40g", 2, "did you mean 'a100-40gb'?"),
    ("plan --model 28b --gpu l4", 2, "did you mean '27b'?"),
    ("plan --model gemma-3-4b --gpu l4", 2, "unknown model 'gemma-3-4b'"),
    ("plan --model /missing/gemma-3-4b-it --gpu l4", 2, "unknown model '/missing/gemma-3-4b-it'"),
    ("plan --model 27b --gpu l4 --count 0", 2, "--count is out of range"),
    ("plan --model 27b --gpu l4 --quantization int9", 2, "did you mean 'int8'?"),
    ("plan --model 27b --gpu l4 --goodput ttft:5", 2, "--goodput needs --request-rate"),
    ("plan --model 27b --gpu l4 --request-rate 1 --goodput tfft:5", 2, "did you mean 'ttft'?"),
    ("plan --model 27b --gpu l4 --request-rate 1 --goodput ''", 2, "--goodput has no limit"),
    ("plan --model 27b --gpu l4 more", 2, "unexpected extra argument (more)"),
    ("plan --model 27b --gpu l4 --max-new-tokens 9-3", 2, "write 3-9"),
    ("plan --model 27b --gpu l4 --max-new-tokens 1000000", 2, "ends at 131,072"),
    ("plan --model 27b --gpu l4 --images x.png --view-mix 1", 2, "exclude each other"),
    ("plan --model 27b --measure --gpu h200", 2, "remove --gpu"),
    ("plan --model 27b --gpu cpu --count 3", 2, "--count 3: a plan for a CPU is for one machine"),
    ("profile --runner engien", 2, "--runner takes generate, engine; got 'engien' (did you mean 'engine'?)"),
    ("profile --mode statik", 2, "did you mean 'static'"),
    ("profile --mode static,", 2, "--mode has an empty value"),
    ("profile --mode static --runner engine", 2, "--mode is for --runner generate"),
    ("profile --runner engine --attention eager", 2, "--attention is for --runner generate"),
    ("profile --runner generate --kv-cache-gb 1", 4, "--kv-cache-gb is for --runner engine"),
    ("profile --tensor-parallel-size 2", 4, "--tensor-parallel-size 2: the profiler records one process; use 1"),
    ("profile --memory --runner engine", 2, "--memory is for --runner generate"),
    ("profile --max-new-tokens 0", 2, "--max-new-tokens is out of range"),
    ("profile -p ' '", 2, "--prompt is empty"),
    ("profile missing.png", 3, "missing.png"),
    ("profile --batch-size 2 doc.png doc.png doc.png", 2, "each request takes one of the 3 images"),
    ("profile --model no-such", 3, "--model no-such"),
    ("profile --random-weights --model-shape 1b doc.png", 2, "reads text only"),
    ("trace cut.json", 3, "cut.json: truncated: the file ends inside an event after"),
    ("trace missing.json", 3, "missing.json: No such file"),
    ("trace trace.json.gz --step prepare_input_for_generation", 2, "did you mean 'prepare_inputs_for_gener"),
    ("trace trace.json.gz --top 0", 2, "--top"),
    ("trace trace.json.gz --html .", 2, "--html . is a folder"),
    ("trace trace.json.gz --html trace.json.gz", 2, "--html trace.json.gz would replace a trace"),
    (f"trace {'trace.json.gz ' * 9}", 2, "trace takes 1 to 8 files, got 9"),
    ("trace", 2, "FILE"),
    ("doctor --only hots", 2, "no group or check is called 'hots' (did you mean 'host'?)"),
    ("doctor --timeout 0", 2, "--timeout"),
    # Checkpoints to write
    ("quantize tiny out --quantization int3", 2, "int4"),
    ("quantize tiny out", 2, "--quantization is missing"),
    ("quantize tiny . --quantization int8", 2, "not the root or the current directory"),
    (f"{INT4} --quantization-group-size 48", 2, "use 128 or 64 or 32"),
    ("quantize tiny out --quantization int8 --quantization-group-size 64", 2, "only int4 has groups"),
    (f"{INT4} -p What?", 2, "--prompt requires calibration documents"),
    (f"{INT4} --calibration torn.png", 3, "--calibration torn.png: no readable image is left"),
    (f"{INT4} --model mini", 2, "--model requires --audit"),
    (f"{INT4} --audit mini", 2, "writes nothing"),
    (f"{INT4} --no-verify --dataset questions.jsonl", 2, "--dataset requires --verify"),
    (f"{INT4} --seed 1", 2, "--seed requires --dataset or --calibration"),
    (f"{INT4} --max-pages 9", 2, "--max-pages requires --calibration"),
    (f"{INT4} --calibration none.jsonl", 3, "--calibration none.jsonl"),
    # Paths that no file system takes
    *((f"{line} {LONG}", 3, "too long") for line in (*TAKE_A_PATH, f"compare {LONG}", "batch doc.png -p x -o")),
    (f"crops doc.png -o {LONG}.png", 3, "too long"),
    (f"bench doc.png --grid {LONG}", 2, "too long"),
    # What this machine or runner cannot do
    ("ask doc.png -p x --runner engine --attention eager", 4, "--attention must stay at"),
    ("ask doc.png -p x --runner engine --device_map auto", 4, "use --tensor-parallel-size"),
    ("ask doc.png -p x --runner generate --kv-cache-gb 1", 4, "--kv-cache-gb is for"),
    ("ask doc.png -p x --attention eager --kv-cache-gb 1", 4, "--kv-cache-gb is for"),
    ("ask doc.png -p x --kv-cache-gb 1e-6", 4, "raise it to at least"),
    ("ask doc.png -p x --quantization fp8 --device cpu", 4, "on a CPU use int8 or int4"),
    ("ask doc.png -p x --quantization int4 --quantization-group-size 128", 4, "groups of 128 do not divide 576 input"),
    ("ask doc.png -p x --quantize-vision fp8 --device cpu", 4, "8.9 or later; on a CPU use int8 or none"),
    ("ask doc.png -p x --runner generate -tp 2", 4, "--tensor-parallel-size is for --runner engine"),
    ("ask doc.png -p x --device cuda:99", 4, "NVIDIA GPU(s)"),
    ("bench doc.png --replicas 99 --device cuda", 4, "--replicas 99 with --gpus-per-replica 1 need 99 GPUs"),
    (f"{REPLICATED} 99 -tp 1,2,4", 4, "--replicas 99 with --tensor-parallel-size 4 need 396 GPUs"),
    (f"{REPLICATED} 99 -tp 2 --gpus-per-replica 2", 4, "--replicas 99 with --tensor-parallel-size 2 need 198 GPUs"),
]


def contents(folder: Path) -> dict[Path, int]:
    """Every path below a folder, with when it changed."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[0][:60])
def test_a_mistake_is_one_line_with_the_fix_and_changes_nothing(
    mistake: tuple[Any, ...], stocked: Path, panscan: Panscan
) -> None:
    before = contents(stocked)
    line, code, *parts = mistake
    said = panscan(line, code=code)
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
    lines += [line for line, code, *_ in MISTAKES if code == 2 and not any(word in line for word in NEED_TORCH)]
    lines += [f"ask doc.png -p x {words}" for words in ("--model gemma-3-27b-it", "--quantization bnb-4bit")]
    lines += ["bench doc.png -p x --model gemma-3-4b-pt --dry-run", "batch doc.png -p x -o answers.jsonl"]
    words = json.dumps([shlex.split(line) for line in lines])
    done = subprocess.run([sys.executable, "-c", code, words], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr.splitlines()[-1]


@pytest.mark.parametrize("line", ["ask doc.png -p x", "batch doc.png -p x -o a", "serve --port 0"])
def test_a_missing_package_is_one_line_with_the_fix(
    line: str, stocked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(weight_formats, "find_spec", lambda _: None)
    assert run([*line.split(), "--quantization", "bnb-8bit" if "batch" in line else "bnb-4bit"]) == 4
    assert "bitsandbytes: pip install bitsandbytes" in capsys.readouterr().err.splitlines()[-1]


def test_a_message_is_one_printable_line(folder: Path, panscan: Panscan) -> None:
    said = panscan("ask", "a\nb\x1b[31m.png", "-p", "x", code=3)
    assert said.err == "panscan: a\\nb\\x1b[31m.png: no such file or directory\n"


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
