"""``panscan plan`` on the command line: what it prints, and what it refuses."""

import json
from pathlib import Path

import pytest
from tests.conftest import documented, noise

from panscan.cli.main import run

PLAN = ["plan", "--model", "27b", "--gpu", "a100-40gb", "--count", "10"]


def test_json_has_every_figure_with_its_range(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*PLAN, "--json", "--goal", "latency", "--quantization", "none"]) == 0
    data = documented("plan", capsys.readouterr().out)
    best = data["recommended"]
    assert best["exact"] and best["commands"]["serve"].startswith("panscan serve --model google/gemma-3-27b-it")
    assert best["ttft_ms"]["low"] < best["ttft_ms"]["value"] < best["ttft_ms"]["high"]
    assert {each["weights"] for each in data["layouts"]} == {"bf16"}
    assert [each["tensor_parallel_sizes"] for each in data["does_not_fit"]] == [[1]]


def test_a_fleet_takes_limits_as_panscan_load_does(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--quantization none --request-rate 9 --goodput ttft:2000 tpot:400 --max-new-tokens 4 --json"
    assert run(f"plan --model 27b --gpu h200 --seed -1 {words}".split()) == 0
    data = documented("plan", capsys.readouterr().out)
    [fleet] = data["fleets"]
    assert (fleet["tensor_parallel_size"], fleet["replicas"]) == (1, 2) and data["within_count"] is None
    assert set(fleet["level"]["percentiles_ms"]) == {"ttft", "tpot", "e2el"}
    two, eight = data["recommended"], next(each for each in data["layouts"] if each["replicas"] == 8)
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
