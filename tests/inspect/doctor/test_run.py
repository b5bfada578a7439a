"""Checks that hang, crash or fail do not take the others with them."""

import pytest
from tests.inspect.doctor.odd_checks import ROOT, odd

from panscan.core.child import Child
from panscan.inspect.doctor.run import run_checks


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes of lanes import the checks of this directory."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")


def test_each_check_has_its_result_whatever_the_others_do() -> None:
    checks = [
        odd("fine"),
        odd("hangs", seconds=0.5),
        odd("fails"),
        odd("crashes"),
        odd("again", function="fine"),
        odd("elsewhere", function="fine", lane="b"),
    ]
    begun = []
    fine, hung, failed, crashed, again, elsewhere = run_checks(checks, 120.0, lambda _, name: begun.append(name))
    for result in (fine, again, elsewhere):
        assert [finding.fact for finding in result.findings] == ["one", "two"]
        assert result.seconds is not None
    assert [finding.fact for finding in hung.findings] == ["before it hung", "the check did not finish within 0.5 s"]
    assert hung.findings[-1].status == "warning"
    assert hung.seconds is None
    assert [finding.fact for finding in failed.findings] == ["the check failed: ValueError: two lines"]
    assert failed.findings[0].status == "not checked"
    [crash] = crashed.findings
    assert crash.status == "warning"
    assert "SIGSEGV" in crash.fact
    assert "broken kernel" in crash.fact
    assert sorted(begun) == sorted(check.name for check in checks)


def test_a_lane_is_given_up_after_three_lost_processes() -> None:
    checks = [odd(str(number), function="leaves") for number in range(4)] + [odd("fine")]
    *lost, skipped, fine = run_checks(checks, 120.0)
    assert all("exited with code 3" in result.findings[0].fact for result in lost)
    for result in (skipped, fine):
        assert [finding.status for finding in result.findings] == ["not checked"]


def test_all_checks_together_have_a_deadline() -> None:
    hung, after, other = run_checks([odd("hangs"), odd("fine"), odd("other", function="hangs", lane="b")], timeout=4.0)
    for result in (hung, after, other):
        assert result.findings[-1].status == "not checked"
        assert "more than 4 s" in result.findings[-1].fact
        assert result.findings[-1].fix == "Raise --timeout."
    assert hung.findings[0].fact == "before it hung"


def test_no_lane_waits_for_the_end_of_a_process_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stuck in a driver does not end when it is killed."""
    begun: list[str] = []
    waited: list[int] = []
    close = Child.close
    monkeypatch.setattr(Child, "close", lambda child: (waited.append(len(begun)), close(child)))
    checks = [odd("hangs", seconds=0.1), odd("fine"), odd("other", function="fine", lane="b")]
    results = run_checks(checks, 120.0, lambda _, name: begun.append(name))
    assert [result.findings[-1].status for result in results] == ["warning", "ok", "ok"]
    assert waited == [3, 3, 3]  # the processes of both lanes, and the one that hung, after all checks
