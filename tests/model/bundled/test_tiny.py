"""The tiny model's answers depend on everything they should, the same under every exact attention."""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file
from tests.small_models import TOKENIZER
from training.tiny import write_tiny
from training.tokenizer import MARKS
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel

from panscan.core import PanAndScan
from panscan.model.bundled import tiny_directory

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Tiny:
    eager: PreTrainedModel
    sdpa: PreTrainedModel
    processor: Any

    def inputs(self, questions: list[str], pages: list[list[Image.Image]], crops: bool = True) -> Inputs:
        """A left-padded batch in Gemma's turns, with pan and scan."""
        prompts = [
            self.processor.apply_chat_template(
                [{"role": "user", "content": [{"type": "image"}] * len(images) + [{"type": "text", "text": question}]}],
                tokenize=False,
                add_generation_prompt=True,
            )
            for question, images in zip(questions, pages, strict=True)
        ]
        drawn: dict[str, Any] = PanAndScan(enabled=crops).processor_kwargs() if any(pages) else {}
        drawn |= {"add_special_tokens": False, "padding": True, "return_tensors": "pt"}
        return dict(self.processor(text=prompts, images=pages if any(pages) else None, **drawn))

    def answer(self, model: PreTrainedModel, inputs: Inputs, tokens: int, **options: Any) -> list[list[int]]:
        written: torch.Tensor = model.generate(**inputs, max_new_tokens=tokens, **options)
        return [row.tolist() for row in written[:, inputs["input_ids"].shape[1] :]]


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    directory = tiny_directory()
    eager, sdpa = (
        AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32, attn_implementation=name)
        for name in ("eager", "sdpa")
    )
    return Tiny(eager, sdpa, AutoProcessor.from_pretrained(directory))


def page(seed: int, width: int = 300, height: int = 900) -> Image.Image:
    """White, with rows of dark bars like words."""
    random, image = np.random.default_rng(seed), Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for top in range(20, height - 20, 30):
        left = 20
        while left < width - 60:
            right = left + int(random.integers(10, 50))
            draw.rectangle((left, top, right, top + 12), fill=tuple(random.integers(0, 160, 3).tolist()))
            left = right + 10
    return image


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
def test_a_changed_input_changes_the_answer_far_beyond_rounding(tiny: Tiny, change: Callable[[Inputs], Inputs]) -> None:
    inputs = tiny.inputs(["What is the total amount of this invoice?"], [[page(0)]])
    assert inputs["pixel_values"].shape == (4, 3, 224, 224)
    before = last_logits(tiny.eager, inputs)
    rounding = (before - last_logits(tiny.sdpa, inputs)).abs().max().item()
    moved = (before - last_logits(tiny.eager, change(inputs))).abs().max().item()
    assert moved > max(1e-2, 100 * rounding)


def test_a_changed_window_changes_the_answer(tiny: Tiny) -> None:
    inputs = tiny.inputs(["What is the total?"], [[page(0)]])
    narrow = AutoModelForImageTextToText.from_pretrained(
        tiny_directory(), dtype=torch.float32, attn_implementation="eager"
    )
    narrow.config.text_config.sliding_window = narrow.model.language_model.config.sliding_window = 100
    assert (last_logits(tiny.eager, inputs) - last_logits(narrow, inputs)).abs().max() > 1e-1


BATCH = (
    ["What is the total?", "List the rows.", "Describe the picture."],
    [[page(1)], [page(2, 500, 500)], [page(3, 900, 400)]],
)


def test_eager_and_sdpa_agree_alone_and_in_a_padded_batch_of_different_crops(tiny: Tiny) -> None:
    batch = tiny.inputs(*BATCH)
    alone = [tiny.inputs([question], [images]) for question, images in zip(*BATCH, strict=True)]
    assert [len(one["pixel_values"]) for one in alone] == [4, 1, 3]
    together = tiny.answer(tiny.eager, batch, 32, min_new_tokens=32)
    assert together == tiny.answer(tiny.sdpa, batch, 32, min_new_tokens=32)
    for row, one in zip(together, alone, strict=True):
        assert torch.allclose(last_logits(tiny.eager, one), last_logits(tiny.sdpa, one), atol=1e-4, rtol=0)
        assert [row] == tiny.answer(tiny.eager, one, 32, min_new_tokens=32)
        assert [row] == tiny.answer(tiny.sdpa, one, 32, min_new_tokens=32)


def test_answers_differ_wander_and_end(tiny: Tiny) -> None:
    questions = ["What is the total?", "Describe the page.", "Who signed the contract?", "Hello"]
    answers = []
    for images in ([], [page(0)], [page(1)]):
        for row in tiny.answer(tiny.sdpa, tiny.inputs(questions, [images] * len(questions)), 64):
            answers.append([token for token in row if token != TOKENIZER.pad_token_id])
    assert len({tuple(answer) for answer in answers}) == len(answers)
    ended = [answer for answer in answers if len(answer) < 64]
    assert 0 < len(ended) < len(answers)
    assert all(answer[-1] in tiny.eager.generation_config.eos_token_id for answer in ended)
    for answer in answers:
        assert len(answer) >= 5
        assert len(set(answer)) > 0.6 * len(answer)
        assert not {TOKENIZER.convert_tokens_to_ids(mark) for mark in MARKS} & set(answer[:-1])


def test_the_weights_are_the_published_ones(tiny: Tiny) -> None:
    """Records name this model: other weights need another name, so this hash changes only together with the recipe."""
    digest = sha256()
    for name, parameter in sorted(tiny.eager.named_parameters()):
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
