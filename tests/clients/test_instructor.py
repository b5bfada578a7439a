"""instructor in its modes for OpenAI's API."""

from collections.abc import Iterable

import instructor
import openai
import pytest
from instructor.core.exceptions import InstructorRetryException
from tests.clients.endpoint import KEY, MODEL, THE_MODELS_WORDS, TOO_LONG, URL, Payment, question

WORDS = pytest.mark.xfail(raises=InstructorRetryException, reason=THE_MODELS_WORDS)
UNFORCED = pytest.mark.xfail(raises=Exception, reason="the mini model calls no tool that it may leave alone")


def client(mode: instructor.Mode = instructor.Mode.TOOLS) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0), mode=mode)


@pytest.mark.parametrize(
    "mode",
    ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", pytest.param("JSON", marks=WORDS), pytest.param("MD_JSON", marks=WORDS)],
)
def test_mode(mode: str) -> None:
    made = client(instructor.Mode[mode]).chat.completions.create(
        model=MODEL, messages=question(), response_model=Payment, max_tokens=100, max_retries=0
    )
    assert isinstance(made, Payment)


@UNFORCED
def test_parallel_tools() -> None:
    made = client(instructor.Mode.PARALLEL_TOOLS).chat.completions.create(
        model=MODEL, messages=question(), response_model=Iterable[Payment], max_tokens=100, max_retries=0
    )
    assert all(isinstance(payment, Payment) for payment in list(made))


def test_partial_answers() -> None:
    *_, last = client().chat.completions.create_partial(
        model=MODEL, messages=question(), response_model=Payment, max_tokens=100, max_retries=0
    )
    assert Payment.model_validate(last.model_dump())


def test_error() -> None:
    with pytest.raises(InstructorRetryException, match="maximum context length is"):
        client().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": TOO_LONG}], response_model=Payment, max_retries=0
        )
