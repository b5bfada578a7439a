"""The script for many GPUs: its jobs fit on the machine, and cards are shared out without overlap."""

from collections import Counter
from pathlib import Path

import pytest
from benchmarks.many_gpus import Job, Layout, Machine, default_jobs
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
