"""What a check of ``panscan doctor`` is and finds, all checks in the order in which they are shown, and results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Literal

from panscan.core.foreign import JsonObject
from panscan.core.text import count

NO_GPU = "PyTorch uses no NVIDIA GPU here"
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
        function: ``module:function``. The function yields findings.
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


Findings = Iterator[CheckFinding]


def on_gpus(check: Callable[[], Findings]) -> Callable[[], Findings]:
    """Return a check that says so where PyTorch uses no GPU."""

    @wraps(check)
    def checked() -> Findings:
        import torch

        if torch.cuda.is_available():
            yield from check()
        else:
            yield not_checked(NO_GPU)

    return checked


def file_text(file: Path) -> str:
    """Return the stripped text of a file of the kernel; empty if it cannot be read."""
    try:
        return file.read_text("ascii").strip()
    except OSError:
        return ""


CHECKS: tuple[Check, ...] = tuple(
    Check(name, group, f"panscan.inspect.doctor.{function}", lane, seconds)
    for name, group, function, lane, seconds in (
        ("pytorch", "gpu", "gpu:pytorch", "gpu", 60.0),
        ("gpus", "gpu", "gpu:gpus", "gpu", 20.0),
        ("kernels", "gpu", "gpu:kernels", "gpu", 20.0),
        ("tf32", "gpu", "gpu:tf32", "gpu", 20.0),
        ("triton", "gpu", "gpu:triton_kernels", "gpu", 40.0),
        ("ceilings", "gpu", "gpu:ceilings", "gpu", 30.0),
        ("requirements", "packages", "host:requirements", "host", 20.0),
        ("torchvision", "packages", "host:torchvision", "gpu", 30.0),
        ("attention-packages", "packages", "host:attention_packages", "gpu", 30.0),
        ("transformers", "gemma", "gemma:transformers", "gemma", 60.0),
        ("attention", "gemma", "gemma:attention", "gemma", 40.0),
        ("flex-attention", "gemma", "gemma:flex_attention", "compile", 60.0),
        ("flash-masks", "gemma", "gemma:flash_masks", "gemma", 30.0),
        ("prefill-chunk-size", "gemma", "gemma:prefill_chunks", "gemma", 30.0),
        ("generate-batch", "gemma", "gemma:generate_batch", "gemma", 30.0),
        ("padding", "gemma", "gemma:padding", "gemma", 30.0),
        ("image-processor", "gemma", "gemma:image_processor", "gemma", 30.0),
        ("compilation", "gemma", "gemma:compilation", "compile", 60.0),
        ("cores", "host", "host:cores", "host", 10.0),
        ("sizes", "host", "host:fits", "gpu", 20.0),
    )
)
GROUPS: dict[str, str] = {
    "gpu": "GPUs, driver and PyTorch",
    "packages": "Installed packages",
    "gemma": "What Transformers computes for Gemma 3 (tested on the tiny model)",
    "host": "Cores, and Gemma 3 sizes that fit in the free memory",
}
"""Groups by name, with their headings."""


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
    nouns = [count(counts[status], status) for status in STATUSES[:2]]
    others = [f"{counts[status]} {status}" for status in STATUSES[2:]]
    return f"{', '.join(nouns + others)}; {count(len(results), 'check')} in {seconds:.0f} s"


def as_json(results: Sequence[CheckResult], seconds: float) -> JsonObject:
    """Return results as plain data: ``summary``, ``seconds``, and ``findings`` in the order in which they are shown."""
    counts = _counts(results)
    findings = [
        {
            "group": result.check.group,
            "check": result.check.name,
            **asdict(finding),
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
