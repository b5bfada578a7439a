"""Trained weights and the true vocabulary: tokens, verdicts, prompts, JSON and sampling (``make test-real``)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from tests.conftest import noise

from panscan import Engine, GenerateRunner, PanAndScan, Request, Sampling
from panscan.cli.main import run as cli
from panscan.model.checkpoint import load_reader
from panscan.model.inputs import count_prompt

pytestmark = pytest.mark.timeout(1200)
_WORDS = Path(__file__).parents[2].joinpath("README.md").read_text("utf-8").split()
_PLACES = ["Accra", "東京", "São Paulo", "Zürich", "दिल्ली", "القاهرة", "Kraków", "Санкт-Петербург"]
_TOKENS = 16


def prompts(count: int) -> list[str]:
    """Return beginnings of texts: prose, code, numbers and several scripts."""
    random = Random(0)
    kinds = [
        lambda: f"The most famous building in {random.choice(_PLACES)} is",
        lambda: " ".join(_WORDS[random.randrange(len(_WORDS) - 60) :][: random.randrange(4, 60)]),
        lambda: f"def area_{random.randrange(100)}(width: float, height: float) -> float:\n    return",
        lambda: f"{random.randrange(9999)} + {random.randrange(9999)} =",
        lambda: f'{{"city": "{random.choice(_PLACES)}", "country": "',
    ]
    return [kinds[number % len(kinds)]() for number in range(count)]


@pytest.fixture(scope="module")
def engine(real: tuple[Path, Path]) -> Iterator[Engine]:
    engine = Engine.from_pretrained(str(real[0]), dtype="fp32", device="cpu", max_new_tokens=_TOKENS, kv_cache_gb=1)
    yield engine
    engine.close()


def raw(prompt: str, **sampling: object) -> Request:
    """A request without the chat template, which this model was not trained on."""
    return Request(prompt, raw=True, sampling=Sampling(**{"max_new_tokens": _TOKENS, **sampling}))


def test_greedy_tokens_equal_those_of_generate(real: tuple[Path, Path], engine: Engine) -> None:
    requests = [raw(prompt) for prompt in prompts(40)]
    answers = engine.generate(requests)
    generate = GenerateRunner.from_pretrained(str(real[0]), dtype="fp32", device="cpu", attention="eager")
    for request, answer in zip(requests, answers, strict=True):
        assert answer.token_ids == generate.generate([request])[0].token_ids, request.prompt


def test_bf16_is_exact_and_int8_near(real: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("\n".join(prompt.replace("\n", " ") for prompt in prompts(6)), "utf-8")
    words = ["--no-images", "--prompts", "prompts.txt", "--raw-prompt", "--max-new-tokens", "8", "--repeats", "1"]
    cells = ["--runner", "engine", "--dtype", "bf16", "--kv-cache-gb", "1", "--quantization", "none,int8"]
    assert cli(["bench", "--model", str(real[0]), "--device", "cpu", *words, *cells]) == 0
    [records] = Path("runs").glob("*/records.jsonl")
    lines = [json.loads(line) for line in records.read_text("utf-8").splitlines()]
    verdicts = {line["cell"]: line for line in lines if line.get("type") == "verdict"}
    exact, int8 = sorted(verdicts.values(), key=lambda verdict: verdict["answer"]["kl"])
    assert exact["verdict"] == "exact"
    assert int8["answer"]["kl"] < 0.15  # nat; 0.04 when it was measured
    assert int8["top1"]["agree"] >= 0.8 * int8["top1"]["clear"]


@pytest.mark.parametrize("enabled", [False, True])
def test_prompt_ids_equal_the_processors(real: tuple[Path, Path], enabled: bool) -> None:
    reader = load_reader(str(real[1]))
    pan_and_scan = PanAndScan(enabled=enabled)
    for prompt, image in zip(prompts(8), [noise(300, 900), noise(1600, 700), noise(640, 480)] * 3, strict=False):
        content = [{"type": "image", "image": image}, {"type": "text", "text": prompt}]
        inputs = reader.processor.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=True,
            return_dict=True,
            add_generation_prompt=True,
            processor_kwargs=pan_and_scan.processor_kwargs(),
        )
        ids, *_ = count_prompt(Request(prompt, [image], pan_and_scan=pan_and_scan), reader)
        assert list(ids) == inputs["input_ids"][0]


def test_json_has_the_schema(engine: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "people": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
            "scripts": {"type": "array", "items": {"enum": ["Latin", "漢字", "кириллица"]}, "maxItems": 2},
        },
        "required": ["city", "people", "scripts"],
    }
    requests = [raw(f"{place}: ", json_schema=json.dumps(schema), max_new_tokens=96) for place in _PLACES]
    for answer in engine.generate(requests):
        parsed = json.loads(answer.text)
        assert set(parsed) == set(schema["required"]) and isinstance(parsed["people"], int)
        assert len(parsed["city"]) <= 20 and {*parsed["scripts"]} <= {"Latin", "漢字", "кириллица"}


def test_sampling_is_repeatable_and_filters(engine: Engine) -> None:
    sampled = [raw("Once upon a time", temperature=1.0, seed=seed) for seed in range(6)]
    first, again = ([answer.token_ids for answer in engine.generate(sampled)] for _ in range(2))
    assert first == again
    assert len({tuple(tokens) for tokens in first}) == 6
    greedy, top = engine.generate([raw("Once upon a time"), raw("Once upon a time", temperature=1.0, top_k=1, seed=1)])
    assert greedy.token_ids == top.token_ids
