"""What a session learns from refusals, passing errors and odd replies, and whether an endpoint is consistent."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from PIL import Image
from tests.verify.replying import Body, Reply, replying

from panscan.core import EndpointError, Request
from panscan.images.encode import encoded_image
from panscan.load.chat import Endpoint
from panscan.verify.consistency import REQUESTS, Consistency, check_consistency
from panscan.verify.endpoint import EndpointClient

IMAGE = Request("What is this?", [encoded_image(Image.new("RGB", (8, 8)))])
TEXT = Request("Count.")


def completion(text: str = "a", logprob: float = -0.1) -> Body:
    content = [{"token": text, "logprob": logprob, "top_logprobs": []}] if text else []
    choice = {"message": {"content": text}, "finish_reason": "stop", "logprobs": {"content": content}}
    return {"choices": [choice]}


def failure(status: int, message: str) -> tuple[int, Body]:
    return status, {"error": {"message": message}}


@contextmanager
def session(reply: Reply, max_tokens: int = 4, top_logprobs: int = 20) -> Iterator[EndpointClient]:
    """A session with an endpoint that calls ``reply`` with the number of each request, from 0, and its body."""
    with replying(reply) as url:
        endpoint = Endpoint(url, "served", None, timeout=20.0)
        yield EndpointClient(endpoint, max_requests=32, max_tokens=max_tokens, top_logprobs=top_logprobs)


def test_a_passing_server_error_drops_no_field() -> None:
    with session(lambda number, _: failure(500, "oops") if number == 0 else (200, completion())) as asked:
        asked.answer(IMAGE)
    assert asked.requests == 2
    assert asked.capabilities.mm_processor_kwargs
    assert asked.capabilities.top_logprobs == 20


def test_a_field_that_an_unnamed_error_concerns_is_omitted() -> None:
    def reply(_: int, body: Body) -> tuple[int, object]:
        return failure(400, "bad request") if "mm_processor_kwargs" in body else (200, completion())

    with session(reply) as asked:
        asked.answer(IMAGE)
        asked.answer(IMAGE)
    assert asked.requests == 3
    assert not asked.capabilities.mm_processor_kwargs
    assert asked.capabilities.top_logprobs == 20


def test_an_error_that_no_field_causes_drops_none() -> None:
    def reply(_: int, body: Body) -> tuple[int, object]:
        pictures = not isinstance(body["messages"][-1]["content"], str)
        return failure(400, "bad request") if pictures else (200, completion())

    with session(reply) as asked:
        with pytest.raises(EndpointError, match="bad request"):
            asked.answer(IMAGE)
        sent = asked.requests
        with pytest.raises(EndpointError, match="bad request"):
            asked.answer(IMAGE)
        assert asked.requests == sent + 1
        assert len(asked.answer(TEXT).steps) == 1
    assert asked.capabilities.mm_processor_kwargs
    assert not asked.capabilities.refusals


def test_an_empty_answer_does_not_switch_log_probabilities_off() -> None:
    with session(lambda number, _: (200, completion("" if number == 0 else "a"))) as asked:
        assert asked.answer(TEXT).steps == ()
        assert len(asked.answer(TEXT).steps) == 1
    assert asked.capabilities.top_logprobs == 20


NO_NUMBERS = (-(10**400), float("nan"), float("-inf"), "-1", True)


@pytest.mark.parametrize(
    ("reported", "read"), [*((value, None) for value in NO_NUMBERS), (1e-7, 0.0), (-2, -2.0)], ids=str
)
def test_what_is_no_log_probability_is_ignored(reported: Any, read: float | None) -> None:
    with session(lambda *_: (200, completion("a", reported))) as asked:
        [step] = asked.answer(TEXT).steps
    assert step.chosen.log_probability == read


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
    question = Request("How much?")
    with session(lambda number, body: engine(number, body, fault), max_tokens=8, top_logprobs=0) as asked:
        found = check_consistency(asked, question, asked.answer(question))
    return found, asked.requests - 1


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
