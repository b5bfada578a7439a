"""What several test files share: one tiny and one mini model per process, and documents drawn for the test."""

import gc
import importlib
import inspect
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

gc.disable()  # until all tests are imported: little of that is garbage, and each collection visits more of it

import numpy as np
import pytest
import torch
from hypothesis import settings
from markupsafe import Markup
from PIL import Image

# Without a GPU, Triton's interpreter runs our kernels. Triton decides as it decorates, its own library first, so this
# comes before Transformers imports it. torch.compile for a CPU makes C++ and is none the wiser.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from tests import forked_workers
from tests.images.site import Site, serving
from transformers import Gemma3ForConditionalGeneration, Gemma3ImageProcessorPil
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
from transformers.modeling_utils import AttentionInterface

from panscan.cli.main import run
from panscan.core.activity import Activity
from panscan.core.lru import LruCache
from panscan.images import fetch
from panscan.images.ink import AILERON
from panscan.model.bundled import mini_directory, tiny_directory
from panscan.model.bundled.random_weights import random_model
from panscan.model.shapes import SHAPES, Shape
from panscan.records.store import Run, read_run
from panscan.report import draw
from panscan.runners.generate import GenerateRunner
from panscan.workload.documents import KINDS, Document, Print, Sheet

needs_images_in_chunks = pytest.mark.skipif(
    "mm_encoder_outputs" not in inspect.signature(Gemma3ForConditionalGeneration.forward).parameters,
    reason="generate(prefill_chunk_size=...) drops the images in this version of Transformers",
)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a background job of a shell ignores it, and so do its children
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("suite", deadline=None)  # machines are busy, and interpreted kernels slow
settings.load_profile("suite")
torch.set_num_threads(1)  # threads of two workers on two cores wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the same for the tests' own subprocesses


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # else full collections, which visit PyTorch, Transformers and all tests, take an eighth of the time
    gc.enable()
    if not torch.cuda.is_available():  # CUDA works in no fork of a process that has asked for its devices
        forked_workers.prepare()


@pytest.fixture(scope="session")
def tiny() -> GenerateRunner:
    """The tiny model in float32 on the CPU, default settings. Tests that change its settings put them back.

    Its processor resizes with Pillow, as Transformers does without torchvision and panscan does on the CPU; with
    torchvision Transformers' default rounds otherwise, and a random model's tokens tell.
    """
    return _by_pillow("tiny", tiny_directory())


@pytest.fixture(scope="session")
def mini() -> GenerateRunner:
    """The model that was trained, else as the fixture ``tiny``."""
    return _by_pillow("mini", mini_directory())


def _by_pillow(model: str, checkpoint: Path) -> GenerateRunner:
    runner = GenerateRunner.from_pretrained(model, dtype="fp32", device="cpu", max_new_tokens=12)
    runner.loaded.reader.processor.image_processor = Gemma3ImageProcessorPil.from_pretrained(checkpoint)
    return runner


@pytest.fixture
def runner(tiny: GenerateRunner) -> Iterator[GenerateRunner]:
    """The tiny model, its settings put back afterwards."""
    before = tiny.settings
    yield tiny
    tiny.configure(before)


@pytest.fixture
def trained(mini: GenerateRunner) -> Iterator[GenerateRunner]:
    """The mini model, its settings put back afterwards."""
    before = mini.settings
    yield mini
    mini.configure(before)


def refuse(problem: Exception) -> None:
    """Raise a problem that most callers report and skip."""
    raise problem


def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait for a condition; a test fails if it does not hold in time, which is long for a busy machine."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.01)


def until_in(process: subprocess.Popen[Any], condition: Callable[[], object], seconds: float = 240.0) -> None:
    """Wait for a condition that a process brings about; a test fails if the process ends before."""

    def holds() -> object:
        assert process.poll() is None, "the process ended before it could be stopped"
        return condition()

    until(holds, seconds)


@contextmanager
def file_size_limit(most: int) -> Iterator[None]:
    """Let this process write no file beyond so many bytes, as where a disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def only_run(folder: Path, output: str = "runs") -> Run:
    """Return the one run of a working directory."""
    [directory] = (folder / output).iterdir()
    return read_run(directory)


class RecordedSteps:
    """A display of progress that keeps what it shows: text, progress and total of the running steps."""

    def __init__(self) -> None:
        self.shown: list[list[tuple[str, float, float | None]]] = []

    def show(self, running: list[Activity]) -> None:
        self.shown.append([(step.text, step.done, step.total) for step in running])


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of random levels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def documented(verb: str, output: str) -> Any:
    """Read what ``--json`` printed; docs/output.md names its keys, and those of objects in its lists."""
    page = (Path(__file__).parent.parent / "docs" / "output.md").read_text("utf-8")
    named = set(re.findall(r"`(\w+)`", re.findall(rf"^\| `{verb}` \|.*", page, flags=re.M)[0]))
    document = json.loads(output)
    lists = [document] if isinstance(document, list) else [[document], *document.values()]
    rows = [row for rows in lists if isinstance(rows, list) for row in rows if isinstance(row, dict)]
    assert sorted({key for row in rows for key in row} - named) == []
    return document


def printed(kind: str, width: int, height: int) -> Document:
    """A made-up document in print that the mini model was trained on, with questions about it."""
    style = Print(size=Print.size_for(AILERON, min(width, height), columns=26))
    draw, _ = KINDS[kind]
    return draw(Random(kind), Sheet(width, height, style), 0)


@pytest.fixture(scope="session")
def interpreter() -> None:
    """Triton's interpreter: skip where Triton has no package, or a GPU runs the kernels (test_gpu.py has it)."""
    importlib.import_module("tests.triton_here")
    if torch.cuda.is_available():
        pytest.skip("for the interpreter: test_gpu.py has it for a GPU")


@pytest.fixture
def without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without drawings, which take longer than a small sweep; tests/report draws them."""
    for name in ("chart_markup", "key_markup"):
        monkeypatch.setattr(draw, name, lambda *_: Markup("<svg></svg>"))


Panscan = Callable[..., Any]
"""The type of :func:`panscan`."""


@pytest.fixture
def panscan(capsys: pytest.CaptureFixture[str]) -> Panscan:
    """Runs a command line, whose first argument is split as a shell does; returns what it printed."""

    def command(line: str, *words: str, code: int = 0) -> Any:
        capsys.readouterr()
        assert run([*shlex.split(line), *words]) == code
        return capsys.readouterr()

    return command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; many files put documents into theirs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A web server on this machine that may be fetched from, and nothing fetched yet."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv(fetch.ALLOW_PRIVATE, "1")
    monkeypatch.setattr(fetch, "_CACHE", LruCache(fetch.CACHE_BYTES, len))
    with serving() as server:
        yield server


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    command += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    subprocess.run(command.split(), check=True, capture_output=True)
    return certificate, key


@pytest.fixture
def documents(tmp_path: Path) -> list[Path]:
    """Three small pictures: tall (crops), wide (crops), square (none)."""
    return draw_documents(tmp_path)


def draw_documents(folder: Path) -> list[Path]:
    """Draw the pictures of the fixture ``documents``."""
    paths = [folder / f"doc{seed}.png" for seed in range(3)]
    for seed, size in enumerate([(256, 800), (900, 300), (300, 300)]):
        noise(*size, seed).save(paths[seed])
    return paths


@pytest.fixture(scope="session")
def text_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a text-only Gemma 3 of few weights: what 270M and 1B are, smaller."""
    place = tmp_path_factory.mktemp("text-only")
    small = replace(SHAPES["tiny"].text, layers=3)
    model, tokenizer = random_model(Shape("small", small, None, 0), dtype=torch.float32, device="cpu")
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, driven by Playwright; tests are skipped where one of them is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium or Chrome is installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def causal() -> Iterator[str]:
    """Attention that is causal at image tokens, as Transformers' flash masks make it."""

    def forward(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        at = torch.arange(key.shape[2], device=key.device)[None]
        last = at[0, key.shape[2] - query.shape[2] :, None]
        seen = (at <= last) & (at > last - (options.get("sliding_window") or key.shape[2]))
        seen = seen if module.is_causal else torch.ones_like(seen)
        if mask is not None:
            seen = seen & mask[:, None, None, :].bool()
        seen = seen.expand(len(query), 1, *seen.shape[-2:])
        return sdpa_attention_forward(module, query, key, value, seen, **options)

    AttentionInterface.register("test-causal", forward)
    AttentionMaskInterface.register("test-causal", flash_attention_mask)
    yield "test-causal"
    AttentionInterface._global_mapping.pop("test-causal")
    AttentionMaskInterface._global_mapping.pop("test-causal")
