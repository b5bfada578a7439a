"""Scripts of ``benchmarks/``: the comparison with vLLM and its table, and the jobs of many GPUs."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from benchmarks import vllm_comparison as vllm
from benchmarks.many_gpus import Job, Layout, Machine, default_jobs
from benchmarks.readme_tables import RECORDS
from benchmarks.vllm_tables import comparison, summary
from benchmarks.workloads.device import counted_joules
from hypothesis import given
from hypothesis import strategies as st
from tests.test_docs import parse

from panscan.core import SettingError
from panscan.settings import settings_from


def orders(rounds: int, gpus: list[int], sides: list[str] | None = None) -> list[list[str]]:
    return [[job.side for job in queue] for queue in vllm.schedule(["w1-27b"], gpus, rounds, sides or list(vllm.SIDES))]


def test_both_compared_sides_run_on_each_gpu_in_both_orders() -> None:
    first, second = orders(1, [0, 1])
    assert first[:2] == ["engine", "vllm-exact"] and second[:2] == ["vllm-exact", "engine"]
    assert first[2:] + second[2:] == ["generate"], "it runs once"
    [alone] = orders(2, [0])
    assert alone == ["engine", "vllm-exact", "vllm-exact", "engine", "generate"]
    assert orders(1, [0, 1], ["engine"]) == [["engine"], ["engine"]]


def test_verdicts_share_the_gpus() -> None:
    queues = vllm.schedule([*vllm.VERDICTS], [4, 7], 1, list(vllm.SIDES))
    assert [[job.gpu for job in queue] for queue in queues] == [[4, 4], [7]]
    assert {job.part for queue in queues for job in queue} == {*vllm.VERDICTS}


def test_every_process_gets_its_sides_options_last() -> None:
    """So that options for all sides cannot override the runner."""
    for queue in vllm.schedule([*vllm.PARTS], [0], 1, list(vllm.SIDES), ["--num-requests", "4"]):
        for job in queue:
            assert job.words[-len(vllm.SIDES[job.side]) :] == vllm.SIDES[job.side] and "--num-requests" in job.words


def test_a_process_that_fails_leaves_the_end_of_its_log(tmp_path: Path) -> None:
    folder = tmp_path / "part.processes"
    folder.mkdir()
    run = vllm.run_job(vllm.Job("w1-27b", "engine", ("json.tool", "--no-such-option"), 0, vllm=False), folder, "")
    assert run["failed"] == "exit code 2" and "error:" in run["log"][-1]
    assert "record" not in run
    [log] = tmp_path.glob("*.log")
    assert log.name.startswith("w1-27b-engine-gpu0") and log.read_text().splitlines() == run["log"]


def part_of(name: str, *runs: dict[str, Any]) -> dict[str, Any]:
    return {"command": f"python -m x --part {name}", "parts": {name: [*runs]}}


def parts() -> list[dict[str, Any]]:
    """The committed record as the parts that it was vllm.merged from, each with a process that failed."""
    record = json.loads(vllm.RECORD.read_text("utf-8"))
    verdicts = [part_of(name, {"side": "", "record": verdict}) for name, verdict in record["verdicts"].items()]
    return [part_of(name, *runs, {"side": "x", "failed": "x"}) for name, runs in record["parts"].items()] + verdicts


def cells(text: str, start: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_the_table_shows_sampled_and_json_traffic() -> None:
    run = next(run for run in parts()[2]["parts"]["w4-4b"] if run["side"] == "vllm-exact")
    kinds = {"greedy": 4.0, "gemma_defaults": 3.0, "json": 2.0}
    turns = {kind: [{"requests": 8, "requests_per_s": rate}] for kind, rate in kinds.items()}
    run["record"]["measured"] = {"vllm": {"turns": turns}}
    assert vllm.figures(run) == ["greedy: 4.00 req/s", "gemma_defaults: 3.00 req/s", "json: 2.00 req/s"]
    others = [part for part in parts() if "traffic-4b" not in part["parts"]]
    text = comparison(vllm.merged([*others, part_of("traffic-4b", run)]))
    assert cells(text, "4B: requests/s, 128 documents at once, JSON schema") == ["-", "2.00", "-"]


def test_only_cards_with_one_uuid_are_said_to_be_the_same() -> None:
    record, other = (json.loads((RECORDS / f"vllm-comparison{gpu}.json").read_text("utf-8")) for gpu in ("", "-h100"))
    claim = "Both sides of a ratio ran on the same card"
    assert claim in summary(record, other)
    record["parts"]["w2-27b"][0]["record"]["gpu_uuids"] = ["another"]
    assert claim not in summary(record, other)
    del record["parts"]["w2-27b"][0]["record"]["gpu_uuids"]
    assert claim not in summary(record, other)


def test_parts_can_be_added_to_a_record() -> None:
    record = vllm.merged(parts())
    assert record["parts"] == json.loads(vllm.RECORD.read_text("utf-8"))["parts"]
    added = vllm.merged([json.loads(json.dumps(vllm.merged(parts()[:2]))), *parts()[2:]])
    assert {**added, "created": ""} == {**record, "created": ""}
    assert {**vllm.merged([added]), "created": ""} == {**record, "created": ""}


def test_the_table_says_what_ran_on_another_machine() -> None:
    runs = parts()[0]["parts"]["w1-27b"]
    generate = part_of("w1-27b", *(run | {"other_machine": False} for run in runs if run["side"] == "generate"))
    others = part_of("w1-27b", *(run for run in runs if run["side"] != "generate"))
    says = ("`generate()` ran on another machine with the same GPU model.", "one batch of 64 documents.")
    together, apart = vllm.merged([others, generate]), vllm.merged([others], [generate])
    assert all(text in comparison(apart) for text in says)
    assert not any(text in comparison(together) for text in says[:1])
    assert all(text in comparison(vllm.merged([apart])) for text in says), "merging again keeps it"
    assert says[0] not in comparison(together) and says[1] in comparison(together)


def test_sides_that_were_asked_something_else_are_not_compared() -> None:
    changed = parts()
    changed[0]["parts"]["w1-27b"][0]["record"]["work"]["prompt_tokens"] = 1101
    with pytest.raises(SystemExit, match="w1-27b: its sides were not asked the same"):
        vllm.merged(changed)


def test_energy_needs_the_counter_of_every_gpu() -> None:
    assert counted_joules([10.0, 20.0], [15.0, 40.0]) == 25.0
    assert counted_joules([10.0, float("nan")], [15.0, float("nan")]) is None


# The script for many GPUs: its jobs fit on the machine, and cards are shared out without overlap.


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_default_jobs_fit_on_the_machine_and_have_their_base(gpus: int) -> None:
    jobs = [Job.named(name, "27b") for name in default_jobs(gpus)]
    assert max(job.layout.gpus for job in jobs) == gpus
    assert max(Counter(job.name for job in jobs).values()) == 1
    names = {job.name for job in jobs}
    assert {job.after for job in jobs} <= {"", *names}
    bases = {(job.kind, job.layout.size, job.layout.weights) for job in jobs if job.layout.replicas == 1}
    assert {(job.kind, job.layout.size, job.layout.weights) for job in jobs} == bases  # to divide by


@given(
    st.builds(
        Layout,
        st.integers(1, 99),
        st.integers(1, 64),
        st.sampled_from([None, "fp8", "int8", "int4"]),
        st.none() | st.integers(1, 200),
        st.booleans(),
        st.sampled_from([None, "fp8", "int8"]),
    )
)
def test_a_layout_is_what_its_name_says(layout: Layout) -> None:
    name = f"{layout.replicas}x{layout.size}"
    name += f"-{layout.weights}" if layout.weights else ""
    name += f"-{layout.memory}gb" if layout.memory else ""
    name += ("-head" if layout.head else "") + (f"-{layout.cache}kv" if layout.cache else "")
    assert Layout.parse(name) == layout
    machine = Machine("27b", "cuda", Path(), {"gpus": []})
    parse(f"panscan serve {machine.flags(layout)}")
    settings = settings_from(machine.settings(layout) | {"runner": "engine"})
    assert (settings.tensor_parallel_size, settings.quantization) == (layout.size, layout.weights)
    assert (settings.gpu_memory_gb, settings.quantize_head == "int8") == (layout.memory, layout.head)
    assert settings.kv_cache_dtype == (layout.cache or "auto")


@pytest.mark.parametrize("name", ["serve", "serve-4", "serve-0x2", "serve-4x2-int7", "w1-4", "w1-tp3", "tp4", ""])
def test_a_wrong_job_is_refused(name: str) -> None:
    with pytest.raises(SettingError):
        Job.named(name, "27b")
