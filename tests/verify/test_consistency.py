"""An endpoint against itself: parameters that do what they say, and answers that it scores in a prompt."""

from typing import Any

import pytest
from tests.verify.replying import Body, replying

from panscan.core import Request
from panscan.load.chat import Endpoint
from panscan.verify.consistency import REQUESTS, Consistency, check_consistency
from panscan.verify.endpoint import EndpointClient

WORDS = ["The", " total", " is", " twelve", " dollars"]
LOGPROBS = [-0.1, -0.2, -0.3, -0.4, -0.5]


def engine(number: int, body: Body, fault: str) -> tuple[int, Any]:
    """Answer with :data:`WORDS` as a right engine does, but for one fault."""
    if "prompt_logprobs" in body and fault == "unknown field":
        return 400, {"error": {"message": "prompt_logprobs: extra fields not permitted"}}
    sampled = body["temperature"] > 0
    words = [*WORDS[:2], f" {number}"] if sampled and fault == "seed" else WORDS
    limit = 4 if fault == "max_tokens" else body["max_tokens"]
    kept, reason = words[:limit], "length" if limit < len(words) else "stop"
    text = "".join(kept)
    for stop in body.get("stop", []) if fault != "stop" else []:
        text = text.partition(stop)[0]
    content = [{"token": word, "logprob": value} for word, value in zip(kept, LOGPROBS, strict=False)]
    reply: Body = {
        "choices": [{"message": {"content": text}, "finish_reason": reason, "logprobs": {"content": content}}],
        "usage": {"completion_tokens": len(kept)},
    }
    if "prompt_logprobs" in body:
        written = [("<bos>", None), ("?", -3.0), *zip(WORDS, LOGPROBS, strict=True), ("<end_of_turn>", -1.0)]
        moved = 0.7 if fault == "prefill" else 0.01
        entries = [{"7": {"logprob": value and value - moved, "decoded_token": word}} for word, value in written]
        reply["prompt_logprobs"] = [None, *entries[1:]]
    return 200, reply


def checked(fault: str) -> tuple[Consistency, int]:
    with replying(lambda number, body: engine(number, body, fault)) as url:
        session = EndpointClient(Endpoint(url, "served", timeout=20.0), max_requests=32, max_tokens=8, top_logprobs=0)
        question = Request("How much?")
        answer = session.answer(question)
        found = check_consistency(session, question, answer)
    return found, session.requests - 1


@pytest.mark.parametrize("fault", ["none", "max_tokens", "stop", "seed"])
def test_each_parameter_must_do_what_it_says(fault: str) -> None:
    found, requests = checked(fault)
    assert [line.partition(":")[0] for line in found.faults] == ([] if fault == "none" else [fault])
    assert (requests, found.notes) == (REQUESTS, [])


@pytest.mark.parametrize(("fault", "moved"), [("none", 0.01), ("prefill", 0.7)])
def test_an_answer_has_the_same_log_probabilities_in_a_prompt(fault: str, moved: float) -> None:
    assert checked(fault)[0].moved == pytest.approx(moved)


def test_an_endpoint_without_prompt_log_probabilities_is_a_note() -> None:
    found, _ = checked("unknown field")
    assert (found.moved, found.faults) == (None, [])
    assert "prompt_logprobs: not checked" in found.notes[0]
