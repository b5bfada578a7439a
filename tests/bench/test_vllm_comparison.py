"""The comparison with vLLM: its schedule, its record, the table that is made of it."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from benchmarks.readme_tables import RECORDS, from_record, workload
from benchmarks.vllm_comparison import PARTS, SIDES, VERDICTS, Job, figures, known_run, merged, run_job, schedule
from benchmarks.vllm_tables import comparison
from benchmarks.workload_tables import distinct_documents
from benchmarks.workloads.device import counted_joules

SIDE_RATES = {"engine": 6.0, "vllm-exact": 4.5, "vllm-default": 5.0, "generate": 0.9}


def orders(rounds: int, gpus: list[int], sides: list[str] | None = None) -> list[list[str]]:
    return [[job.side for job in queue] for queue in schedule(["w1-27b"], gpus, rounds, sides or list(SIDES))]


def test_both_compared_sides_run_on_each_gpu_in_both_orders() -> None:
    first, second = orders(1, [0, 1])
    assert first[:2] == ["engine", "vllm-exact"] and second[:2] == ["vllm-exact", "engine"]
    assert sorted(first[2:] + second[2:]) == ["generate", "vllm-default"], "the other sides run once"
    [alone] = orders(2, [0])
    assert alone[:4] == ["engine", "vllm-exact", "vllm-exact", "engine"] and alone[4:] == ["vllm-default", "generate"]
    assert orders(1, [0, 1], ["engine"]) == [["engine"], ["engine"]]


def test_verdicts_share_the_gpus() -> None:
    queues = schedule([*VERDICTS], [4, 7], 1, list(SIDES))
    assert [[job.gpu for job in queue] for queue in queues] == [[4, 4], [7]]
    assert {job.part for queue in queues for job in queue} == {*VERDICTS}


def test_every_process_gets_its_sides_options_last() -> None:
    """So that options for all sides cannot override the runner."""
    for queue in schedule([*PARTS], [0], 1, list(SIDES), ["--num-requests", "4"]):
        for job in queue:
            assert job.words[-len(SIDES[job.side]) :] == SIDES[job.side] and "--num-requests" in job.words


def test_a_process_that_fails_leaves_the_end_of_its_log(tmp_path: Path) -> None:
    folder = tmp_path / "part.processes"
    folder.mkdir()
    run = run_job(Job("w1-27b", "engine", ("json.tool", "--no-such-option"), 0, vllm=False), folder, "")
    assert run["failed"] == "exit code 2" and "error:" in run["log"][-1]
    assert "record" not in run
    [log] = tmp_path.glob("*.log")
    assert log.name.startswith("w1-27b-engine-gpu0") and log.read_text().splitlines() == run["log"]


def turn(rate: float, joules: float | None) -> dict[str, Any]:
    return {"requests": 8, "requests_per_s": rate, "joules_per_request": joules, "power": joules and {"mean_w": 690.0}}


def run_of(part: str, side: str, gpu: int, rate: float) -> dict[str, Any]:
    stages = {"load": 1.0, "preprocess": 189.0 if part.endswith("4b") else 2 * rate}
    latencies: dict[str, Any] = {"ttft_ms": {"all": [900 / rate]}, "e2e_ms": {"all": [7e3]}, "stages_ms": stages}
    turns = [turn(rate, 600 / rate), turn(rate + 0.1, 600 / rate)]
    found: dict[str, Any] = {"throughput": turns, "alone": latencies, "ratios": {"ttft_ms": 1.2}}
    if part.startswith("w2"):
        found = {"image_major": turns, "round_robin": turns, "follow_up": latencies}
    environment = {
        "gpus": [{"name": "NVIDIA H200", "driver": "580"}],
        "cpu": "Xeon",
        "packages": {"torch": "2.11.0", "transformers": "5.17.0"} | ({"vllm": "0.24.0"} if "vllm" in side else {}),
    }
    work = {"views": 4, "prompt_tokens": 1102, "image_tokens": 1024, "output_tokens": 128, "requests": 128}
    record = {"created": f"2026-11-2{3 + part.endswith('4b')}T12:00:00+00:00", "work": work, "environment": environment}
    record |= {"measured": {side.partition("-")[0]: found}}
    backends = {"vllm-default": ["FLASH_ATTN"], "vllm-exact": ["AttentionBackendEnum.TRITON_ATTN"]}
    return {"side": side, "gpu": gpu, "backends": backends.get(side, []), "record": record}


def parts() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in ("w1-27b", "w2-27b", "w4-4b"):
        sides = [side for side in PARTS[name].sides for _ in range(2)]
        runs = [run_of(name, side, number % 2, SIDE_RATES[side]) for number, side in enumerate(sides)]
        found.append(
            {"command": f"python -m x --part {name}", "parts": {name: [*runs, {"side": "engine", "failed": "x"}]}}
        )
    words = {"engine": ("exact", 1.001), "vllm-exact": ("exact", 1.2), "vllm-default": ("different", 40.4)}
    verdicts = {side: {"verdict": word, "ratio": ratio} for side, (word, ratio) in words.items()}
    run = {"side": "", "record": {"model": "27b", "layers": 6, "verdicts": verdicts}}
    return [*found, {"command": "python -m x", "parts": {"verdict-27b": [run]}}]


def cells(text: str, start: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_the_table_shows_sampled_and_json_traffic() -> None:
    run = run_of("traffic-4b", "vllm-exact", 0, 4.0)
    kinds = {"greedy": 4.0, "gemma_defaults": 3.0, "json": 2.0}
    run["record"]["measured"] = {"vllm": {"turns": {kind: [turn(rate, None)] for kind, rate in kinds.items()}}}
    assert figures(run) == ["greedy: 4.00 req/s", "gemma_defaults: 3.00 req/s", "json: 2.00 req/s"]
    part = {"command": "python -m x", "parts": {"traffic-4b": [run]}}
    text = comparison(merged([*parts(), part]))
    assert cells(text, "4B: requests/s, 128 documents at once, JSON schema") == ["-", "2.00", "-", "-"]


def test_a_record_of_the_engine_takes_the_place_of_a_run() -> None:
    run = known_run(RECORDS / "w4-4b.json")
    turns = run["record"]["measured"]["engine"]["throughput"]
    others = [part for part in parts() if "w4-4b" not in part["parts"]]
    text = comparison(merged([*others, {"command": "python -m x", "parts": {"w4-4b": [run]}}]))
    rate = statistics.median(turn["requests_per_s"] for turn in turns)
    assert cells(text, "4B: requests/s")[0].startswith(f"{rate:.2f} (")
    assert "Warm-up: a whole turn of the engine" in text and "Warm-up" not in comparison(merged(parts()))


def test_a_record_that_two_parts_used_counts_once() -> None:
    run = known_run(RECORDS / "w4-4b.json")
    part = {"command": "python -m x", "parts": {"w4-4b": [run]}}
    assert len(merged([part, json.loads(json.dumps(part))])["parts"]["w4-4b"]) == 1
    assert len(merged([parts()[2], parts()[2]])["parts"]["w4-4b"]) == 2 * 8, "runs are never dropped"


def test_parts_can_be_added_to_a_record() -> None:
    whole = merged(parts())
    added = merged([json.loads(json.dumps(merged(parts()[:2]))), *parts()[2:]])
    assert {**added, "created": ""} == {**whole, "created": ""}
    assert {**merged([added]), "created": ""} == {**whole, "created": ""}


def test_the_table_says_what_ran_on_another_machine() -> None:
    def of(side: str) -> dict[str, Any]:
        runs = [run for run in parts()[0]["parts"]["w1-27b"] if (run["side"] == "generate") == (side == "generate")]
        return {"command": f"python -m x --sides {side}", "parts": {"w1-27b": runs}}

    says = ("`generate()` ran on another machine with the same GPU model.", "one batch of 8 documents.")
    together, apart = merged([of("others"), of("generate")]), merged([of("others")], [of("generate")])
    assert all(text in comparison(apart) for text in says)
    assert not any(text in comparison(together) for text in says[:1])
    assert all(text in comparison(merged([apart])) for text in says), "merging again keeps it"
    assert says[0] not in comparison(together) and says[1] in comparison(together)


def test_sides_that_were_asked_something_else_are_not_compared() -> None:
    found = parts()
    found[0]["parts"]["w1-27b"][0]["record"]["work"]["prompt_tokens"] = 1101
    with pytest.raises(SystemExit, match="w1-27b: its sides were not asked the same"):
        merged(found)


def test_a_table_waits_for_its_record() -> None:
    assert from_record("no-such-record", comparison, "Above:")() == ""
    assert workload("w4-4b", distinct_documents, "Above:")().startswith("Above:\n\n|  | engine | limit")


def test_energy_needs_the_counter_of_every_gpu() -> None:
    assert counted_joules([10.0, 20.0], [15.0, 40.0]) == 25.0
    assert counted_joules([10.0, float("nan")], [15.0, float("nan")]) is None
