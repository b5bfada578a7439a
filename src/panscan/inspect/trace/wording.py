"""Summaries in words: the headline, names short enough to read, and figures with units."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from panscan.core.text import clean, number_text, percent
from panscan.inspect.trace.figures import NOTHING, Filler, StepTime, Summary

_LONGEST = 60  # characters of a name
_IDLE_WORTH_WORDS = 0.05  # share of the step
_PYTHON = re.compile(r"^(?P<path>.*[\\/])?(?P<file>[^\\/]+)\((?P<line>\d+)\): (?P<function>.+)$")
_FUNCTOR = re.compile(r"\b(\w*Functor\w*|\w+_kernel_(?:cuda|impl)|\w+Ops)\b")
_BRACKETS = re.compile(r"<[^<>]*>|\([^()]*\)|\{[^{}]*\}")
_WAITS = re.compile(r"(Synchronize|EventQuery|StreamQuery|aten::item|aten::_local_scalar_dense)")


def headline(summary: Summary) -> str:
    """Return the most important figure of a trace as one sentence."""
    steps = summary.steps
    if steps is None:
        active = sum(gpu.busy_ms for gpu in summary.gpus)
        return f"GPU events only: {milliseconds(active)} of activity in {milliseconds(summary.span_ms)}"
    per = f"per {steps.name}" if steps.name != "trace" else "from the first to the last activity"
    if not summary.gpus:
        return _cpu_headline(summary, steps, per)
    subject = "The GPU is" if len(summary.gpus) == 1 else "All GPUs are"
    whole = milliseconds(steps.step_ms)
    if steps.idle_ms < _IDLE_WORTH_WORDS * steps.step_ms:
        most = f"; longest kernel in total: {short_name(summary.kernels[0].name)}" if summary.kernels else ""
        one = "The GPU is" if len(summary.gpus) == 1 else "A GPU is"
        return f"{one} busy for {percent(steps.busy_ms / max(steps.step_ms, 1e-12))} of {whole} {per}{most}"
    text = f"{subject} idle for {milliseconds(steps.idle_ms)} of {whole} {per}"
    return text + _idle_reason(steps)


def _idle_reason(steps: StepTime) -> str:
    cause = steps.cause
    if cause is not None:
        verb = "waits in" if _WAITS.search(cause.name) else "runs"
        return f"; {milliseconds(cause.total_ms)} of that while the CPU {verb} {_function(cause.name)}"
    if not steps.fillers:
        return ""
    first = steps.fillers[0]
    if first.name == NOTHING:
        return f"; {milliseconds(first.self_ms)} of that with no CPU event recorded"
    where = " itself" if first.kind in ("annotation", "python") else ""
    return f"; {milliseconds(first.self_ms)} of that in {_function(first.name)}{where}, more than in any other function"


def _cpu_headline(summary: Summary, steps: StepTime, per: str) -> str:
    text = f"Without GPU events: the main thread is in operators for {milliseconds(steps.busy_ms)}"
    text += f" of {milliseconds(steps.step_ms)} {per}"
    if summary.operators:
        first = summary.operators[0]
        text += f"; most self time in the trace: {first.name} ({milliseconds(first.self_ms)})"
    return text


def _function(name: str) -> str:
    """Return a Python function's name without its file; other names unchanged, shortened."""
    match = _PYTHON.match(name)
    return clean(match["function"] if match else short_name(name))


def short_name(name: str) -> str:
    """Return a name to read: no paths, template arguments or parameters, except for the functor of a generic kernel."""
    name = clean(name)
    if match := _PYTHON.match(name):
        return f"{match['function']} ({match['file']}:{match['line']})"
    plain = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    if not name.startswith(("Memcpy", "Memset", "<", "nn.Module")):
        before = ""
        while before != plain:
            before, plain = plain, _BRACKETS.sub("", plain)
        plain = plain.rpartition("at::native::")[2]
    functors = _FUNCTOR.findall(name.partition("<")[2])
    if functors and functors[-1] not in plain:
        plain = f"{cut_middle(plain, _LONGEST - 24)} ({functors[-1][:24]})"
    return cut_middle(plain.strip() or name)


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return short names that differ: where they would not, names with their template arguments, cut in the middle."""
    short = {name: short_name(name) for name in names}
    seen = Counter(short.values())
    return {
        name: text if seen[text] == 1 else cut_middle(clean(name).removeprefix("void ")) for name, text in short.items()
    }


def cut_middle(text: str, most: int = _LONGEST) -> str:
    """Shorten a text to a number of characters; an ellipsis replaces the middle."""
    return text if len(text) <= most else f"{text[: 2 * most // 3]}…{text[-(most - 2 * most // 3 - 1) :]}"


def filler_name(filler: Filler, *, outside: bool = True) -> str:
    """Return the name of what fills idle time; with ``outside``, of an annotation that this is outside operators."""
    if filler.name == NOTHING:
        return "(nothing recorded)"
    if outside and filler.kind == "annotation":
        return f"{short_name(filler.name)} (outside operators)"
    return short_name(filler.name)


def milliseconds(value: float) -> str:
    """Return milliseconds with their unit; microseconds below 0.1 ms."""
    return f"{number_text(value)} ms" if value >= 0.1 or value == 0 else f"{number_text(1e3 * value)} us"
