"""Checkpoints as people have them: the same answer through every verb and runner, or the same refusal.

``PANSCAN_RANDOM_CHECKPOINTS=300`` tries that many random ones instead of a few.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import noise

from panscan import Engine, GenerateRunner, Request, Sampling
from panscan.cli.main import run
from panscan.core import PanscanError, PanscanWarning
from panscan.model.build import decoder_linears
from panscan.model.bundled.tiny import tiny_directory
from panscan.model.checkpoint import Placement, load_meta_model, load_model, load_shard_of
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


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


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


def renamed(tensors: _Tensors, layout: str) -> _Tensors:
    """Return tensors under the names of Transformers 5, or of a language model inside another."""
    if layout == "transformers 5":
        names = {name: name.replace("language_model.model.", "model.language_model.") for name in tensors}
        names = {name: new.replace("language_model.lm_head", "lm_head") for name, new in names.items()}
        return {names[name]: values for name, values in tensors.items()}
    return tensors


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
    write_weights(folder, renamed(tensors, choose("names", "published", "transformers 5")), layout)
    return ", ".join(words)


def outcome(what: Callable[[], Any]) -> Any:
    """Return a result, or the message of a refusal."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PanscanWarning)
            return what()
    except PanscanError as error:
        return f"refused: {error}"


def answers(folder: Path) -> dict[str, Any]:
    """Return the answer of a checkpoint through each verb that computes with dense weights."""
    name = str(folder)
    settings = Settings(model=name, device="cpu", dtype="fp32", max_new_tokens=6, do_pan_and_scan=False)

    def by_engine() -> list[int]:
        with Engine.from_settings(settings) as engine:
            return [*engine.generate([ASKED], progress=False)[0].token_ids]

    def by_shard() -> list[int]:
        loaded, _ = load_shard_of(name, 0, 1, torch.float32, CPU.device)
        return [*GenerateRunner(loaded, settings).run([ASKED])[0].token_ids]

    def by_generate() -> list[int]:
        return [*GenerateRunner(load_model(name, CPU), settings).run([ASKED])[0].token_ids]

    return {"engine": outcome(by_engine), "generate": outcome(by_generate), "shard": outcome(by_shard)}


def check(folder: Path, words: str) -> None:
    """Check that every verb agrees on a checkpoint."""
    name, found = str(folder), answers(folder)
    assert len({str(answer) for answer in found.values()}) == 1, (words, found)
    answer = found["engine"]
    listed = outcome(lambda: DenseCheckpoint(name).name)
    head = outcome(lambda: load_meta_model(name, torch.float32, CPU.device, revision=None, embedding=True))
    if isinstance(answer, str):
        two_faults = "quantization_config: none" not in words  # without weights, nothing shows that it is left over
        assert two_faults or listed == head == answer, (words, answer, listed, head)
        assert str(listed).startswith("refused") and str(head).startswith("refused"), (words, listed, head)
        return
    assert model_named(name).id == name, words
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PanscanWarning)
        model = load_model(name, CPU).model
        assert torch.equal(head.model.lm_head.weight, model.lm_head.weight), words
        out = folder.with_name("int8")
        assert run(["quantize", name, str(out), "--quantization", "int8", "--no-verify", "--device", "cpu"]) == 0, words
        written = load_model(str(out), CPU).model
    assert torch.equal(written.lm_head.weight, model.lm_head.weight), words
    for module, dense in decoder_linears(model):
        weights = written.get_submodule(module).dequantized(torch.float32)
        assert (weights - dense.weight).abs().max() <= dense.weight.abs().max() / 127, (words, module)


@pytest.mark.parametrize("seed", range(int(os.environ.get("PANSCAN_RANDOM_CHECKPOINTS", "3"))))
def test_every_verb_agrees_on_a_random_checkpoint(tmp_path: Path, seed: int) -> None:
    words = random_checkpoint(random.Random(seed), tmp_path / "model")
    check(tmp_path / "model", words)
