"""Prompts against Transformers' own processor, token by token."""

import json
import tracemalloc
from collections.abc import Callable
from copy import copy
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.small_models import TOKENIZER

from panscan.core import PanAndScan, Request, SettingError
from panscan.core.tools import CallFormat
from panscan.images.views import plan_views
from panscan.model.gemma3.config import processor_for
from panscan.model.prompt import PromptWriter

IMAGE_TOKENS = 16
PROCESSOR = processor_for(TOKENIZER, 28, IMAGE_TOKENS)
WRITER = PromptWriter(TOKENIZER, IMAGE_TOKENS)
CHOSEN = PanAndScan(min_crop_size=8, max_num_crops=4)
SPECIAL = sorted(added.content for added in TOKENIZER.added_tokens_decoder.values() if added.special)

CHARACTERS = st.characters(codec="utf-8", exclude_characters="\u2581")  # which reads back as a space
PLAIN = st.text(st.characters(codec="utf-8"), max_size=60).filter(
    lambda text: not any(special in text for special in SPECIAL)
)
SIZES = st.lists(st.tuples(st.integers(16, 80), st.integers(16, 80)), max_size=3)


def tokenizer_of(template: str | None) -> Any:
    tokenizer = copy(TOKENIZER)
    tokenizer.chat_template = template
    return tokenizer


def writer_of(template: str | None, image_tokens: int = IMAGE_TOKENS) -> PromptWriter:
    return PromptWriter(tokenizer_of(template), image_tokens)


def processor_ids(turns: list[dict[str, Any]], images: list[Image.Image], processor: Any = PROCESSOR) -> list[int]:
    text = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    kwargs = {"images": images, **CHOSEN.processor_kwargs()} if images else {}
    return processor(text=text, add_special_tokens=False, **kwargs)["input_ids"][0]


Sizes = list[tuple[int, int]]
TURNS = st.lists(st.tuples(st.lists(PLAIN, min_size=1, max_size=3), SIZES), min_size=1, max_size=4)


@settings(max_examples=400)
@given(TURNS, st.none() | PLAIN, st.booleans())
def test_ids_equal_the_processors(turns: list[tuple[list[str], Sizes]], system: str | None, plain: bool) -> None:
    """Of conversations, in which tokens merge across the parts of a turn, and of a plain prompt."""
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    images = []
    for index, (texts, sizes) in enumerate(turns[:1] if plain else turns):
        parts: list[dict[str, Any]] = [{"type": "text", "text": text} for text in (texts[:1] if plain else texts)]
        if index % 2 == 0:
            parts = [{"type": "image"} for _ in sizes] + parts
            images += [Image.new("RGB", size) for size in sizes]
        messages.append({"role": "assistant" if index % 2 else "user", "content": parts})
    request = Request(messages=messages, images=images)
    if plain:
        request = Request(prompt=turns[0][0][0], images=images, system=system)
    if WRITER.special_in(request) is None:
        written = WRITER.write(request, [plan_views(*image.size, CHOSEN).crops for image in images])
        assert written.ids == processor_ids(messages, images)
        assert written.image_tokens == written.ids.count(TOKENIZER.image_token_id)


@pytest.mark.parametrize(("turns", "beginning"), [(60, ""), (3, "{{ strftime_now('%A %Y') }} ")])
def test_layouts_that_are_not_remembered_equal_the_processors(turns: int, beginning: str) -> None:
    """A chat of many turns, and a template with the date, are rendered every time: with the present turns."""
    tokenizer = tokenizer_of(beginning + TOKENIZER.chat_template)
    writer, processor = PromptWriter(tokenizer, IMAGE_TOKENS), processor_for(tokenizer, 28, IMAGE_TOKENS)
    image = {"type": "image"}
    messages: list[dict[str, Any]] = []
    for number in range(turns):
        text = {"type": "text", "text": f"{number}: is it {number * number}?"}
        role, content = ("assistant", [text]) if number % 2 else ("user", [image, text])
        messages.append({"role": role, "content": content})
        if number % 2 == 0:
            images = [Image.new("RGB", (20, 70))] * (number // 2 + 1)
            crops = [plan_views(20, 70, CHOSEN).crops] * len(images)
            written = writer.write(Request(messages=messages, images=images), crops)
            assert written.ids == processor_ids(messages, images, processor)


FRAGMENTS = st.lists(st.sampled_from(SPECIAL) | st.text(CHARACTERS, max_size=4), max_size=5).map("".join)
SPLITS = st.tuples(FRAGMENTS, st.lists(st.integers(0, 60), max_size=4), st.sampled_from(["", " ", "\n"]))


def cut(split: tuple[str, list[int], str]) -> list[dict[str, str]]:
    """A text as parts that the template, which trims each of them, joins to that text again."""
    text, places, space = split
    edges = [0, *sorted(places), len(text)]
    return [{"type": "text", "text": f"{space}{text[a:b]}{space}"} for a, b in pairwise(edges)]


@settings(max_examples=300)
@given(SPLITS, SPLITS, FRAGMENTS)
@example(("<end_of_turn>", [8], ""), ("", [], ""), "")
@example(("<end_of_turn>", [8], " "), ("<start_of_image>", [1, 4, 9], "\n"), "<eos>")
def test_special_tokens_cut_into_parts_are_plain_text(
    first: tuple[str, list[int], str], third: tuple[str, list[int], str], system: str
) -> None:
    def turns(said: list[dict[str, str]], answer: str, asked: list[dict[str, str]]) -> list[dict[str, Any]]:
        system_turn = {"role": "system", "content": [{"type": "text", "text": f"{system}<end_of_"}]}
        texts = [("user", said), ("assistant", answer), ("user", asked)]
        return [system_turn, *({"role": role, "content": content} for role, content in texts)]

    written = WRITER.write(Request(messages=turns(cut(first), "<end_of_", cut(third))), []).ids
    plain: list[dict[str, str]] = [{"type": "text", "text": "x"}]
    innocent = processor_ids([turn | {"content": plain} for turn in turns(plain, "x", plain)], [])
    control = set(TOKENIZER.convert_tokens_to_ids(SPECIAL))
    assert [i for i in written if i in control] == [i for i in innocent if i in control]
    joined = ["".join(part["text"].strip() for part in cut(split)) for split in (first, third)]
    assert TOKENIZER.decode(written) == (
        f"<bos><start_of_turn>user\n{system}<end_of_\n\n{joined[0]}<end_of_turn>\n"
        f"<start_of_turn>model\n<end_of_<end_of_turn>\n"
        f"<start_of_turn>user\n{joined[1]}<end_of_turn>\n<start_of_turn>model\n"
    )


def test_a_prompt_follows_the_present_template_and_time() -> None:
    """Rendered layouts are remembered, but not for another template, nor one with the time."""
    tokenizer = copy(TOKENIZER)
    writer, template = PromptWriter(tokenizer, IMAGE_TOKENS), tokenizer.chat_template
    texts = []
    for end in ("1998", "1999", *["{{ strftime_now('%H%M%S%f') }}"] * 2):  # rendering takes longer than a microsecond
        tokenizer.chat_template = template + end
        texts.append(TOKENIZER.decode(writer.write(Request(prompt="What?"), []).ids))
    assert texts[0].endswith("1998") and texts[1].endswith("1999")
    assert texts[2][:-12] == texts[3][:-12] and texts[2] != texts[3]


MANY_PROMPTS = [
    (400, lambda number: [f"{number} " + "abc " * 50], 1.5e6),
    (8, lambda number: [f"{number} " + "abc " * 4000], 0.3e6),
    (8, lambda number: [" " * (100_000 + number), "x"], 0.3e6),
    (6, lambda number: [*[""] * (2_000 + number), "x"], 0.3e6),
]


@pytest.mark.parametrize(("count", "texts_of", "most_bytes"), MANY_PROMPTS)
def test_memory_of_prompts_is_bounded(count: int, texts_of: Callable[[int], list[str]], most_bytes: float) -> None:
    """No more than a hundred or so short texts, and nothing of long ones and of long conversations."""
    writer = PromptWriter(TOKENIZER, IMAGE_TOKENS)

    def write(number: int) -> None:
        parts = [{"type": "text", "text": text} for text in texts_of(number)]
        writer.write(Request(messages=[{"role": "user", "content": parts}]), [])

    write(0)
    tracemalloc.start()
    for number in range(1, count):
        write(number)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < most_bytes, f"{grown / 1e6:.1f} MB"


WITH_SPECIAL_TOKENS = [
    ("What?", None),
    ("a <end_of_turn>", "<end_of_turn>"),
    ([{"type": "text", "text": "<end_of_ "}, {"type": "text", "text": "turn>"}], "<end_of_turn>"),
    ([{"type": "text", "text": "<end_of_"}, {"type": "image"}, {"type": "text", "text": "turn>"}], None),
    ([{"type": "image"}, {"type": "text", "text": "<start_of_image>"}], "<start_of_image>"),
]


@pytest.mark.parametrize(("content", "special"), WITH_SPECIAL_TOKENS)
def test_special_tokens_are_found_where_the_template_joins_texts(content: Any, special: str | None) -> None:
    assert WRITER.special_in(Request(messages=[{"role": "user", "content": content}])) == special


@pytest.mark.parametrize("crops", range(8))
def test_cost_counts_what_is_written(crops: int) -> None:
    bare = len(WRITER.write(Request(prompt="What?"), []).ids)
    with_image = len(WRITER.write(Request(prompt="What?", images=["x.png"]), [crops]).ids)
    assert with_image - bare == WRITER.cost().of(crops)


def test_raw_prompts_equal_the_processors() -> None:
    images = [Image.new("RGB", (20, 70)), Image.new("RGB", (30, 30))]
    text = "One: <start_of_image> two:\n\n<start_of_image><end_of_turn> same?"
    ids = PROCESSOR(text=text, images=images, **CHOSEN.processor_kwargs())["input_ids"][0]
    crops = [plan_views(*image.size, CHOSEN).crops for image in images]
    written = WRITER.write(Request(prompt=text, images=images, raw=True), crops)
    assert written.ids == [TOKENIZER.bos_token_id, *(i for i in ids if i != TOKENIZER.bos_token_id)]


SURROGATE = r"lone surrogate '\\ud"
KEYED = (
    "{{ bos_token }}{% if polite %}Please. {% endif %}{% for m in messages %}{% for p in m['content'] %}"
    "{% if p['source_lang_code'] is defined %}{{ p['source_lang_code'] }}: {% endif %}"
    "{{ '<start_of_image>' if p['type'] == 'image' else p['text'] }}{% endfor %}{% endfor %}"
)
MALFORMED = [
    ([], "a list of turns, not empty"),
    ([{"role": "system", "content": "Be brief."}], "a system message alone asks nothing: add a turn"),
    ([{"role": "<eos>user", "content": "Who?"}], "the role of turn 1 must be a word"),
    ("Who?", "a list of turns"),
    ([None], "turn 1 must be"),
    ([{"content": "Who?"}], "turn 1 must be"),
    ([{"role": "user", "content": "Who?"}, {"role": "assistant"}], "the content of turn 2 must be"),
    ([{"role": "user", "content": {"type": "text", "text": "Who?"}}], "the content of turn 1 must be"),
    ([{"role": "user", "content": [None]}], "part 1 of turn 1 must be"),
    ([{"role": "user", "content": [{"type": "image"}, {"text": "Who?"}]}], "part 2 of turn 1 is of type None"),
    ([{"role": "user", "content": [{"type": "text"}]}], "'text' of part 1 of turn 1 must be a text"),
    ([{"role": "user", "content": [{"type": "image"}]}], "1 image placeholder"),
    ([{"role": "user", "content": [{"type": "audio"}]}], "audio"),
    ([{"role": "assistant", "content": "first"}], "chat template"),
    ([{"role": "user", "content": "\ud83d"}], SURROGATE),
]
REFUSED_VALUES = [
    ({"target_lang_code": "de"}, "'target_lang_code' is not read by the chat template"),
    ({"messages": []}, "'messages' cannot be set"),
    ({"bos_token": "x"}, "'bos_token' cannot be set"),
    ({"polite": {1, 2}}, "'polite' must be a JSON value"),
    ({"polite": "<eos>"}, "'polite' contains '<'"),
    ({"polite": "x" * 70_000}, "'polite' has 70,002 characters"),
]
GERMAN = [{"role": "user", "content": [{"type": "text", "text": "Hi", "target_lang_code": "de"}]}]
REFUSED: list[tuple[PromptWriter, dict[str, Any], str]] = [
    (WRITER, {"prompt": "no place", "images": ["a.png"], "raw": True}, "0 image placeholder"),
    (WRITER, {"prompt": "<start_of_image>", "raw": True}, "1 image placeholder"),
    (WRITER, {"prompt": "<image_soft_token>", "raw": True}, "marks an image with"),
    (WRITER, {"prompt": "caf\udce9"}, SURROGATE),
    (WRITER, {"prompt": "caf\udce9", "raw": True}, SURROGATE),
    (WRITER, {"prompt": "What?", "system": "\ud83d"}, SURROGATE),
    (writer_of(None, 0), {"prompt": "x", "images": ["a.png"]}, "reads text only"),
    (writer_of(KEYED), {"messages": GERMAN}, "the key 'target_lang_code' of a part is not read by the chat template"),
    *((WRITER, {"messages": messages}, message) for messages, message in MALFORMED),
    *(
        (writer_of(KEYED), {"prompt": "Hi", "template_kwargs": values}, f"template_kwargs: {message}")
        for values, message in REFUSED_VALUES
    ),
]


@pytest.mark.parametrize(("writer", "fields", "message"), REFUSED)
def test_requests_that_cannot_be_written_are_refused(writer: PromptWriter, fields: Any, message: str) -> None:
    with pytest.raises(SettingError, match=rf"\A.*{message}.*\Z"):  # one line
        writer.write(Request(**fields), [0] * len(fields.get("images", [])))


LEAVES = st.none() | st.integers() | st.sampled_from(["user", "assistant", "text", "image", "What?", "\ud83d"])
KEYS = st.sampled_from(["role", "content", "type", "text"])
JUNK = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4))


@given(JUNK.filter(lambda messages: messages is not None))
def test_whatever_messages_hold_is_written_or_refused(messages: Any) -> None:
    try:
        written = WRITER.write(Request(messages=messages), [])
    except SettingError:
        return
    assert written.ids == processor_ids(messages, [])


@given(st.lists(PLAIN, min_size=1, max_size=3))
def test_the_parts_of_a_system_message_are_lines_of_one_text(parts: list[str]) -> None:
    def ids(content: Any) -> list[int]:
        return WRITER.write(Request(messages=[{"role": "system", "content": content}, *turns]), []).ids

    turns = [{"role": "user", "content": "What?"}]
    assert ids([{"type": "text", "text": text} for text in parts]) == ids("\n".join(parts))
    with pytest.raises(SettingError, match="turn 1 is a system message with an image"):
        ids([{"type": "text", "text": "Look:"}, {"type": "image"}])


def test_a_template_that_drops_a_text_is_an_error() -> None:
    writer = writer_of("{{ messages[0]['content'][0]['text'] }}")
    rendered, dropped = {"type": "text", "text": "What?"}, {"type": "text", "text": "Never invent."}
    writer.write(Request(messages=[{"role": "user", "content": [rendered, {"type": "text", "text": " "}]}]), [])
    with pytest.raises(SettingError, match=r"template \(chat_template.jinja\) drops the text 'Never invent.'"):
        writer.write(Request(messages=[{"role": "user", "content": [rendered, dropped]}]), [])


TEXTS = "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + m['role'] + ' ' + m['content'] }}{% endfor %}"


def test_further_keys_of_parts_and_values_reach_the_template() -> None:
    """Each request has its own: the layout of the first is not remembered for the second."""
    writer = writer_of(KEYED)
    for code in ("cs", "de"):
        part = {"type": "text", "text": "Hi", "source_lang_code": code}
        ids = writer.write(Request(messages=[{"role": "user", "content": [part]}]), []).ids
        assert TOKENIZER.decode(ids) == f"<bos>{code}: Hi"
        [image] = TOKENIZER.decode(
            writer.write(Request("Hi", ["x.png"], template_kwargs={"source_lang_code": code}), [0]).ids
        ).split("<bos>")[1:]
        assert image.startswith(f"{code}: ") and image.endswith(f"{code}: Hi")
    asked = Request("Hi", template_kwargs={"polite": True})
    assert TOKENIZER.decode(writer.write(asked, []).ids) == "<bos>Please. Hi"
    assert TOKENIZER.decode(writer.write(Request("Hi"), []).ids) == "<bos>Hi"


def test_a_template_for_texts_takes_texts_and_images() -> None:
    writer = writer_of(TEXTS)
    parts = [{"type": "image"}, {"type": "text", "text": "What <eos>?"}]
    written = writer.write(Request(messages=[{"role": "user", "content": parts}], images=["x.png"]), [0])
    assert written.ids.count(TOKENIZER.image_token_id) == IMAGE_TOKENS
    assert TOKENIZER.eos_token_id not in written.ids
    assert TOKENIZER.decode(written.ids).endswith("What <eos>?")
    assert TOKENIZER.decode(writer.write(Request("Hi"), []).ids) == "<bos><start_of_turn>user Hi"


TURNS_WITH_TOOLS = (
    "{{ bos_token }}{% if tools %}<start_of_turn>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<end_of_turn>\n{% endif %}{% for m in messages %}<start_of_turn>{{ m.role }}\n"
    "{% if m.role == 'tool' %}{{ m.name }} {{ m.tool_call_id }}: {% endif %}"
    "{% for part in m.content %}{{ part.text | trim }}{% endfor %}"
    "CALLS<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)
ONE = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
EACH = "{% for call in m.tool_calls %}"
TAGGED = EACH + "{% if not loop.first %}{{ '\n' }}{% endif %}<tool_call>\n" + ONE + "\n</tool_call>{% endfor %}"
LISTED = "{% if m.tool_calls %}[" + EACH + ONE + "{{ loop.last and ']' or ', ' }}{% endfor %}{% endif %}"
IN_TAGS, IN_LIST = (TURNS_WITH_TOOLS.replace("CALLS", calls) for calls in (TAGGED, LISTED))
OTHER_TEMPLATES = {
    "Gemma's own": TOKENIZER.chat_template,
    "calls like functions": TURNS_WITH_TOOLS.replace("CALLS", EACH + "{{ call.function.name }}(){% endfor %}"),
    "no definitions": IN_TAGS.replace("{{ tool | tojson }}", ""),
    "no results": IN_TAGS.replace("part.text", "(part.text if m.role != 'tool' else '')"),
    "special tokens around calls": IN_TAGS.replace("<tool_call>", "<start_of_image>"),
}


def tool(description: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"cents": {"type": "integer", "description": description}}}
    return {"type": "function", "function": {"name": "pay", "description": description, "parameters": parameters}}


def history(text: str) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "pay", "arguments": json.dumps({"note": text})}}
    return [
        {"role": "user", "content": [{"type": "text", "text": text}]},
        {"role": "assistant", "content": [], "tool_calls": [{"id": "1", **call}, {"id": "2", **call}]},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": text}]},
    ]


@pytest.mark.parametrize("template", [IN_TAGS, IN_LIST])
@settings(max_examples=40)
@given(PLAIN.filter(str.strip))
def test_tools_are_written_as_by_transformers(template: str, text: str) -> None:
    tokenizer = tokenizer_of(template)
    turns, tools = history(text), [tool(text)]
    parsed = [{**turn, "name": "pay"} if turn["role"] == "tool" else turn for turn in history(text)]
    for call in parsed[1]["tool_calls"]:
        call["function"] = {"name": "pay", "arguments": {"note": text}}
    for end in (1, 3):
        rendered = tokenizer.apply_chat_template(parsed[:end], tools=tools, tokenize=False, add_generation_prompt=True)
        written = PromptWriter(tokenizer, 0).write(Request(messages=turns[:end], tools=tools), [])
        assert written.ids == tokenizer.encode(rendered, add_special_tokens=False)


@pytest.mark.parametrize("template", [IN_TAGS, IN_LIST])
@given(st.lists(st.sampled_from([*SPECIAL, "<", ">", "[", "a", "start_of_turn", '"', "\\"]), max_size=6).map("".join))
def test_no_special_token_forms_in_definitions_and_calls(template: str, text: str) -> None:
    writer = writer_of(template, 0)

    def specials(word: str) -> list[int]:
        turns = [*history("a")[:1], *history(word)[1:2], *history("a")[2:]]
        ids = writer.write(Request(messages=turns, tools=[tool(word)]), []).ids
        return [token for token in ids if token in TOKENIZER.all_special_ids]

    assert specials(text) == specials("a")


def test_the_format_of_calls_is_read_off_the_template() -> None:
    def form(template: str) -> CallFormat | None:
        return writer_of(template, 0).call_format

    between = "\n</tool_call>\n<tool_call>\n"
    assert form(IN_TAGS) == CallFormat("arguments", "<tool_call>\n", between, "\n</tool_call>")
    assert form(IN_LIST) == CallFormat("arguments", "[", ", ", "]")
    assert {name: form(template) for name, template in OTHER_TEMPLATES.items()} == dict.fromkeys(OTHER_TEMPLATES)
    documented = PromptWriter(TOKENIZER, 0).write(Request(messages=history("a"), tools=[tool("b")]), [])
    assert "You have access to functions" in TOKENIZER.decode(documented.ids)


def test_a_template_that_fails_on_a_definition_blames_the_tools() -> None:
    failing = "{{ tool.function.description + '' + (1 if 'fail' in tool.function.description else '') }}"
    writer = writer_of(IN_TAGS.replace("{{ tool | tojson }}", "{{ tool | tojson }}" + failing), 0)
    with pytest.raises(SettingError, match=r"^tools: chat template"):
        writer.write(Request(messages=history("a"), tools=[tool("fail")]), [])
