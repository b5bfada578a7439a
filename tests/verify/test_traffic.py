"""The verdict on measured traffic: right answers, swapped images, texts of other tokens, and too little evidence."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.conftest import noise

from panscan import GenerateRunner, Request
from panscan.core import PanAndScan, SettingError
from panscan.images.encode import encoded_image
from panscan.load.chat import ChatRequest, RequestOutcome, chat_body, data_url
from panscan.load.content import LoadRequest
from panscan.load.options import LoadLevel
from panscan.settings import Settings, settings_from
from panscan.verify.local import open_local
from panscan.verify.run import Verification
from panscan.verify.traffic import TrafficSample, check_plain_answers, verify_traffic
from panscan.workload.request_sets import chat_parts

COUNT, TOKENS = 4, 10
VIEWS = PanAndScan(enabled=False)
SETTINGS = settings_from({"model": "tiny", "dtype": "fp32", "device": "cpu", "do_pan_and_scan": False})
PAGES = [encoded_image(noise(64, 64, seed)) for seed in range(COUNT)]


@pytest.fixture(scope="module")
def answers(tiny: GenerateRunner) -> list[str]:
    """What a right server answers about each page."""
    settings = Settings(model="tiny", dtype="fp32", device="cpu", max_new_tokens=TOKENS, do_pan_and_scan=False)
    before = tiny.settings
    tiny.configure(settings)
    try:
        return [result.text for result in tiny.run([Request("What?", [page], pan_and_scan=VIEWS) for page in PAGES])]
    finally:
        tiny.configure(before)  # other files use the same model


def verified(tiny: GenerateRunner, texts: Sequence[str], **options: bool) -> Verification:
    sample, level = TrafficSample(COUNT), LoadLevel(max_concurrency=8)
    requests, outcomes = [], []
    for number, (page, text) in enumerate(zip(PAGES, texts, strict=True)):
        content = chat_parts([data_url("image/png", page)], "What?")
        body = chat_body("served", [{"role": "user", "content": content}], TOKENS)
        requests.append(LoadRequest(ChatRequest(f"{number}", body, TOKENS), None))
        outcomes.append(RequestOutcome(f"{number}", 0.0, 0.0, 0.0, text=text, finish_reason="length"))
    sample.add(level, requests, outcomes[::-1])
    return verify_traffic("http://x", ("served", None), SETTINGS, sample, loaded=tiny.loaded, **options)


def test_right_answers_are_close_and_say_what_a_text_cannot_exclude(tiny: GenerateRunner, answers: list[str]) -> None:
    found = verified(tiny, answers)
    assert (found.word, found.wrong) == ("close", []), found.message
    said = " ".join(found.not_visible)
    judged = sum(bool(answer["tokens"]) for answer in found.answers)  # fewer, where a text begins inside a character
    assert f"{judged} of {COUNT} answers were computed again" in said
    assert f"with {judged}% probability" in said
    assert "without log-probabilities" in said


def test_two_swapped_answers_are_named(tiny: GenerateRunner, answers: list[str]) -> None:
    found = verified(tiny, [answers[1], answers[0], *answers[2:]])
    assert found.word == "different"
    assert set(found.wrong) <= {"0 (concurrency-8)", "1 (concurrency-8)"} and found.wrong


def test_texts_without_a_clear_token_are_no_evidence(tiny: GenerateRunner, answers: list[str]) -> None:
    found = verified(tiny, ["", "", "", answers[3][:1]])
    assert found.word == "unknown"
    assert "no verdict" in found.message


def test_a_text_is_followed_along_the_tokens_of_the_reference(tiny: GenerateRunner, answers: list[str]) -> None:
    """Random models write texts that the tokenizer would write with other tokens: these are no wrong tokens."""
    with open_local(SETTINGS, tiny.loaded) as local:
        texts = [b"".join(local.tokens.text(token) for token in local.tokens.encode(text)) for text in answers]
        assert [text.decode(errors="replace") for text in texts] == answers
        lengths = np.array([len(local.tokens.encode(text)) for text in answers])
        assert (lengths != TOKENS).any(), "some text must have another tokenisation for this test to say anything"
        starts = local.tokens.starting(texts[0])
        assert all(texts[0].startswith(local.tokens.text(token)) for token in starts)
        assert len(starts) > 1


@pytest.mark.parametrize("extra", [{"temperature": 1}, {"repetition_penalty": 1.3}, {"guided_regex": "a+"}])
def test_requests_that_change_answers_are_refused(extra: dict[str, Any]) -> None:
    check_plain_answers({"temperature": 0.0, "logprobs": True, "seed": 3})
    with pytest.raises(SettingError, match=f"remove {next(iter(extra))} from --extra-body"):
        check_plain_answers({"temperature": 0.0, **extra})
