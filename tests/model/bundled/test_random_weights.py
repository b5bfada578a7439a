"""Random models of any shape: every weight drawn, every buffer right, nothing built twice."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training.tokenizer import MARKS
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Gemma3ForCausalLM, PreTrainedModel

from panscan.model.bundled.random_weights import _MEANS, random_model
from panscan.model.shapes import Shape, TextShape, VisionShape
from panscan.model.sharding import shard_of

TEXT = TextShape(5000, 64, 96, 6, 2, 1, 32, 16, 32, 256)
SMALL = Shape("small", TEXT, VisionShape(hidden=48, intermediate=64, layers=2, heads=2, image_size=56), image_tokens=4)
BLIND = Shape("blind", TEXT)

every_shape = pytest.mark.parametrize("shape", ["tiny", SMALL, BLIND], ids=["tiny", "small", "text only"])


def auto(model: PreTrainedModel) -> Any:
    return AutoModelForCausalLM if isinstance(model, Gemma3ForCausalLM) else AutoModelForImageTextToText


@every_shape
def test_every_parameter_is_drawn(shape: str | Shape) -> None:
    model, _ = random_model(shape, dtype=torch.float32, device="cpu")
    for name, parameter in model.named_parameters():
        mean = 1.0 if "vision_tower" in name and "norm" in name and name.endswith("weight") else 0.0
        mean = _MEANS.get(name.split(".")[-2], mean)
        assert (parameter - mean).std().item() == pytest.approx(0.02, rel=0.5), name
        assert parameter.mean().item() == pytest.approx(mean, abs=0.02), name


@every_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_loads_as_the_same(shape: str | Shape, dtype: torch.dtype, tmp_path: Path) -> None:
    model, tools = random_model(shape, dtype=dtype, device="cpu")
    model.save_pretrained(tmp_path)
    loaded = auto(model).from_pretrained(tmp_path, dtype=dtype)
    fresh = auto(model).from_config(model.config, dtype=dtype)
    buffers = dict(model.named_buffers())
    for other in (loaded, fresh):
        assert buffers.keys() == dict(other.named_buffers()).keys()
        for name, buffer in other.named_buffers():
            assert buffer.dtype == buffers[name].dtype
            assert torch.equal(buffer, buffers[name]), name
    inputs = prompt(tools)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, loaded(**inputs).logits)


def prompt(tools: Any) -> dict[str, torch.Tensor]:
    """A prompt with two views where the model can see, and a text otherwise."""
    if not hasattr(tools, "image_processor"):
        return dict(tools("What is the total?", return_tensors="pt"))
    images = [Image.new("RGB", (60, 40), colour) for colour in ("red", "blue")]
    return dict(tools(text="<start_of_image> and <start_of_image>?", images=[images], return_tensors="pt"))


@every_shape
def test_it_answers_without_writing_special_tokens(shape: str | Shape) -> None:
    model, tools = random_model(shape, dtype=torch.float32, device="cpu")
    inputs = prompt(tools)
    answer = model.generate(**inputs, max_new_tokens=24)[0, inputs["input_ids"].shape[1] :].tolist()
    assert answer
    assert not set(range(len(MARKS))) & set(answer[:-1])


DEEP_TEXT = TextShape(5000, 256, 512, 18, 2, 1, 128, 128, 128, 1024)
DEEP = Shape("deep", DEEP_TEXT, SMALL.vision, image_tokens=16)


def test_tokens_depend_on_the_images() -> None:
    """Else measured tokens of random weights could not show that an image was dropped or swapped."""
    model, tools = random_model(DEEP, dtype=torch.float32, device="cpu")
    answers = []
    for text in ("Total 12.50", "Total 12.90"):
        page = Image.new("RGB", (56, 56), "white")
        ImageDraw.Draw(page).text((2, 20), text, fill="black")
        inputs = tools(text="<bos><start_of_image>What is it?\n", images=[page], return_tensors="pt")
        for pixels in (inputs["pixel_values"], torch.zeros_like(inputs["pixel_values"])):
            inputs["pixel_values"] = pixels
            answer = model.generate(**inputs, max_new_tokens=12, min_new_tokens=12)
            answers.append(tuple(answer[0, inputs["input_ids"].shape[1] :].tolist()))
    assert len({*answers}) == 3, "two pages, and none"
    assert all(len({*answer}) > 4 for answer in answers), "no token repeats for ever"


def test_tokens_beyond_the_tokenizer_decode_to_nothing() -> None:
    model, tokenizer = random_model(BLIND, dtype=torch.float32, device="cpu")
    assert model.get_input_embeddings().num_embeddings == 5000 > len(tokenizer)
    assert tokenizer.decode([4999, *tokenizer("total", add_special_tokens=False)["input_ids"], 1024]) == "total"


def weights() -> torch.Tensor:
    model, _ = random_model(SMALL, dtype=torch.float32, device="cpu")
    return torch.cat([parameter.flatten() for parameter in model.parameters()])


def test_weights_are_the_same_each_time_and_the_global_state_is_left_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = weights()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(first, weights())


@pytest.mark.parametrize("shape", [SMALL, BLIND], ids=["small", "text only"])
@pytest.mark.parametrize("size", [2, 3])
def test_shards_are_those_of_the_model_bit_for_bit(shape: Shape, size: int) -> None:
    shape = replace(shape, text=replace(TEXT, heads=6, kv_heads=6, hidden=66))
    whole, _ = random_model(shape, dtype=torch.bfloat16, device="cpu")
    for rank in range(size):
        drawn, _ = random_model(shape, rank=rank, size=size, dtype=torch.bfloat16, device="cpu")
        shard = dict(drawn.named_parameters())
        for name, parameter in whole.named_parameters():
            assert torch.equal(shard[name], shard_of(name, parameter, rank, size)), name


@every_shape
def test_a_meta_model_has_shapes_and_no_storage(shape: str | Shape) -> None:
    with Created() as created:
        meta_model, tools = random_model(shape, dtype=torch.bfloat16, device="meta")
    assert all(tensor.is_meta for tensor in created.held), "nothing large was ever allocated"
    model, others = random_model(shape, dtype=torch.bfloat16, device="cpu")
    assert type(tools) is type(others)
    assert meta_model.config.to_dict() == model.config.to_dict()
    assert meta_model.generation_config.to_dict() == model.generation_config.to_dict()
    parameters = dict(model.named_parameters())
    assert [name for name, _ in meta_model.named_parameters()] == list(parameters)
    for name, parameter in meta_model.named_parameters():
        assert parameter.is_meta and parameter.dtype == torch.bfloat16
        assert parameter.shape == parameters[name].shape, name


class Created(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    """Notes every large floating-point tensor that any operator gives back: dtype, and bytes by storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.dtypes: set[torch.dtype] = set()
        self.held: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel() >= 2048:
                self.dtypes.add(leaf.dtype)
                self.held.append(leaf)
        return result

    def bytes(self) -> int:
        return sum({leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes() for leaf in self.held}.values())


def test_a_model_is_built_in_place_in_its_own_precision() -> None:
    with Created() as created:
        model, _ = random_model(SMALL, dtype=torch.bfloat16, device="cpu")
    assert created.dtypes == {torch.bfloat16}
    output_matrix = model.get_input_embeddings().weight.nbytes  # made before it is tied, and given back
    assert created.bytes() <= model.get_memory_footprint() + output_matrix
