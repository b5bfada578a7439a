"""Models of other kinds than the tiny one, and the reference's answers, computed once per process."""

import json
import shutil
from pathlib import Path

import pytest
from tests.engine.driving import Reference, questions
from tests.model.conftest import edit

from panscan import GenerateRunner
from panscan.engine.structured.grammar import Grammars
from panscan.model.bundled import tiny_directory


@pytest.fixture(scope="session")
def reference(tiny: GenerateRunner) -> Reference:
    return Reference(tiny)


@pytest.fixture(scope="session")
def mini_reference(mini: GenerateRunner) -> Reference:
    return Reference(mini, questions())


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> GenerateRunner:
    """The tiny model with a window of 24 tokens: less than half of an image span."""
    place = tmp_path_factory.mktemp("narrow") / "tiny"
    shutil.copytree(tiny_directory(), place)
    text = json.loads((place / "config.json").read_text())["text_config"]
    edit(place / "config.json", text_config={**text, "sliding_window": 24})
    return GenerateRunner.from_pretrained(str(place), dtype="fp32", device="cpu")


@pytest.fixture(scope="session")
def narrow_reference(narrow: GenerateRunner) -> Reference:
    return Reference(narrow)


@pytest.fixture(scope="session")
def text_runner(text_checkpoint: Path) -> GenerateRunner:
    return GenerateRunner.from_pretrained(str(text_checkpoint), dtype="fp32", device="cpu")


@pytest.fixture(scope="session")
def text_reference(text_runner: GenerateRunner) -> Reference:
    return Reference(text_runner)


@pytest.fixture(scope="session")
def grammars(tiny: GenerateRunner) -> Grammars:
    return Grammars(tiny.loaded.reader.tokenizer, tiny.loaded.eos_ids)
