"""``panscan profile``: named phases in its traces, agreement with ``panscan trace``, Gemma 3n, refused input."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.idle_gap import random_gemma3n
from tests.conftest import documented, noise
from transformers import Gemma3nTextConfig

from panscan.cli.main import run
from panscan.core import SettingError, UnsupportedError
from panscan.inspect.profile.results import slowdown
from panscan.inspect.profile.run import ENGINE, GENERATE_MODES, chosen_modes, mode_settings
from panscan.model.phases import profiled
from panscan.runners.generate import GenerateRunner
from panscan.settings import Settings

TOKENS = 3


@pytest.fixture(scope="module")
def gemma3n(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Gemma 3n with shared keys and values, as a checkpoint directory."""
    config = Gemma3nTextConfig(
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_kv_shared_layers=2,
        laurel_rank=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size=1024,
        vocab_size_per_layer_input=1024,
    )
    loaded = random_gemma3n("small", config, torch.float32, torch.device("cpu"))
    folder = tmp_path_factory.mktemp("gemma3n")
    loaded.model.save_pretrained(folder)
    loaded.reader.tokenizer.save_pretrained(folder)
    return folder


def profile(folder: Path, words: str) -> Path:
    """Profile on the command line; return the profile directory."""
    assert run(f"profile {words} --output-dir {folder}/profiles --max-new-tokens {TOKENS}".split()) == 0
    return sorted((folder / "profiles").iterdir())[-1]


def events_of(trace: Path) -> list[dict[str, Any]]:
    with gzip.open(trace, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def ranges_of(trace: Path) -> Counter[str]:
    """Number of ranges of each name in a trace."""
    return Counter(event["name"] for event in events_of(trace) if event.get("cat") == "user_annotation")


def test_generate_and_the_engine_have_all_phases_and_agree_with_panscan_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise(100, 100).save(tmp_path / "doc.png")
    folder = profile(tmp_path, f"{tmp_path}/doc.png -p What? --model mini")
    written_files = "dynamic.json.gz engine.json.gz summary.html summary.json"
    assert sorted(path.name for path in folder.iterdir()) == written_files.split()
    written = json.loads((folder / "summary.json").read_text())
    for mode in ("dynamic", "engine"):
        trace = folder / f"{mode}.json.gz"
        ranges = ranges_of(trace)
        once = dict.fromkeys(("request", "load", "preprocess", "vision", "prefill"), 1)
        assert {
            name.removeprefix("panscan."): count for name, count in ranges.items() if name.startswith("panscan.")
        } == {**once, "decode": TOKENS - 1}
        assert written[mode]["facts"]["output_tokens"] == TOKENS
        assert written[mode]["facts"]["views"] == 1
        capsys.readouterr()
        assert run(["trace", str(trace), "--json", "--top", "1000"]) == 0
        [shown] = json.loads(capsys.readouterr().out)["traces"]
        assert {**shown, "name": mode} == written[mode]["summary"]
    assert ranges_of(folder / "dynamic.json.gz")["prepare_inputs_for_generation"] == TOKENS
    assert all(name in (folder / "summary.html").read_text() for name in ("dynamic", "engine"))


def test_a_batch_on_the_engine_with_shapes_and_stacks(tmp_path: Path) -> None:
    noise(60, 60).save(tmp_path / "doc.png")
    words = "--model tiny --runner engine --batch-size 2 --record-shapes --stacks"
    folder = profile(tmp_path, f"{tmp_path}/doc.png {words}")
    events = events_of(folder / "engine.json.gz")
    ranges = ranges_of(folder / "engine.json.gz")
    assert ranges["panscan.load"] == ranges["panscan.preprocess"] == 2
    assert ranges["panscan.decode"] >= TOKENS - 1
    assert any("Input Dims" in event.get("args", {}) for event in events)
    assert any(event.get("cat") == "python_function" for event in events)


def test_gemma3n_takes_the_same_command(gemma3n: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = profile(tmp_path, f"--model {gemma3n} --mode dynamic,static --memory")
    said = capsys.readouterr()
    assert "no pan and scan and no panscan engine" in said.err
    assert "prepare_inputs_for_generation" in (folder / "summary.json").read_text()
    for mode in ("dynamic", "static"):
        ranges = ranges_of(folder / f"{mode}.json.gz")
        assert (ranges["panscan.prefill"], ranges["panscan.decode"], ranges["panscan.vision"]) == (1, TOKENS - 1, 0)
        assert any(event["name"] == "[memory]" for event in events_of(folder / f"{mode}.json.gz"))


LACKS = [
    ("--runner engine", 2, "--runner engine: Gemma 3n has no pan and scan and no pan"),
    ("--do-pan-and-scan true", 2, "--pan-and-scan: Gemma 3n has no pan and scan"),
    ("doc.png", 2, "reads text only: leave the images out"),
    ("--quantization int8", 4, "--quantization is not supported for Gemma 3n"),
    ("--quantize-head int8", 4, "--quantize-head is not supported for Gemma 3n"),
    ("--quantize-vision int8", 4, "--quantize-vision is not supported for Gemma 3n"),
    ("--preprocess device", 4, "--preprocess is not supported for Gemma 3n"),
]


@pytest.mark.parametrize(("words", "code", "said"), LACKS)
def test_gemma3n_refuses_what_it_lacks_before_anything_is_written(
    gemma3n: Path, words: str, code: int, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise(40, 40).save("doc.png")
    assert run(["profile", "--model", str(gemma3n), *words.split()]) == code
    assert said in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in folder.iterdir()] == ["doc.png"]


def test_modes_come_once_in_their_order_and_the_engine_last() -> None:
    assert chosen_modes(["engine", "generate"], ["static", "dynamic", "static"]) == [
        GENERATE_MODES["static"],
        GENERATE_MODES["dynamic"],
        ENGINE,
    ]
    assert chosen_modes(["generate"], ["all"]) == list(GENERATE_MODES.values())
    with pytest.raises(SettingError, match=r"^--mode is for --runner generate"):
        chosen_modes(["engine"], ["static"])


def test_each_runner_gets_only_the_settings_that_it_has() -> None:
    base = Settings(batch_size=3, attention="eager", kv_cache_gb=1.0)
    engine = mode_settings(base, ENGINE, on_gpu=True)
    generate = mode_settings(base, GENERATE_MODES["static"], on_gpu=True)
    assert (engine.runner, engine.max_num_seqs, engine.kv_cache_gb, engine.attention) == ("engine", 3, 1.0, "sdpa")
    values = (generate.runner, generate.cache, generate.kv_cache_gb, generate.attention)
    assert values == ("generate", "static", None, "eager")
    with pytest.raises(UnsupportedError, match="cuda-graphs needs an NVIDIA GPU"):
        mode_settings(base, GENERATE_MODES["cuda-graphs"], on_gpu=False)
    everything = [mode.name for mode in chosen_modes(["generate", "engine"], ["all"], on_gpu=False)]
    assert everything == ["dynamic", "static", "compiled", "engine"]


def test_without_a_profiler_nothing_of_the_model_is_wrapped(tiny: GenerateRunner) -> None:
    assert not profiled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert profiled()
    [result] = tiny.run([tiny.request("What?", [noise(60, 60)])])
    assert result.token_ids
    assert not {"prepare_inputs_for_generation", "_update_model_kwargs_for_generation"} & vars(tiny.loaded.model).keys()


def test_an_engine_that_cannot_open_gives_its_own_error_after_the_results_of_the_other_mode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise(60, 60).save(tmp_path / "doc.png")
    arguments = [str(tmp_path / "doc.png"), "--model", "tiny", "--max-new-tokens", "2", "--kv-cache-gb", "100000"]
    assert run(["profile", *arguments, "--output-dir", str(tmp_path / "profiles"), "--json"]) == 4
    said = capsys.readouterr()
    assert "--kv-cache-gb 100000: cpu has room for" in said.err
    [folder] = (tmp_path / "profiles").iterdir()
    document = documented("profile", said.out)
    assert document["directory"] == str(folder)
    assert document["traces"] == {"dynamic": str(folder / "dynamic.json.gz")}
    assert document["modes"] == json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize(("plain", "traced", "warns"), [(15.5, 332.0, True), (10.0, 15.0, False), (None, None, False)])
def test_a_step_that_the_profiler_slows_down_is_named(plain: float | None, traced: float | None, warns: bool) -> None:
    text = slowdown("compiled", {"without_profiler": {"tpot_ms": plain}, "profiled": {"tpot_ms": traced}})
    assert ("a step 21.4 times as long (332 instead of 15.5 ms)" in text) == warns == bool(text)
