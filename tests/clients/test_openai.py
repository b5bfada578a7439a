"""OpenAI's own package: answers, streams, structured output, tools and errors, also without blocking."""

import openai
import pytest
from tests.clients.endpoint import ANSWER, KEY, MODEL, TOO_LONG, URL, Payment, pay, question

CLIENT = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)


def test_answer_to_an_image() -> None:
    answer = CLIENT.chat.completions.create(model=MODEL, messages=question())
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (ANSWER, "stop")
    assert answer.usage is not None and answer.usage.completion_tokens > 0


async def test_async_stream() -> None:
    async with openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=question(), stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == ANSWER
    assert chunks[-1].usage is not None


def test_parsed_answer() -> None:
    answer = CLIENT.chat.completions.parse(model=MODEL, messages=question(), response_format=Payment)
    assert isinstance(answer.choices[0].message.parsed, Payment)


def test_streamed_tool_call() -> None:
    tool = openai.pydantic_function_tool(Payment, name="pay")
    with CLIENT.chat.completions.stream(
        model=MODEL, messages=question(), tools=[tool], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Payment)


def test_result_of_a_tool() -> None:
    messages = question()
    named = {"type": "function", "function": {"name": "pay"}}
    called = CLIENT.chat.completions.create(model=MODEL, messages=messages, tools=[pay()], tool_choice=named)
    (call,) = called.choices[0].message.tool_calls
    messages += [called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "paid"}]
    answer = CLIENT.chat.completions.create(
        model=MODEL, messages=messages, tools=[pay()], tool_choice="none", max_tokens=9
    )
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls


def test_completion_of_token_ids() -> None:
    answer = CLIENT.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=2, logprobs=0)
    assert answer.usage is not None and answer.usage.prompt_tokens == 3
    assert all(value <= 0 for value in answer.choices[0].logprobs.token_logprobs)


def test_errors() -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is") as refusal:
        CLIENT.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": TOO_LONG}])
    assert refusal.value.code == "context_length_exceeded"
    assert refusal.value.request_id
    with pytest.raises(openai.NotFoundError, match="other"):
        CLIENT.chat.completions.create(model="other", messages=question())
