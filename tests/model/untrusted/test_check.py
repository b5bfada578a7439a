"""Hostile checkpoints are one error that names the file; published layouts of good ones pass."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.robustness.__main__ import TOTALS
from benchmarks.robustness.checkpoints import RECIPES, checkpoint_cases
from safetensors.torch import load_file, save_file

from panscan.core import ModelError, PanscanError
from panscan.model.bundled import mini_directory
from panscan.model.checkpoint import Placement, load_model, load_reader
from panscan.model.untrusted.check import check_directory
from panscan.model.untrusted.reading import DamagedFileError
from panscan.plan.models import model_named

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="FIFOs and links")

FILES = {
    "adapter": "adapter_config.json",
    "code": "config.json",
    "config": "config.json",
    "generation": "generation_config.json",
    "header": "model.safetensors",
    "index": "model.safetensors.index.json",
    "processor": "processor_config.json",
    "quantization": "config.json",
    "special tokens": "special_tokens_map.json",
    "template": "chat_template.jinja",
    "tokenizer": "tokenizer.json",
    "tokenizer config": "tokenizer_config.json",
    "weights": "model.safetensors",
}
"""The file that recipes of each group damage."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The mini checkpoint as somebody's local directory."""
    return Path(shutil.copytree(mini_directory(), tmp_path / "model"))


def test_the_robustness_job_runs_every_recipe() -> None:
    assert len(checkpoint_cases()) == TOTALS["checkpoints"] == 2 * len(RECIPES)
    assert {recipe for recipe, command in checkpoint_cases() if command == "ask"} == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_hostile_checkpoint_is_one_error_that_names_the_file(copy: Path, name: str) -> None:
    RECIPES[name](copy)
    with pytest.raises(ModelError) as raised:
        load_model(str(copy), Placement(torch.device("cpu"), torch.float32))
    message = str(raised.value)
    assert FILES[name.partition(":")[0]] in message
    assert "\n" not in message
    assert len(message) < 600


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith(("config", "index", "header"))])
def test_plans_reject_the_same_configurations(copy: Path, name: str) -> None:
    RECIPES[name](copy)
    if name == "index: missing":
        model_named(str(copy))  # a plan needs no weights
    else:
        with pytest.raises(PanscanError, match=r"config\.json|safetensors|unknown model"):
            model_named(str(copy))


def test_a_snapshot_of_the_hub_cache_links_to_its_blobs(copy: Path, tmp_path: Path) -> None:
    repo = tmp_path / "models--owner--gemma"
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(copy.iterdir()):
        shutil.move(path, repo / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert load_reader(str(snapshot)).reads_images
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(repo.parent / "elsewhere.json")
    shutil.copy(mini_directory() / "config.json", repo.parent / "elsewhere.json")
    with pytest.raises(DamagedFileError, match=r"^config\.json: links to a file outside the checkpoint"):
        check_directory(snapshot)


def test_other_files_beside_a_checkpoint_are_not_read(copy: Path) -> None:
    (copy / "trainer_state.json").write_text("[" * 10_000_000)
    os.mkfifo(copy / "notes.txt")
    (copy / "original").mkdir()
    check_directory(copy)


def test_a_changed_file_is_checked_again(copy: Path) -> None:
    check_directory(copy)
    (copy / "generation_config.json").write_text('{"eos_token_id": -7}')
    with pytest.raises(DamagedFileError, match=r"^generation_config\.json: eos_token_id is -7"):
        check_directory(copy)


def test_two_sets_of_weights_are_refused_and_a_stale_index_is_ignored(copy: Path) -> None:
    """Loaders differ in which of both they read."""
    index = {"weight_map": {"lm_head.weight": "weights.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {stored.file for stored in check_directory(copy).tensors.values()} == {"model.safetensors"}
    shutil.copy(copy / "model.safetensors", copy / "weights.safetensors")
    with pytest.raises(DamagedFileError, match=r"^two sets of weights: model\.safetensors, and weights\.safetensors"):
        check_directory(copy)
    (copy / "weights.safetensors").unlink()
    (copy / "model.safetensors").write_bytes(b"")
    with pytest.raises(DamagedFileError, match=r"^model\.safetensors: the header"):
        check_directory(copy)


def test_the_named_tensor_does_not_fit_the_configuration(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 640
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(DamagedFileError) as raised:
        check_directory(copy)
    assert str(raised.value) == (
        "config.json: intermediate_size and hidden_size do not fit the weights:"
        " language_model.model.layers.0.mlp.gate_proj.weight in model.safetensors is [576, 256], not [640, 256]"
    )


def test_a_model_that_was_saved_inside_a_wrapper_is_named(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    save_file({f"module.{name}": values for name, values in tensors.items()}, copy / "model.safetensors")
    with pytest.raises(DamagedFileError, match=r"no layer has a name of Gemma 3 \(a tensor is 'module\.language_model"):
        check_directory(copy)
