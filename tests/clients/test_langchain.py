"""LangChain: its standard suite for chat models in full, and the receipt."""

from io import BytesIO
from typing import Any

import httpx
import openai
import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from PIL import Image
from tests.clients.endpoint import ANSWER, IMAGE, KEY, MODEL, TOO_LONG, URL, question

PARAMETERS: dict[str, Any] = {
    "model": MODEL,
    "base_url": URL,
    "api_key": KEY,
    "max_tokens": 200,
    "temperature": 0,
    "max_retries": 0,
    "stream_usage": True,
}


def words(what: str) -> pytest.MarkDecorator:
    kinds = (AssertionError, openai.LengthFinishReasonError, OutputParserException)
    return pytest.mark.xfail(raises=kinds, reason=f"the mini model knows too few words: {what}")


class TestStandard(ChatModelIntegrationTests):
    """The suite; what is overridden fails because of the model or its template."""

    @pytest.fixture(autouse=True)
    def no_downloads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The suite's picture and PDF are the receipt, so that a run needs no network."""
        pdf = BytesIO()
        Image.open(IMAGE).convert("RGB").save(pdf, "PDF")

        def get(url: str, **_options: Any) -> httpx.Response:
            return httpx.Response(200, content=pdf.getvalue() if url.endswith(".pdf") else IMAGE.read_bytes())

        monkeypatch.setattr(httpx, "get", get)

    chat_model_class = ChatOpenAI
    chat_model_params = PARAMETERS
    model_override_value = MODEL
    supports_image_inputs = True
    supports_pdf_inputs = True
    supports_image_tool_message = True
    supports_pdf_tool_message = True
    supports_json_mode = True

    @pytest.mark.xfail(
        raises=openai.BadRequestError,
        reason="Gemma 3's chat template requires alternating roles; Transformers raises the same error",
    )
    def test_double_messages_conversation(self, model: BaseChatModel) -> None:
        super().test_double_messages_conversation(model)

    @words("it does not copy the 3 of the question into a call")
    def test_tool_calling(self, model: BaseChatModel) -> None:
        super().test_tool_calling(model)

    @words("it does not copy the 3 of the question into a call")
    async def test_tool_calling_async(self, model: BaseChatModel) -> None:
        await super().test_tool_calling_async(model)

    @words("it writes no style of a greeting")
    def test_bind_runnables_as_tools(self, model: BaseChatModel) -> None:
        super().test_bind_runnables_as_tools(model)

    @words("it calls no tool that it may leave alone")
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    @words("it does not copy Chinese characters into a call")
    def test_unicode_tool_call_integration(
        self, model: BaseChatModel, *, tool_choice: str | None = None, force_tool_call: bool = True
    ) -> None:
        super().test_unicode_tool_call_integration(model, tool_choice=tool_choice, force_tool_call=force_tool_call)

    @words("it writes none of the names in the schema, which only the prompt asks for")
    def test_json_mode(self, model: BaseChatModel) -> None:
        super().test_json_mode(model)


def test_answer_to_an_image() -> None:
    assert ChatOpenAI(**PARAMETERS).invoke(question()).content == ANSWER


def test_error() -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is"):
        ChatOpenAI(**PARAMETERS).invoke(TOO_LONG)
