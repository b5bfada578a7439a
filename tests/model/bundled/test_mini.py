"""The packaged mini model: a whole Gemma 3 checkpoint that Transformers loads with nothing of ours."""

import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training.tokenizer import CHAT_TEMPLATE, END_MARKS, MARKS, build_tokenizer, generation_config
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, GenerationConfig

from panscan.core import ModelError
from panscan.model.bundled import fingerprints, mini_directory, tiny_directory
from panscan.model.gemma3.config import shape_of_config
from panscan.model.shapes import SHAPES

TOKENIZER = AutoTokenizer.from_pretrained(mini_directory())
MOST_BYTES = 14_000_000


@pytest.mark.parametrize("checkpoint", [mini_directory, tiny_directory], ids=["mini", "tiny"])
def test_transformers_loads_them_without_a_network(checkpoint: Any, tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a bundled model must not need a network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    place = shutil.copytree(checkpoint(), tmp_path / "model")
    model, told = AutoModelForImageTextToText.from_pretrained(place, output_loading_info=True)
    processor = AutoProcessor.from_pretrained(place)
    assert not any(told.values()) and model.dtype == torch.bfloat16
    names = [type(part).__name__ for part in (model, processor)]
    assert names == ["Gemma3ForConditionalGeneration", "Gemma3Processor"]
    assert shape_of_config(model.config) == SHAPES["mini" if checkpoint is mini_directory else "tiny"]


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


def test_its_ids_are_those_of_its_tokenizer() -> None:
    config = AutoConfig.from_pretrained(mini_directory())
    for name in ("boi", "eoi", "image"):
        assert getattr(config, f"{name}_token_index") == getattr(TOKENIZER, f"{name}_token_id")
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


def test_what_an_installation_lacks_is_said(tmp_path: Path, monkeypatch: Any) -> None:
    place = Path(shutil.copytree(mini_directory(), tmp_path / "weights" / "mini"))
    for name in ("model.safetensors", "tokenizer.json"):
        (place / name).unlink()
    monkeypatch.setattr("panscan.model.bundled.files", lambda _: tmp_path)
    with pytest.raises(ModelError, match=rf"mini model in {place} lacks model.safetensors, tokenizer.json: install"):
        mini_directory()
