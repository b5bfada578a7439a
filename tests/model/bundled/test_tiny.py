"""The tiny model's answers depend on everything they should, and its weights never change."""

from collections.abc import Callable
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file
from training.tiny import write_tiny
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel

from panscan.core import PanAndScan
from panscan.model.bundled import tiny_directory

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
