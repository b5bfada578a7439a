"""What a check is, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "STATUSES",
    "Check",
    "CheckFinding",
    "CheckResult",
    "Status",
    "not_checked",
    "ok",
    "problem",
    "warning",
]

Status = Literal["ok", "warning", "problem", "not checked"]
STATUSES: tuple[Status, ...] = ("problem", "warning", "not checked", "ok")
"""The worst first. A problem makes Gemma 3 wrong or impossible here; a warning makes it slow, or may make it wrong."""


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """One fact about this machine.

    Args:
        status: judgement of the fact.
        fact: what was measured or read, in a sentence.
        fix: what to do; None if there is nothing to do.
    """

    status: Status
    fact: str
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """A check and where to find it.

    Args:
        name: unique; what ``--json`` calls it.
        group: heading under which its findings are shown.
        function: ``module:function``. The function takes no arguments and yields findings.
        lane: checks of a lane run one after the other in one process; lanes run at the same time.
        seconds: deadline, from the start of the check.
    """

    name: str
    group: str
    function: str
    lane: str
    seconds: float


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The findings of a check, in order, and how many seconds it took (None: it did not run to its end)."""

    check: Check
    findings: tuple[CheckFinding, ...]
    seconds: float | None


def ok(fact: str) -> CheckFinding:
    """Return a fact that needs no action."""
    return CheckFinding("ok", fact)


def warning(fact: str, fix: str) -> CheckFinding:
    """Return a fact that makes Gemma 3 slow here, or may make it wrong."""
    return CheckFinding("warning", fact, fix)


def problem(fact: str, fix: str) -> CheckFinding:
    """Return a fact that makes Gemma 3 wrong or impossible here."""
    return CheckFinding("problem", fact, fix)


def not_checked(reason: str, fix: str | None = None) -> CheckFinding:
    """Return the reason why something was not checked."""
    return CheckFinding("not checked", reason, fix)
