"""What the tests of all clients ask: one server, one receipt and its total, one schema."""

import base64
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

URL = os.environ["PANSCAN_CLIENTS_URL"] + "/v1"
MODEL = os.environ["PANSCAN_CLIENTS_MODEL"]
IMAGE = Path(os.environ["PANSCAN_CLIENTS_IMAGE"])
QUESTION, ANSWER = os.environ["PANSCAN_CLIENTS_QUESTION"], os.environ["PANSCAN_CLIENTS_ANSWER"]
TOKENIZER = os.environ["PANSCAN_CLIENTS_TOKENIZER"]
KEY = "none"
TOO_LONG = "total " * 40_000  # the context has 32,768 tokens
THE_MODELS_WORDS = "the mini model knows too few words: nothing but the prompt asks for the names in the schema"


class Payment(BaseModel):
    """Pay an invoice."""

    cents: int = Field(ge=0, le=999)
    currency: Literal["USD", "EUR"]


def data_url() -> str:
    """Return the receipt as a URL."""
    return "data:image/png;base64," + base64.b64encode(IMAGE.read_bytes()).decode()


def question() -> list[dict[str, Any]]:
    """Return the messages that ask for the receipt's total, in the form of OpenAI's API."""
    content = [{"type": "image_url", "image_url": {"url": data_url()}}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": content}]


def pay() -> dict[str, Any]:
    """Return a tool that takes a payment."""
    return {"type": "function", "function": {"name": "pay", "parameters": Payment.model_json_schema()}}
