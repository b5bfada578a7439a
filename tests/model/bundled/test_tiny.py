"""The tiny model's answers depend on everything they should, and its weights never change."""

import shutil
from collections.abc import Callable
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jinja2 import TemplateError
from PIL import Image, ImageDraw
from safetensors.torch import load_file
from tests.small_models import TOKENIZER
from training.tiny import write_tiny
from training.tokenizer import CHAT_TEMPLATE, END_MARKS, MARKS, VOCABULARY_SIZE, build_tokenizer, generation_config
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from panscan.core import ModelError, PanAndScan
from panscan.model.bundled import fingerprints, mini_directory, tiny_directory
from panscan.model.gemma3.config import shape_of_config
from panscan.model.shapes import SHAPES

Inputs = dict[str, torch.Tensor]


def load(attention: str) -> Any:
    kind = AutoModelForImageTextToText
    return kind.from_pretrained(tiny_directory(), dtype=torch.float32, attn_implementation=attention)


@pytest.fixture(scope="module")
def eager() -> PreTrainedModel:
    return load("eager")


def page_and_question() -> Inputs:
    """A page with rows of dark bars like words, which three crops read, and a question about it."""
    random, image = np.random.default_rng(0), Image.new("RGB", (300, 900), "white")
    draw = ImageDraw.Draw(image)
    for top, left in product(range(20, 880, 30), range(20, 240, 40)):
        colour = tuple(random.integers(0, 160, 3).tolist())
        draw.rectangle((left, top, left + int(random.integers(10, 30)), top + 12), fill=colour)
    processor = AutoProcessor.from_pretrained(tiny_directory())
    content = [{"type": "image"}, {"type": "text", "text": "What is the total amount of this invoice?"}]
    chat = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    kwargs = {"add_special_tokens": False, "return_tensors": "pt", **PanAndScan().processor_kwargs()}
    return dict(processor(text=text, images=[image], **kwargs))


def last_logits(model: PreTrainedModel, inputs: Inputs) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs).logits
    return logits[:, -1]


def changed_patch(inputs: Inputs) -> Inputs:
    pixels = inputs["pixel_values"].clone()
    pixels[2, :, 100:108, 100:108] *= -1
    return inputs | {"pixel_values": pixels}


def swapped_crops(inputs: Inputs) -> Inputs:
    return inputs | {"pixel_values": inputs["pixel_values"][[0, 2, 1, 3]]}


def permuted_words(inputs: Inputs) -> Inputs:
    ids = inputs["input_ids"].clone()
    words = ids[0, -12:-5].clone()
    ids[0, -12:-5] = words.roll(3)
    assert not torch.equal(ids, inputs["input_ids"])
    return inputs | {"input_ids": ids}


def causal_image_tokens(inputs: Inputs) -> Inputs:
    return {name: value for name, value in inputs.items() if name != "token_type_ids"}


@pytest.mark.parametrize("change", [changed_patch, swapped_crops, permuted_words, causal_image_tokens])
def test_a_changed_input_changes_more_than_rounding(eager: PreTrainedModel, change: Callable[[Inputs], Inputs]) -> None:
    inputs = page_and_question()
    assert inputs["pixel_values"].shape == (4, 3, 224, 224)
    before = last_logits(eager, inputs)
    rounding = (before - last_logits(load("sdpa"), inputs)).abs().max().item()
    moved = (before - last_logits(eager, change(inputs))).abs().max().item()
    assert moved > max(1e-2, 100 * rounding)


def test_the_weights_are_the_published_ones(eager: PreTrainedModel) -> None:
    """Records name this model: other weights need another name, so this hash changes only together with the recipe."""
    digest = sha256()
    for name, parameter in sorted(eager.named_parameters()):
        digest.update(name.encode() + parameter.detach().to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    assert digest.hexdigest()[:16] == "160770904aee21fe"


def test_the_packaged_checkpoint_is_the_written_one(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    write_tiny(tmp_path)
    assert torch.equal(before, torch.get_rng_state())
    packaged, written = (load_file(folder / "model.safetensors") for folder in (tiny_directory(), tmp_path))
    assert packaged.keys() == written.keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in packaged.items())
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in tiny_directory().iterdir()}
    for name in ("chat_template.jinja", "tokenizer.json"):
        assert (tmp_path / name).read_text() == (tiny_directory() / name).read_text()


# The packaged mini model: a whole Gemma 3 checkpoint that Transformers loads with nothing of ours.


MINI_TOKENIZER = AutoTokenizer.from_pretrained(mini_directory())
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
        assert getattr(config, f"{name}_token_index") == getattr(MINI_TOKENIZER, f"{name}_token_id")
    stored, due = GenerationConfig.from_pretrained(mini_directory()), generation_config(MINI_TOKENIZER)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "suppress_tokens", "do_sample"):
        assert getattr(stored, name) == getattr(due, name), name
    assert stored.eos_token_id == MINI_TOKENIZER.convert_tokens_to_ids(list(END_MARKS))
    assert len(MINI_TOKENIZER) <= config.text_config.vocab_size


def test_its_tokenizer_is_the_built_one() -> None:
    """Its weights belong to these ids."""
    vocabulary = " ".join(sorted(MINI_TOKENIZER.get_vocab(), key=MINI_TOKENIZER.get_vocab().__getitem__))
    assert MINI_TOKENIZER.get_vocab() == build_tokenizer(0).get_vocab()
    assert sha256(vocabulary.encode()).hexdigest()[:16] == "de9192abeef419ff"
    assert MINI_TOKENIZER.chat_template == CHAT_TEMPLATE
    assert MINI_TOKENIZER.convert_ids_to_tokens(list(range(len(MARKS)))) == list(MARKS)


def test_what_an_installation_lacks_is_said(tmp_path: Path, monkeypatch: Any) -> None:
    place = Path(shutil.copytree(mini_directory(), tmp_path / "weights" / "mini"))
    for name in ("model.safetensors", "tokenizer.json"):
        (place / name).unlink()
    monkeypatch.setattr("panscan.model.bundled.files", lambda _: tmp_path)
    with pytest.raises(ModelError, match=rf"mini model in {place} lacks model.safetensors, tokenizer.json: install"):
        mini_directory()


# The built-in tokenizer: any text reads back, marks and turns are Gemma's.


def test_the_vocabulary_is_the_same_everywhere() -> None:
    """The tiny model's weights belong to these ids."""
    vocabulary = " ".join(sorted(TOKENIZER.get_vocab(), key=TOKENIZER.get_vocab().__getitem__))
    assert sha256(vocabulary.encode()).hexdigest()[:16] == "5e4d96cb39d79e1a"


def test_marks_are_single_tokens_in_gemmas_places() -> None:
    assert len(TOKENIZER) == VOCABULARY_SIZE
    assert TOKENIZER.convert_tokens_to_ids(["<pad>", "<eos>", "<bos>", "<unk>"]) == [0, 1, 2, 3]
    assert TOKENIZER("<start_of_image>Hi")["input_ids"][:2] == [2, TOKENIZER.boi_token_id]
    assert TOKENIZER("\n" * 6, add_special_tokens=False).tokens() == ["\n" * 4, "\n" * 2]
    assert TOKENIZER.decode(TOKENIZER("<end_of_turn>Hi\n")["input_ids"], skip_special_tokens=True) == "Hi\n"


def turns(*messages: tuple[str, Any], **options: Any) -> str:
    said = [{"role": role, "content": content} for role, content in messages]
    return TOKENIZER.apply_chat_template(said, tokenize=False, **options)


def test_turns_are_gemmas() -> None:
    picture = [{"type": "image"}, {"type": "text", "text": " What? "}]
    assert turns(("user", picture), add_generation_prompt=True) == (
        "<bos><start_of_turn>user\n<start_of_image>What?<end_of_turn>\n<start_of_turn>model\n"
    )
    brief = "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nYes<end_of_turn>\n"
    for system in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        assert turns(("system", system), ("user", " Hi\n"), ("assistant", "Yes ")) == brief


HI = ("user", "Hi")


@pytest.mark.parametrize("messages", [[("assistant", "Yes")], [HI, HI], [HI, ("system", "No"), HI, HI], [("user", 3)]])
def test_turns_out_of_order_are_refused(messages: list[tuple[str, Any]]) -> None:
    with pytest.raises(TemplateError):
        turns(*messages)
