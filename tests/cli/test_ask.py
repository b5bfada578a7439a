"""``panscan ask``: the answers of the Python interface, the text on stdout and everything else beside it."""

import io
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from tests.conftest import Panscan, documented, noise

from panscan import GenerateRunner, PanAndScan, Result, Sampling
from panscan.images.files import expand_images, open_image
from panscan.images.views import plan_views

QUICK = ["--model", "tiny", "--device", "cpu", "--max-new-tokens", "6"]
QUESTION = "What is the total?"


@pytest.fixture
def folder(folder: Path) -> Path:
    """A working directory with two pictures and a PDF of three pages, the last one wide."""
    noise(260, 800).save("tall.png")
    noise(300, 300, 1).save("square.jpg")
    noise(150, 150, 2).save("scan.pdf", save_all=True, append_images=[noise(150, 150, 3), noise(300, 130, 4)])
    return folder


def asked(panscan: Panscan, *arguments: str) -> dict[str, Any]:
    """What ``panscan ask --json`` prints."""
    printed = panscan("ask", *arguments, "--json", *QUICK).out
    assert printed.count("\n") == 1
    return documented("ask", printed)


def expected(tiny: GenerateRunner, images: list[str], prompt: str = QUESTION, **fields: Any) -> Result:
    """What the Python interface answers."""
    [result] = tiny.generate([tiny.request(prompt, images, sampling=Sampling(6), **fields)])
    return result


def test_several_images_are_one_prompt(folder: Path, panscan: Panscan, tiny: GenerateRunner) -> None:
    answer = asked(panscan, "tall.png", "square.jpg", "-p", QUESTION, "--system", "Answer in French.")
    result = expected(tiny, ["tall.png", "square.jpg"], system="Answer in French.")
    names = ("text", "finish_reason", "views", "crops", "image_tokens", "prompt_tokens", "output_tokens")
    assert {name: answer[name] for name in names} == {name: getattr(result, name) for name in names}
    assert (answer["views"], answer["crops"], answer["image_tokens"]) == (5, 3, 5 * 64)
    assert set(answer) == {*names, "demonstration", "pixels", "runner", "ttft_ms", "e2el_ms", "stages_ms", "startup_ms"}
    assert list(answer["startup_ms"]) == ["import", "model"]
    assert (answer["runner"], answer["demonstration"]) == ("engine", True)
    assert list(answer["stages_ms"]) == ["load", "preprocess", "queue", "vision", "prefill", "decode"]
    assert sum(answer["stages_ms"].values()) == pytest.approx(answer["e2el_ms"], abs=0.01)
    assert 0 < answer["ttft_ms"] <= answer["e2el_ms"]


def test_every_page_of_a_pdf_is_an_image(folder: Path, panscan: Panscan) -> None:
    sizes = [open_image(page).size for page in expand_images(["scan.pdf"])]
    crops = [plan_views(*size, PanAndScan()).crops for size in sizes]
    assert len(crops) == 3 and crops[2] > 0
    answer = asked(panscan, "scan.pdf", "-p", QUESTION)
    assert (answer["views"], answer["crops"]) == (3 + sum(crops), sum(crops))
    assert asked(panscan, "scan.pdf#page=2", "-p", QUESTION)["views"] == 1 + crops[1]


def test_an_image_is_not_needed(folder: Path, panscan: Panscan) -> None:
    answer = asked(panscan, "-p", QUESTION)
    assert (answer["views"], answer["image_tokens"]) == (0, 0)
    assert "vision" not in answer["stages_ms"]


@pytest.mark.parametrize("arguments", [["-p", "-"], []])
def test_the_prompt_may_come_from_stdin(folder: Path, panscan: Panscan, arguments: list[str]) -> None:
    direct = asked(panscan, "square.jpg", "-p", QUESTION)
    with patch("sys.stdin", io.StringIO(f"\n{QUESTION} \n")):
        piped = asked(panscan, "square.jpg", *arguments)
    assert (piped["text"], piped["prompt_tokens"]) == (direct["text"], direct["prompt_tokens"])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


WITHOUT_PROMPT = [
    (Terminal("typed"), "-p: no prompt is given"),
    (io.StringIO(" \n"), "the prompt is empty"),
    (io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8"), "standard input is not UTF-8"),
    (io.StringIO("caf\udce9"), "not UTF-8"),
]


@pytest.mark.parametrize(("stdin", "message"), WITHOUT_PROMPT)
def test_a_stdin_without_a_prompt_is_said(folder: Path, panscan: Panscan, stdin: Any, message: str) -> None:
    with patch("sys.stdin", stdin):
        printed, said = panscan("ask square.jpg", *QUICK, code=2)
    assert printed == "" and message in said


def test_a_raw_prompt_stays_as_it_is(folder: Path, panscan: Panscan, tiny: GenerateRunner) -> None:
    prompt = " <start_of_image> The total is \n"
    answer = asked(panscan, "square.jpg", "--raw-prompt", "-p", prompt)
    result = expected(tiny, ["square.jpg"], prompt, raw=True)
    assert (answer["text"], answer["prompt_tokens"]) == (result.text, result.prompt_tokens)
    assert result.prompt_tokens > expected(tiny, ["square.jpg"], prompt.strip(), raw=True).prompt_tokens


def test_presets_set_the_views_and_flags_win(folder: Path, panscan: Panscan) -> None:
    ask_tall = ["tall.png", "-p", QUESTION]
    assert asked(panscan, *ask_tall)["crops"] == 3
    assert asked(panscan, *ask_tall, "--preset", "baseline")["crops"] == 0
    preset = {"batch_size": [2, 4], "equal_views": True, "runner": "generate", "grid_max_crops": 2, "max_new_tokens": 1}
    (folder / "p.yaml").write_text(yaml.safe_dump(preset))
    captured = panscan("ask", *ask_tall, "--preset", "p.yaml", "--json", *QUICK)
    report = json.loads(captured.out)
    assert (report["crops"], report["output_tokens"]) == (2, 6)
    assert "--preset p.yaml: ignoring batch_size, equal_views: not supported by panscan ask\n" in captured.err


RUNNERS = [
    ([], {}, "engine", ""),
    (["--attention", "eager"], {}, "generate", ""),
    ([], {"attention": "eager"}, "generate", ""),
    (["--attention", "sdpa"], {"attention": "eager"}, "engine", ""),
    ([], {"runner": "engine", "attention": "eager", "kv_cache_gb": 0.01}, "engine", "attention"),
    ([], {"runner": "engine", "attention": "sdpa"}, "engine", ""),
    (["--attention", "eager"], {"runner": "engine", "kv_cache_gb": 0.01}, "generate", "kv_cache_gb"),
    (["--runner", "generate"], {"runner": "engine", "kv_cache_gb": 0.01}, "generate", "kv_cache_gb"),
    ([], {"runner": "generate", "kv_cache_gb": 0.01}, "generate", "kv_cache_gb"),
]


@pytest.mark.parametrize("case", RUNNERS)
def test_a_runner_is_chosen_and_of_a_preset_it_takes_what_it_has(folder: Path, panscan: Panscan, case: Any) -> None:
    flags, preset, runner, left_out = case
    (folder / "p.yaml").write_text(yaml.safe_dump(preset))
    captured = panscan("ask square.jpg --preset p.yaml --json -p", QUESTION, *flags, *QUICK)
    assert json.loads(captured.out)["runner"] == runner
    assert (f"ignoring {left_out}: not supported by runner {runner}\n" in captured.err) == bool(left_out)
    assert ("ignoring" in captured.err) == bool(left_out)


SCHEMA = {"enum": ["cash", "card"]}


def test_a_schema_constrains_the_answer(folder: Path, panscan: Panscan) -> None:
    (folder / "schema.json").write_text(json.dumps(SCHEMA))
    answer = asked(panscan, "square.jpg", "-p", QUESTION, "--json-schema", "schema.json")
    assert json.loads(answer["text"]) in SCHEMA["enum"]
    assert (answer["runner"], answer["finish_reason"]) == ("engine", "stop")


def test_remarks_go_to_stderr(folder: Path, panscan: Panscan, tiny: GenerateRunner) -> None:
    captured = panscan("ask tall.png -p", QUESTION, *QUICK)
    result = expected(tiny, ["tall.png"])
    assert captured.out == f"{result.text}\n"
    assert f" pixels, 4 views, 256 image tokens, {result.prompt_tokens} prompt tokens" in captured.err
    assert " ms\n" in captured.err
    assert "no --model given" not in captured.err


def test_without_a_model_it_says_which_one_answers(folder: Path, panscan: Panscan) -> None:
    said = panscan("ask square.jpg -p", QUESTION, "--device", "cpu", "--max-new-tokens", "6").err
    assert said.startswith("no --model given: using the bundled mini Gemma 3, which reads panscan's sample documents\n")
    assert " pixels, 1 view, 144 image tokens, " in said
