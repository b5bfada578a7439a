"""The tiny model's checkpoint: the same bytes everywhere, through races, tears and caches that cannot be written."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.forked_workers import program

from panscan.model.bundled.tiny import tiny_directory, write_tiny


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished checkpoint in a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PANSCAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield tiny_directory()


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_two_builds_write_the_same_bytes_and_leave_the_random_state_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_tiny(tmp_path / name)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert torch.equal(before, torch.get_rng_state())


def lose_a_file(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def cut_the_weights(directory: Path) -> None:
    os.truncate(directory / "model.safetensors", 1000)


def garble_the_config(directory: Path) -> None:
    (directory / "config.json").write_text("{}")


def lose_the_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()


@pytest.mark.parametrize("tear", [lose_a_file, cut_the_weights, garble_the_config, lose_the_manifest])
def test_a_torn_cache_is_built_again(
    tear: Callable[[Path], None], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torn = tmp_path / whole.name
    shutil.copytree(whole, torn)
    tear(torn)
    monkeypatch.setenv("PANSCAN_CACHE", str(tmp_path))
    assert tiny_directory() == torn
    assert contents(torn) == contents(whole)


def test_a_whole_cache_is_left_as_it_is(whole: Path) -> None:
    weights = whole / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert tiny_directory() == weights.parent
    assert weights.stat().st_mtime_ns == before


CHILD = """
import os, socket, sys
import torch, transformers
from panscan.model.bundled.tiny import tiny_directory

def refuse(*_):
    raise AssertionError("the tiny model must not need a network")

torch.set_num_threads(1)
socket.socket.connect = socket.getaddrinfo = refuse
transformers.utils.logging.disable_progress_bar()
print("ready", flush=True)
sys.stdin.readline()
shared = tiny_directory()
model = transformers.AutoModelForImageTextToText.from_pretrained(shared)
processor = transformers.AutoProcessor.from_pretrained(shared)
inputs = processor.apply_chat_template(
    [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
    add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
)
model.generate(**inputs, max_new_tokens=3)
print(shared, model.dtype, flush=True)
os.environ["PANSCAN_CACHE"] = torch.__file__
print(tiny_directory(), tiny_directory(), (tiny_directory() / "model.safetensors").stat().st_size, flush=True)
"""


@dataclass(frozen=True)
class Child:
    shared: list[str]
    fallback: list[str]
    errors: str


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Child]]:
    """Two processes that ask for the tiny model at the same moment, from an empty cache, without a network."""
    root = tmp_path_factory.mktemp("race")
    temporary = tmp_path_factory.mktemp("temporary")
    processes = [
        subprocess.Popen(
            program(CHILD),
            env={**os.environ, "PANSCAN_CACHE": str(root), "TMPDIR": str(temporary), **offline},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for offline in ({}, {"HF_HUB_OFFLINE": "1"})  # the second is not forked: the name is read at import
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    results = []
    for process in processes:
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        shared, fallback = output.splitlines()
        results.append(Child(shared.split(), fallback.split(), errors))
    return root, results


def test_two_processes_build_one_checkpoint(children: tuple[Path, list[Child]], whole: Path) -> None:
    root, results = children
    directory = root / whole.name
    assert [child.shared for child in results] == [[str(directory), "torch.bfloat16"]] * 2
    assert contents(directory) == contents(whole)
    assert {path.name for path in root.iterdir()} == {directory.name, f"{directory.name}.lock"}


def test_loading_and_generating_warn_of_nothing(children: tuple[Path, list[Child]]) -> None:
    for child in children[1]:
        assert "[transformers]" not in child.errors
        assert "Warning" not in child.errors


def test_a_cache_that_cannot_be_written_gives_one_model_in_the_users_temporary_directory(
    children: tuple[Path, list[Child]], whole: Path
) -> None:
    [place] = {place for child in children[1] for place in child.fallback[:2]}
    assert Path(place).parent.stat().st_mode & 0o077 == 0
    assert contents(Path(place)) == contents(whole)
