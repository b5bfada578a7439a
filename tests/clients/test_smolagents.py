"""smolagents: its model of OpenAI's API, and an agent whose every step is a tool call."""

import openai
import pytest
from PIL import Image
from smolagents import OpenAIModel, ToolCallingAgent
from tests.clients.endpoint import ANSWER, IMAGE, KEY, MODEL, QUESTION, TOO_LONG, URL, Payment, question

CHAT = OpenAIModel(model_id=MODEL, api_base=URL, api_key=KEY, max_tokens=200)


def test_answer_to_an_image() -> None:
    content = [{"type": "image", "image": Image.open(IMAGE)}, {"type": "text", "text": QUESTION}]
    assert CHAT.generate([{"role": "user", "content": content}]).content == ANSWER


def test_stream() -> None:
    assert "".join(delta.content or "" for delta in CHAT.generate_stream(question())) == ANSWER


def test_structured_output() -> None:
    schema = {"name": "payment", "schema": Payment.model_json_schema()}
    form = {"type": "json_schema", "json_schema": schema}
    assert Payment.model_validate_json(CHAT.generate(question(), response_format=form).content)


def test_agent() -> None:
    agent = ToolCallingAgent(tools=[], model=CHAT, max_steps=1)
    assert isinstance(agent.run(QUESTION), str)
    assert any(step.tool_calls for step in agent.memory.steps if hasattr(step, "tool_calls"))


def test_error() -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is"):
        CHAT.generate([{"role": "user", "content": TOO_LONG}])
