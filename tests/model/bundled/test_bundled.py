"""The bundled models, random models of any shape, and their tokenizer."""

import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from jinja2 import TemplateError
from PIL import Image, ImageDraw
from safetensors.torch import load_file
from tests.small_models import TOKENIZER
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training.tiny import write_tiny
from training.tokenizer import CHAT_TEMPLATE, END_MARKS, MARKS, VOCABULARY_SIZE, build_tokenizer, generation_config

from panscan.core import ModelError
from panscan.model.bundled import fingerprints, mini_directory, tiny_directory
from panscan.model.bundled.random_weights import _MEANS, random_model
from panscan.model.gemma3.config import shape_of_config
from panscan.model.shapes import SHAPES, Shape, TextShape, VisionShape
from panscan.model.sharding import shard_of


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


MINI_TOKENIZER = transformers.AutoTokenizer.from_pretrained(mini_directory())
MOST_BYTES = 14_000_000
PUBLISHED = ("language_model.model.", "multi_modal_projector.", "vision_tower.vision_model.")
"""Beginnings of the names of tensors; vLLM reads no others."""


@pytest.mark.parametrize("checkpoint", [mini_directory, tiny_directory], ids=["mini", "tiny"])
def test_transformers_loads_them_without_a_network(checkpoint: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Weights are in bfloat16, under Google's names. The output matrix is the embedding: it has no name of its own."""

    def refuse(*_: object) -> None:
        raise AssertionError("a bundled model must not need a network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    place = shutil.copytree(checkpoint(), tmp_path / "model")
    model, told = transformers.AutoModelForImageTextToText.from_pretrained(place, output_loading_info=True)
    processor = transformers.AutoProcessor.from_pretrained(place)
    assert not any(told.values()) and model.dtype == torch.bfloat16
    names = [type(part).__name__ for part in (model, processor)]
    assert names == ["Gemma3ForConditionalGeneration", "Gemma3Processor"]
    shape = SHAPES["mini" if checkpoint is mini_directory else "tiny"]
    assert shape_of_config(model.config) == shape
    assert (place / "model.safetensors").stat().st_size <= MOST_BYTES
    tensors = load_file(place / "model.safetensors")
    assert [name for name in tensors if not name.startswith(PUBLISHED)] == []
    assert {name.split(".")[0] for name in tensors} == {name.split(".")[0] for name in PUBLISHED}
    assert all(tensor.dtype == torch.bfloat16 and torch.isfinite(tensor).all() for tensor in tensors.values())
    assert sum(tensor.numel() for tensor in tensors.values()) == shape.parameters()


def test_bundled_weights_have_fingerprints_and_others_have_none() -> None:
    """Records name these models: other weights need another name."""
    due = {"mini": "750e9e9dcde7", "tiny": "a250a8fa0e99"}
    assert fingerprints(["tiny", "google/gemma-3-4b-it", "mini", "./tiny", "tiny"]) == due
    assert fingerprints(["google/gemma-3-4b-it"]) == {}


def test_its_ids_are_those_of_its_tokenizer() -> None:
    config = transformers.AutoConfig.from_pretrained(mini_directory())
    for name in ("boi", "eoi", "image"):
        assert getattr(config, f"{name}_token_index") == getattr(MINI_TOKENIZER, f"{name}_token_id")
    stored, due = transformers.GenerationConfig.from_pretrained(mini_directory()), generation_config(MINI_TOKENIZER)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "suppress_tokens", "do_sample"):
        assert getattr(stored, name) == getattr(due, name), name
    assert stored.eos_token_id == MINI_TOKENIZER.convert_tokens_to_ids(list(END_MARKS))
    assert len(MINI_TOKENIZER) <= config.text_config.vocab_size


def test_its_tokenizer_is_the_built_one() -> None:
    """The weights of both models belong to these ids."""
    for tokenizer, digest in ((MINI_TOKENIZER, "de9192abeef419ff"), (TOKENIZER, "5e4d96cb39d79e1a")):
        vocabulary = " ".join(sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__))
        assert sha256(vocabulary.encode()).hexdigest()[:16] == digest
    assert MINI_TOKENIZER.get_vocab() == build_tokenizer(0).get_vocab()
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


# Random models of any shape: every weight drawn, every buffer right, nothing built twice.


TEXT = TextShape(5000, 64, 96, 6, 2, 1, 32, 16, 32, 256)
SMALL = Shape("small", TEXT, VisionShape(hidden=48, intermediate=64, layers=2, heads=2, image_size=56), image_tokens=4)
BLIND = Shape("blind", TEXT)

every_shape = pytest.mark.parametrize("shape", ["tiny", SMALL, BLIND], ids=["tiny", "small", "text only"])


def auto(model: transformers.PreTrainedModel) -> Any:
    causal = isinstance(model, transformers.Gemma3ForCausalLM)
    return transformers.AutoModelForCausalLM if causal else transformers.AutoModelForImageTextToText


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


@pytest.mark.parametrize("shape", [SMALL, BLIND], ids=["small", "text only"])
@pytest.mark.parametrize("size", [2, 3])
def test_shards_are_those_of_the_model_bit_for_bit(shape: Shape, size: int) -> None:
    shape = replace(shape, text=replace(TEXT, heads=6, kv_heads=6, hidden=66))
    unsharded, _ = random_model(shape, dtype=torch.bfloat16, device="cpu")
    for rank in range(size):
        torch.manual_seed(rank)  # the global state decides nothing
        drawn, _ = random_model(shape, rank=rank, size=size, dtype=torch.bfloat16, device="cpu")
        shard = dict(drawn.named_parameters())
        for name, parameter in unsharded.named_parameters():
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
    before = torch.get_rng_state()
    with Created() as created:
        model, _ = random_model(SMALL, dtype=torch.bfloat16, device="cpu")
    assert torch.equal(before, torch.get_rng_state())
    assert created.dtypes == {torch.bfloat16}
    output_matrix = model.get_input_embeddings().weight.nbytes  # made before it is tied, and given back
    assert created.bytes() <= model.get_memory_footprint() + output_matrix
