"""``llm`` on the command line, whose schemas leave objects open."""

import json
import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from tests.clients.endpoint import IMAGE, KEY, MODEL, QUESTION, TOO_LONG, URL, question


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration of ``llm`` that knows the server."""
    entry = {"model_id": "served", "model_name": MODEL, "api_base": URL, "vision": True, "supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([{**entry, "supports_tools": True}]))
    return tmp_path


def ask(folder: Path, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "llm", "-m", "served", *words],
        input=text,
        env={**os.environ, "LLM_USER_PATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("option", [[], ["--no-stream"]], ids=["streamed", "at once"])
def test_answer_to_an_image(folder: Path, option: list[str]) -> None:
    messages = question()
    messages[0]["content"].reverse()  # llm sends the text first
    expected = openai.OpenAI(base_url=URL, api_key=KEY).chat.completions.create(model=MODEL, messages=messages)
    assert ask(folder, QUESTION, "-a", str(IMAGE), *option).stdout.strip() == expected.choices[0].message.content


def test_schema(folder: Path) -> None:
    answer = ask(folder, QUESTION, "--schema", "cents int, paid bool", "-o", "max_tokens", "100")
    assert json.loads(answer.stdout).keys() == {"cents", "paid"}, answer.stderr


def test_tool_that_may_be_called(folder: Path) -> None:
    answer = ask(folder, QUESTION, "--tool", "llm_time", "-o", "max_tokens", "20")
    assert answer.returncode == 0 and answer.stdout.strip(), answer.stderr


def test_error(folder: Path) -> None:
    answer = ask(folder, text=TOO_LONG)
    assert answer.returncode == 1 and "maximum context length is" in answer.stderr
