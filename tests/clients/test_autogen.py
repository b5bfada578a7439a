"""AutoGen: its client of OpenAI's API, and an agent that is given a tool."""

import openai
import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_core import Image
from autogen_core.models import ModelInfo, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from PIL import Image as Picture
from tests.clients.endpoint import ANSWER, IMAGE, KEY, MODEL, QUESTION, TOO_LONG, URL, Payment

INFO = ModelInfo(vision=True, function_calling=True, json_output=True, family="unknown", structured_output=True)
CLIENT = OpenAIChatCompletionClient(model=MODEL, base_url=URL, api_key=KEY, model_info=INFO, max_tokens=100)
ASKED = [UserMessage(content=[Image(Picture.open(IMAGE)), QUESTION], source="user")]


def pay(cents: int) -> str:
    """Pay an invoice."""
    return f"paid {cents}"


PAY = FunctionTool(pay, description="Pay an invoice", strict=True)


async def test_answer_to_an_image() -> None:
    assert (await CLIENT.create(ASKED)).content == ANSWER


async def test_stream() -> None:
    *pieces, result = [piece async for piece in CLIENT.create_stream(ASKED)]
    assert "".join(pieces) == ANSWER == result.content


async def test_structured_output() -> None:
    answer = await CLIENT.create(ASKED, json_output=Payment)
    assert Payment.model_validate_json(str(answer.content))


async def test_tool_call() -> None:
    answer = await CLIENT.create(ASKED, tools=[PAY], tool_choice=PAY)
    [call] = answer.content
    assert call.name == "pay" and answer.finish_reason == "function_calls"


async def test_agent_with_a_tool_that_it_may_leave_alone() -> None:
    result = await AssistantAgent("clerk", CLIENT, tools=[PAY]).run(task="What is the total?")
    assert result.messages[-1].content


async def test_error() -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is"):
        await CLIENT.create([UserMessage(content=TOO_LONG, source="user")])
