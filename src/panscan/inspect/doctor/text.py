"""Results of checks as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from panscan.inspect.doctor.checks import GROUPS, STATUSES, CheckResult, Status


def lines(results: Sequence[CheckResult]) -> Iterator[tuple[Status | None, str]]:
    """Yield lines to print, each with the status whose colour it has; None: none."""
    for group, heading in GROUPS.items():
        shown = [result for result in results if result.check.group == group]
        if not shown:
            continue
        yield None, heading
        for result in shown:
            for finding in result.findings:
                yield finding.status, f"  {finding.status:<12} {result.check.name}: {finding.fact}"
                if finding.fix is not None:
                    yield None, f"  {'':<12} Fix: {finding.fix}"
        yield None, ""


def summary(results: Sequence[CheckResult], seconds: float) -> str:
    """Return the numbers of findings by status, in one line."""
    counts = _counts(results)
    parts = []
    for status in STATUSES:
        plural = "" if counts[status] == 1 or status not in ("problem", "warning") else "s"
        parts.append(f"{counts[status]} {status}{plural}")
    return f"{', '.join(parts)}; {len(results)} check{'' if len(results) == 1 else 's'} in {seconds:.0f} s"


def as_json(results: Sequence[CheckResult], seconds: float) -> dict[str, Any]:
    """Return results as plain data: ``summary``, ``seconds``, and ``findings`` in the order in which they are shown."""
    counts = _counts(results)
    findings = [
        {
            "group": result.check.group,
            "check": result.check.name,
            "status": finding.status,
            "fact": finding.fact,
            "fix": finding.fix,
            "seconds": None if result.seconds is None else round(result.seconds, 3),
        }
        for result in results
        for finding in result.findings
    ]
    return {
        "summary": {status.replace(" ", "_"): counts[status] for status in STATUSES},
        "seconds": round(seconds, 1),
        "findings": findings,
    }


def _counts(results: Sequence[CheckResult]) -> Counter[Status]:
    return Counter(finding.status for result in results for finding in result.findings)
