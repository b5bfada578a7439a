"""The openai package of npm, if ``make test-clients`` found npm."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.clients.endpoint import ANSWER, MODEL, TOO_LONG, URL, Payment, pay, question

PACKAGES = Path(sys.prefix) / "npm" / "node_modules"
pytestmark = pytest.mark.skipif(not PACKAGES.exists(), reason="npm is not installed")


def printed(name: str) -> Any:
    """Return what one use of the package prints."""
    given = {"name": name, "url": URL, "model": MODEL, "question": question(), "tool": pay(), "tooLong": TOO_LONG}
    done = subprocess.run(
        ["node", str(Path(__file__).with_name("openai_npm.cjs"))],
        input=json.dumps({**given, "schema": Payment.model_json_schema()}),
        env={**os.environ, "NODE_PATH": str(PACKAGES)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["answer", "stream"])
def test_answer_to_an_image(name: str) -> None:
    assert printed(name) == ANSWER


@pytest.mark.parametrize("name", ["structured", "tool"])
def test_structured_output_and_a_tool(name: str) -> None:
    assert Payment.model_validate(printed(name))


def test_error() -> None:
    assert printed("error") == ["context_length_exceeded", "messages"]
