"""Checkpoints as people have them: the same answer through every verb and runner, or the same refusal.

``PANSCAN_RANDOM_CHECKPOINTS=300`` tries that many random ones instead of a few.
"""

import json
import os
import random
import shutil
import warnings
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import noise
from tests.model.conftest import edit
from transformers import Gemma3ImageProcessorPil

from panscan import Engine, GenerateRunner, Request, Sampling
from panscan.cli.main import run
from panscan.core import ModelError, PanscanError, PanscanWarning, SettingError, View
from panscan.images.pixels import pixels_pil
from panscan.model.build import decoder_linears
from panscan.model.bundled import tiny_directory
from panscan.model.checkpoint import Placement, load_meta_model, load_model, load_reader, load_shard_of
from panscan.plan.models import model_named
from panscan.quantize.source import DenseCheckpoint
from panscan.settings import Settings

CPU = Placement(torch.device("cpu"), torch.float32)
HEAD, EMBEDDING = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"
ASKED = Request("What is it?", [noise(90, 200)], sampling=Sampling(max_new_tokens=6, temperature=0.0))
TEXT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<start_of_turn>' + m['role'] + '\n' + m['content'] + '<end_of_turn>\n' }}{% endfor %}"
    "{{ '<start_of_turn>model\n' }}"
)
_Tensors = dict[str, torch.Tensor]


def write_weights(folder: Path, tensors: _Tensors, layout: str) -> None:
    """Write tensors as one file, as shards with or without an index, or with what is left of others."""
    single = folder / "model.safetensors"
    single.unlink(missing_ok=True)
    names = sorted(tensors)
    shards = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    if layout in ("single", "stale index", "two sets"):
        save_file(tensors, single, metadata={"format": "pt"})
    if layout in ("shards", "shards without index", "two sets"):
        for file in {*shards.values()}:
            part = {name: tensors[name].contiguous() for name in names if shards[name] == file}
            save_file(part, folder / file, metadata={"format": "pt"})
    if layout in ("shards", "stale index", "two sets", "index of nothing"):
        index = {"metadata": {}, "weight_map": shards}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if layout == "index of a single file":
        save_file({name: tensors[name] for name in names[::2]}, single, metadata={"format": "pt"})
        save_file({name: tensors[name] for name in names[1::2]}, folder / "rest.safetensors", metadata={"format": "pt"})
        files = {name: ("model", "rest")[number % 2] + ".safetensors" for number, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    if layout == "pickled":
        torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "consolidated.bin").write_bytes(b"left over")


LAYOUTS = ("single", "shards", "stale index", "index of a single file")
BAD_LAYOUTS = ("two sets", "shards without index", "index of nothing", "pickled")


def with_head(tensors: _Tensors, kind: str) -> None:
    embedding = tensors[EMBEDDING]
    if kind in ("copy", "only head"):
        tensors[HEAD] = embedding.clone()
    elif kind == "other dtype":
        tensors[HEAD] = embedding.float()
    elif kind == "other values":
        tensors[HEAD] = embedding.flip(0).contiguous()
    if kind == "only head":
        del tensors[EMBEDDING]


def random_checkpoint(draw: random.Random, folder: Path) -> str:
    """Write a checkpoint; return what it is, in words."""
    shutil.copytree(tiny_directory(), folder)
    tensors = load_file(folder / "model.safetensors")
    config, text = folder / "config.json", json.loads((folder / "config.json").read_text())["text_config"]
    words = []

    def choose(name: str, *values: str) -> str:
        words.append(f"{name}: {(chosen := draw.choice(values))}")
        return chosen

    with_head(tensors, choose("head", "none", "none", "copy", "other dtype", "other values", "only head"))
    tied = choose("tied", "as is", "as is", "absent", "false")
    if tied != "as is":
        stored = json.loads(config.read_text())
        stored.pop("tie_word_embeddings", None)
        stored["text_config"].pop("tie_word_embeddings", None)
        config.write_text(json.dumps(stored | ({"tie_word_embeddings": False} if tied == "false" else {})))
    place = choose("quantization_config", "none", "none", "top", "text")
    leftover = {"quant_method": draw.choice(["bitsandbytes", "compressed-tensors", "gptq"]), "load_in_4bit": True}
    if place == "top":
        edit(config, quantization_config=leftover)
    elif place == "text":
        edit(config, text_config={**text, "quantization_config": leftover})
    architecture = choose("architecture", *["as is"] * 6, "none", "Gemma3ForSequenceClassification", "Gemma3TextModel")
    if architecture != "as is":
        edit(config, architectures=None if architecture == "none" else [architecture])
    if choose("adapter", "none", "none", "left over") != "none":
        adapter = {"peft_type": "LORA", "base_model_name_or_path": "google/gemma-3-4b-it", "r": 4}
        (folder / "adapter_config.json").write_text(json.dumps(adapter))
    template = choose("template", "jinja", "json", "for texts", "of the tokenizer")
    jinja = folder / "chat_template.jinja"
    written = TEXT_TEMPLATE if template == "for texts" else jinja.read_text()
    if template in ("json", "of the tokenizer"):
        jinja.unlink()
        name = "chat_template.json" if template == "json" else "tokenizer_config.json"
        (folder / name).exists() or (folder / name).write_text("{}")
        edit(folder / name, chat_template=written)
    else:
        jinja.write_text(written)
    end = choose("end tokens", "as is", "generation only", "tokenizer")
    if end != "as is":
        edit(folder / "generation_config.json", eos_token_id=1)
    if end == "tokenizer":
        edit(folder / "tokenizer_config.json", eos_token="<end_of_turn>")
    layout = choose("files", *LAYOUTS, *LAYOUTS, *BAD_LAYOUTS[: draw.choice([0, 4])])
    if choose("names", "published", "transformers 5") != "published":
        old = ("language_model.model.", "model.language_model."), ("language_model.lm_head", "lm_head")
        tensors = {reduce(lambda name, pair: name.replace(*pair), old, name): part for name, part in tensors.items()}
    write_weights(folder, tensors, layout)
    return ", ".join(words)


def outcome(what: Callable[[], Any]) -> Any:
    """Return a result, or the message of a refusal."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PanscanWarning)
            return what()
    except PanscanError as error:
        return f"refused: {error}"


def check(folder: Path, words: str) -> None:
    """Check that every verb agrees on a checkpoint: the answers of one that loads, or the refusal."""
    name = str(folder)
    settings = Settings(model=name, device="cpu", dtype="fp32", max_new_tokens=6, do_pan_and_scan=False)

    def by_engine() -> list[int]:
        with Engine.from_settings(settings) as engine:
            return [*engine.generate([ASKED], progress=False)[0].token_ids]

    loaded = outcome(lambda: load_model(name, CPU))
    answer = outcome(by_engine)
    shard = outcome(lambda: load_shard_of(name, 0, 1, torch.float32, CPU.device))
    listed = outcome(lambda: DenseCheckpoint(name).name)
    head = outcome(lambda: load_meta_model(name, torch.float32, CPU.device, revision=None, embedding=True))
    if isinstance(loaded, str):
        assert loaded == answer == shard, (words, loaded, answer, shard)
        two_faults = "quantization_config: none" not in words  # without weights, nothing shows that it is left over
        assert two_faults or listed == head == answer, (words, answer, listed, head)
        assert str(listed).startswith("refused") and str(head).startswith("refused"), (words, listed, head)
        return
    assert answer == [*GenerateRunner(loaded, settings).run([ASKED])[0].token_ids], words
    assert shard.eos_ids == loaded.eos_ids, words
    weights, parts = loaded.model.state_dict(), shard.model.state_dict()
    assert weights.keys() == parts.keys() and all(torch.equal(parts[key], weights[key]) for key in parts), words
    assert model_named(name).id == name, words
    model = loaded.model
    assert torch.equal(head.model.lm_head.weight, model.lm_head.weight), words
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PanscanWarning)
        out = folder.with_name("int8")
        assert run(["quantize", name, str(out), "--quantization", "int8", "--no-verify", "--device", "cpu"]) == 0, words
        written = load_model(str(out), CPU).model
    assert torch.equal(written.lm_head.weight, model.lm_head.weight), words
    for module, dense in decoder_linears(model):
        dequantized = written.get_submodule(module).dequantized(torch.float32)
        assert (dequantized - dense.weight).abs().max() <= dense.weight.abs().max() / 127, (words, module)


@pytest.mark.parametrize("seed", range(int(os.environ.get("PANSCAN_RANDOM_CHECKPOINTS", "3"))))
def test_every_verb_agrees_on_a_random_checkpoint(tmp_path: Path, seed: int) -> None:
    words = random_checkpoint(random.Random(seed), tmp_path / "model")
    check(tmp_path / "model", words)


def edit_images(folder: Path, **fields: Any) -> None:
    images = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    edit(folder / "processor_config.json", image_processor={**images, **fields})


SCALED = {"rescale_factor": 1 / 127, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.7, 0.8, 0.9]}
UNREADABLE = [("do_resize", False), ("resample", 0), ("resample", None), ("do_rescale", "no"), ("do_normalize", 2)]


@pytest.mark.parametrize("fields", [{"do_rescale": False}, {"do_normalize": False}, {"resample": 3}, SCALED])
def test_pixels_follow_the_processors_settings(copy: Path, fields: dict[str, Any]) -> None:
    image, views = noise(90, 200), [View("whole", (0, 0, 90, 200))]
    plain = pixels_pil(image, views, load_reader(str(copy)).pixels)
    edit_images(copy, **fields)
    stored = json.loads((copy / "processor_config.json").read_text())["image_processor"]
    pixels = pixels_pil(image, views, load_reader(str(copy)).pixels)
    assert not torch.allclose(pixels, plain, atol=1e-3)
    expected = Gemma3ImageProcessorPil(**{**stored, "do_pan_and_scan": False})(image, return_tensors="pt")
    assert torch.allclose(pixels, expected["pixel_values"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "value"), UNREADABLE)
def test_settings_of_pixels_that_cannot_be_honoured_are_refused(copy: Path, name: str, value: Any) -> None:
    edit_images(copy, **{name: value})
    with pytest.raises(ModelError, match=rf"\A.*{name}.*\Z"):
        load_reader(str(copy))


END_TOKENS = [
    ({"generation_config.json": 1, "config.json": 40}, {1, 40}),
    ({"generation_config.json": [1, 7], "config.json": None}, {1, 7}),
    ({"generation_config.json": None, "config.json": [40, 41]}, {1, 40, 41}),
]


@pytest.mark.parametrize(("named", "expected"), END_TOKENS)
def test_end_tokens_are_those_of_all_files(  # 1 is that of text_config
    copy: Path, named: dict[str, Any], expected: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    edit(copy / "tokenizer_config.json", eos_token="<end_of_turn>")
    for file, tokens in named.items():
        edit(copy / file, eos_token_id=tokens)
    caplog.set_level("INFO", "panscan.model")
    loaded = load_meta_model(str(copy), torch.float32, CPU.device, revision=None, embedding=False)
    end = loaded.reader.tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert loaded.eos_ids == {end, *expected} == {*loaded.model.generation_config.eos_token_id}
    assert ("end tokens: " in caplog.text) == (named["generation_config.json"] is not None)


def test_mlx_weights_are_refused_by_name(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.0.self_attn.q_proj.weight"))
    rows = tensors[name].shape[0]
    tensors[name] = torch.zeros(rows, 8, dtype=torch.uint32)
    tensors[name.replace("weight", "scales")] = torch.ones(rows, 1)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    edit(copy / "config.json", quantization={"group_size": 64, "bits": 4})
    for load in (lambda: load_model(str(copy), CPU), lambda: DenseCheckpoint(str(copy))):
        with pytest.raises(PanscanError, match="MLX"):
            load()


def test_a_plan_reads_the_config_of_a_directory_or_of_the_hubs_cache(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "model.safetensors").unlink()
    stored = json.loads((copy / "config.json").read_text())
    edit(copy / "config.json", text_config={**stored["text_config"], "num_hidden_layers": 5, "layer_types": None})
    assert model_named(str(copy)).shape.text.layers == 5
    assert run(["plan", "--model", str(copy), "--gpu", "h100"]) == 0
    assert str(copy) in capsys.readouterr().out
    cache, commit = tmp_path / "cache" / "models--someone--medical-4b-it", "0" * 40
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(commit)
    shutil.copytree(copy, cache / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache.parent))
    model = model_named("someone/medical-4b-it")
    assert (model.id, model.shape.text.layers) == ("someone/medical-4b-it", 5)
    with pytest.raises(SettingError, match=r"config.json of 'someone/other-4b' is not on this machine"):
        model_named("someone/other-4b")
