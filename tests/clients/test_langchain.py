"""LangChain: its standard suite for chat models in full, and the receipt."""

from io import BytesIO
from typing import Any

import httpx
import openai
import pytest
from langchain_core.exceptions import OutputParserException
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


CANNOT = "the mini model knows too few words: it "
EXPECTED = {
    "test_tool_calling": "does not copy the 3 of the question into a call",
    "test_tool_calling_async": "does not copy the 3 of the question into a call",
    "test_bind_runnables_as_tools": "writes no style of a greeting",
    "test_agent_loop": "calls no tool that it may leave alone",
    "test_unicode_tool_call_integration": "does not copy Chinese characters into a call",
    "test_json_mode": "writes none of the names in the schema, which only the prompt asks for",
}
"""Tests of the suite that fail because of the model."""
ROLES = "Gemma 3's chat template requires alternating roles; Transformers raises the same error"


class TestStandard(ChatModelIntegrationTests):
    """The suite; some of its tests fail because of the model or its template."""

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

    @pytest.fixture(autouse=True)
    def expected_failures(self, request: pytest.FixtureRequest) -> None:
        if request.function.__name__ == "test_double_messages_conversation":
            request.applymarker(pytest.mark.xfail(raises=openai.BadRequestError, reason=ROLES))
        if reason := EXPECTED.get(request.function.__name__):
            kinds = (AssertionError, openai.LengthFinishReasonError, OutputParserException)
            request.applymarker(pytest.mark.xfail(raises=kinds, reason=CANNOT + reason))


def test_answer_to_an_image() -> None:
    assert ChatOpenAI(**PARAMETERS).invoke(question()).content == ANSWER


def test_error() -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is"):
        ChatOpenAI(**PARAMETERS).invoke(TOO_LONG)
