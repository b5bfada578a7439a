"""GPUs, which layouts fit, which one is recommended, and ``panscan plan`` on the command line."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import pytest
from tests.conftest import documented, noise

from panscan.cli.main import cli, run
from panscan.core import ModelError, SettingError
from panscan.engine.options import EngineOptions
from panscan.model.bundled import mini_directory, tiny_directory
from panscan.model.shapes import SHAPES
from panscan.plan.advice import advise, command_words, rejections, warnings_for, what_would_fit
from panscan.plan.gpus import Gpu, all_gpus, gpu_named, reported_gpu
from panscan.plan.layouts import Layout, PlanInputs, find_layouts
from panscan.plan.mix import WorkloadMix, mix_of_sizes, mix_of_views, parse_output_tokens
from panscan.plan.models import model_named
from panscan.settings import WEIGHT_KINDS, Settings, axes


def inputs_for(model: str, gpu: str, count: int, **fields: Any) -> PlanInputs:
    shape = SHAPES[model]
    mix = mix_of_views("4" if shape.vision else "0", shape, text_tokens=42, output_tokens=(256, 256))
    plain = {"shape": shape, "gpu": gpu_named(gpu), "count": count, "mix": mix, "options": EngineOptions()}
    return PlanInputs(**{**plain, **fields})


def fitting(inputs: PlanInputs) -> list[Layout]:
    return [layout for layout in find_layouts(inputs) if layout.fits]


def test_ten_a100_with_40_gb() -> None:
    inputs = inputs_for("27b", "a100-40gb", 10)
    layouts = find_layouts(inputs)
    advice = advise(layouts, "throughput")
    assert advice is not None and advice.layout.exact and advice.layout.variant.tensor_parallel_size > 1
    assert advice.faster is not None and advice.faster.variant.weights == "int8" and advice.gain is not None
    assert "--kv-cache-dtype int8" in " ".join(command_words(inputs, "serve", advice.faster, "27b"))
    # Both caches are compared where memory limits the requests at once, which a batch of a group of four is not.
    running = {(*layout.kind, layout.gpus // layout.replicas): layout.running for layout in layouts if layout.fits}
    for weights, size in (("int8", 1), (None, 2), ("int8", 2)):
        assert 1.8 < running[weights, "int8", size] / running[weights, "auto", size] < 2.4
    assert (None, "auto", 4) in running and (None, "int8", 4) not in running
    reasons = {rejection.weights: rejection for rejection in rejections(layouts)}
    assert reasons["bf16"].tensor_parallel_sizes == (1,) and "54.9 GB of weights" in reasons["bf16"].reason
    assert reasons["fp8"].tensor_parallel_sizes == (1, 2, 4, 8) and "8.9" in reasons["fp8"].reason
    assert {warning.name for warning in warnings_for(inputs, layouts)} == {"device_map", "fp8", "flash_attention"}


def test_an_int8_cache_is_named_where_memory_limits_the_exact_layout() -> None:
    for gpu, named in (("a100-80gb", True), ("h200", False)):
        inputs = inputs_for("27b", gpu, 1, kinds=(None,))
        layouts = find_layouts(inputs)
        assert [caution.name for caution in warnings_for(inputs, layouts)].count("kv_cache") == named
        advice = advise(layouts, "throughput")
        assert advice is not None and advice.layout.exact


def test_a_specification_without_an_fp8_rate_is_not_a_gpu_without_fp8() -> None:
    inputs = inputs_for("4b", "memory=24,bandwidth=936,bf16=71,capability=8.9", 1)
    [text] = [warning.text for warning in warnings_for(inputs, find_layouts(inputs)) if warning.name == "fp8"]
    assert "no fp8 rate given: add fp8=" in text and "has no fp8" not in text


def test_layouts_that_fit_are_ordered_by_the_goal() -> None:
    throughput = [layout.speed.requests_per_s.value for layout in fitting(inputs_for("4b", "l40s", 4))]
    latency = [layout.speed.e2e.value for layout in fitting(inputs_for("4b", "l40s", 4, goal="latency"))]
    assert throughput == sorted(throughput, reverse=True) and latency == sorted(latency)
    assert len(throughput) == len(latency) > 4


def test_quantised_weights_are_recommended_only_where_no_exact_layout_is_possible() -> None:
    fits = advise(find_layouts(inputs_for("27b", "h200", 1)), "throughput")
    assert fits is not None and fits.layout.exact and fits.rule.startswith("unquantised weights")
    too_small = advise(find_layouts(inputs_for("27b", "a100-40gb", 1)), "throughput")
    assert too_small is not None and not too_small.layout.exact and "do not fit" in too_small.rule
    asked = advise(find_layouts(inputs_for("27b", "h200", 1, kinds=("fp8",))), "throughput")
    assert asked is not None and asked.layout.variant.weights == "fp8" and "--quantization" in asked.rule
    options = EngineOptions(kv_cache_dtype="fp8")
    cache = advise(find_layouts(inputs_for("27b", "h200", 1, kinds=(None,), options=options)), "throughput")
    assert cache is not None and "--kv-cache-dtype" in cache.rule


def test_a_model_that_fits_nowhere_names_what_would_fit() -> None:
    inputs = inputs_for("27b", "a100-40gb", 1, kinds=(None,))
    assert advise(find_layouts(inputs), "throughput") is None
    weights, count, gpu = what_would_fit(inputs)
    assert weights.startswith("--quantization int") and count.startswith("--count 2") and gpu.startswith("--gpu ")
    larger = inputs_for("27b", gpu.split()[1], 1, kinds=(None,))
    assert fitting(larger) and larger.gpu.memory_bytes > inputs.gpu.memory_bytes
    fp8_cache = inputs_for("27b", "a100-40gb", 10, options=EngineOptions(kv_cache_dtype="fp8"))
    assert what_would_fit(fp8_cache) == ["--kv-cache-dtype int8"]


def test_slow_links_are_a_caution_only_where_a_layout_uses_them() -> None:
    for model, gpu, count, expected in (("27b", "l40s", 2, True), ("27b", "h200", 2, False), ("4b", "l40s", 1, False)):
        inputs = inputs_for(model, gpu, count)
        names = {caution.name for caution in warnings_for(inputs, find_layouts(inputs))}
        assert ("link" in names, "device_map" in names) == (expected, count > 1)


@pytest.mark.parametrize(("gpu", "kinds"), [("a100-40gb", (None,)), ("l4", (None, "fp8")), ("rtx-5060-ti", ("int4",))])
def test_each_change_that_would_fit_fits_and_less_of_it_does_not(gpu: str, kinds: tuple[str | None, ...]) -> None:
    inputs = inputs_for("27b", gpu, 1, kinds=kinds)
    names = {"bf16": None, "none": None}
    changes = dict(change.split(maxsplit=1) for change in what_would_fit(inputs))
    others = [kind for kind in (None, *WEIGHT_KINDS) if kind not in kinds]
    assert ("--quantization" in changes) == bool(fitting(replace(inputs, kinds=tuple(others))))
    if weights := changes.get("--quantization"):
        assert fitting(replace(inputs, kinds=(names.get(weights, weights),))) and names.get(weights, weights) in others
    match = re.fullmatch(r"(\d+) \(--tensor-parallel-size (\d+), (\w+)\)", changes["--count"])
    assert match is not None and match[1] == match[2] == "2"
    assert fitting(replace(inputs, count=2, kinds=(names.get(match[3], match[3]),)))
    named = [text.split() for text in changes["--gpu"].removeprefix("--gpu ").split(" or --gpu ")]
    assert [names.get(weights[1:-1], weights[1:-1]) for _, weights in named] == list(kinds)
    for (name, _), kind in zip(named, kinds, strict=True):
        larger = replace(inputs, gpu=gpu_named(name), kinds=(kind,))
        assert fitting(larger)
        for smaller in all_gpus().values():
            if smaller.capability is not None and smaller.memory_bytes < larger.gpu.memory_bytes:
                assert not fitting(replace(larger, gpu=smaller))


def test_a_long_request_does_not_fit_in_a_small_cache() -> None:
    mix = mix_of_views("400", SHAPES["27b"], text_tokens=42, output_tokens=(256, 256))
    inputs = inputs_for("27b", "a100-40gb", 1, kinds=("int8",), mix=mix)
    [layout] = find_layouts(inputs)
    assert layout.reason is not None and "the longest request has" in layout.reason


PLANS = [
    ("h200", 1, (None,), EngineOptions()),
    ("a100-40gb", 10, (None,), EngineOptions(max_num_seqs=64, kv_cache_gb=3.5)),
    ("l40s", 4, ("int4",), EngineOptions(prefill_chunk_size=1024, kv_cache_dtype="fp8", gpu_memory_gb=40.0)),
    ("cpu", 1, ("int4",), EngineOptions()),
]


@pytest.mark.parametrize("verb", ["serve", "batch"])
@pytest.mark.parametrize(("gpu", "count", "kinds", "options"), PLANS)
def test_commands_parse_and_set_what_the_plan_assumed(
    verb: str, gpu: str, count: int, kinds: tuple[str | None, ...], options: EngineOptions
) -> None:
    inputs = inputs_for("4b", gpu, count, kinds=kinds, options=options)
    advice = advise(find_layouts(inputs), "throughput")
    program, name, *words = command_words(inputs, verb, advice.layout, "google/gemma-3-4b-it")
    assert (program, name) == ("panscan", verb)
    command = cli.get_command(click.Context(cli), verb)
    parsed = command.make_context(verb, words, **cli.context_settings).params
    given = {name: axis.parse(parsed[name]) for name, axis in axes().items() if parsed.get(name) is not None}
    settings = Settings(**{"runner": "engine", **given})
    variant = advice.layout.variant
    assert settings.tensor_parallel_size == variant.tensor_parallel_size
    assert settings.quantization == variant.weights
    assert (parsed["replicas"] or 1) == advice.layout.replicas
    assert ("--replicas" in words) == (advice.layout.replicas > 1)
    assert ("--tensor-parallel-size" in words) == (variant.tensor_parallel_size > 1)
    chosen = EngineOptions.of(settings)
    assert (chosen.max_num_seqs, chosen.kv_cache_dtype) == (options.max_num_seqs, variant.kv_cache_dtype)
    assert (chosen.kv_cache_gb, chosen.gpu_memory_gb) == (options.kv_cache_gb, options.gpu_memory_gb)
    assert chosen.prefill_chunk_size == options.prefill_chunk_size


def test_models_by_name_and_by_configuration(tmp_path: Path) -> None:
    assert model_named("27b").id == "google/gemma-3-27b-it"
    assert model_named("someone/gemma-3-4b-it-finetuned").shape is SHAPES["4b"]
    for directory, name in ((mini_directory(), "mini"), (tiny_directory(), "tiny")):
        shape = model_named(str(directory)).shape
        assert (shape.vision, shape.image_tokens) == (SHAPES[name].vision, SHAPES[name].image_tokens)
        assert shape.parameters() == SHAPES[name].parameters() and shape.text.window == SHAPES[name].text.window
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    vision = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    vision |= {"image_size": 896, "patch_size": 14}
    published = {"model_type": "gemma3", "text_config": text, "vision_config": vision}  # defaults are left out
    (tmp_path / "config.json").write_text(json.dumps(published), "utf-8")
    shape = model_named(str(tmp_path)).shape
    assert replace(shape, name="4b") == replace(SHAPES["4b"], text=replace(SHAPES["4b"].text, rope_factor=None))
    with pytest.raises(SettingError, match="did you mean '27b'"):
        model_named("28b")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', "utf-8")
    with pytest.raises(ModelError, match="this is a 'llama' model"):
        model_named(str(tmp_path))


def mixed(text: str, **fields: Any) -> WorkloadMix:
    return mix_of_views(text, SHAPES["4b"], **{"text_tokens": 20, "output_tokens": (10, 30), **fields})


def test_mixes() -> None:
    mix = mixed("1:1,5:3")
    assert (mix.mean_views, mix.mean_output_tokens) == (4.0, 20.0)
    requests = mix.requests(200, seed=1)
    assert {request.views for request in requests} == {1, 5} and {request.output_tokens for request in requests} <= set(
        range(10, 31)
    )
    assert all(len(request.ids) == mix.prompt_tokens(request.views) for request in requests)
    keys = [span.key for request in requests for span in request.layout.spans]
    assert len(set(keys)) == len(keys)  # no page is asked about twice
    again = mix.requests(200, seed=1)
    assert [request.ids for request in again] == [request.ids for request in requests]
    pages = mix_of_sizes(
        [(896, 2688), (800, 800)], SHAPES["4b"], Settings().pan_and_scan, text_tokens=20, output_tokens=(1, 1)
    )
    assert [page.views for page in pages.pages] == [1, 4]
    assert parse_output_tokens("16-256") == (16, 256)


@pytest.mark.parametrize("text", ["", "x", "1:", ":2", "1:0", "-1", "1,1", "1:nan", "2000", "1:2,"])
def test_wrong_mixes_are_refused(text: str) -> None:
    with pytest.raises(SettingError, match="--view-mix"):
        mixed(text)


# ``panscan plan`` on the command line: what it prints, and what it refuses.


PLAN = ["plan", "--model", "27b", "--gpu", "a100-40gb", "--count", "10"]


def test_json_has_every_figure_with_its_range(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*PLAN, "--json", "--goal", "latency", "--quantization", "none"]) == 0
    data = documented("plan", capsys.readouterr().out)
    best = data["recommended"]
    assert best["exact"] and best["commands"]["serve"].startswith("panscan serve --model google/gemma-3-27b-it")
    assert best["ttft_ms"]["low"] < best["ttft_ms"]["value"] < best["ttft_ms"]["high"]
    assert {row["weights"] for row in data["layouts"]} == {"bf16"}
    assert [row["tensor_parallel_sizes"] for row in data["does_not_fit"]] == [[1]]


def test_a_fleet_takes_limits_as_panscan_load_does(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--quantization none --request-rate 9 --goodput ttft:2000 tpot:400 --max-new-tokens 4 --json"
    assert run(f"plan --model 27b --gpu h200 --seed -1 {words}".split()) == 0
    data = documented("plan", capsys.readouterr().out)
    [fleet] = data["fleets"]
    assert (fleet["tensor_parallel_size"], fleet["replicas"]) == (1, 2) and data["within_count"] is None
    level, goodput = fleet["level"], fleet["level"]["goodput"]
    assert level["requests_per_s"] == pytest.approx(goodput["sent"] / goodput["seconds"])
    assert set(level["percentiles_ms"]) == {"ttft", "tpot", "e2el"}
    two, eight = data["recommended"], next(row for row in data["layouts"] if row["replicas"] == 8)
    assert two["requests_per_s"]["value"] == pytest.approx(2 / 8 * eight["requests_per_s"]["value"])


def test_a_small_model_whose_replicas_are_limited_by_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--view-mix", "0", "--max-new-tokens", "8", "--request-rate", "500", "--quantization", "none", "--json"]
    assert run(["plan", "--model", "1b", "--gpu", "h200", "--count", "1", *words]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["recommended"]["replicas"] == data["fleets"][0]["replicas"] > 1
    assert data["within_count"] is False


def test_limits_that_no_fleet_meets_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--quantization none --request-rate 2000 --goodput ttft:1 --goodput-attainment 0.999"
    assert run(f"plan --model 27b --gpu h200 --count 1 {words}".split()) == 4
    captured = capsys.readouterr()
    assert "No number of replicas meets 2,000 requests/s with 99.9% within TTFT 1 ms" in captured.out
    *progress, error = captured.err.splitlines()
    assert "no number of replicas meets" in error and all(line.startswith("simulating") for line in progress)


def test_views_are_counted_on_the_given_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise(896, 2688).save(tmp_path / "tall.png")
    noise(400, 400).save(tmp_path / "square.png")
    assert run([*PLAN, "--json", "--images", str(tmp_path)]) == 0
    pages = json.loads(capsys.readouterr().out)["mix"]["pages"]
    assert pages == [{"views": 1, "share": 1.0}, {"views": 4, "share": 1.0}]


def test_a_model_that_fits_nowhere_ends_with_what_would_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "27b", "--gpu", "rtx-5060-ti", "--json"]) == 4
    captured = capsys.readouterr()
    assert json.loads(captured.out)["recommended"] is None
    assert "this would fit: --count 2" in captured.err


def test_weights_that_leave_too_little_memory_fit_with_an_int8_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "27b", "--gpu", "l4", "--quantization", "int4", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["recommended"]["kv_cache_dtype"], data["recommended"]["exact"]) == ("int8", False)
    assert data["does_not_fit"][0]["reason"].endswith("with --kv-cache-dtype int8 it fits")


def test_a_cache_that_is_too_large_is_the_reason_that_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "4b", "--gpu", "l4", "--kv-cache-gb", "500"]) == 4
    captured = capsys.readouterr()
    assert "less than --kv-cache-gb 500; raise" in captured.out and "with --kv-cache-gb 500" in captured.err


# The GPU data file, names, and specifications that users type.


NVIDIA = [pytest.param(gpu, id=name) for name, gpu in all_gpus().items() if gpu.capability is not None]
SPECIFICATION = "memory=24, bandwidth=936,bf16=71,int8=142,link=16"


def test_the_data_file_has_the_promised_gpus() -> None:
    promised = "a100-40gb a100-80gb h100 h100-pcie h200 b200 l4 l40s rtx-3090 rtx-4090 rtx-5090 rtx-5060-ti t4 cpu"
    assert set(promised.split()) <= set(all_gpus())


@pytest.mark.parametrize("gpu", NVIDIA)
def test_figures_are_plausible(gpu: Gpu) -> None:
    assert gpu.sources
    assert all(
        urlsplit(url).hostname in ("www.nvidia.com", "images.nvidia.com", "resources.nvidia.com") for url in gpu.sources
    )
    nominal = float(gpu.label.split(" GB")[0].split()[-1]) * 2**30
    assert 0.9 * nominal < gpu.memory_bytes < 1.01 * nominal
    assert 200e9 < gpu.bytes_per_s < 10e12
    assert gpu.link_bytes_per_s < gpu.bytes_per_s
    rates = gpu.flops_per_s
    dense = rates.get("bf16", rates["fp16"])
    assert rates["fp32"] < dense == rates["fp16"]
    assert all(1.9 * dense < rates[kind] < 4.1 * dense for kind in ("int8", "fp8") if kind in rates)
    assert ("bf16" in rates) == (gpu.capability is not None and gpu.capability >= (8, 0))
    assert ("fp8" in rates) == (gpu.capability is not None and gpu.capability >= (8, 9))


ALIASES = [
    ("a100-40gb", "a100-40gb"),
    ("A100", "a100-40gb"),
    ("NVIDIA A100 80 GB (SXM)", "a100-80gb"),
    ("H100", "h100"),
    ("RTX 4090", "rtx-4090"),
    ("5060ti", "rtx-5060-ti"),
    (" CPU ", "cpu"),
]


@pytest.mark.parametrize(("text", "name"), ALIASES)
def test_names_and_aliases_in_any_spelling(text: str, name: str) -> None:
    assert gpu_named(text).name == name


def test_names_and_aliases_are_unique() -> None:
    names = [name for gpu in all_gpus().values() for name in (gpu.name, gpu.label, *gpu.aliases)]
    assert len({"".join(filter(str.isalnum, name.lower())) for name in names}) == len(names)


def test_a_specification_has_the_figures_that_were_typed() -> None:
    gpu = gpu_named(SPECIFICATION)
    assert (gpu.memory_bytes, gpu.bytes_per_s, gpu.link_bytes_per_s) == (24 * 10**9, 936e9, 16e9)
    assert dict(gpu.flops_per_s) == {"bf16": 71e12, "int8": 142e12}
    assert gpu.capability == (8, 0)
    assert gpu_named(f"{SPECIFICATION},fp8=142").capability == (8, 9)
    assert gpu_named(f"{SPECIFICATION},capability=7.5").capability == (7, 5)


BAD_SPECIFICATIONS = [
    ("memory=24", "bandwidth, bf16 missing"),
    ("memory=24,memory=24,bandwidth=1,bf16=1", "memory is given twice"),
    ("memry=24,bandwidth=1,bf16=1", r"unknown key 'memry' \(did you mean 'memory'\?\)"),
    ("memory=24,bandwidth=fast,bf16=1", "bandwidth takes a number above 0"),
    ("memory=24,bandwidth=-1,bf16=1", "bandwidth is out of range: it must be a number above 0 and"),
    ("memory=24,bandwidth=nan,bf16=1", "bandwidth is out of range: it must be a number above 0 and"),
    ("memory=24,bandwidth=1e9,bf16=1", "bandwidth is out of range: it must be a number above 0 and"),
    ("memory=24,bandwidth=1,bf16=1,capability=8", "capability takes a version such as 8.9"),
    ("memory=24,,bandwidth=1,bf16=1", "unknown key ''"),
    ("", "unknown GPU ''"),
]


@pytest.mark.parametrize(("text", "reason"), BAD_SPECIFICATIONS)
def test_bad_specifications_are_refused(text: str, reason: str) -> None:
    with pytest.raises(SettingError, match=f"--gpu: {reason}"):
        gpu_named(text)


def test_a_gpu_refuses_types_that_its_products_do_not_have() -> None:
    a100, t4, cpu, h100 = map(gpu_named, ("a100", "t4", "cpu", "h100"))
    assert h100.refusal("fp8", "fp8") is None is a100.refusal("int8")
    assert "8.9 or later; a100-40gb has 8.0: use int8 or int4" in str(a100.refusal("fp8"))
    assert "--kv-cache-dtype fp8 needs" in str(a100.refusal(None, "fp8"))
    assert a100.refusal(None, tower="int8") is None
    reason = str(a100.refusal(None, tower="fp8"))
    assert reason.startswith("--quantize-vision fp8 needs compute capability 8.9 or later; a100-40gb has 8.0: use int8")
    assert "no bf16 products" in str(t4.refusal(None))
    custom, newer = gpu_named(SPECIFICATION), gpu_named(f"{SPECIFICATION},capability=8.6")
    assert "custom has 8.0 (assumed; give capability=8.9)" in str(custom.refusal("fp8"))
    assert "custom has 8.6: use" in str(newer.refusal("fp8"))
    assert "8.0 or later; t4 has 7.5" in str(t4.refusal("int4", dtype="fp32"))
    assert t4.refusal(None, dtype="fp32") is None is cpu.refusal("int4")
    assert "on a CPU use int8 or int4" in str(cpu.refusal("fp8"))


REPORTED = [
    ("NVIDIA H200", 139.8, "h200"),
    ("NVIDIA A100-SXM4-80GB", 79.15, "a100-80gb"),
    ("NVIDIA A100 80GB PCIe", 79.15, "a100-pcie-80gb"),
    ("NVIDIA A100-PG509-200", 39.4, "a100-40gb"),
    ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
    ("NVIDIA H100 NVL", 93.0, None),
    ("NVIDIA GeForce RTX 4090", 23.5, "rtx-4090"),
    ("Tesla T4", 14.6, "t4"),
    ("Tesla V100-SXM2-32GB", 31.7, None),
]


@pytest.mark.parametrize(("name", "gib", "expected"), REPORTED)
def test_a_gpu_is_found_by_the_name_that_its_driver_reports(name: str, gib: float, expected: str | None) -> None:
    gpu = reported_gpu(name, int(gib * 2**30))
    assert (gpu.name if gpu else None) == expected
