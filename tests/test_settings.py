"""Settings: one table, every spelling, clear refusals."""

from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from panscan.core import PanAndScan, Request, Sampling, SettingError
from panscan.settings import Settings, axes, choose_runner, recorded_settings, settings_from
from panscan.settings.spellings import FOREIGN_OPTIONS, FOREIGN_VALUES


def test_the_table_covers_every_field_once() -> None:
    assert list(axes()) == [item.name for item in fields(Settings)]
    spellings = [spelling for axis in axes().values() for spelling in axis.spellings]
    assert len(spellings) == len(set(spellings))
    assert all(axis.help for axis in axes().values())


def test_defaults_are_transformers_pan_and_scan_and_greedy() -> None:
    assert Settings().pan_and_scan == PanAndScan(True, 256, 4, 1.2)
    assert Settings().sampling == Sampling(max_new_tokens=128)
    assert Settings().changed() == {}


VALUES = {bool: st.booleans(), int: st.integers(32, 64), float: st.floats(0.01, 0.99), str: st.text("abc", min_size=1)}


@given(st.data(), st.sampled_from(sorted(axes())))
def test_a_value_written_as_text_is_read_back(data: st.DataObject, name: str) -> None:
    axis = axes()[name]
    values: Any = st.sampled_from(axis.choices) if axis.choices else VALUES[axis.kind]
    value = data.draw(values)
    assert axis.parse(str(value)) == value
    assert axis.parse(value) == value
    if axis.optional:
        assert axis.parse("none") is None


@pytest.mark.parametrize(
    ("other", "name", "value"),
    [
        ("model_id", "model", "m"),
        ("precision", "dtype", "bf16"),
        ("attn_impl", "attention", "eager"),
        ("attn_implementation", "attention", "eager"),
        ("torch_dtype", "dtype", "bf16"),
        ("max_tokens", "max_new_tokens", 5),
        ("enable_prefix_caching", "prefix_caching", False),
        ("tp", "tensor_parallel_size", 2),
        ("max-num-crops", "pan_and_scan_max_num_crops", 6),
        ("pan_and_scan", "do_pan_and_scan", False),
        ("--grid-min-ratio", "pan_and_scan_min_ratio_to_activate", 2.0),
        ("grid_max_crops", "pan_and_scan_max_num_crops", 6),
        ("grid_min_crop_size", "pan_and_scan_min_crop_size", 448),
    ],
)
def test_other_names_of_a_setting_work(other: str, name: str, value: Any) -> None:
    assert getattr(settings_from({other: str(value)}), name) == value


@pytest.mark.parametrize(
    ("name", "alias", "value"),
    [
        ("dtype", "bfloat16", "bf16"),
        ("dtype", "half", "fp16"),
        ("dtype", "torch.float32", "fp32"),
        ("dtype", "float", "fp32"),
        ("kv_cache_dtype", "fp8_e4m3", "fp8"),
        ("model", "27b", "google/gemma-3-27b-it"),
        ("attention", "paged|sdpa", "sdpa"),
    ],
)
def test_other_values_of_a_setting_work(name: str, alias: str, value: str) -> None:
    assert getattr(settings_from({name: alias}), name) == value


def test_a_request_may_have_settings_of_its_views_and_its_sampling() -> None:
    settings = Settings(pan_and_scan_max_num_crops=7, max_new_tokens=9)
    plain = settings.request("What?", "a.png", {"id": "x"})
    assert (plain.pan_and_scan, plain.sampling, plain.id) == (settings.pan_and_scan, settings.sampling, "x")
    request = settings.request("What?", "a.png", {"regex": "[0-9]+"})
    assert request.sampling == replace(settings.sampling, regex="[0-9]+")
    given = {"do_pan_and_scan": True, "max_num_crops": 2, "max_new_tokens": 3, "temperature": 0.5, "sampling_seed": 4}
    request = settings.request("What?", "a.png", given)
    assert (request.pan_and_scan.enabled, request.pan_and_scan.max_num_crops) == (True, 2)
    assert (request.sampling.max_new_tokens, request.sampling.temperature, request.sampling.seed) == (3, 0.5, 4)
    assert not settings.request("What?", "a.png", {"pan_and_scan": False}).pan_and_scan.enabled
    sampled: dict[str, Any] = {"stop": ("\n",), "logit_bias": {5: 1.0}, "logprobs": 2, "seed": 3, "max_new_tokens": 2}
    assert settings.request("What?", "a.png", sampled).sampling == Sampling(**sampled)
    for name, message in (
        ("do_sample", "--temperature above 0"),
        ("dtype", "give it to from_pretrained"),
        ("max_new_token", "did you mean 'max_new_tokens'"),
    ):
        with pytest.raises(SettingError, match=message):
            settings.request("What?", "a.png", {name: 1})


@pytest.mark.parametrize(
    ("prompt", "images", "options", "message"),
    [
        ("x", (), {"sampling": Sampling(), "max_new_tokens": 2}, "max_new_tokens and sampling exclude each other"),
        ("x", (), {"regex": "a", "sampling": Sampling()}, "regex and sampling exclude each other"),
        ("x", (), {"pan_and_scan": PanAndScan(), "max_num_crops": 2}, "max_num_crops and pan_and_scan exclude"),
        ([{"role": "user", "content": [{"type": "image", "image": b"1"}]}], b"2", {}, "the messages hold images, too"),
        (None, (), {}, "prompt must be a text or a list of messages, got None"),
    ],
)
def test_no_part_of_a_request_is_dropped(prompt: Any, images: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Settings().request(prompt, images, options)


def test_a_conversation_of_transformers_brings_its_images() -> None:
    parts = [{"type": "image", "image": b"1"}, {"type": "text", "text": "and"}, {"type": "image", "url": "b.png"}]
    request = Settings().request([{"role": "system", "content": "x"}, {"role": "user", "content": parts}], (), {})
    assert list(request.images) == [b"1", "b.png"]
    assert request.messages == [
        {"role": "system", "content": "x"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]},
    ]
    assert parts[0]["image"] == b"1"
    for part, image in (
        ({"type": "image_url", "image_url": {"url": "c.png", "detail": "high"}}, "c.png"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,MQ=="}}, b"1"),
        ({"type": "image_url", "image_url": "c.png"}, "c.png"),
        ({"type": "image", "base64": "MQ=="}, b"1"),
    ):
        request = Request(messages=[{"role": "user", "content": [part]}])
        assert list(request.images) == [image]
        assert request.messages == [{"role": "user", "content": [{"type": part["type"]}]}]
    low = {"type": "image_url", "image_url": {"url": "c.png", "detail": "low"}}
    with pytest.raises(SettingError, match="'low' is not supported here: use PanAndScan"):
        Request(messages=[{"role": "user", "content": [low]}])


def test_memory_limits_may_be_a_mapping() -> None:
    limits = {"device_map": "auto", "max_memory": {0: "30GiB", "cpu": "60GiB"}}
    assert settings_from(limits).max_memory == "0=30GiB;cpu=60GiB"


def test_other_tools_names_are_no_settings_of_ours_and_name_settings_that_exist() -> None:
    known = {spelling for axis in axes().values() for spelling in axis.spellings}
    assert not known & {*FOREIGN_OPTIONS}
    for name, values in FOREIGN_VALUES.items():
        assert all(axes()[name].parse(alias) == value for alias, value in values.items())
        assert not axes()[name].choices or {*values.values()} <= {*axes()[name].choices}


UNSUPPORTED = "the engine does not support"


@pytest.mark.parametrize(
    ("settings", "preset", "runner", "reason"),
    [
        ({}, {}, "engine", "the default; it supports all your options"),
        ({"attention": "eager"}, {}, "generate", "the engine does not support --attention eager"),
        ({"batch_size": [1, 4]}, {}, "generate", f"{UNSUPPORTED} --batch-size 4; --max-num-seqs limits its batches"),
        ({"batch_size": [1]}, {}, "engine", "the default; it supports all your options"),
        ({"device_map": "auto"}, {}, "generate", "the engine does not support --device-map auto"),
        ({"device": "mps"}, {}, "generate", "the engine does not support --device mps"),
        ({}, {"cache": "static"}, "generate", "the engine does not support --cache static"),
        ({}, {"runner": "engine", "cache": "static"}, "engine", ""),
        ({"compile": "default"}, {"runner": "engine"}, "generate", "the engine does not support --compile default"),
        ({}, {"runner": "vllm"}, "vllm", ""),
        ({"runner": "engine", "attention": "eager"}, {}, "engine", ""),
    ],
)
def test_what_the_engine_supports(settings: dict[str, Any], preset: dict[str, Any], runner: str, reason: str) -> None:
    assert choose_runner(settings, preset)[:2] == (runner, reason)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"bach_size": 2}, "did you mean 'batch_size'"),
        ({"max_model_len": 4096}, "^max_model_len: .*; use --kv-cache-gb"),
        ({"load_in_4bit": True}, "^load_in_4bit: use --quantization bnb-4bit"),
        ({"attn_impl": "sdpa", "attention": "eager"}, "set twice"),
        ({"dtype": "bf17"}, "did you mean 'bf16'"),
        ({"batch_size": "two"}, "--batch-size takes a whole number"),
        ({"batch_size": 0}, "--batch-size is out of range: it must be a whole number from 1 to 65536, got 0"),
        ({"batch_size": "none"}, "takes no 'none'"),
        ({"equal_views": "perhaps"}, "true or false"),
        ({"temperature": "hot"}, "a number"),
        ({"temperature": -1}, "^--temperature is out of range: it must be a number from 0 to 1000000, got -1"),
        ({"temperature": "nan"}, "--temperature is out of range"),
        ({"temperature": 0.5, "sampling_seed": 2**64}, "^--sampling-seed is out of range"),
        ({"kv_cache_gb": 0}, "^--kv-cache-gb is out of range: .* above 0 and at most 1000000, got 0 .leave"),
        ({"kv_cache_gb": "inf"}, "--kv-cache-gb is out of range"),
        ({"vision_cache_gb": 0}, "^--vision-cache-gb is out of range: .* above 0 and .*, got 0 .it holds the encoded"),
        ({"max_concurrency": 0}, "--max-concurrency is out of range: it must be a whole number from 1 to"),
        ({"top_p": 0.5}, "temperature above 0"),
        ({"max_new_tokens": 0}, "--max-new-tokens is out of range"),
        ({"pan_and_scan_max_num_crops": 0}, "max-num-crops"),
        ({"random_weights": True}, "^--random-weights: .*; add --model-shape"),
        ({"model_shape": "4b"}, "^--model-shape 4b: requires --random-weights"),
        ({"random_weights": True, "model_shape": "4b", "model": "x/y"}, "^--model: not supported with --random-"),
        ({"random_weights": True, "model_shape": "4b", "quantization": "bnb-8bit"}, "use fp8, int8 or int4"),
        ({"random_weights": True, "model_shape": "4b", "device_map": "auto"}, "^--device-map: not supported with"),
        ({"attention": "flsh"}, "kernels-hub name"),
        ({"device": "tpu"}, "--device takes"),
        ({"device_map": "auto", "device": "cpu"}, "^--device cpu: --device-map places the layers; leave out one"),
        ({"max_memory": "0=1GiB"}, "^--max-memory: requires --device-map; add --device-map auto"),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size is out of range: .* from 1 to 64, got 0"),
        ({"tensor_parallel_size": 2, "device_map": "auto"}, "^--device-map: not supported with --tensor-parallel-s"),
        ({"tensor_parallel_size": 2, "device": "cuda:1"}, "^--device cuda:1: .*; use --device cuda,"),
        ({"tensor_parallel_size": 2, "quantization": "bnb-8bit"}, "bnb-8bit cannot be split; use fp8, int8 or int4"),
        ({"quantization": "torchao-int8"}, "--quantization takes fp8, int8, int4, bnb-8bit, bnb-4bit; got"),
        ({"quantization": "int8", "device_map": "auto"}, "^--device-map: not supported with --quantization int8"),
        ({"quantize_head": "int8", "device_map": "auto"}, "^--quantize-head: .* use --tensor-parallel-size"),
        ({"quantize_head": "int8", "quantization": "bnb-8bit"}, "^--quantize-head: .* fp8, int8 or int4"),
        ({"quantize_vision": "fp8", "device_map": "auto"}, "^--quantize-vision: .* use --tensor-parallel-size"),
        ({"quantize_vision": "fp8", "quantization": "bnb-8bit"}, "^--quantize-vision: .* fp8, int8 or int4"),
        ({"quantize_vision": "int4"}, "^--quantize-vision takes int8, fp8"),
        ({"quantization": "int8", "quantization_group_size": 64}, "-size 64: .*; add --quantization int4"),
        ({"quantization": "int4", "quantization_group_size": 48}, "-size takes 128, 64 or 32; got 48"),
        ({"quantization": "int4", "quantization_group_size": 8}, "-size is out of range: .* from 32 to"),
        ({"kv_cache_dtype": "fp16"}, "--kv-cache-dtype takes auto, fp8, int8; got"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization is out of range: .* above 0 and at most 1, got"),
        ({"gpu_memory_gb": 0}, "--gpu-memory-gb is out of range"),
    ],
)
def test_bad_settings_name_the_knob(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        settings_from(given_)


NUMBERS = [name for name, axis in axes().items() if axis.kind in (int, float)]
BEYOND = ["nan", "inf", "-inf", "1e300", "-1e300", "1" * 6000, str(2**70), str(-(2**70)), "٣" * 60, ""]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_beyond_every_use_name_their_own_flag(name: str) -> None:
    for text in BEYOND:
        with pytest.raises(SettingError) as caught:
            axes()[name].parse(text)
        message = str(caught.value)
        assert message.startswith(f"--{axes()[name].flag} ")
        assert len(message) < 240
    for value in (10**6000, 2**70, float("nan"), [1], {"a": 1}):
        with pytest.raises(SettingError, match=f"^--{axes()[name].flag} "):
            axes()[name].parse(value)


@pytest.mark.parametrize("name", list(axes()))
def test_a_value_of_another_type_names_the_flag(name: str) -> None:
    with pytest.raises(SettingError, match=f"^--{axes()[name].flag} "):
        Settings(**{name: object()})


def test_a_record_of_settings_makes_them_again() -> None:
    chosen = settings_from({"batch_size": 4, "do_pan_and_scan": False, "temperature": 0.5, "top_k": 3})
    assert Settings(**asdict(chosen)) == chosen


def test_a_record_may_hold_settings_that_were_removed() -> None:
    chosen = Settings(runner="engine", max_num_seqs=4)
    removed = {"fast_start": True, "tf32": False, "tp_plan": None, "pad_to_multiple_of": None}
    assert recorded_settings({**asdict(chosen), **removed}) == chosen
    with pytest.raises(SettingError, match=r"^tf32 True: .* has no such setting; measure again"):
        recorded_settings({"tf32": True})
    with pytest.raises(TypeError, match="unheard_of"):
        recorded_settings({"unheard_of": 1})


def test_tensor_parallelism_accepts_every_device_without_an_index() -> None:
    for device in ("auto", "cpu", "cuda"):
        assert Settings(tensor_parallel_size=2, device=device).tensor_parallel_size == 2


def test_only_what_needs_a_reload_is_in_the_load_key() -> None:
    plain = Settings()
    assert Settings(batch_size=8, attention="eager", cache="static").load_key == plain.load_key
    assert Settings(dtype="fp32").load_key != plain.load_key
    assert Settings(model="other").load_key != plain.load_key
    assert Settings(tensor_parallel_size=2).load_key != plain.load_key
    assert Settings(gpu_memory_utilization=0.5, gpu_memory_gb=8).load_key == plain.load_key
