"""lm-eval: log-likelihoods of prompts through completions (``echo``), and answers through both endpoints."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from tests.clients.endpoint import KEY, MODEL, TOKENIZER, TOO_LONG, URL

ROWS = [
    {"text": "The total is", "choices": [" 17.50", " not in words"], "label": 0},
    {"text": "The date", "choices": [" is", " of"], "label": 1},
]
COMMON = f"model={MODEL},num_concurrent=2,max_retries=1"


def evaluated(folder: Path, model: str, arguments: str, **task: Any) -> dict[str, Any]:
    """Return the results of lm-eval on a task of two rows."""
    data = folder / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)))
    chat = model == "local-chat-completions"
    common = {
        "task": "rows",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "text",
    }
    results = simple_evaluate(
        model=model, model_args=f"{COMMON},{arguments}", tasks=[{**common, **task}], apply_chat_template=chat
    )
    rows: dict[str, Any] = results["results"]["rows"]
    assert len(results["samples"]["rows"]) == len(ROWS)
    return rows


@pytest.mark.parametrize("as_tokens", [True, False])
def test_multiple_choice(tmp_path: Path, as_tokens: bool) -> None:
    arguments = f"base_url={URL}/completions,tokenizer={TOKENIZER},tokenized_requests={as_tokens},batch_size=2"
    task = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "label"}
    assert 0 <= evaluated(tmp_path, "local-completions", arguments, **task)["acc,none"] <= 1


def test_log_likelihoods_are_those_of_the_prompt() -> None:
    model = LocalCompletionsAPI(base_url=f"{URL}/completions", model=MODEL, tokenizer=TOKENIZER, batch_size=1)
    text, ending = ROWS[0]["text"], ROWS[0]["choices"][0]
    [(value, _)] = model.loglikelihood([Instance("loglikelihood", {}, (text, ending), 0)])
    ids = model.tok_encode(text + ending)
    answer = openai.OpenAI(base_url=URL, api_key=KEY).completions.create(
        model=MODEL, prompt=ids, max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    entries = answer.choices[0].model_extra["prompt_logprobs"]
    scored = [entry[str(token)]["logprob"] for token, entry in zip(ids, entries, strict=True) if entry]
    assert value == pytest.approx(sum(scored[len(model.tok_encode(text)) - 1 :]), abs=1e-4)


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("local-completions", f"base_url={URL}/completions,tokenizer={TOKENIZER}"),
        ("local-chat-completions", f"base_url={URL}/chat/completions"),
    ],
)
def test_generation(tmp_path: Path, model: str, arguments: str) -> None:
    task = {"output_type": "generate_until", "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8}}
    metrics = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    scores = evaluated(tmp_path, model, arguments, doc_to_target="text", metric_list=metrics, **task)
    assert 0 <= scores["exact_match,none"] <= 1


def test_error() -> None:
    model = LocalCompletionsAPI(
        base_url=f"{URL}/completions", model=MODEL, tokenizer=TOKENIZER, max_retries=1, tokenized_requests=False
    )
    with pytest.raises(Exception, match=r"Bad Request|400"):
        model.model_call([TOO_LONG], generate=True, gen_kwargs={"max_gen_toks": 1}).keys()
