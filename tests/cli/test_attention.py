"""``panscan attention``: its picture, its JSON and its errors."""

import json
from pathlib import Path

import pytest
from PIL import Image
from tests.conftest import documented, noise

from panscan.cli.main import run


@pytest.fixture
def folder(folder: Path) -> Path:
    noise(260, 800, 3).save("doc.png")
    return folder


def test_a_picture_and_the_cells_that_flash_attention_lacks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["attention", "doc.png", "-p", "What?", "--model", "tiny", "--attn_impl", "flash_attention_2"]
    assert run(words) == 0
    printed = capsys.readouterr()
    with Image.open(folder / "attention.png") as picture:
        assert picture.format == "PNG" and picture.width > 700
    assert "flash_attention_2 lacks" in printed.out
    assert "picture: attention.png" in printed.err
    assert run([*words, "--json"]) == 0
    facts = documented("attention", capsys.readouterr().out)
    views = [each for each in facts["segments"] if each["image"] is not None]
    assert [each["label"] for each in views] == ["whole", "crop 1", "crop 2", "crop 3"]
    lost = sum((each["end"] - each["start"]) * (each["end"] - each["start"] - 1) // 2 for each in views)
    assert facts["implementations"][1]["differences"][0]["missing"] == lost
    assert facts["picture"] is None


def test_a_prompt_without_images_is_causal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["attention", "-p", "Hi", "--model", "tiny", "--attention", "flash_attention_2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    [group] = facts["implementations"]
    assert group["names"] == ["eager", "flash_attention_2"]
    assert group["differences"][0]["reference"] == facts["tokens"] * (facts["tokens"] + 1) // 2
