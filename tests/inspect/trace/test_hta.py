"""GPU times against HolisticTraceAnalysis on the same traces."""

import json

import pytest
from tests.inspect.trace.hta_figures import FIGURES, hta_figures, traces

from panscan.inspect.trace.summary import summarize

EXPECTED = json.loads(FIGURES.read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_busy_and_idle_agree_with_holistic_trace_analysis(name: str) -> None:
    (gpu,) = summarize(traces()[name].events).gpus
    expected = EXPECTED[name]
    assert gpu.span_ms == pytest.approx(expected["kernel_time(us)"] / 1e3)
    assert gpu.idle_ms == pytest.approx(expected["idle_time(us)"] / 1e3)
    assert gpu.busy_ms == pytest.approx((expected["compute_time(us)"] + expected["non_compute_time(us)"]) / 1e3)
    if len(expected["idle_by_stream"]) == 1:  # HTA splits the gaps of each stream
        [causes] = expected["idle_by_stream"].values()
        assert gpu.host_wait_ms == pytest.approx(causes["host_wait"] / 1e3)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_committed_figures_are_those_of_the_installed_version(name: str) -> None:
    pytest.importorskip("hta", reason="HolisticTraceAnalysis is not installed")
    assert hta_figures(traces()[name]) == EXPECTED[name]
