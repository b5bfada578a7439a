"""LiteLLM, which takes errors from their words."""

import json
from typing import Any

import litellm
import pytest
from tests.clients.endpoint import ANSWER, KEY, MODEL, TOO_LONG, URL, Payment, pay, question


def ask(**fields: Any) -> Any:
    given = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY, "messages": question(), "max_tokens": 100}
    return litellm.completion(**{**given, **fields})


def test_answer_to_an_image() -> None:
    assert ask().choices[0].message.content == ANSWER


async def test_async_stream() -> None:
    stream = await litellm.acompletion(
        model=f"openai/{MODEL}", api_base=URL, api_key=KEY, messages=question(), stream=True
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == ANSWER


def test_structured_output() -> None:
    assert Payment.model_validate_json(ask(response_format=Payment).choices[0].message.content)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pay"}}])
def test_tool_call(choice: Any) -> None:
    called = ask(tools=[pay()], tool_choice=choice, parallel_tool_calls=False).choices[0]
    assert called.finish_reason == "tool_calls"
    assert Payment.model_validate(json.loads(called.message.tool_calls[0].function.arguments))


def test_errors() -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(messages=[{"role": "user", "content": TOO_LONG}])
    with pytest.raises(litellm.NotFoundError):
        ask(model="openai/other")
