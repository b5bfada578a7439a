"""The mini model answers to everything it should, and its checkpoint survives races, tears and read-only caches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from PIL import Image, ImageDraw
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask

from panscan.core import PanAndScan
from panscan.model.mini import mini_directory, write_mini
from panscan.model.tokenizer import MARKS, VOCABULARY_SIZE, build_tokenizer

Inputs = dict[str, torch.Tensor]

TOKENIZER = build_tokenizer()
CAUSAL_IMAGES = "causal_images"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PANSCAN_CACHE", str(root))
        yield root


@dataclass(frozen=True)
class Mini:
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
        return dict(
            self.processor(
                text=prompts,
                images=pages if any(pages) else None,
                add_special_tokens=False,
                padding=True,
                return_tensors="pt",
                **drawn,
            )
        )

    def answer(self, model: PreTrainedModel, inputs: Inputs, tokens: int, **options: Any) -> list[list[int]]:
        return model.generate(**inputs, max_new_tokens=tokens, **options)[:, inputs["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small only wait for each other's threads, for long when the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def mini(cache: Path) -> Mini:
    directory = mini_directory()
    eager, sdpa = (
        AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32, attn_implementation=name)
        for name in ("eager", "sdpa")
    )
    return Mini(eager, sdpa, AutoProcessor.from_pretrained(directory))


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
        return model(**inputs).logits[:, -1]


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
def test_a_changed_input_changes_the_answer_far_beyond_rounding(mini: Mini, change: Callable[[Inputs], Inputs]) -> None:
    inputs = mini.inputs(["What is the total amount of this invoice?"], [[page(0)]])
    assert inputs["pixel_values"].shape == (4, 3, 224, 224)
    before = last_logits(mini.eager, inputs)
    rounding = (before - last_logits(mini.sdpa, inputs)).abs().max()
    moved = (before - last_logits(mini.eager, change(inputs))).abs().max()
    assert moved > max(1e-2, 100 * rounding)


def test_a_changed_window_changes_the_answer(mini: Mini, cache: Path) -> None:
    inputs = mini.inputs(["What is the total?"], [[page(0)]])
    narrow = AutoModelForImageTextToText.from_pretrained(
        mini_directory(), dtype=torch.float32, attn_implementation="eager"
    )
    narrow.config.text_config.sliding_window = narrow.model.language_model.config.sliding_window = 100
    assert (last_logits(mini.eager, inputs) - last_logits(narrow, inputs)).abs().max() > 1e-1


def test_the_masks_of_flash_attention_change_the_answer(mini: Mini, cache: Path) -> None:
    """They forget that image tokens see each other; below the window nothing else differs."""
    AttentionInterface.register(CAUSAL_IMAGES, sdpa_attention_forward)
    AttentionMaskInterface.register(CAUSAL_IMAGES, flash_attention_mask)
    causal = AutoModelForImageTextToText.from_pretrained(
        mini_directory(),
        dtype=torch.float32,
        attn_implementation={"text_config": CAUSAL_IMAGES, "vision_config": "sdpa"},
    )
    with_image = mini.inputs(["What is this?"], [[page(0)]], crops=False)
    assert with_image["input_ids"].shape[1] < 128
    moved = (last_logits(mini.sdpa, with_image) - last_logits(causal, with_image)).abs().max()
    text_alone = mini.inputs(["What is this?"], [[]])
    assert torch.allclose(last_logits(mini.sdpa, text_alone), last_logits(causal, text_alone), atol=1e-4)
    assert moved > 1e-1


BATCH = (
    ["What is the total?", "List the rows.", "Describe the picture."],
    [[page(1)], [page(2, 500, 500)], [page(3, 900, 400)]],
)


def test_eager_and_sdpa_agree_alone_and_in_a_padded_batch_of_different_crops(mini: Mini) -> None:
    batch = mini.inputs(*BATCH)
    alone = [mini.inputs([question], [images]) for question, images in zip(*BATCH, strict=True)]
    assert [len(one["pixel_values"]) for one in alone] == [4, 1, 3]
    together = mini.answer(mini.eager, batch, 32, min_new_tokens=32)
    assert together == mini.answer(mini.sdpa, batch, 32, min_new_tokens=32)
    for row, one in zip(together, alone, strict=True):
        assert torch.allclose(last_logits(mini.eager, one), last_logits(mini.sdpa, one), atol=1e-4, rtol=0)
        assert [row] == mini.answer(mini.eager, one, 32, min_new_tokens=32)
        assert [row] == mini.answer(mini.sdpa, one, 32, min_new_tokens=32)


def test_answers_differ_wander_and_end(mini: Mini) -> None:
    questions = ["What is the total?", "Describe the page.", "Who signed the contract?", "Hello"]
    answers = []
    for images in ([], [page(0)], [page(1)]):
        for row in mini.answer(mini.sdpa, mini.inputs(questions, [images] * len(questions)), 64):
            answers.append([token for token in row if token != TOKENIZER.pad_token_id])
    assert len({tuple(answer) for answer in answers}) == len(answers)
    ended = [answer for answer in answers if len(answer) < 64]
    assert 0 < len(ended) < len(answers)
    assert all(answer[-1] in mini.eager.generation_config.eos_token_id for answer in ended)
    for answer in answers:
        assert len(answer) >= 5
        assert len(set(answer)) > 0.6 * len(answer)
        assert not {TOKENIZER.convert_tokens_to_ids(mark) for mark in MARKS} & set(answer[:-1])


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_two_builds_write_the_same_bytes_and_leave_the_random_state_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_mini(tmp_path / name)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert torch.equal(before, torch.get_rng_state())


def test_the_weights_are_the_published_ones(mini: Mini) -> None:
    """Records name this model: other weights need another name, so this hash changes only together with the recipe."""
    digest = sha256()
    for name, parameter in sorted(mini.eager.named_parameters()):
        digest.update(name.encode() + parameter.detach().to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    assert digest.hexdigest()[:16] == "160770904aee21fe"
    vocabulary = " ".join(sorted(TOKENIZER.get_vocab(), key=TOKENIZER.get_vocab().__getitem__))
    assert sha256(vocabulary.encode()).hexdigest()[:16] == "5e4d96cb39d79e1a"


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
    tear: Callable[[Path], None], mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = mini_directory()
    torn = tmp_path / whole.name
    shutil.copytree(whole, torn)
    tear(torn)
    monkeypatch.setenv("PANSCAN_CACHE", str(tmp_path))
    assert mini_directory() == torn
    assert contents(torn) == contents(whole)


def test_a_whole_cache_is_left_as_it_is(mini: Mini) -> None:
    weights = mini_directory() / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert mini_directory() == weights.parent
    assert weights.stat().st_mtime_ns == before


CHILD = """
import os, socket, sys
import torch, transformers
from panscan.model.mini import mini_directory

def refuse(*_):
    raise AssertionError("the mini model must not need a network")

torch.set_num_threads(1)
socket.socket.connect = socket.getaddrinfo = refuse
transformers.utils.logging.disable_progress_bar()
print("ready", flush=True)
sys.stdin.readline()
shared = mini_directory()
model = transformers.AutoModelForImageTextToText.from_pretrained(shared)
processor = transformers.AutoProcessor.from_pretrained(shared)
inputs = processor.apply_chat_template(
    [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
    add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
)
model.generate(**inputs, max_new_tokens=3)
print(shared, model.dtype, flush=True)
os.environ["PANSCAN_CACHE"] = __file__
print(mini_directory(), mini_directory(), (mini_directory() / "model.safetensors").stat().st_size, flush=True)
"""


@dataclass(frozen=True)
class Child:
    shared: list[str]
    fallback: list[str]
    errors: str


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Child]]:
    """Two processes that ask for the mini model at the same moment, from an empty cache, without a network."""
    root = tmp_path_factory.mktemp("race")
    script = tmp_path_factory.mktemp("script") / "child.py"
    script.write_text(CHILD)
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=os.environ | {"PANSCAN_CACHE": str(root), "HF_HUB_OFFLINE": offline},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for offline in "01"
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


def test_two_processes_build_one_checkpoint(children: tuple[Path, list[Child]], mini: Mini) -> None:
    root, results = children
    directory = root / mini_directory().name
    assert [child.shared for child in results] == [[str(directory), "torch.bfloat16"]] * 2
    assert contents(directory) == contents(mini_directory())
    assert {path.name for path in root.iterdir()} == {directory.name, f"{directory.name}.lock"}


def test_loading_and_generating_warn_of_nothing(children: tuple[Path, list[Child]]) -> None:
    for child in children[1]:
        assert "[transformers]" not in child.errors
        assert "Warning" not in child.errors


def test_a_cache_that_cannot_be_written_gives_one_temporary_model_per_process(
    children: tuple[Path, list[Child]], mini: Mini
) -> None:
    places = {place for child in children[1] for place in child.fallback[:2]}
    assert len(places) == 2
    size = (mini_directory() / "model.safetensors").stat().st_size
    assert [child.fallback[2] for child in children[1]] == [str(size)] * 2
    assert not any(Path(place).exists() for place in places)


plain = st.text().filter(lambda text: "▁" not in text)


@settings(max_examples=200)
@given(st.lists(plain | st.sampled_from([*MARKS, "\n\n\n\n\n", " the ", "<0x41>"])).map("".join))
def test_any_text_reads_back_as_it_was(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids) == text
    assert max(ids, default=0) < VOCABULARY_SIZE


@given(plain)
def test_the_saved_tokenizer_is_the_built_one(mini: Mini, text: str) -> None:
    assert mini.processor.tokenizer(text)["input_ids"] == TOKENIZER(text)["input_ids"]


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


@pytest.mark.parametrize(
    "messages",
    [
        [("assistant", "Yes")],
        [("user", "Hi"), ("user", "Hi")],
        [("user", "Hi"), ("system", "No"), ("user", "Hi"), ("user", "Hi")],
        [("user", 3)],
    ],
)
def test_turns_out_of_order_are_refused(messages: list[tuple[str, Any]]) -> None:
    with pytest.raises(TemplateError):
        turns(*messages)
