"""Loading: the path that real checkpoints take, and one line for each way in which it can fail."""

import json
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import noise

from panscan import GenerateRunner, Request
from panscan.core import ModelError, SettingError
from panscan.model.checkpoint import Placement, load_meta_model, load_model, load_reader
from panscan.settings import settings_from

CPU = Placement(torch.device("cpu"), torch.float32)


def answer(runner: GenerateRunner) -> list[int]:
    return runner.generate([runner.request("What is the total?", [noise(300, 900)])])[0].token_ids


def test_a_sharded_local_directory_gives_the_same_answers(tiny: GenerateRunner, copy: Path) -> None:
    deepcopy(tiny.loaded.model).to(torch.bfloat16).save_pretrained(copy, max_shard_size="1MB")
    (copy / "model.safetensors").unlink()
    assert len(list(copy.glob("model-*.safetensors"))) > 2
    local = GenerateRunner.from_pretrained(str(copy), dtype="fp32", device="cpu", max_new_tokens=12)
    assert answer(local) == answer(tiny)


def test_a_base_checkpoint_takes_raw_prompts_only(tiny: GenerateRunner, copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    base = GenerateRunner.from_pretrained(str(copy), dtype="fp32", device="cpu", max_new_tokens=12)
    with pytest.raises(ModelError, match="--raw-prompt"):
        base.generate([base.request("What?")])
    greedy = base.settings.sampling
    raw = Request(prompt="<start_of_image> reads: ", images=[noise(300, 900)], raw=True, sampling=greedy)
    [result] = base.generate([raw])
    assert result.views == 4
    assert result.token_ids == tiny.generate([raw])[0].token_ids


def test_the_checkpoints_sampling_defaults_do_not_leak(copy: Path) -> None:
    """Released checkpoints store do_sample=True, top_k=64: greedy must still be greedy, and silent."""
    stored = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps({**stored, "do_sample": True, "top_k": 64, "top_p": 0.95}))
    runner = GenerateRunner.from_pretrained(str(copy), dtype="fp32", device="cpu", max_new_tokens=12)
    assert answer(runner) == answer(runner)
    assert runner.loaded.model.generation_config.top_k != 64


def test_a_directory_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_reader(str(tmp_path))
    for name in ("./nowhere", "/nowhere/at/all", "a/b/c"):
        with pytest.raises(ModelError, match="no such directory"):
            load_reader(name)


FAMILIES = {"llama": "", "gemma2": ": it reads no images", "gemma3n": ": only 'panscan profile' runs Gemma 3n"}


@pytest.mark.parametrize(("kind", "reason"), FAMILIES.items())
def test_another_model_family_is_refused(copy: Path, kind: str, reason: str) -> None:
    config = {"model_type": kind, "architectures": ["LlamaForCausalLM"]}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"panscan runs Gemma 3; this is a {kind!r} model{reason}"):
        load_reader(str(copy))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_one_line(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(ModelError, match=r"\A.*--model.*\Z"):
        load_model(str(copy), CPU)


@pytest.fixture
def code(tmp_path: Path) -> str:
    """Python code that leaves a trace when it runs."""
    return f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"


class Runs:
    """Runs code when it is unpickled."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, (self.code,)


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def with_own_model(copy: Path) -> str:
    change(copy / "config.json", model_type="own", auto_map={"AutoConfig": "own.X", "AutoModel": "own.X"})
    return "panscan runs Gemma 3; this is a 'own' model"


def with_own_processor(copy: Path) -> str:
    for name in ("processor_config.json", "tokenizer_config.json"):
        change(copy / name, processor_class="Own", auto_map={"AutoProcessor": "own.X"})
    return "it requires custom code (trust_remote_code), which panscan does not run"


def with_own_kernel(copy: Path) -> str:
    text = json.loads((copy / "config.json").read_text())["text_config"]
    change(copy / "config.json", text_config={**text, "_attn_implementation": "somebody/kernel"})
    return "config.json names code to download ('somebody/kernel')"


@pytest.mark.parametrize("prepare", [with_own_model, with_own_processor, with_own_kernel])
def test_a_checkpoint_runs_no_custom_code_and_asks_nothing(
    copy: Path, code: str, tmp_path: Path, prepare: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / "own.py").write_text(f"{code}class X: pass\n")
    message = prepare(copy)
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")  # the user's careless answer
    with pytest.raises(ModelError, match=rf"\A.*{re.escape(message)}.*\Z"):
        load_model(str(copy), CPU)
    assert asked == []
    assert not (tmp_path / "ran").exists()


def test_code_beside_a_gemma_3_is_ignored(copy: Path, code: str, tmp_path: Path) -> None:
    (copy / "own.py").write_text(f"{code}class X: pass\n")
    change(copy / "config.json", auto_map={"AutoConfig": "own.X", "AutoModelForImageTextToText": "own.X"})
    change(copy / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.X", "own.X"]})
    (copy / "custom_generate").mkdir()
    (copy / "custom_generate" / "generate.py").write_text(code)
    assert load_model(str(copy), CPU).model.config.model_type == "gemma3"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("harmless", [True, False])
@pytest.mark.parametrize("place", ["pytorch_model.bin", "index"])
def test_pickled_weights_are_refused(copy: Path, code: str, tmp_path: Path, harmless: bool, place: str) -> None:
    tensors: dict[str, object] = dict(load_file(copy / "model.safetensors"))
    (copy / "model.safetensors").unlink()
    names = dict.fromkeys(tensors, "weights.bin")
    torch.save(tensors if harmless else {**tensors, "x": Runs(code)}, copy / "weights.bin")
    if place == "index":
        index = {"metadata": {"total_size": 1}, "weight_map": names}
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        (copy / "weights.bin").rename(copy / place)
    with pytest.raises(ModelError, match=r"\A.*not all of its weights are in safetensors files: convert them.*\Z"):
        load_model(str(copy), CPU)
    assert not (tmp_path / "ran").exists()


def test_a_meta_model_needs_no_generation_settings(copy: Path) -> None:
    """Fine-tuned checkpoints often lack the file; ranks need a meta model of them."""
    (copy / "generation_config.json").unlink()
    meta_model = load_meta_model(str(copy), torch.float32, torch.device("cpu"), revision=None, embedding=False)
    whole = load_model(str(copy), Placement(torch.device("cpu"), torch.float32))
    assert meta_model.eos_ids == whole.eos_ids
    assert meta_model.model.generation_config.suppress_tokens == whole.model.generation_config.suppress_tokens


def test_missing_weights_are_not_drawn_at_random(copy: Path) -> None:
    weights = copy / "model.safetensors"
    tensors = load_file(weights)
    lost = next(name for name in tensors if "mm_input_projection_weight" in name)
    del tensors[lost]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are missing, e\.g\. .*mm_input_projection_weight"):
        load_model(str(copy), CPU)


@pytest.mark.parametrize("text", ["30GiB", "gpu=30GiB", "0=", "=3", "cpu=XGiB", "0=3"])
def test_max_memory_is_read_or_refused(text: str) -> None:
    with pytest.raises(SettingError, match="--max-memory takes"):
        settings_from({"device_map": "auto", "max_memory": text})


def test_max_memory_as_accelerate_wants_it() -> None:
    placed = Placement(torch.device("cpu"), torch.float32, device_map="auto", max_memory="0=30GiB; cpu=60GiB")
    assert placed.arguments()["max_memory"] == {0: "30GiB", "cpu": "60GiB"}


def test_device_map_places_the_model(tiny: GenerateRunner) -> None:
    spread = GenerateRunner.from_pretrained("tiny", dtype="fp32", device_map="auto", max_memory="cpu=2GiB")
    if torch.cuda.is_available():
        pytest.skip("auto takes the GPU here")
    asked = [tiny.request("What?", [noise(300, 900)])]
    assert spread.generate(asked)[0].token_ids == tiny.generate(asked)[0].token_ids
