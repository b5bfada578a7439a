"""Verification of real servers and of endpoints with few abilities, by the command and by the script of a test kit."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import printed
from tests.verify.faulty_server import ROOT, command
from tests.verify.replying import Body, replying

from panscan.core import EndpointError, PanAndScan, Request, SettingError
from panscan.core.activity import Activity, displayed
from panscan.images.encode import encoded_image
from panscan.load.chat import Endpoint
from panscan.model.bundled import mini_directory
from panscan.runners.generate import GenerateRunner
from panscan.settings import Settings
from panscan.verdict.evidence import Distributions
from panscan.verify import kit_script
from panscan.verify.endpoint import EndpointClient, VerifyOptions
from panscan.verify.hypotheses import REFERENCE, hypothesis
from panscan.verify.kit import export_kit
from panscan.verify.local import LocalModel, open_local
from panscan.verify.run import Verification, as_json, check_long_text, verify_endpoint
from panscan.workload.probes import long_probe

STEPS = 6
Replies = dict[str, dict[str, Any]]
Answers = Callable[[bool], Replies]
"""The reference's own answers, with crops or without."""
EMPTY = {"answers nothing": "", "cuts a character": "\ud83d"}  # answers to questions with images
DOCUMENTS = {"chart": printed("chart", 300, 300), "receipt": printed("receipt", 256, 600)}
PROBES = [Request(page.questions[0].question, [encoded_image(page.image)], id=name) for name, page in DOCUMENTS.items()]
CHART = PROBES[:1]
TEXT = Request("List the months of the year.", id="text")


def verified(url: str, probes: Sequence[Request] = PROBES, **options: Any) -> Verification:
    settings = Settings(model="mini", device="cpu", dtype="fp32")
    return verify_endpoint(VerifyOptions(url, settings, max_tokens=STEPS, **options), probes)


@contextmanager
def announced_computations() -> Iterator[set[str]]:
    """Yield the names of the steps in which local computations happen; empty for one outside of all steps."""
    innermost, names = "", set[str]()
    compute = LocalModel.log_probabilities

    class Steps:
        def show(self, running: list[Activity]) -> None:
            nonlocal innermost
            innermost = running[-1].text if running else ""

    def named(*arguments: Any) -> Any:
        names.add(innermost)
        return compute(*arguments)

    with pytest.MonkeyPatch.context() as patch, displayed(Steps().show):
        patch.setattr(LocalModel, "log_probabilities", named)
        yield names


@pytest.fixture(scope="module")
def off(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that exists while the server of :func:`toggled` has no fault."""
    return tmp_path_factory.mktemp("fault") / "off"


@pytest.fixture(scope="module")
def toggled(off: Path) -> Iterator[str]:
    """The URL of a server whose image tokens are causal while the file ``off`` does not exist."""
    line, environment = command("causal", "--no-prefix-caching"), {**os.environ, "FAULT_OFF": str(off)}
    process = subprocess.Popen(line, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        yield next(match[1] for line in process.stderr if (match := re.match(r"Serving \S+ on (\S+)", line)))
    finally:
        process.terminate()
        process.communicate(timeout=120)


def test_a_right_server_is_exact_and_a_causal_one_is_diagnosed(toggled: str, off: Path) -> None:
    off.touch()
    verdict = verified(toggled, CHART)
    assert verdict.word == "exact", verdict.message
    assert verdict.requests <= 32
    assert any(line.startswith("faults too small to show") for line in verdict.not_visible)
    off.unlink()
    verdict = verified(toggled, CHART)
    assert verdict.word == "different"
    assert verdict.message.startswith("different: image tokens are causal. The attention backend")
    assert verdict.explanation.strength == "matches"
    written = json.loads(json.dumps(as_json(verdict)))
    assert written["diagnosis"]["hypothesis"] == "causal-image-tokens"
    assert [row["hypothesis"] for row in written["evidence"]][:2] == ["reference", "causal-image-tokens"]


def run_script(script: Path, url: str, *options: str) -> tuple[int, str]:
    """Run a kit's script as its user does, with the standard library alone; return its exit code and output."""
    line = [sys.executable, "-I", "-S", str(script), url, *options]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert not done.stderr
    return done.returncode, done.stdout


def test_a_kit_passes_a_right_server_and_names_the_fault_of_a_causal_one(
    toggled: str, off: Path, replies: Answers, tmp_path: Path
) -> None:
    kit = tmp_path / "kit"
    export_kit(kit, pages=[3])

    off.touch()
    code, out = run_script(kit / "check.py", toggled)
    assert code == 0 and out.startswith("pages/01.png: plain: 0.0x the noise; pan and scan: 0.0x the noise\nPASS"), out
    causal = re.search(r"A causal image mask would deviate ([\d,]+)x", out)
    assert causal is not None and int(causal[1].replace(",", "")) > 100
    off.unlink()
    code, out = run_script(kit / "check.py", f"{toggled}/v1/")
    assert code == 1 and "\nThis explains the answers (0.0x): image tokens are causal. The attention" in out, out
    [page] = json.loads((kit / "kit.json").read_text())["pages"]
    with answering({page["questions"][0]["prompt"]: replies(True)[str(TEXT.prompt)]}, "samples") as url:
        code, out = run_script(kit / "check.py", url)
    assert code == 1 and "no log-probabilities" in out and "FAIL" in out
    code, out = run_script(kit / "check.py", url)
    assert code == 1 and "lists no model" in out and out.count("\n") == 1, "a server that is down is one line"
    assert "Apache License" in (kit / "LICENSE").read_text()
    assert {path.name for path in (kit / "checkpoint").iterdir()} == {path.name for path in mini_directory().iterdir()}
    with pytest.raises(SettingError, match="the directory is not empty"):
        export_kit(kit)


def answering(replies: Replies, broken: str = "") -> AbstractContextManager[str]:
    """Serve fixed answers without log-probabilities; unknown fields are refused, and ``broken`` names a fault."""

    def reply(_: int, body: Body) -> tuple[int, object]:
        content = body["messages"][-1]["content"]
        refused = [name for name in ("mm_processor_kwargs", "logprobs") if name in body and broken != "samples"]
        if refused:
            return 400, {"error": {"message": f"{refused[0]}: extra fields not permitted"}}
        if broken == "not a completion":
            return 200, {"answer": "42"}
        if isinstance(content, str):
            return 200, replies[content]
        if broken == "refuses images":
            return 400, {"error": {"message": "this model does not accept images"}}
        if broken == "takes one image" and len(content) > 2:
            return 400, {"error": {"message": "at most one image"}}
        if broken == "limits images":
            return 429, {"error": {"message": "too many requests"}}
        if broken in EMPTY:
            return 200, {"choices": [{"message": {"content": EMPTY[broken]}, "finish_reason": "stop"}]}
        return 200, replies[content[-1]["text"]]

    return replying(reply)


@pytest.fixture(scope="module")
def replies(mini: GenerateRunner) -> Answers:
    by_crops: dict[bool, Replies] = {}
    with open_local(mini.settings, mini.loaded) as local:
        for crops in (True, False):
            by_crops[crops] = {}
            for probe in [*PROBES, TEXT]:
                request = Request(probe.prompt, probe.images, pan_and_scan=PanAndScan(enabled=crops))
                tokens = local.greedy(request, STEPS)
                text = b"".join(local.tokens.text(id) for id in tokens if id not in local.tokens.eos_ids).decode()
                count = local.prompt_tokens(request, hypothesis("reference"))
                choice = {
                    "message": {"content": text},
                    "finish_reason": "stop" if tokens[-1] in local.tokens.eos_ids else "length",
                }
                by_crops[crops][str(probe.prompt)] = {"choices": [choice], "usage": {"prompt_tokens": count}}
    return lambda crops: by_crops[crops]


def reported(tokens: Sequence[int], rows: Distributions) -> dict[str, Any]:
    """A response with the tokens and the five most probable ones of each distribution."""
    content = [
        {
            "token": f"token_id:{token}",
            "logprob": float(row[token]),
            "top_logprobs": [{"token": f"token_id:{id}", "logprob": float(row[id])} for id in row.argsort()[::-1][:5]],
        }
        for token, row in zip(tokens, rows, strict=True)
    ]
    choice = {"message": {"content": "an answer"}, "finish_reason": "length", "logprobs": {"content": content}}
    return {"choices": [choice]}


def test_a_long_text_is_compared_with_the_reference_or_said_to_be_unchecked(tiny: GenerateRunner) -> None:
    with open_local(tiny.settings, tiny.loaded) as local:
        probe = long_probe(300, lambda text: len(local.tokens.encode(text)))  # longer than the window
        tokens = local.greedy(probe, 4)
        names = ("reference", "no-model-turn")
        rows = {name: local.log_probabilities(probe, tokens, hypothesis(name)) for name in names}

        def checked(reply: object, positions: int = 300, **options: int) -> tuple[str, str]:
            status = 200 if isinstance(reply, dict) else 400
            with replying(lambda *_: (status, reply)) as url:
                given = {"max_requests": 3, "max_tokens": 4, "top_logprobs": 5} | options
                session = EndpointClient(Endpoint(url, "served"), **given)
                return check_long_text(session, local, positions)

        with announced_computations() as steps:
            assert checked(reported(tokens, rows["reference"])) == ("", "")
        assert steps == {"a text of 300 tokens", f"{probe.id}: rounding noise", f"{probe.id}: {REFERENCE.title}"}
        fault, _ = checked(reported(tokens, rows["no-model-turn"]))
        assert "those about shorter prompts match. Check the server's RoPE scaling" in fault
        for unchecked, why in [
            (checked("maximum context length is 512"), "HTTP 400"),
            (checked({}, positions=local.positions), f"the model has {local.positions:,}"),
            (checked({}, max_requests=0), "the limit of requests"),
        ]:
            assert not unchecked[0] and why in unchecked[1]


def test_an_endpoint_that_samples_its_tokens_is_different(mini: GenerateRunner) -> None:
    [probe] = CHART
    request = Request(probe.prompt, probe.images, pan_and_scan=PanAndScan(enabled=True))
    tokens: list[int] = []
    with open_local(mini.settings, mini.loaded) as local:
        for _ in range(STEPS):  # always the second choice
            rows = local.log_probabilities(request, [*tokens, 0], hypothesis("reference"))
            tokens.append(int(rows[-1].argsort()[-2]))
    with answering({str(probe.prompt): reported(tokens, rows)}, "samples") as url:
        verdict = verified(url, CHART)
    assert verdict.word == "different"
    assert "does not decode greedily" in verdict.message


def test_without_log_probabilities_tokens_and_prompt_counts_decide(replies: Answers) -> None:
    with answering(replies(True)) as url:
        verdict = verified(url, CHART)
    assert (verdict.word, verdict.served_model) == ("close", "served"), verdict.message
    assert "exact needs log-probabilities" in verdict.message
    assert any(line.startswith("distributions: the endpoint reports no log-prob") for line in verdict.not_visible)
    assert any(line.startswith("pan and scan on request") for line in verdict.not_visible)
    with answering(replies(False)) as url:
        verdict = verified(url)
    assert verdict.word == "different"
    assert "no pan and scan" in verdict.message


BROKEN_ENDPOINTS = [
    ("limits images", "unknown", "no question about an image was answered: POST"),
    ("cuts a character", "unknown", "no question about an image was answered"),
    ("answers nothing", "different", ""),
    ("refuses images", "unknown", "this model does not accept images"),
    ("not a completion", "unknown", "not a chat completion"),
]


@pytest.mark.parametrize(("broken", "word", "why"), BROKEN_ENDPOINTS)
def test_right_texts_do_not_make_an_endpoint_right(replies: Answers, broken: str, word: str, why: str) -> None:
    with answering(replies(True), broken) as url:
        verdict = verified(url, [*CHART, TEXT])
    assert (verdict.word, len(verdict.answers)) == (word, 2), verdict.message
    assert why in verdict.message and verdict.message.startswith("no verdict") == (word == "unknown")
    assert broken != "limits images" or "images: the endpoint refuses them" not in verdict.not_visible


def test_an_endpoint_that_takes_one_image_is_asked_for_two_only_once(replies: Answers) -> None:
    two = Request(CHART[0].prompt, [*PROBES[0].images, *PROBES[1].images])
    with answering(replies(True), "takes one image") as url:
        verification = verified(url, [replace(two, id="two"), replace(two, id="two again"), *CHART])
    assert [request.id for request, _ in verification.failed] == ["two"]
    assert "several images in a request: the endpoint refuses them" in verification.not_visible
    assert verification.word != "unknown", verification.message


def test_all_that_is_computed_for_a_verification_is_announced(replies: Answers) -> None:
    with answering(replies(True)) as url, announced_computations() as steps:
        verified(url, CHART)
    assert "" not in steps and "reading the answers" in steps


def test_a_limit_on_requests_is_kept(replies: Answers) -> None:
    with answering(replies(True)) as url:
        verdict = verified(url, CHART, max_requests=3)
    assert verdict.requests == 3
    assert any("the limit of 3 requests" in line for line in verdict.not_visible)


def test_three_failures_in_a_row_end_the_questions(replies: Answers) -> None:
    with answering(replies(True), "limits images") as url:
        verdict = verified(url, [*CHART, *CHART, TEXT, *CHART, *CHART, *CHART, TEXT, TEXT])
    assert len(verdict.answers) == 6
    assert "2 of 8 questions: not asked (failures in a row)" in verdict.not_visible


def test_an_endpoint_that_is_down_is_an_error() -> None:
    with answering({}) as url:
        pass
    with pytest.raises(EndpointError, match="refused"):
        verified(url)


_ROW = {"a": math.log(0.6), "b": math.log(0.4)}
_ANSWER = {"tokens": ["a", "a", ""], "clear": [True] * 3, "log_probabilities": {"reference": [_ROW] * 3}}
_QUESTION = {"name": "plain", "prompt": "?", "mm_processor_kwargs": {}, "prompt_tokens": 9, "noise": 1e-3, **_ANSWER}
_KIT = {
    "fields": {},
    "noise": 1e-3,
    "limits": {"exact": 3, "close": 10},
    "end_tokens": ["<end>"],
    "correct": ["reference"],
    "computations": {
        name: {"deviation": 500.0, "title": "", "cause": ""}
        for name in ("reference", "causal-image-tokens", "no-pan-and-scan")
    },
    "pages": [{"file": "page.png", "questions": [_QUESTION] * 2}] * 4,
}


def _steps(count: int, row: dict[str, float]) -> list[dict[str, Any]]:
    top = [{"token": token, "logprob": value} for token, value in row.items()]
    return [{"token": token, "logprob": 0, "top_logprobs": top} for token in ("a", "a", "<end>")[:count]]


def _reply(steps: object, **fields: object) -> dict[str, Any]:
    return {"choices": [{"logprobs": {"content": steps}}], **fields}


def ask_kit(reply: object, kit: Path, *options: str) -> tuple[int, str]:
    """Run the script on a server with this reply."""
    (kit / "kit.json").write_text(json.dumps(_KIT))
    (kit / "page.png").write_bytes(b"")
    script = shutil.copy(kit_script.__file__, kit / "check.py")
    with replying(lambda *_: (200, reply)) as url:
        return run_script(script, url, *options)


@pytest.mark.parametrize("count", [3, 2])
def test_a_right_answer_passes_with_and_without_its_end_token(count: int, tmp_path: Path) -> None:
    code, shown = ask_kit(_reply(_steps(count, _ROW)), tmp_path)
    assert code == 0 and "missing crops 500x" in shown
    code, shown = ask_kit(_reply(_steps(count, _ROW)), tmp_path, "--no-pan-and-scan")
    assert code == 0 and "crops" not in shown


def test_an_answer_that_ends_too_early_fails(tmp_path: Path) -> None:
    code, shown = ask_kit(_reply(_steps(1, _ROW)), tmp_path)
    assert code == 1 and "wrong token" in shown and "8 questions wrong" in shown


UNUSABLE_REPLIES = [
    _reply(_steps(3, {})),
    _reply(_steps(3, {"a": math.nan, "b": math.nan})),
    _reply(_steps(3, {"a": 0.0, "b": 0.0})),
    _reply(["a"]),
    _reply(_steps(3, _ROW), usage=[9]),
    {"choices": [{"logprobs": None}]},
    b"garbage\r\n\r\n",
    b"HTTP/1.0 200 OK\r\ncontent-length: 99\r\n\r\n{",
    b"",
]


@pytest.mark.parametrize(
    "reply",
    UNUSABLE_REPLIES,
    ids=["none", "NaN", "no probabilities", "strings", "usage", "no log-probabilities", "not HTTP", "cut", "closed"],
)
def test_a_server_without_usable_answers_fails_early(reply: object, tmp_path: Path) -> None:
    code, shown = ask_kit(reply, tmp_path)
    assert code == 1 and shown.count("page.png") == 2, "later pages are not asked"
    assert shown.endswith("FAIL: the first questions have no answer with log-probabilities.\n")
