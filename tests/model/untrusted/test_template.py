"""Chat templates: the text that Transformers renders, and a short error for a template that costs too much."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.robustness.__main__ import TOTALS
from benchmarks.robustness.checkpoints import RECIPES, checkpoint_cases
from safetensors.torch import load_file, save_file
from tests.model.conftest import edit
from training.tokenizer import CHAT_TEMPLATE
from transformers.utils.chat_template_utils import render_jinja_template

from panscan.core import ModelError, PanscanError, SettingError
from panscan.model.bundled import mini_directory
from panscan.model.checkpoint import Placement, load_model, load_reader
from panscan.model.untrusted.budget import MAX_TEXT
from panscan.model.untrusted.check import check_directory
from panscan.model.untrusted.reading import DamagedFileError
from panscan.model.untrusted.template import MAX_TEMPLATE, render_template
from panscan.plan.models import model_named

SOURCE = "chat_template.jinja"
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}
IMAGE = {"type": "image"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def turn(role: str, *parts: dict[str, str]) -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


CHATS = {
    "short": [turn("user", text("Hi"))],
    "image": [turn("user", IMAGE, text("  What is the total?\n"))],
    "system": [turn("system", text("Be brief.")), turn("user", IMAGE, text("a"), IMAGE, text("b"))],
    "turns": [turn("user", text("1")), turn("assistant", text("é 🙂 \\ ' {{ x }}")), turn("user", text("2 "))],
    "long": [turn(role, text(f"turn {n} " * n)) for n in range(100) for role in ("user", "assistant")][:199],
}
"""Conversations with every kind of turn and part."""

FEATURES = (Path(__file__).parent / "features.jinja").read_text("utf-8")


def transformers_text(template: str, chat: list[dict[str, Any]]) -> str:
    [rendered], _ = render_jinja_template([chat], chat_template=template, add_generation_prompt=True, **TOKENS)
    return str(rendered)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, FEATURES], ids=["gemma", "features"])
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_the_text_is_that_of_transformers(template: str, chat: list[dict[str, Any]]) -> None:
    assert render_template(template, SOURCE, chat, **TOKENS) == transformers_text(template, chat)


GROWING = "{% set ns = namespace(x=START) %}{% for i in range(100) %}{% set ns.x = NEXT %}{% endfor %}{{ ns.x }}"


def growing(start: str, following: str) -> str:
    return GROWING.replace("START", start).replace("NEXT", following)


# Beside those of benchmarks/robustness/checkpoints.py, which the recipes below try.
EXPENSIVE = {
    "repeat, from the right": "{{ 20000000000 * ('a' | safe) }}",
    "list": "{{ [1] * 10000000000 }}",
    "concatenation": growing("'a'", "ns.x ~ ns.x"),
    "join": growing("'a'", "[ns.x, ns.x] | join"),
    "join, method": "{{ ('x' * 1000000).join(['a'] * 100000) }}",
    "indent": "{{ ('\\n' * 100000) | indent(100000) }}",
    "indent, width": "{{ 'a' | indent(1000000000000) }}",
    "replace": growing("'a'", "ns.x.replace('a', 'aa')"),
    "tuples as keys": growing("(1,)", "(ns.x, ns.x)") + "{{ {ns.x: 1} }}",
    "dictionaries": growing("1", "dict(a=ns.x, b=ns.x)"),
    "percent": growing("'a'", "'%s%s' % (ns.x, ns.x)"),
    "percent, width": "{{ '%20000000000d' % 1 }}",
    "percent, width of a value": "{{ '%*d' % (10000000000, 1) }}",
    "percent, precision": "{{ '%.20000000000f' % 1 }}",
    "hexadecimal": "{{ ('f' * 100000) | int(base=16) }}",
    "JSON": "{{ [1, 2] | tojson(indent=10000000000) }}",
    "loop with a condition": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "comparisons": "{% set x = 'a' * 900000 %}{% for i in range(99999) %}{{ x == x ~ '' }}{% endfor %}",
    "generators": growing("[1]", "ns.x | map('upper')").replace("100", "100000"),
    "recursive macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "compile time": "{% autoescape ('a' * 20000000000) %}{% endautoescape %}",
    "date": "{{ strftime_now('%c' * 100000) }}",
}


@pytest.mark.parametrize("template", EXPENSIVE.values(), ids=EXPENSIVE)
def test_a_template_that_costs_too_much_is_one_error(template: str) -> None:
    with pytest.raises(ModelError, match=r"^chat template \(chat_template.jinja\): .*original checkpoint$"):
        render_template(template, SOURCE, CHATS["image"], **TOKENS)


def test_a_large_value_may_be_written_as_json() -> None:
    assert render_template("{{ ('a' * 300000) | tojson | length }}", SOURCE, CHATS["short"], **TOKENS) == "300002"


DAMAGED = {
    "syntax": ("{% for %}", "line 1: Expected an expression"),
    "variable": ("{{ nothing.x }}", "'nothing' is undefined"),
    "types": ("{{ 1 + 'a' }}", "TypeError: unsupported operand"),
    "depth": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "it is nested too deeply"),
    "internals": ("{{ ''.__class__.__mro__ }}", "attribute '__class__' of 'str' object is unsafe"),
    "method": ("{{ (1).to_bytes(10000000000) }}", "to_bytes cannot be called"),
    "filter": ("{{ 'x' | urlize }}", "No filter named 'urlize'"),
    "width": ("{{ 'a' | center(10000000000) }}", "No filter named 'center'"),
    "width of a method": ("{{ 'a'.ljust(10000000000) }}", "ljust cannot be called"),
    "format": ("{{ '{:20000000000}'.format(1) }}", "format cannot be called"),
    "format of a filter": ("{{ ('{:20000000000}' | attr('format'))(1) }}", "format cannot be called"),
    "format_map": ("{{ '{a:>9999999999}'.format_map({'a': 1}) }}", "format_map cannot be called"),
    "words": ("{{ lipsum(n=1000000000) }}", "'lipsum' is undefined"),
    "file": ("{% include '/etc/passwd' %}", "no loader"),
    "size": (" " * (MAX_TEMPLATE + 1), "at most 262,144 are supported"),
}


@pytest.mark.parametrize(("template", "reason"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_template_is_named(template: str, reason: str) -> None:
    with pytest.raises(ModelError, match=r"^chat template \(tokenizer_config.json\)") as raised:
        render_template(template, "tokenizer_config.json", CHATS["short"])
    assert reason in str(raised.value)


def test_messages_that_a_template_rejects_are_the_users_error() -> None:
    with pytest.raises(SettingError, match=r"chat_template.jinja\) rejects them: Conversation roles must alternate"):
        render_template(CHAT_TEMPLATE, SOURCE, [turn("assistant", text("Hi"))], **TOKENS)


def test_a_long_conversation_may_write_more() -> None:
    words = "word " * (MAX_TEXT // 5)
    chat = [turn("user", text(words)), turn("assistant", text("ok")), turn("user", text(words))]
    rendered = render_template(CHAT_TEMPLATE, SOURCE, chat, **TOKENS)
    assert rendered.count("word") == 2 * (MAX_TEXT // 5)


def test_every_filter_is_metered_or_left_out() -> None:
    """A filter of a later Jinja is wrapped like the others, so it cannot be called without counting its input."""
    for filtered in ("upper", "lower", "string", "list", "wordcount", "urlencode", "title", "sort", "min"):
        loop = "{% set x = 'a' * 900000 %}{% for i in range(99999) %}{% set y = x | FILTER %}{% endfor %}"
        with pytest.raises(PanscanError, match="too many steps"):
            render_template(loop.replace("FILTER", filtered), SOURCE, CHATS["short"])


# Hostile checkpoints are one error that names the file; published layouts of good ones pass.


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="FIFOs and links")

FILES = {
    "adapter": "adapter_config.json",
    "code": "config.json",
    "config": "config.json",
    "generation": "generation_config.json",
    "header": "model.safetensors",
    "index": "model.safetensors.index.json",
    "processor": "processor_config.json",
    "quantization": "config.json",
    "special tokens": "special_tokens_map.json",
    "template": "chat_template.jinja",
    "tokenizer": "tokenizer.json",
    "tokenizer config": "tokenizer_config.json",
    "weights": "model.safetensors",
}
"""The file that recipes of each group damage."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The mini checkpoint as somebody's local directory."""
    return Path(shutil.copytree(mini_directory(), tmp_path / "model"))


def test_the_robustness_job_runs_every_recipe() -> None:
    assert len(checkpoint_cases()) == TOTALS["checkpoints"] == 2 * len(RECIPES)
    assert {recipe for recipe, command in checkpoint_cases() if command == "ask"} == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_hostile_checkpoint_is_one_error_that_names_the_file(copy: Path, name: str) -> None:
    RECIPES[name](copy)
    with pytest.raises(ModelError) as raised:
        load_model(str(copy), Placement(torch.device("cpu"), torch.float32))
    message = str(raised.value)
    assert FILES[name.partition(":")[0]] in message
    assert "\n" not in message
    assert len(message) < 600


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith(("config", "index", "header"))])
def test_plans_reject_the_same_configurations(copy: Path, name: str) -> None:
    RECIPES[name](copy)
    if name == "index: missing":
        model_named(str(copy))  # a plan needs no weights
    else:
        with pytest.raises(PanscanError, match=r"config\.json|safetensors|unknown model"):
            model_named(str(copy))


def test_a_missing_processor_and_a_byte_order_mark_are_named(copy: Path) -> None:
    (copy / "processor_config.json").unlink()
    with pytest.raises(ModelError, match=r"there is no processor_config\.json or preprocessor_config\.json: copy it"):
        load_reader(str(copy))
    (copy / "config.json").write_bytes(b"\xef\xbb\xbf" + (copy / "config.json").read_bytes())
    with pytest.raises(DamagedFileError, match=r"config\.json: begins with a byte order mark: save it as UTF-8"):
        check_directory(copy)


def test_a_snapshot_of_the_hub_cache_links_to_its_blobs(copy: Path, tmp_path: Path) -> None:
    repo = tmp_path / "models--owner--gemma"
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(copy.iterdir()):
        shutil.move(path, repo / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert load_reader(str(snapshot)).reads_images
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(repo.parent / "elsewhere.json")
    shutil.copy(mini_directory() / "config.json", repo.parent / "elsewhere.json")
    with pytest.raises(DamagedFileError, match=r"^config\.json: links to a file outside the checkpoint"):
        check_directory(snapshot)


def test_other_files_beside_a_checkpoint_are_not_read(copy: Path) -> None:
    (copy / "trainer_state.json").write_text("[" * 10_000_000)
    os.mkfifo(copy / "notes.txt")
    (copy / "original").mkdir()
    check_directory(copy)


def test_a_changed_file_is_checked_again(copy: Path) -> None:
    check_directory(copy)
    (copy / "generation_config.json").write_text('{"eos_token_id": -7}')
    with pytest.raises(DamagedFileError, match=r"^generation_config\.json: eos_token_id is -7"):
        check_directory(copy)


def test_two_sets_of_weights_are_refused_and_a_stale_index_is_ignored(copy: Path) -> None:
    """Loaders differ in which of both they read."""
    index = {"weight_map": {"lm_head.weight": "weights.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {stored.file for stored in check_directory(copy).tensors.values()} == {"model.safetensors"}
    shutil.copy(copy / "model.safetensors", copy / "weights.safetensors")
    with pytest.raises(DamagedFileError, match=r"^two sets of weights: model\.safetensors, and weights\.safetensors"):
        check_directory(copy)
    (copy / "weights.safetensors").unlink()
    (copy / "model.safetensors").write_bytes(b"")
    with pytest.raises(DamagedFileError, match=r"^model\.safetensors: the header"):
        check_directory(copy)


def test_the_named_tensor_does_not_fit_the_configuration(copy: Path) -> None:
    text_config = json.loads((copy / "config.json").read_text())["text_config"]
    edit(copy / "config.json", text_config={**text_config, "intermediate_size": 640})
    with pytest.raises(DamagedFileError) as raised:
        check_directory(copy)
    assert str(raised.value) == (
        "config.json: intermediate_size and hidden_size do not fit the weights:"
        " language_model.model.layers.0.mlp.gate_proj.weight in model.safetensors is [576, 256], not [640, 256]"
    )


@pytest.mark.parametrize("part", ["text_config", "vision_config"])
def test_a_configuration_with_another_number_of_layers_is_refused(copy: Path, part: str) -> None:
    config = json.loads((copy / "config.json").read_text())
    layers = config[part]["num_hidden_layers"] + 1
    edit(copy / "config.json", **{part: {**config[part], "num_hidden_layers": layers, "layer_types": None}})
    with pytest.raises(DamagedFileError, match=rf"{'vision_config.' * (part == 'vision_config')}num_hidden_layers"):
        check_directory(copy)


def test_a_model_that_was_saved_inside_a_wrapper_is_named(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    save_file({f"module.{name}": values for name, values in tensors.items()}, copy / "model.safetensors")
    with pytest.raises(DamagedFileError, match=r"no layer has a name of Gemma 3 \(a tensor is 'module\.language_model"):
        check_directory(copy)
