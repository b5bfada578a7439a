"""A small sample of ``benchmarks/decision_errors.py``, which goes red if decisions get worse."""

import json

import numpy as np
from benchmarks.decision_errors import RECORD, accuracy_errors, coverage, faster_chosen


def test_few_questions_recommend_nothing_worse_and_call_nothing_equal_a_loss() -> None:
    """Uncorrected tests call an equal one of nine cells a loss in half of the runs; of three cells, the most accurate
    over 35 questions is a worse one in a quarter."""
    found = accuracy_errors(np.random.default_rng(3), 100, 9, 8, pages=1)
    assert found["false_loss"] <= 0.09 and found["one_worse_chosen"] == 0 and found["contradictions"] == 0
    assert accuracy_errors(np.random.default_rng(4), 35, 3, 25, pages=1)["one_worse_chosen"] == 0


def test_intervals_hold_the_truth_and_the_faster_cell_is_chosen() -> None:
    found = coverage(np.random.default_rng(5), 25)
    assert min(found[name] for name in ("engine", "generate", "ratio")) >= 0.8
    assert faster_chosen(np.random.default_rng(5), 25) >= 0.95


def test_the_committed_record_meets_the_bars() -> None:
    record = json.loads(RECORD.read_text("utf-8"))
    for name, row in record["answers"].items():
        assert max(row["false_loss"], row["one_worse_chosen"], row["all_worse_chosen"]) <= 0.05, name
        assert row["contradictions"] == 0, name
        assert row["equal_qualifies"] >= (0.8 if name.startswith("1000") else 0.0), name
    speeds = record["speeds"]
    for name, row in (*speeds["noise"].items(), ("five repeats", speeds["five_repeats"])):
        assert all(0.93 <= row[interval] <= 0.97 for interval in ("engine", "generate", "ratio")), name
    assert speeds["runs"] >= 2_000 and speeds["faster"] >= 0.95
