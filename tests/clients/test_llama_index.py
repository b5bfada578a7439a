"""LlamaIndex through its class for servers like OpenAI's."""

import openai
import pytest
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from tests.clients.endpoint import ANSWER, IMAGE, KEY, MODEL, QUESTION, TOO_LONG, URL, Payment

CHAT = OpenAILike(
    model=MODEL,
    api_base=URL,
    api_key=KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=32_768,
    max_tokens=100,
    max_retries=0,
)
ASKED = [
    ChatMessage(role="user", blocks=[ImageBlock(path=IMAGE, image_mimetype="image/png"), TextBlock(text=QUESTION)])
]


def test_answer_to_an_image() -> None:
    assert CHAT.chat(ASKED).message.content == ANSWER


async def test_async_stream() -> None:
    assert "".join([part.delta or "" async for part in await CHAT.astream_chat(ASKED)]) == ANSWER


def test_structured_output() -> None:
    assert isinstance(CHAT.structured_predict(Payment, PromptTemplate(QUESTION)), Payment)


def test_tool_call() -> None:
    tool = FunctionTool.from_defaults(lambda cents, currency: "paid", name="pay", fn_schema=Payment)
    answer = CHAT.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    (call, *_) = CHAT.get_tool_calls_from_response(answer)
    assert Payment.model_validate(call.tool_kwargs)


def test_error() -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is"):
        CHAT.complete(TOO_LONG)
