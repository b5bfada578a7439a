"""The inference client of huggingface_hub."""

from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import BadRequestError
from tests.clients.endpoint import ANSWER, KEY, MODEL, TOO_LONG, URL, Payment, pay, question

CLIENT = InferenceClient(base_url=URL, api_key=KEY)


def ask(**fields: Any) -> Any:
    return CLIENT.chat_completion(**{"model": MODEL, "messages": question(), "max_tokens": 100, **fields})


def test_answer_to_an_image() -> None:
    assert ask().choices[0].message.content == ANSWER


async def test_async_stream() -> None:
    async with AsyncInferenceClient(base_url=URL, api_key=KEY) as client:
        stream = await client.chat_completion(model=MODEL, messages=question(), max_tokens=100, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == ANSWER


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"name": "payment", "schema": Payment.model_json_schema()}},
        {"type": "json_object", "value": Payment.model_json_schema()},
    ],
    ids=["OpenAI's spelling", "Hugging Face's spelling"],
)
def test_structured_output(form: Any) -> None:
    assert Payment.model_validate_json(ask(response_format=form).choices[0].message.content)


def test_tool_call() -> None:
    (call,) = ask(tools=[pay()], tool_choice="required").choices[0].message.tool_calls[:1]
    assert Payment.model_validate_json(call.function.arguments)


def test_error() -> None:
    with pytest.raises(BadRequestError, match="maximum context length is"):
        ask(messages=[{"role": "user", "content": TOO_LONG}])
