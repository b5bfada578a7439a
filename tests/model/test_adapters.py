"""Adapters: PEFT's own merge is the truth; every loader has the same weights; a bad adapter is one line."""

import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import noise, only_run
from tests.model.conftest import edit
from tests.serve.serving import DEADLINE, launch

from panscan import Engine, Request, Sampling
from panscan.bench.grid import adapter_sums, build_cells
from panscan.cli.main import run as cli
from panscan.core import ModelError, PanscanError, PanscanWarning, SettingError, UnsupportedError
from panscan.core.model_names import canonical_model, split_adapters
from panscan.model.adapters import merged_tensors, write_merged
from panscan.model.bundled import fingerprints
from panscan.model.checkpoint import Placement, load_meta_model, load_model, load_reader, load_shard_of
from panscan.model.linear.quantized import WeightFormat
from panscan.model.load import load_for as load
from panscan.model.quantization import base_model_of
from panscan.model.shapes import SHAPES
from panscan.model.sharding import shard_of
from panscan.plan.models import model_named
from panscan.serve.loaded_model import open_model
from panscan.settings import Settings

pytestmark = pytest.mark.usefixtures("without_charts")

_CPU = torch.device("cpu")
_FLOAT = Placement(_CPU, torch.float32)
_Q = "model.language_model.layers.1.self_attn.q_proj"
_EMBEDDING = {"modules_to_save": ["embed_tokens"]}
_PUBLISHED = _Q.replace("model.language_model", "language_model.model")
_KINDS: dict[str, dict[str, Any]] = {
    "every linear, with patterns": {
        "lora_alpha": 7,
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 2, r"layers.1.self_attn.k_proj": 6},
        "alpha_pattern": {r"language_model\.layers\.[0-3]\.self_attn\.q_proj": 3, "fc1": 32},
        "modules_to_save": ["multi_modal_projector"],
    },
    "rank-stabilised, biases": {
        "use_rslora": True,
        "target_modules": ["q_proj", "fc2"],
        "bias": "all",
        "modules_to_save": ["input_layernorm"],
        "trainable_token_indices": [7, 3, 5],
    },
    "DoRA, with convolution and embeddings": {
        "use_dora": True,
        "target_modules": ["up_proj", "out_proj", "patch_embedding", "embed_tokens", "position_embedding"],
    },
    "biases of the factors": {"lora_bias": True, "target_modules": ["fc1"], "fan_in_fan_out": True},
    "output matrix": {"target_modules": ["lm_head"]},
    "output matrix apart": {"target_modules": ["o_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "replaced embedding, tied": {"target_modules": ["o_proj"], "ensure_weight_tying": True, **_EMBEDDING},
}
"""Configurations of adapters, which together have every supported kind of change."""


def random_adapter(peft: Any, directory: Path, seed: int, **config: Any) -> Path:
    """Write an adapter of the tiny model with random values, by PEFT."""
    model = peft.get_peft_model(load_model("tiny", _FLOAT).model, peft.LoraConfig(r=4, **config))
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            parameter.add_(torch.randn(parameter.shape, generator=random) * 0.1)
    model.save_pretrained(directory)
    return directory


def merged_by_peft(peft: Any, *adapters: Path) -> Any:
    """Return the tiny model with adapters merged by PEFT."""
    names = [f"adapter {number}" for number in range(len(adapters))]
    model = peft.PeftModel.from_pretrained(load_model("tiny", _FLOAT).model, str(adapters[0]), adapter_name=names[0])
    for name, directory in zip(names[1:], adapters[1:], strict=True):
        model.load_adapter(str(directory), adapter_name=name)
    return model.merge_and_unload(adapter_names=names)


def named(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)}


@pytest.mark.filterwarnings("ignore")  # PEFT warns about tied matrices
@pytest.mark.parametrize("kinds", [[kind] for kind in _KINDS] + [list(_KINDS)[:3:2]], ids=" + ".join)
def test_merged_weights_equal_pefts(tmp_path: Path, kinds: list[str]) -> None:
    peft = pytest.importorskip("peft")
    adapters = [random_adapter(peft, tmp_path / str(seed), seed, **_KINDS[kind]) for seed, kind in enumerate(kinds, 1)]
    expected = named(merged_by_peft(peft, *adapters))
    merged = load_model("+".join(["tiny", *map(str, adapters)]), _FLOAT).model
    assert expected.keys() == named(merged).keys()
    for name, value in named(merged).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6, msg=name)
    tied = expected["lm_head.weight"].equal(expected["model.language_model.embed_tokens.weight"])
    assert tied == merged.config.tie_word_embeddings == merged.config.get_text_config().tie_word_embeddings


def write_adapter(directory: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """Write an adapter of the tiny model by hand."""
    directory.mkdir(exist_ok=True)
    fields = {"peft_type": "LORA", "base_model_name_or_path": "tiny", "r": 2, "lora_alpha": 4, **config}
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    save_file({f"base_model.model.{name}": values for name, values in tensors.items()}, directory / _WEIGHTS)
    return directory


_WEIGHTS = "adapter_model.safetensors"


def factors(module: str = _Q, outputs: int = 128, inputs: int = 128, rank: int = 2) -> dict[str, torch.Tensor]:
    """Return the matrices of a module, which all give the same result in every order of additions."""
    first = torch.arange(rank * inputs).reshape(rank, inputs) % 7 / 64
    second = torch.arange(outputs * rank).reshape(outputs, rank) % 5 / 64
    return {f"{module}.lora_A.weight": first, f"{module}.lora_B.weight": second}


@pytest.fixture
def two_adapters(tmp_path: Path) -> Path:
    """A directory with the adapters ``0`` and ``1``, each of the layer with its number, which change answers."""
    for number in (0, 1):
        parts = factors(f"model.language_model.layers.{number}.self_attn.q_proj")
        write_adapter(tmp_path / str(number), {name: values * 4 for name, values in parts.items()})
    return tmp_path


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", factors() | {"lm_head.weight": torch.ones(1024, 128) / 8})


def test_every_loader_has_the_merged_weights(adapter: Path, tmp_path: Path) -> None:
    merged = load_model(str(adapter), _FLOAT)
    before, after = named(load_model("tiny", _FLOAT).model), named(merged.model)
    parts = factors()
    delta = 2 * parts[f"{_Q}.lora_B.weight"] @ parts[f"{_Q}.lora_A.weight"]
    changed = {name for name in before if not after[name].equal(before[name])}
    assert changed == {f"{_Q}.weight", "lm_head.weight"}
    assert after[f"{_Q}.weight"].equal(before[f"{_Q}.weight"] + delta)
    shard = load_shard_of(f"tiny+{adapter}", 1, 2, torch.float32, _CPU).model
    for name, value in named(shard).items():
        assert value.equal(shard_of(name, after[name], 1, 2))
    meta = load_meta_model(str(adapter), torch.float32, _CPU, revision=None, embedding=True).model
    assert meta.get_output_embeddings().weight.equal(after["lm_head.weight"])
    (tmp_path / "saved").mkdir()
    write_merged(str(adapter), tmp_path / "saved")
    for name, value in named(load_model(str(tmp_path / "saved"), _FLOAT).model).items():
        assert value.equal(after[name].bfloat16().float())
    states = []
    for words in (["tiny", "--adapter", str(adapter)], [str(tmp_path / "saved")]):  # on load, and by panscan quantize
        name, out = "+".join(word for word in words if word != "--adapter"), tmp_path / f"int8 {len(words)}"
        shard = load_shard_of(name, 0, 1, torch.bfloat16, _CPU, weight_format=WeightFormat("int8"))
        assert cli(["quantize", *words, str(out), "--quantization", "int8", "--no-verify", "--device", "cpu"]) == 0
        assert base_model_of(str(out)) == name  # whose answers the verdict of the quantised checkpoint needs
        stored = load_model(str(out), Placement(_CPU, torch.bfloat16))
        states.append([*shard.model.state_dict().values(), *stored.model.state_dict().values()])
    assert all(one.equal(other) for one, other in zip(*states, strict=True))


def _config(**fields: Any) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    return lambda tensors, config: config.update(fields)


_ROW = {"model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(1, 128)}
_SLOW = {rf"{'(.*)' * 4}\3\4\5\6\B\bx{{0,{n}}}": 1 for n in range(99)}
_BAD: dict[str, tuple[str, Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]]] = {
    "rank 0": ("r is 0; expected `int` >= 1", _config(r=0)),
    "other rank": ("the rank of .* is 3, but its tensors have 2", _config(r=3)),
    "rank 0 in tensors": ("rank of .* is 2, but its tensors have 0", lambda t, c: t.update(factors(rank=0))),
    "method": ("peft_type is 'IA3', but only LORA", _config(peft_type="IA3")),
    "MLX": ("MLX wrote this", lambda tensors, config: (config.pop("peft_type"), config.update(lora_parameters={}))),
    "changes the base": ("init_lora_weights 'pissa' changes", _config(init_lora_weights="pissa")),
    "unknown field": ("'layer_replication' is not supp", _config(layer_replication=[[0, 2], [1, 2]])),
    "infinite scale": ("lora_alpha is 1e[+]300; expected `float` <= 1", _config(lora_alpha=1e300)),
    "endless pattern": ("takes too long", _config(alpha_pattern={r"(.*?)*?(.*?)*?[!?]\b": 1.0})),
    "many slow patterns": ("takes too long", _config(alpha_pattern=_SLOW)),
    "broken pattern": ("rank_pattern: .*: missing", _config(rank_pattern={"(": 1})),
    "layers of a larger model": ("changes .*layers.40.*which the base model lacks", lambda t, c: t.update(_layer(40))),
    "width of a larger model": (r"has the shape \[2, 256\]; expected", lambda t, c: t.update(factors(inputs=256))),
    "one factor": ("has no lora_B", lambda tensors, config: tensors.pop(f"{_Q}.lora_B.weight")),
    "no magnitude": ("has no magnitude", _config(use_dora=True)),
    "NaN": ("has infinite or NaN", lambda tensors, config: tensors[f"{_Q}.lora_A.weight"].fill_(torch.nan)),
    "integers": ("expected floating-point", lambda t, c: t.update({f"{_Q}.weight": torch.ones(128, 128).int()})),
    "row beyond": ("not all below 1,024", lambda t, c: (t.update(_ROW), c.update(trainable_token_indices=[1024]))),
    "no tensors": ("has no tensors", lambda tensors, config: tensors.clear()),
    "layout twice": ("are the same part", lambda t, c: t.update(factors(_PUBLISHED))),
}


def _layer(number: int) -> dict[str, torch.Tensor]:
    return factors(f"model.language_model.layers.{number}.self_attn.q_proj")


@pytest.mark.parametrize("name", _BAD)
def test_a_bad_adapter_is_one_line(tmp_path: Path, name: str) -> None:
    message, damage = _BAD[name]
    tensors, config = factors(), {"peft_type": "LORA"}
    damage(tensors, config)
    directory = write_adapter(tmp_path / "bad", tensors, **config)
    if "peft_type" not in config:
        (directory / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(PanscanError, match=rf"\A--adapter {directory}: .*{message}.*\Z"):
        merged_tensors(f"tiny+{directory}")


def test_pickled_adapters_and_quantised_bases_are_refused(adapter: Path, tmp_path: Path) -> None:
    words = ["--quantization", "int8", "--no-verify", "--device", "cpu"]
    assert cli(["quantize", "tiny", str(tmp_path / "int8"), *words]) == 0
    with pytest.raises(ModelError, match=r"the base .*int8 is quantised: use --model with the unquantised base"):
        load_model(f"{tmp_path / 'int8'}+{adapter}", _FLOAT)
    (adapter / _WEIGHTS).rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"adapter_model\.bin: pickled weights can run code"):
        load_model(str(adapter), _FLOAT)


def test_a_base_is_found_or_named(adapter: Path, tmp_path: Path) -> None:
    second = write_adapter(tmp_path / "second", factors(), base_model_name_or_path="../adapter")
    inner = merged_tensors(str(second))  # an adapter of an adapter: both are merged
    twice = merged_tensors(f"tiny+{adapter}+{second}")
    assert inner.read("layers.1.self_attn.q_proj.weight").equal(twice.read("layers.1.self_attn.q_proj.weight"))
    for base, message in {
        str(second): "leads back to itself",
        "/trained/elsewhere": "its base /trained/elsewhere is not on this machine; name the base with --model BASE",
        "~nobody-here/base": "its base ~nobody-here/base is not on this machine; name the base with --model BASE",
        "a/" + "b" * 4000: "its base a/b{148} is not on this machine; name the base with --model BASE",
        None: "has no base_model_name_or_path; name the base with --model BASE --adapter",
    }.items():
        edit(adapter / "adapter_config.json", base_model_name_or_path=base)
        with pytest.raises(ModelError, match=message):
            merged_tensors(str(second))
    with pytest.raises(ModelError, match="--adapter mini: not an adapter"):
        merged_tensors("tiny+mini")


def test_a_template_or_tokenizer_unlike_the_bases_is_said(adapter: Path) -> None:
    base = load_reader("tiny").tokenizer
    base.save_pretrained(adapter)  # as trainers do; not byte for byte the base's
    tokenizer = json.loads((adapter / "tokenizer.json").read_text())
    (adapter / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", PanscanWarning)
        load_reader(str(adapter))
    tokenizer["added_tokens"][0]["content"] = "<renamed>"
    (adapter / "tokenizer.json").write_text(json.dumps(tokenizer))
    (adapter / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    with pytest.warns(PanscanWarning, match=f"^--model {adapter}: ignoring its chat template and tokenizer, unlike"):
        reader = load_reader(str(adapter))
    assert reader.tokenizer.chat_template == base.chat_template
    (adapter / "tokenizer.json").write_text('{"added_tokens": 1}')
    with pytest.warns(PanscanWarning, match="and tokenizer, unlike"):
        load_reader(str(adapter))


def test_a_plan_of_an_adapter_is_that_of_its_base(adapter: Path) -> None:
    for name in (str(adapter), f"tiny+{adapter}", f"google/gemma-3-4b-it+{adapter}"):
        planned = model_named(name)
        assert (planned.id, planned.shape) == (name, SHAPES["4b" if "4b" in name else "tiny"])
    edit(adapter / "adapter_config.json", base_model_name_or_path=str(adapter))
    with pytest.raises(ModelError, match="its base leads back to itself"):
        model_named(str(adapter))


def test_names_are_split_where_no_directory_contains_the_sign(tmp_path: Path) -> None:
    directory = tmp_path / "a+b"
    directory.mkdir()
    names = ["google/gemma-3-4b-it", str(directory), "owner/lora"]
    assert split_adapters("+".join(names)) == names
    assert canonical_model(f"tiny+{directory}/.") == f"tiny+{directory.resolve()}"


def test_an_adapter_that_is_trained_again_has_another_fingerprint(adapter: Path) -> None:
    before = fingerprints([f"tiny+{adapter}", "owner/model"])
    tensors = load_file(adapter / _WEIGHTS)
    save_file({name: values * 2 for name, values in tensors.items()}, adapter / _WEIGHTS)
    after = fingerprints([f"tiny+{adapter}"])
    assert before.keys() == after.keys() == {f"tiny+{adapter}"} and before != after
    assert re.fullmatch("[0-9a-f]{12}", before[f"tiny+{adapter}"])


def test_a_sweep_varies_adapters_and_their_sums() -> None:
    def models(options: list[str], **flags: list[str]) -> list[str]:
        return [cell.settings.model for cell in build_cells(flags, adapters=adapter_sums(options))]

    assert models(["a,b"]) == ["a", "b"]  # without a model, the base that the first adapter names
    assert models(["none,a", "b"], model=["m", "n"]) == ["m+b", "m+a+b", "n+b", "n+a+b"]
    assert models([], model=["m"]) == ["m"]
    with pytest.raises(SettingError, match="--adapter none: which model"):
        models(["none,a"])
    with pytest.raises(SettingError, match="--adapter has an empty value: 'a,'"):
        models(["a,"])


@pytest.mark.usefixtures("two_adapters")
def test_a_sweep_over_adapters_loads_their_base_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise(60, 60).save(folder / "page.png")
    loads: list[str] = []
    monkeypatch.setattr("panscan.model.load.load_for", lambda settings: loads.append(settings.model) or load(settings))
    words = ["--images", "page.png", "-p", "What?", "--max-new-tokens", "5", "--repeats", "2", "--dtype", "fp32"]
    adapters = ["--model", "tiny", "--adapter", "none,0,1"]
    cells = ["--runner", "engine", "--kv-cache-gb", "0.1", "--device", "cpu", "--include-content"]
    assert cli(["bench", *adapters, *words, *cells]) == 0
    assert len(loads) == 1
    run = only_run(folder)
    assert {verdict.verdict for verdict in run.verdicts.values()} == {"exact"}
    answers = {
        cell.settings["model"]: {request.content and request.content.answer for request in run.requests_of(id)}
        for id, cell in run.cells.items()
    }
    for model in ("tiny", "tiny+0", "tiny+1"):
        with Engine.from_pretrained(model, dtype="fp32", device="cpu", kv_cache_gb=0.1, max_new_tokens=5) as engine:
            assert answers[model] == {engine.generate([engine.request("What?", ["page.png"])])[0].text}
    assert len({*map(str, answers.values())}) == 3


def test_a_server_has_a_name_for_the_base_and_each_adapter(two_adapters: Path) -> None:
    names = {"base": "tiny", "first": f"tiny+{two_adapters / '0'}", "second": f"tiny+{two_adapters / '1'}"}
    adapters = [f"--adapter={name}={two_adapters / number}" for name, number in (("first", "0"), ("second", "1"))]
    server = launch("--model", "tiny", *adapters, "--served-model-name", "base", "--kv-cache-gb", "0.05")
    try:
        listed = httpx.get(f"{server}/v1/models", timeout=DEADLINE).json()["data"]
        assert {model["id"]: model["root"] for model in listed} == names
        assert [model["parent"] for model in listed] == [None, "base", "base"]
        for name, model in names.items():
            body = {"prompt": "What is", "max_tokens": 8, "temperature": 0, "model": name}
            answer = httpx.post(f"{server}/v1/completions", json=body, timeout=DEADLINE).json()
            request = Request("What is", raw=True, sampling=Sampling(max_new_tokens=8))
            with Engine.from_pretrained(model, dtype="fp32", device="cpu", kv_cache_gb=0.05) as engine:
                assert answer["choices"][0]["text"] == engine.generate([request])[0].text
            assert answer["model"] == name
    finally:
        assert server.stop() == 0


def test_models_with_adapters_share_what_the_adapters_keep(two_adapters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for quantization in (None, "int4"):
        settings = Settings(model="tiny", runner="engine", dtype="fp32", device="cpu", quantization=quantization)
        model = open_model(settings, {name: f"tiny+{two_adapters / name}" for name in "01"})
        try:
            base, *others = (model.engine_of(name).loaded.model.state_dict() for name in (None, "0", "1"))
            assert all(base[key].equal(values) for key, values in load(settings).model.state_dict().items())
            for name, tensors in zip("01", others, strict=True):
                expected = load(replace(settings, model=f"tiny+{two_adapters / name}")).model.state_dict()
                assert all(tensors[key].equal(values) for key, values in expected.items())
                apart = [key for key in tensors if tensors[key].data_ptr() != base[key].data_ptr()]
                assert apart and all(f"layers.{name}.self_attn." in key for key in apart)
        finally:
            for name in (None, "0", "1"):
                model.engine_of(name).close()
    monkeypatch.setattr("panscan.model.load.measure_memory", lambda device: (10**6, 10**3, 0))
    with pytest.raises(UnsupportedError, match=r"changes need 6\.55e-05 GB, and cpu has 1e-06 GB free: serve fewer"):
        open_model(replace(settings, quantization=None), {"0": f"tiny+{two_adapters / '0'}"})
    monkeypatch.setattr("panscan.serve.loaded_model.load_for", lambda settings: pytest.fail("the base was loaded"))
    bad = write_adapter(two_adapters / "bad", factors(rank=0))
    with pytest.raises(ModelError, match=r"rank of .* is 2, but its tensors have 0"):
        open_model(settings, {"0": f"tiny+{two_adapters / '0'}", "bad": f"tiny+{bad}"})
    split = replace(settings, quantization=None, tensor_parallel_size=2)
    with pytest.raises(UnsupportedError, match=r"^--adapter NAME=ADAPTER: .* leave out --tensor-parallel-size"):
        open_model(split, {"0": f"tiny+{two_adapters / '0'}"})
