"""The command ``panscan verify``: options, broken endpoints, files, and exit codes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.load.fake_server import fake_server

from panscan.cli.main import run


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """An endpoint that answers with text that is not the model's; the served model's name selects a fault."""
    with fake_server(tokens=3) as url:
        yield url


def verify(url: str, *options: str) -> int:
    words = ["verify", url, "--model", "tiny", "--device", "cpu", "--max-new-tokens", "3", "--max-requests", "4"]
    return run([*words, *options])


def test_another_models_answers_differ(endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "verdict.json"
    code = verify(endpoint, "--output", str(output))
    found = json.loads(output.read_text())
    shown = capsys.readouterr().out
    assert code == {"different": 5, "unknown": 6}[found["verdict"]]
    inputs, message = shown.splitlines()[:2]
    assert message.startswith(found["message"][:40])
    asked = [answer for answer in found["answers"] if answer["pixels"]]
    views = [answer["views"] for answer in asked]
    assert asked and all(answer["image_tokens"] == 64 * answer["views"] for answer in asked)
    assert inputs.startswith(f"{len(asked)} question")
    assert asked[0]["pixels"][0] in inputs and f"{max(views)} view" in inputs and f"{64 * max(views)} image" in inputs
    assert found["requests"] <= 4
    assert "Not checked: distributions: the endpoint reports no log-probabilities" in shown
    assert verify(endpoint, "--output", str(output)) == 2
    assert f"--output {output}: the file exists" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["html", "early-close", "malformed", "refuse-images", "500", "close"])
def test_a_broken_endpoint_ends_with_one_line(endpoint: str, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = verify(endpoint, "--served-model", f"fake:{fault}", "--max-requests", "3")
    shown = capsys.readouterr()
    assert code in (3, 5, 6)
    assert "Traceback" not in shown.out + shown.err
    assert code == 5 or "no verdict" in shown.out or shown.err.count("\n") == 1
