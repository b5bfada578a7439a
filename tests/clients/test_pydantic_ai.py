"""pydantic-ai: text, structured output by tool and by schema, streams and errors."""

from typing import Any

import pytest
from pydantic_ai import Agent, BinaryContent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from tests.clients.endpoint import ANSWER, IMAGE, KEY, MODEL, QUESTION, TOO_LONG, URL, Payment

CHAT = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
ASKED = [BinaryContent(IMAGE.read_bytes(), media_type="image/png"), QUESTION]
LIMIT: Any = {"max_tokens": 100}


def test_answer_to_an_image() -> None:
    assert Agent(CHAT).run_sync(ASKED).output == ANSWER


@pytest.mark.parametrize(
    "kind",
    [Payment, NativeOutput(Payment), [ToolOutput(Payment, name="pay"), ToolOutput(bool, name="refuse")]],
    ids=["tool", "schema", "one of two tools"],
)
def test_output(kind: Any) -> None:
    assert isinstance(Agent(CHAT, output_type=kind).run_sync(ASKED, model_settings=LIMIT).output, Payment | bool)


def test_tool_that_may_be_called() -> None:
    agent = Agent(CHAT)
    agent.tool_plain(lambda city: "sunny", name="weather")
    assert isinstance(agent.run_sync("Weather in Rome?", model_settings=LIMIT).output, str)


async def test_stream() -> None:
    async with Agent(CHAT, output_type=Payment).run_stream(ASKED, model_settings=LIMIT) as result:
        assert isinstance(await result.get_output(), Payment)


async def test_streamed_text() -> None:
    async with Agent(CHAT).run_stream(ASKED) as result:
        assert "".join([text async for text in result.stream_text(delta=True)]) == ANSWER


def test_error() -> None:
    with pytest.raises(ModelHTTPError, match="maximum context length is") as refusal:
        Agent(CHAT).run_sync(TOO_LONG)
    assert refusal.value.status_code == 400
