"""The packaged mini model: a whole Gemma 3 checkpoint that Transformers loads with nothing of ours."""

import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from training.tiny import rename_as_published
from training.tokenizer import CHAT_TEMPLATE, END_MARKS, MARKS, build_tokenizer, generation_config
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig

import panscan
from panscan.model.bundled import fingerprints, mini_directory, tiny_directory
from panscan.model.gemma3.config import shape_of_config
from panscan.model.shapes import SHAPES

TOKENIZER = AutoTokenizer.from_pretrained(mini_directory())
MOST_BYTES = 14_000_000

ALONE = """
import socket, sys
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

def refuse(*_):
    raise AssertionError("a bundled model must not need a network")

socket.socket.connect = socket.getaddrinfo = refuse
for checkpoint in sys.argv[1:]:
    model, told = AutoModelForImageTextToText.from_pretrained(checkpoint, output_loading_info=True)
    processor = AutoProcessor.from_pretrained(checkpoint)
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What does the sign say?"}]}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=text, images=[Image.new("RGB", (300, 300))], add_special_tokens=False, return_tensors="pt")
    inputs.pop("num_crops", None)
    written = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4)
    assert written.shape[1] == inputs["input_ids"].shape[1] + 4
    print(type(model).__name__, type(processor).__name__, model.dtype, sum(map(len, told.values())))
print([name for name in sys.modules if name.startswith("panscan")])
"""


def test_transformers_loads_them_without_panscan(tmp_path: Path) -> None:
    checkpoints = [shutil.copytree(place, tmp_path / place.name) for place in (mini_directory(), tiny_directory())]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *map(str, checkpoints)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    *loaded, ours = done.stdout.splitlines()
    assert loaded == ["Gemma3ForConditionalGeneration Gemma3Processor torch.bfloat16 0"] * 2
    assert ours == "[]"
    assert "Warning" not in done.stderr


def test_bundled_weights_have_fingerprints_and_others_have_none() -> None:
    due = {
        name: sha256((directory() / "model.safetensors").read_bytes()).hexdigest()[:12]
        for name, directory in (("mini", mini_directory), ("tiny", tiny_directory))
    }
    assert fingerprints(["tiny", "google/gemma-3-4b-it", "mini", "./tiny", "tiny"]) == due
    assert fingerprints(["google/gemma-3-4b-it"]) == {}


@pytest.mark.parametrize("checkpoint", [mini_directory, tiny_directory], ids=["mini", "tiny"])
def test_weights_are_bfloat16_and_have_the_names_that_google_published(checkpoint: Any) -> None:
    """vLLM reads no others. The output matrix is the embedding, so it has no name of its own."""
    known = ("language_model.model.", "multi_modal_projector.", "vision_tower.vision_model.")
    assert (mini_directory() / "model.safetensors").stat().st_size <= MOST_BYTES
    [weights] = checkpoint().rglob("*.safetensors")
    tensors = load_file(weights)
    assert [name for name in tensors if not name.startswith(known)] == []
    assert {name.split(".")[0] for name in tensors} == {"language_model", "multi_modal_projector", "vision_tower"}
    assert all(tensor.dtype == torch.bfloat16 and torch.isfinite(tensor).all() for tensor in tensors.values())
    shape = SHAPES["mini" if checkpoint is mini_directory else "tiny"]
    assert sum(tensor.numel() for tensor in tensors.values()) == shape.parameters()


def test_renaming_changes_no_weight(tmp_path: Path) -> None:
    """Transformers reads its own names and the published ones; renamed twice is renamed once."""
    own = AutoModelForImageTextToText.from_pretrained(mini_directory())
    own.save_pretrained(tmp_path)
    weights, found = tmp_path / "model.safetensors", []
    for _ in range(2):
        rename_as_published(weights)
        found.append(sha256(weights.read_bytes()).hexdigest())
    assert found[0] == found[1]
    renamed, told = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told.values())
    kept = dict(own.named_parameters())
    assert all(torch.equal(kept[name], each) for name, each in renamed.named_parameters())


def test_it_is_built_as_gemma_3() -> None:
    config = AutoConfig.from_pretrained(mini_directory())
    text, vision = config.text_config, config.vision_config
    assert config.architectures == ["Gemma3ForConditionalGeneration"]
    rope = text.rope_parameters
    assert rope["full_attention"]["rope_theta"] == 1e6 and rope["sliding_attention"]["rope_theta"] == 1e4
    assert text.hidden_activation == vision.hidden_act == "gelu_pytorch_tanh"
    assert not vision.vision_use_head
    assert shape_of_config(config) == SHAPES["mini"]
    assert (vision.image_size // vision.patch_size) ** 2 == 4 * config.mm_tokens_per_image


def test_its_ids_are_those_of_its_tokenizer() -> None:
    config = AutoConfig.from_pretrained(mini_directory())
    assert (config.boi_token_index, config.eoi_token_index, config.image_token_index) == (
        TOKENIZER.boi_token_id,
        TOKENIZER.eoi_token_id,
        TOKENIZER.image_token_id,
    )
    stored, due = GenerationConfig.from_pretrained(mini_directory()), generation_config(TOKENIZER)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "suppress_tokens", "do_sample"):
        assert getattr(stored, name) == getattr(due, name), name
    assert stored.eos_token_id == TOKENIZER.convert_tokens_to_ids(list(END_MARKS))
    assert len(TOKENIZER) <= config.text_config.vocab_size


def test_its_tokenizer_is_the_built_one() -> None:
    """Its weights belong to these ids."""
    vocabulary = " ".join(sorted(TOKENIZER.get_vocab(), key=TOKENIZER.get_vocab().__getitem__))
    assert TOKENIZER.get_vocab() == build_tokenizer(0).get_vocab()
    assert sha256(vocabulary.encode()).hexdigest()[:16] == "de9192abeef419ff"
    assert TOKENIZER.chat_template == CHAT_TEMPLATE
    assert TOKENIZER.convert_ids_to_tokens(list(range(len(MARKS)))) == list(MARKS)


@given(st.text().filter(lambda text: "▁" not in text))
def test_any_text_reads_back_and_a_character_is_a_token(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids) == text
    plain = "".join(letter for letter in text if letter.isascii() and letter.isprintable())
    assert len(TOKENIZER(plain, add_special_tokens=False)["input_ids"]) == len(plain)


FOUND = """
import panscan.model.bundled as mini
print(found := mini.mini_directory())
for name in ("model.safetensors", "tokenizer.json"):
    (found / name).unlink()
try:
    mini.mini_directory()
except mini.ModelError as error:
    print(error)
"""


def test_it_is_found_where_the_package_lies_and_what_lacks_is_said(tmp_path: Path) -> None:
    package = tmp_path / "panscan"
    shutil.copytree(Path(panscan.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", FOUND]
    found, said = subprocess.check_output(command, env=environment, cwd=tmp_path, text=True).splitlines()
    assert found == str(package / "model" / "weights" / "mini")
    assert f"mini model in {found} lacks model.safetensors, tokenizer.json: install panscan again" in said
