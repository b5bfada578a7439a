"""Checks of an endpoint against itself, which need no reference: its parameters, and its own scores of its answers.

An engine computes an answer token by token, and the same tokens in a prompt all at once. An endpoint that reports the
log-probabilities of prompts (vLLM's ``prompt_logprobs``) shows whether both give the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from panscan.core import EndpointError, Request
from panscan.verify.endpoint import EndpointAnswer, EndpointClient, log_probability

REQUESTS = 5
"""Requests that the checks send."""
_SHORT = 2  # output tokens of a shortened answer


class Consistency(Struct):
    """What the checks found.

    Args:
        faults: parameters that do not do what they say.
        moved: largest difference between the two log-probabilities of a token of the answer, in nats; None: not scored.
        notes: what was not checked, and why.
    """

    faults: list[str] = []
    moved: float | None = None
    notes: list[str] = []


def check_consistency(session: EndpointClient, request: Request, answer: EndpointAnswer) -> Consistency:
    """Ask a question again with other parameters, and let the endpoint score its answer.

    Args:
        session: requests to the endpoint.
        request: a question.
        answer: its greedy answer.
    """
    consistency = Consistency()

    @contextmanager
    def checking(name: str) -> Iterator[None]:
        try:
            yield
        except EndpointError as error:
            consistency.notes.append(f"{name}: not checked ({error})")

    with checking("max_tokens"):
        short = session.variant(request, max_tokens=_SHORT)
        if (tokens := short.output_tokens or len(short.steps)) > _SHORT:
            consistency.faults.append(f"max_tokens: {tokens} tokens instead of {_SHORT}")
        elif not answer.text.startswith(short.text.rstrip("\ufffd")):
            consistency.faults.append("max_tokens: a shorter limit gives another answer")
    stop = answer.text[len(answer.text) // 2 :][:3]
    if not stop.strip() or "\ufffd" in stop:
        consistency.notes.append("stop: not checked (the answer is too short)")
    else:
        with checking("stop"):
            if session.variant(request, stop=[stop]).text != answer.text[: answer.text.index(stop)]:
                consistency.faults.append(f"stop: the answer does not end before {stop!r}")
    with checking("seed"):
        if len({session.variant(request, temperature=1.0, seed=7).text for _ in range(2)}) > 1:
            consistency.faults.append("seed: the same seed gives two answers")
    with checking("prompt_logprobs"):
        reply = session.post(request, answer=answer.text, max_tokens=1, prompt_logprobs=0)
        _compare_scores(reply, answer, consistency)
    return consistency


def _compare_scores(reply: Any, answer: EndpointAnswer, consistency: Consistency) -> None:
    """Compare the log-probabilities of an answer with those of the same tokens in a prompt."""
    match reply:
        case {"prompt_logprobs": [*rows]}:
            scored = list(map(_scored_token, rows))
        case _:
            scored = []
    written = [(step.chosen.text, step.chosen.log_probability) for step in answer.steps]
    texts = [text for text, _ in written]
    starts = range(len(scored) - len(texts), -1, -1)
    start = next((s for s in starts if [text for text, _ in scored[s : s + len(texts)]] == texts), None)
    if not texts or start is None:
        why = "the response has none" if not scored else "the prompt writes the answer with other tokens"
        consistency.notes.append(f"prefill against decode: not compared (prompt_logprobs: {why})")
        return
    pairs = zip(written, scored[start:], strict=False)
    consistency.moved = max((abs(a - b) for (_, a), (_, b) in pairs if a is not None and b is not None), default=None)


def _scored_token(row: Any) -> tuple[str, float | None]:
    """Return text and log-probability of a prompt token in vLLM's format, in which it comes first."""
    entry = next(iter(row.values()), None) if isinstance(row, Mapping) else None
    if not isinstance(entry, Mapping):
        return "", None
    return str(entry.get("decoded_token")), log_probability(entry.get("logprob"))
