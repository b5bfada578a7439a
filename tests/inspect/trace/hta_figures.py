"""Write ``hta_figures.json``: what HolisticTraceAnalysis reports for the traces of :mod:`tests.inspect.trace.kineto`.

HolisticTraceAnalysis installs JupyterLab and about 80 other packages (500 MB), so it is not a development dependency.
To write the figures again, use a separate environment::

    python -m venv /tmp/hta && /tmp/hta/bin/pip install HolisticTraceAnalysis==0.5.0
    PYTHONPATH=. /tmp/hta/bin/python tests/inspect/trace/hta_figures.py
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.inspect.trace.kineto import KinetoTrace, busy_trace, decode_trace

FIGURES = Path(__file__).with_name("hta_figures.json")


def traces() -> dict[str, KinetoTrace]:
    """Return the traces by name."""
    return {"busy": busy_trace(), "decode": decode_trace(), "graph": decode_trace(graph=True, prepare=1000)}


def hta_figures(trace: KinetoTrace) -> dict[str, Any]:
    """Return the temporal breakdown and the idle time of each stream, in microseconds."""
    os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
    from hta.trace_analysis import TraceAnalysis

    with tempfile.TemporaryDirectory() as folder:
        path = trace.save(Path(folder, "trace.json"))
        analysis = TraceAnalysis(trace_files={0: str(path)}, trace_dir=folder, include_last_profiler_step=True)
    breakdown = analysis.get_temporal_breakdown(visualize=False).to_dict("records")[0]
    idle: dict[str, dict[str, float]] = {}
    for row in analysis.get_idle_time_breakdown(ranks=[0], visualize=False)[0].to_dict("records"):
        idle.setdefault(str(row["stream"]), {})[row["idle_category"]] = float(row["idle_time"])
    names = ("idle_time(us)", "compute_time(us)", "non_compute_time(us)", "kernel_time(us)")
    return {**{name: float(breakdown[name]) for name in names}, "idle_by_stream": idle}


if __name__ == "__main__":
    figures = {name: hta_figures(trace) for name, trace in traces().items()}
    FIGURES.write_text(json.dumps(figures, indent=2) + "\n")
