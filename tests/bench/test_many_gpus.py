"""The script for many GPUs: its jobs fit on the machine, and cards are shared out without overlap."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from benchmarks import layout_tables
from benchmarks.many_gpus import Job, Layout, Machine, default_jobs
from benchmarks.plan_points import replica_points
from hypothesis import given
from hypothesis import strategies as st
from tests.test_faster import parse

from panscan.core import SettingError
from panscan.settings import settings_from


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


def test_measured_layouts_stand_beside_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = {"cpu_ms_per_request": {"ingress": 12.5}, "prompt_tokens": 1102.0, "output_tokens": 128}
    machine = {"environment": {"gpus": [{"name": "NVIDIA H100 80GB HBM3"}], "cpu": "CPU"}, "created": "2026-11-27T00"}
    settings = {"model_shape": "27b", "tensor_parallel_size": 2}
    for replicas, rate in ((1, 8.0), (4, 30.4)):
        record = {"settings": settings, "replicas": replicas, "pages_per_replica": 64, **machine}
        record["w1"] = [turn | {"requests_per_s": rate}]
        (tmp_path / f"serve-27b-{replicas}x2-h100.json").write_text(json.dumps(record))
    (tmp_path / "serve-27b-2x4-h100.json").write_text(
        json.dumps(record | {"w1": [], "replicas": 2})
    )  # was ended before
    monkeypatch.setattr(layout_tables, "RECORDS", tmp_path)
    layout_tables.read_records.cache_clear()
    rows = {line.split(" | ")[0]: line for line in layout_tables.many_gpus().partition("Measured:")[2].splitlines()}
    layout_tables.read_records.cache_clear()
    assert "| 2 x 4" not in rows
    match = re.fullmatch(r"\| 4 x 2 \| bf16 \| all \| 30\.4 \| ([\d.]+) \| 0\.95 \| 12\.5 \| - \|", rows["| 4 x 2"])
    assert match is not None and 24 < float(match[1]) < 44
    points = [point for path in sorted(tmp_path.iterdir()) for point in replica_points(path.name, tmp_path)]
    assert [point.measured for point in points] == [8.0, 7.6]
