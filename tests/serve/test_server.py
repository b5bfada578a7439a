"""The HTTP API over the real command: answers equal the engine's own, and every field has its documented effect."""

import base64
import json
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.conftest import noise, printed, until
from tests.serve import serving
from tests.serve.serving import DEADLINE, Server, chat, data_url, get, image_part, post, refused, saved, user

from panscan import Engine, PanAndScan, Request, Result, Sampling
from panscan.core.deadline import Deadline
from panscan.engine.detokenizer import token_bytes
from panscan.images.views import PUBLISHED_COST, plan_views
from panscan.serve import protocol
from panscan.serve.body import Body, FieldError, parse
from panscan.serve.options import ServeOptions
from panscan.serve.protocol import ChatCompletionRequest, CompletionRequest, TokenizeRequest, ViewsRequest
from panscan.serve.request_builder import RequestBuilder
from panscan.settings import Settings
from panscan.workload.samples import write_samples

openai = pytest.importorskip("openai", reason="the OpenAI client is not installed")

GUIDE = Path(__file__).parents[2] / "docs" / "serve.md"

TOKENS = 12
GREEDY, DEFAULT = Sampling(TOKENS), PanAndScan()
RECEIPT = printed("receipt", 220, 660)
CHART = printed("chart", 300, 300)
QUESTION = RECEIPT.questions[0].question
PNG, JPEG = saved(RECEIPT.image), saved(CHART.image, "JPEG", quality=90)
PDF = saved(noise(300, 200), "PDF", save_all=True, append_images=[noise(200, 500, 1), noise(250, 250, 2)])
TIFF = saved(noise(90, 300, 3), "TIFF", save_all=True, append_images=[noise(200, 100, 4)])


@dataclass(frozen=True)
class Case:
    """A question, for the API and for the engine.

    Args:
        messages: messages for the API.
        images: (file content, page count) of its images and documents, in order.
        fields: other fields for the API.
        sampling: equivalent sampling parameters for the engine.
        pan_and_scan: equivalent settings for the engine.
    """

    messages: list[dict[str, Any]]
    images: tuple[tuple[bytes, int], ...] = ()
    fields: dict[str, Any] | None = None
    sampling: Sampling = GREEDY
    pan_and_scan: PanAndScan = DEFAULT

    def request(self, folder: Path) -> Request:
        """Return the engine's request; documents are read from files, page by page."""
        pages = []
        for number, (content, count) in enumerate(self.images):
            path = folder / str(number)
            path.write_bytes(content)
            pages += [f"{path}#page={page}" for page in range(1, count + 1)] if count > 1 else [str(path)]
        counts = iter([count for _, count in self.images])
        turns = []
        for turn in self.messages:
            content: Any = turn["content"]
            if not isinstance(content, str):
                parts = ([part] if part["type"] == "text" else [{"type": "image"}] * next(counts) for part in content)
                content = [*chain.from_iterable(parts)]
            turns.append({**turn, "content": content})
        return Request(messages=turns, images=pages, sampling=self.sampling, pan_and_scan=self.pan_and_scan)

    @property
    def body(self) -> dict[str, Any]:
        """The body of the API's request."""
        return {"model": "mini", "messages": self.messages, "max_tokens": TOKENS, **(self.fields or {})}


TURNS = [
    {"role": "system", "content": "Answer in few words."},
    *user("First", image_part(data_url(PNG)), "?"),
    {"role": "assistant", "content": "A receipt."},
    *user(image_part(data_url(JPEG)), "And this?"),
]
ABOUT_RECEIPT, RECEIPT_FILE = user(image_part(data_url(PNG)), QUESTION), ((PNG, 1),)
FILE_PART = {"type": "file", "file": {"file_data": data_url(TIFF)}}


def sampled(messages: list[dict[str, Any]], images: tuple[tuple[bytes, int], ...] = (), **fields: Any) -> Case:
    """Return a case whose fields are those of the engine's sampling."""
    chosen = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return Case(messages, images, fields, Sampling(TOKENS, **chosen))


def cropped(**settings: Any) -> Case:
    """Return a case with pan-and-scan settings."""
    kwargs = {name if name == "do_pan_and_scan" else f"pan_and_scan_{name}": settings[name] for name in settings}
    chosen = PanAndScan(enabled=False) if "do_pan_and_scan" in settings else PanAndScan(**settings)
    return Case(ABOUT_RECEIPT, RECEIPT_FILE, {"mm_processor_kwargs": kwargs}, pan_and_scan=chosen)


CASES = {
    "text": sampled(user("Hi"), ignore_eos=True),
    "image": Case(ABOUT_RECEIPT, RECEIPT_FILE),
    "conversation": Case(TURNS, ((PNG, 1), (JPEG, 1))),
    "plain image_url": Case(user({"type": "image_url", "image_url": data_url(JPEG)}, "Hi"), ((JPEG, 1),)),
    "pdf and tiff": Case(user("Compare", image_part(data_url(PDF)), FILE_PART), ((PDF, 3), (TIFF, 2))),
    "no crops": cropped(do_pan_and_scan=False),
    "more crops": cropped(min_crop_size=50, max_num_crops=6),
    "sampled": sampled(user("Say it"), temperature=1.0, seed=7, top_p=0.9, top_k=50),
    "stop": sampled(ABOUT_RECEIPT, RECEIPT_FILE, stop=["0", "5"]),
    "openai's penalties": sampled(user("Hi"), frequency_penalty=0.5, presence_penalty=1.5, ignore_eos=True),
    "bias": Case(user("Hi"), fields={"logit_bias": {"300": 90}}, sampling=Sampling(TOKENS, logit_bias={300: 90})),
    "penalty": sampled(user("Hi"), repetition_penalty=1.5, min_p=0.1, temperature=0.5, seed=-3),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained("mini", device="cpu", dtype="fp32", kv_cache_gb=0.05) as opened:
        yield opened


def streamed(server: Server, body: dict[str, Any], path: str = "/v1/chat/completions") -> list[dict[str, Any]]:
    """Return the events of a stream, after checking how it ends."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    response = post(server, path, body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def check_usage(usage: dict[str, Any], result: Result) -> None:
    assert usage["prompt_tokens"] == result.prompt_tokens
    assert usage["completion_tokens"] == result.output_tokens
    assert usage["total_tokens"] == result.prompt_tokens + result.output_tokens
    assert usage["prompt_tokens_details"]["image_tokens"] == result.image_tokens
    assert usage["views"] == result.views


def test_concurrent_whole_and_streamed_answers_match_the_engine(server: Server, engine: Engine, tmp_path: Path) -> None:
    """All cases run at once, each of them streaming and non-streaming."""
    expected = {}
    for name, case in CASES.items():
        (tmp_path / name).mkdir()
        request = case.request(tmp_path / name)
        [expected[name]] = engine.generate([replace(request, sampling=replace(request.sampling, logprobs=2))])
    bodies = {name: {**case.body, "logprobs": True, "top_logprobs": 2} for name, case in CASES.items()}
    with ThreadPoolExecutor(2 * len(CASES)) as pool:
        futures = {name: pool.submit(post, server, "/v1/chat/completions", body) for name, body in bodies.items()}
        events = {name: pool.submit(streamed, server, body) for name, body in bodies.items()}
    tokenizer = engine.loaded.reader.tokenizer
    for name, result in expected.items():
        assert result.error is None
        answer = futures[name].result().json()
        [choice], chunks = answer["choices"], events[name].result()
        assert (choice["message"]["content"], choice["finish_reason"]) == (result.text, result.finish_reason), name
        tokens = [bytes(token["bytes"]) for token in choice["logprobs"]["content"]]
        assert tokens == [token_bytes(tokenizer, token) for token in result.token_ids], name
        for entry, wanted in zip(choice["logprobs"]["content"], result.logprobs or (), strict=True):
            # What is cached changes the order of sums, and float32 results by up to 6e-6.
            values = [entry["logprob"], *(top["logprob"] for top in entry["top_logprobs"])]
            assert values == pytest.approx([wanted.logprob, *(value for _, value in wanted.top)], abs=2e-5)
        check_usage(answer["usage"], result)
        assert "".join(part["delta"].get("content", "") for chunk in chunks for part in chunk["choices"]) == result.text
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        ends = [part["finish_reason"] for chunk in chunks for part in chunk["choices"] if part["finish_reason"]]
        assert ends == [result.finish_reason]
        check_usage(chunks[-1]["usage"], result)
        assert chunks[-1]["panscan"]["crops"] == answer["panscan"]["crops"] == result.crops


def test_the_first_token_has_a_chunk_also_without_text(server: Server) -> None:
    """Clients measure the time to the first token by it: here it is a byte that begins a character."""
    body = {"messages": user("Hi"), "max_tokens": 4, "ignore_eos": True, "stream": True, "logit_bias": {"240": 100}}
    response = post(server, "/v1/chat/completions", body)
    chunks = [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-2]]
    first, second, *others = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert (first, second) == ({"role": "assistant", "content": ""}, {"content": ""})
    assert "".join(delta.get("content", "") for delta in others) == 4 * "\ufffd"
    assert all(delta.get("content") for delta in others[:-1]), "tokens behind it have none"


def test_continuous_usage_counts_the_tokens_so_far(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": user("Hi"), "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "n": 2}
    response = post(server, "/v1/chat/completions", {**body, "stream_options": options})
    *events, last, _, _ = response.text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    total = json.loads(last.removeprefix("data: "))["usage"]
    for choice in range(2):
        counts = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == choice and "usage" in chunk]
        completion = [usage["completion_tokens"] for usage in counts]
        assert completion == [*range(TOKENS + 1)], "a chunk for every token, also for those without text"
        assert total["completion_tokens"] // 2 == TOKENS
        assert {usage["prompt_tokens"] for usage in counts} == {total["prompt_tokens"]}
    unstreamed = post(server, "/v1/chat/completions", {**body, "stream": False, "stream_options": options})
    assert (unstreamed.status_code, "stream_options requires stream: true" in unstreamed.text) == (400, True)
    options["include_usage"] = False
    refused = post(server, "/v1/chat/completions", {**body, "stream_options": options})
    assert refused.status_code == 400
    assert "continuous_usage_stats requires include_usage" in refused.text


def test_choices_use_consecutive_seeds_and_completions_are_raw(client: openai.OpenAI, engine: Engine) -> None:
    sampling = Sampling(TOKENS, temperature=1.0, seed=2**64 - 2)
    seeds = (2**64 - 2, 2**64 - 1, 0)
    prompts = [(prompt, seed) for prompt in ("One", "Two") for seed in seeds]
    requests = [Request(prompt, raw=True, sampling=replace(sampling, seed=seed)) for prompt, seed in prompts]
    expected = engine.generate(requests)
    how = {"n": 3, "max_tokens": TOKENS, "temperature": 1, "seed": 2**64 - 2}
    answer = client.completions.create(model="mini", prompt=["One", "Two"], **how)
    assert [choice.text for choice in answer.choices] == [result.text for result in expected]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage.prompt_tokens == expected[0].prompt_tokens + expected[3].prompt_tokens
    assert answer.usage.completion_tokens == sum(result.output_tokens for result in expected)


def test_completions_have_log_probabilities_at_their_place_in_the_text(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "mini", "prompt": "The total", "max_tokens": 6}
    asked = {**body, "extra_body": {"ignore_eos": True}}
    logprobs = client.completions.create(**asked, logprobs=0).choices[0].logprobs
    alone = [{token: value} for token, value in zip(logprobs.tokens or [], logprobs.token_logprobs, strict=True)]
    assert logprobs.top_logprobs == alone  # 0: the chosen tokens alone
    places = list(accumulate(map(len, logprobs.tokens or []), initial=0))[:-1]
    assert logprobs.text_offset == places
    chunks = client.completions.create(**asked, logprobs=1, stream=True)
    streamed = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs is not None]
    assert [place for piece in streamed for place in piece.text_offset or []] == places


def test_echoed_prompts_have_log_probabilities(server: Server, engine: Engine) -> None:
    """As lm-eval asks: of the prompt and one token more, with offsets; and as in the field of vLLM."""
    prompts = ["The total is 17.50", "A much longer text, of which every token counts."]
    asked = [Request(prompt, raw=True, sampling=Sampling(1, logprobs=2, prompt_logprobs=2)) for prompt in prompts]
    results = engine.generate(asked)
    ids = [result.prompt_ids for result in results]
    for prompt in (prompts, ids):
        body = {"prompt": prompt, "max_tokens": 1, "logprobs": 2, "echo": True}
        for choice, result, text in zip(_choices(server, body), results, prompts, strict=True):
            logprobs = choice["logprobs"]
            assert choice["text"] == text + result.text == "".join(logprobs["tokens"])
            due = [*(result.prompt_logprobs or ()), *(result.logprobs or ())]
            assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
            values = [entry.logprob for entry in due if entry is not None]
            assert logprobs["token_logprobs"][1:] == pytest.approx(values, abs=2e-5)
            assert logprobs["text_offset"] == list(accumulate(map(len, logprobs["tokens"]), initial=0))[:-1]
            assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"][1:])
        # Without an answer: max_tokens 0. The token that is computed and dropped ends no text.
        [first, _] = _choices(server, {**body, "max_tokens": 0, "stop_token_ids": [results[0].token_ids[0]]})
        assert first["text"] == prompts[0] and len(first["logprobs"]["tokens"]) == len(ids[0] or ())
        assert first["finish_reason"] == "length"
    [choice] = _choices(server, {"prompt": ids[0], "max_tokens": 1, "prompt_logprobs": 2})
    assert choice["prompt_logprobs"][0] is None and choice["text"] == results[0].text
    for token, entry, due in zip(ids[0], choice["prompt_logprobs"], results[0].prompt_logprobs or (), strict=True):
        assert due is None or entry[str(token)]["logprob"] == pytest.approx(due.logprob, abs=2e-5)
        assert due is None or sorted(value["rank"] for value in entry.values())[:2] == [1, 2]
    answer = chat(server, user(image_part(data_url(PNG)), "?"), max_tokens=1, prompt_logprobs=0).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in answer["prompt_logprobs"][1:])


def _choices(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = post(server, "/v1/completions", body).json()
    assert answer["usage"]["completion_tokens"] == body["max_tokens"] * len(answer["choices"])
    choices: list[dict[str, Any]] = answer["choices"]
    return choices


@pytest.mark.parametrize("prompt", ["The total", [2, 300, 400]])
def test_a_stream_begins_with_the_echoed_prompt(client: openai.OpenAI, prompt: Any) -> None:
    text = client.completions.create(model="mini", prompt=prompt, max_tokens=4, echo=True).choices[0].text
    chunks = client.completions.create(model="mini", prompt=prompt, max_tokens=4, echo=True, stream=True)
    texts = [choice.text for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == text and (prompt == texts[0] or isinstance(prompt, list))


def test_tokens_of_equal_text_have_entries_of_their_own(client: openai.OpenAI) -> None:
    """After an end token, the most probable tokens include control tokens without a text and bytes that are no text."""
    prompt = "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n"
    how = {"max_tokens": 8, "logprobs": 20, "extra_body": {"ignore_eos": True}}
    asked = client.completions.create(model="mini", prompt=prompt, **how)
    logprobs = asked.choices[0].logprobs
    assert any(name.startswith("token_id:") for top in logprobs.top_logprobs for name in top)
    for token, value, top in zip(logprobs.tokens or [], logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) in (20, 21) and top[token] == value


YES = {"const": "yes"}


STRUCTURED = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "yes", "schema": YES, "strict": True}}},
    {"response_format": {"type": "json_object", "schema": YES}},
    {"response_format": {"type": "json_object", "value": YES}},
    {"response_format": {"type": "json", "value": YES}},
    {"response_format": {"type": "regex", "value": '"y(es)"'}},
    {"structured_outputs": {"json": YES}},
    {"structured_outputs": {"json": json.dumps(YES), "regex": None}},
    {"structured_outputs": {"regex": '"yes"'}},
    {"structured_outputs": {"choice": ['"yes"']}},
    {"structured_outputs": {"grammar": 'root ::= "\\"yes\\""'}},
    {"guided_json": YES},
    {"guided_regex": '"yes"', "guided_decoding_backend": None},
    {"guided_choice": ['"yes"']},
    {"guided_grammar": 'start: /"yes"/'},
]


@pytest.mark.parametrize("fields", STRUCTURED, ids=json.dumps)
def test_every_spelling_of_structured_output_is_understood(server: Server, fields: dict[str, Any]) -> None:
    [choice] = chat(server, user("Hi"), max_tokens=20, **fields).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('"yes"', "stop")
    [choice] = post(server, "/v1/completions", {"prompt": "Hi", "max_tokens": 20, **fields}).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ('"yes"', "stop")


def test_an_upload_is_the_same_as_a_data_url(server: Server) -> None:
    crops = {"pan_and_scan_min_crop_size": 100, "pan_and_scan_max_num_crops": 2}
    fields = {"max_tokens": TOKENS, "mm_processor_kwargs": crops}
    request = {**fields, "messages": user(image_part("attachment:page one"), QUESTION)}
    files = [("page one", ("a.png", PNG)), ("request", (None, json.dumps(request)))]
    uploaded = httpx.post(f"{server}/v1/chat/completions", files=files, timeout=DEADLINE).json()
    wrapped = "data:image/png;base64," + base64.encodebytes(PNG).decode()  # in lines, as base64(1) writes it
    sent = chat(server, user(image_part(wrapped), QUESTION), **fields).json()
    assert uploaded["choices"] == sent["choices"]
    assert uploaded["usage"]["views"] == sent["usage"]["views"] == 3


def test_tokenize_matches_the_engine(server: Server, engine: Engine, tmp_path: Path) -> None:
    ids, image_tokens, views = engine.count(CASES["conversation"].request(tmp_path))
    response = post(server, "/tokenize", {"messages": TURNS}).json()
    sizes = {"image_tokens": image_tokens, "views": views, "max_model_len": engine.loaded.reader.prompts.context}
    assert response == {"count": len(ids), "tokens": ids, **sizes}
    raw, *_ = engine.count(Request("Hi", raw=True))
    assert post(server, "/tokenize", {"prompt": "Hi"}).json()["tokens"] == raw


def test_prompts_may_be_token_ids(server: Server, engine: Engine) -> None:
    text = "The total is $4.20 \u20ac"
    ids = post(server, "/tokenize", {"prompt": text}).json()["tokens"]
    bare = post(server, "/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert ids == [engine.loaded.reader.tokenizer.bos_token_id, *bare]
    assert bare == engine.loaded.reader.tokenizer.encode(text, add_special_tokens=False)
    assert post(server, "/detokenize", {"tokens": ids}).json() == {"prompt": text}

    def answers(prompt: Any, **fields: Any) -> list[str]:
        body = {"prompt": prompt, "max_tokens": TOKENS, **fields}
        return [choice["text"] for choice in post(server, "/v1/completions", body).json()["choices"]]

    assert answers(ids) == answers(text)
    assert answers(bare) == answers(text, add_special_tokens=False) != answers(text)
    assert answers([ids, bare]) == answers(ids) + answers(bare)
    image, vocabulary = engine.loaded.reader.tokenizer.image_token_id, engine.loaded.reader.prompts.token_ids
    for wrong in ([vocabulary], [ids, 5], [], [[]], [image]):
        refused(post(server, "/v1/completions", {"prompt": wrong}), 400, "prompt")
    refused(post(server, "/v1/completions", {"prompt": [-1]}), 400, "prompt")
    refused(post(server, "/v1/completions", {"prompt": "", "add_special_tokens": False}), 400, "prompt")
    assert post(server, "/v1/completions", {"prompt": "", "max_tokens": 1}).status_code == 200
    assert post(server, "/detokenize", {"tokens": [vocabulary - 1]}).status_code == 200
    refused(post(server, "/detokenize", {"tokens": [5, vocabulary]}), 400, "tokens")


def test_an_image_of_low_detail_is_one_view(server: Server, engine: Engine) -> None:
    kwargs = {"pan_and_scan_min_crop_size": 50, "pan_and_scan_max_num_crops": 6}
    settings = PanAndScan(min_crop_size=50, max_num_crops=6)

    def counts(*details: str) -> tuple[int, int]:
        url = data_url(PNG)
        parts: list[Any] = [{"type": "image_url", "image_url": {"url": url, "detail": detail}} for detail in details]
        asked = {"messages": user(*parts, QUESTION), "max_tokens": 1, "mm_processor_kwargs": kwargs}
        usage = post(server, "/v1/chat/completions", asked).json()["usage"]
        response = post(server, "/tokenize", {name: asked[name] for name in ("messages", "mm_processor_kwargs")}).json()
        assert (response["count"], response["views"]) == (usage["prompt_tokens"], usage["views"])
        return response["count"], response["views"]

    ids, _, views = engine.count(Request(QUESTION, [RECEIPT.image], pan_and_scan=settings))
    assert counts("high") == counts("auto") == (len(ids), views) and views > 1
    alone = engine.count(Request(QUESTION, [RECEIPT.image], pan_and_scan=PanAndScan(False)))
    assert counts("low") == (len(alone[0]), 1)
    assert counts("low", "high")[1] == counts("high", "low")[1] == views + 1


NEUTRAL_FIELDS: dict[str, Any] = {
    "skip_special_tokens": True,
    "length_penalty": 1.0,
    "use_beam_search": False,
    "add_generation_prompt": True,
    "chat_template_kwargs": {},
    "return_token_ids": False,
    "min_tokens": 0,
    "user": "me",
    "safety_identifier": "me",
    "prompt_cache_key": "all",
}
CHANGING_FIELDS: dict[str, Any] = {
    "skip_special_tokens": False,
    "length_penalty": 2,
    "use_beam_search": True,
    "add_generation_prompt": False,
    "min_tokens": 4,
    "cache_salt": "x",
}


def test_fields_that_change_nothing_are_accepted(server: Server) -> None:
    messages = [{"role": "user", "name": "Ada", "content": "Hi"}]
    plain, neutral = (chat(server, messages, max_tokens=4, **fields).json() for fields in ({}, NEUTRAL_FIELDS))
    assert plain["choices"] == neutral["choices"]
    for name, value in CHANGING_FIELDS.items():
        assert name in refused(chat(server, messages, max_tokens=4, **{name: value}), 400, name)


def test_values_and_keys_reach_the_template(server: Server, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = engine.loaded.reader
    template = "{{ polite }}{{ messages[0]['content'][0]['code'] }}" + reader.tokenizer.chat_template
    monkeypatch.setattr(reader.tokenizer, "chat_template", template)
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi", "code": "de"}]}]
    body = json.dumps({"messages": messages, "chat_template_kwargs": {"polite": "Please."}}).encode()
    builder = RequestBuilder(ServeOptions(settings=Settings(model="mini")), PUBLISHED_COST, {}, Deadline())
    asked = builder.chat(parse(ChatCompletionRequest, body)).requests[0]
    counted = builder.counted(parse(TokenizeRequest, body))
    for request in (asked, counted):
        assert reader.tokenizer.decode(reader.prompts.write(request, []).ids).startswith("Please.de<bos>")
    assert "'code'" in refused(chat(server, messages, max_tokens=1), 400, "messages")
    response = chat(server, [{"role": "user", "content": "Hi"}], max_tokens=1, chat_template_kwargs={"rude": 1})
    assert "'rude' is not read by the chat template" in refused(response, 400, "chat_template_kwargs")


def test_views_are_those_of_the_upright_image(server: Server, engine: Engine) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    content = saved(noise(300, 900), "JPEG", exif=exif.tobytes())
    kwargs = {"pan_and_scan_min_crop_size": 100, "pan_and_scan_max_num_crops": 3}
    body = {"image": data_url(content), "mm_processor_kwargs": kwargs}
    [page] = post(server, "/v1/views", {**body, "preview": True}).json()["pages"]
    with Image.open(BytesIO(base64.b64decode(page.pop("preview").partition(",")[2]))) as image:
        assert image.size == (900, 300)
    assert post(server, "/v1/views", body).json()["pages"] == [page]
    plan = plan_views(900, 300, PanAndScan(min_crop_size=100, max_num_crops=3), engine.loaded.reader.prompts.cost())
    assert (page["width"], page["height"]) == (900, 300)
    boxes = [(view["kind"], tuple(view["box"])) for view in page["views"]]
    assert boxes == [(view.kind, view.box) for view in plan.views]
    assert (page["image_tokens"], page["prompt_tokens"]) == (plan.image_tokens, plan.prompt_tokens)
    sized = post(server, "/v1/views", {"width": 900, "height": 300, "mm_processor_kwargs": kwargs}).json()
    assert sized["pages"][0]["views"] == page["views"]


def test_the_model_and_its_limits_are_listed(server: Server, client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.owned_by) == ("mini", "panscan")
    assert client.models.retrieve("mini").id == "mini"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "Hi"}])
    facts = get(server, "/v1/models").json()["data"][0]["panscan"]
    assert facts["demonstration"] is True
    assert facts["runner"] == "engine" and facts["reads_images"] and facts["limits"]["max_images"] == 16


BODIES: dict[type[Body], dict[str, Any]] = {
    ChatCompletionRequest: {"messages": user("Hi"), "max_tokens": 1},
    CompletionRequest: {"prompt": "Hi", "max_tokens": 1},
    TokenizeRequest: {"prompt": "Hi"},
    protocol.DetokenizeRequest: {"tokens": [5]},
    ViewsRequest: {"width": 5, "height": 5},
}


def test_the_openapi_document_describes_bodies_and_path_parameters(server: Server) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schemathesis = pytest.importorskip("schemathesis")
    document = get(server, "/openapi.json").json()
    schemathesis.openapi.from_dict(document).validate()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert re.findall(r"{(\w+)}", path) == [parameter["name"] for parameter in operation.get("parameters", [])]
    for kind, body in BODIES.items():
        schema = {**document, "$ref": f"#/components/schemas/{kind.__name__}"}
        jsonschema.validate(body, schema)
        for wrong in ({"other": 1}, {"mm_processor_kwargs": {"pan_and_scan_max_num_crops": "4"}}, {"prompt": 5}):
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate({**body, **wrong}, schema)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(st.sampled_from(list(BODIES)), TEXTS, st.integers() | TEXTS)
def test_unknown_fields_are_refused_by_name(kind: type[Body], name: str, value: Any) -> None:
    if name not in kind.__struct_fields__ and name not in kind.NEUTRAL and name not in kind.REPLACED:
        with pytest.raises(FieldError) as refusal:
            parse(kind, json.dumps({**BODIES[kind], name: value}).encode())
        assert refusal.value.param == name
        assert str(refusal.value).startswith(name if name.isprintable() and name else repr(name))


SCHEMA = {"type": "json_schema"}


FIELD_ERRORS = [
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 17}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**300}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 10**300}, "max_completion_tokens"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"tools": [{}]}, "tools.0.function"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"seed": 2**64}, "seed"),
    ({"mm_processor_kwargs": {"size": 1}}, "mm_processor_kwargs.size"),
    ({"temprature": 1}, "temprature"),
    ({"mm_processor_kwargs": {"pan_and_scan_max_num_crops": 0}}, "mm_processor_kwargs"),
    ({"messages": [{"role": "system", "content": "a"}]}, "messages"),
    ({"response_format": SCHEMA | {"json_schema": {"name": "a", "schema": {"not": {}}}}}, "response_format"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": -3}, "presence_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"9999999": 1}}, "logit_bias"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json"),
    ({"response_format": {"type": "json_object", "value": "a"}}, "response_format"),
    ({"response_format": {"type": "regex", "schema": {}}}, "response_format"),
    ({"functions": [{"name": "pay"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"messages": [{"role": "assistant", "content": "a", "function_call": {}}]}, "messages.0.function_call"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 20, "messages": user("a" * 20_000)}, "prompt_logprobs"),
]


@pytest.mark.parametrize(("fields", "param"), FIELD_ERRORS)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_name_the_field_before_streams(server: Server, fields: dict[str, Any], param: str, stream: bool) -> None:
    refused(post(server, "/v1/chat/completions", {"messages": user("Hi"), **fields, "stream": stream}), 400, param)


def test_a_prompt_that_is_too_long_is_recognised_by_clients(server: Server, client: openai.OpenAI) -> None:
    """LiteLLM, LangChain and dspy look for the code, or for these words."""
    long = "word " * 40_000
    for path, param, value in (("chat/completions", "messages", user(long)), ("completions", "prompt", long)):
        response = post(server, f"/v1/{path}", {param: value})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
        assert "this model's maximum context length is 32768 tokens" in error["message"]


def test_every_response_has_a_request_id(server: Server) -> None:
    for path, status in (("/v1/models", 200), ("/v1/models/", 200), ("/v1/models/other", 404), ("/v1/responses", 404)):
        assert get(server, path, headers={"X-Request-Id": "mine-7"}).headers["x-request-id"] == "mine-7"
        made = [get(server, path, headers={"X-Request-Id": "a b"}) for _ in range(2)]
        assert {response.status_code for response in made} == {status}
        assert made[0].headers["x-request-id"] != made[1].headers["x-request-id"]
    assert "x-request-id" in get(server, "/v1/models", headers={"Host": "evil.example"}).headers
    body = {"messages": user("Hi"), "max_tokens": 1, "stream": True}
    assert len(post(server, "/v1/chat/completions", body).headers["x-request-id"]) == 32


UNKNOWN_ROUTES = [
    ("POST", "/v1/responses", 404, "no '/v1/responses'; it has POST /v1/chat/completions, /v1/completions"),
    ("POST", "/v1/v1/chat/completions", 404, "it has POST /v1/chat/completions"),
    ("GET", "/v1/chat/completions", 405, "'/v1/chat/completions' takes POST, not GET"),
]


@pytest.mark.parametrize(("method", "path", "status", "words"), UNKNOWN_ROUTES)
def test_unknown_routes_name_the_supported_one(server: Server, method: str, path: str, status: int, words: str) -> None:
    assert words in refused(httpx.request(method, f"{server}{path}", json={}), status)


def test_metrics_add_up(server: Server) -> None:
    counted = {"vllm:prompt_tokens_total": "prompt_tokens", "vllm:generation_tokens_total": "completion_tokens"}
    counted["panscan:views_total"] = "views"

    def counted_gaps() -> list[float]:
        text = get(server, "/metrics").text
        kinds = r"(?:count|bucket.*\+Inf)"
        return [*map(float, re.findall(rf"^vllm:inter_token_latency_seconds_{kinds}.* (\S+)$", text, re.MULTILINE))]

    until(server.idle)
    before = {name: server.metric(name) for name in counted}
    gaps = counted_gaps()
    answered = server.metric("vllm:request_success_total", finished_reason="length")
    failed = server.metric("panscan:requests_refused_total", status="400")
    body = CASES["image"].body
    answer = post(server, "/v1/chat/completions", {**body, "ignore_eos": True}).json()
    streamed(server, {**body, "ignore_eos": True})
    post(server, "/v1/chat/completions", {"messages": []})
    until(lambda: server.metric("vllm:request_success_total", finished_reason="length") == answered + 2)
    for name, field in counted.items():
        assert server.metric(name) == before[name] + 2 * answer["usage"][field], name
    assert server.metric("panscan:requests_refused_total", status="400") == failed + 1
    assert len(gaps) == 2 and counted_gaps() == [count + 2 * (TOKENS - 1) for count in gaps]
    assert server.metric("vllm:num_preemptions_total") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_frees_the_engine(server: Server, stream: bool) -> None:
    until(server.idle)
    body = {"messages": user("Hi"), "max_tokens": 16_000, "ignore_eos": True, "stream": stream}
    with serving.open_request(server, "/v1/chat/completions", json.dumps(body).encode()):
        until(lambda: server.metric("vllm:num_requests_running") == 1)
    until(server.idle)
    assert chat(server, user("Hi"), max_tokens=2).status_code == 200


def test_a_slow_reader_does_not_delay_others(server: Server) -> None:
    body = {"messages": user("Hi"), "max_tokens": 3000, "ignore_eos": True, "stream": True, "logprobs": True}
    body["top_logprobs"] = 20
    with httpx.stream("POST", f"{server}/v1/chat/completions", json=body, timeout=DEADLINE) as response:
        assert response.status_code == 200  # its chunks are not read
        assert chat(server, user("Hi"), max_tokens=TOKENS).status_code == 200
    until(server.idle)


def test_traces_have_a_span_per_stage(engine: Engine) -> None:
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    from panscan.serve import tracing

    provider = trace.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    [result] = engine.generate([Request(QUESTION, [noise(80, 80, 9)], sampling=Sampling(4, ignore_eos=True))])
    parent = "0af7651916cd43dd8448eb211c80319c"
    tracing.record(provider.get_tracer("test"), result, {"traceparent": f"00-{parent}-b7ad6b7169203331-01"})
    *stages, root = memory.get_finished_spans()
    assert [span.name for span in stages] == ["queue", "load", "preprocess", "schedule", "vision", "prefill", "decode"]
    assert root.name == "llm_request" and f"{root.context.trace_id:x}" == parent.lstrip("0")
    assert all(span.parent.span_id == root.context.span_id for span in stages)
    for before, after in pairwise(stages):
        assert before.end_time == after.start_time
    assert (root.start_time, root.end_time) == (stages[0].start_time, pytest.approx(stages[-1].end_time, abs=10**9))
    assert root.attributes["gen_ai.usage.output_tokens"] == 4


def test_the_guides_client_runs_unchanged(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    streamed, extracted, *_ = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    write_samples(tmp_path / "samples", count=1)
    names: dict[str, Any] = {}
    exec(streamed.replace("http://127.0.0.1:8000", server.url), names)
    total = capsys.readouterr().out
    assert re.fullmatch(r"\$\d+\.\d\d", total)
    exec(extracted, names)
    assert json.loads(capsys.readouterr().out) == {"total": total}


def test_a_startup_failure_is_one_line(server: Server) -> None:
    command = serving.command("--port", str(server.port))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    usual = ("runner: engine", "no --model", "warning: mini is")
    [line] = [line for line in ended.stderr.splitlines() if not line.startswith(usual) and not line.endswith(" ...")]
    assert ended.returncode == 2 and "cannot be bound" in line
