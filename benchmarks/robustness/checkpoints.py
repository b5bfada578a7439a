"""Part ``checkpoints``: checkpoints that are well-formed and expensive, damaged, or not made of files.

Each recipe changes a copy of the bundled mini model. A case is one command on one of them.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.robustness.cases import Case, Part
from benchmarks.robustness.children import Ended, panscan, run_child
from benchmarks.robustness.commands import _detail, outcome_of
from panscan.model.bundled import mini_directory
from panscan.workload.samples import write_samples

_DEADLINE = 60.0  # seconds
_MEMORY = 2_500_000_000  # bytes of a command, beyond what the forking process has
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"

Recipe = Callable[[Path], None]


def _template(text: str) -> Recipe:
    return lambda folder: _write(folder / "chat_template.jinja", text)


def _doubled(following: str, start: str = "'a'") -> Recipe:
    loop = "{% for i in range(100) %}{% set ns.x = " + following + " %}{% endfor %}"
    return _template("{% set ns = namespace(x=" + start + ") %}" + loop + "{{ ns.x }}")


def _fields(file: str, **changes: Any) -> Recipe:
    """Set fields of a JSON file; ``part__field`` is a field of a part."""

    def change(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        for name, value in changes.items():
            *parts, field = name.split("__")
            target = content
            for part in parts:
                target = target[part]
            target[field] = value
        _write(folder / file, json.dumps(content))

    return change


def _content(file: str, data: str | bytes) -> Recipe:
    return lambda folder: _write(folder / file, data)


def _config(**changes: Any) -> Recipe:
    return _fields("config.json", **changes)


def _text(**changes: Any) -> Recipe:
    return _config(**{f"text_config__{name}": value for name, value in changes.items()})


def _vision(**changes: Any) -> Recipe:
    return _config(**{f"vision_config__{name}": value for name, value in changes.items()})


def _images(**changes: Any) -> Recipe:
    return _fields("processor_config.json", **{f"image_processor__{name}": value for name, value in changes.items()})


def _header(change: Callable[[dict[str, Any]], Any], length: int | None = None) -> Recipe:
    """Change the header of the weights, and write it with its length or another one."""

    def rewrite(folder: Path) -> None:
        data = (folder / _WEIGHTS).read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        text = change(header)
        text = (text if isinstance(text, str) else json.dumps(header)).encode()
        _write(folder / _WEIGHTS, struct.pack("<Q", len(text) if length is None else length) + text + data[8 + size :])

    return rewrite


def _long_header(folder: Path) -> None:
    with (folder / _WEIGHTS).open("r+b") as file:
        file.write(struct.pack("<Q", 100_000_000))
        file.truncate(200_000_000)


def _tensor(**facts: Any) -> Recipe:
    return _header(lambda header: next(value for key, value in header.items() if key[0] != "_").update(facts))


def _index(file: str) -> Recipe:
    def write(folder: Path) -> None:
        (folder.parent / "outside.safetensors").write_bytes((folder / _WEIGHTS).read_bytes())
        (folder / _WEIGHTS).rename(folder / "weights.safetensors")
        _write(folder / _INDEX, json.dumps({"metadata": {}, "weight_map": {"a": file, "b": "weights.safetensors"}}))

    return write


def _adapter(folder: Path) -> None:
    (folder / _WEIGHTS).unlink()
    _write(folder / "adapter_config.json", '{"base_model_name_or_path": "/etc"}')


def _special(file: str, make: Callable[[Path], Any]) -> Recipe:
    def replace(folder: Path) -> None:
        (folder / file).unlink()
        make(folder / file)

    return replace


def _sparse(file: str) -> Recipe:
    def grow(folder: Path) -> None:
        with (folder / file).open("r+b") as handle:
            handle.truncate(1 << 30)

    return grow


def _tokenizer_steps(folder: Path) -> None:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    _fields("tokenizer.json", normalizer={"type": "Sequence", "normalizers": [step] * 10})(folder)
    _fields("tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")(folder)


def _processor_class(folder: Path) -> None:
    for file in ("processor_config.json", "tokenizer_config.json"):
        _fields(file, processor_class="LlavaProcessor")(folder)


def _twice(folder: Path) -> None:
    text = (
        (folder / "config.json")
        .read_text()
        .replace('"model_type": "gemma3",', '"model_type": "x", "model_type": "gemma3",')
    )
    _write(folder / "config.json", text)


RECIPES: dict[str, Recipe] = {
    "template: repeat": _template("{{ 'a' * 20000000000 }}"),
    "template: format": _template("{{ '%20000000000d' % 1 }}"),
    "template: str.format": _template("{{ '{:20000000000}'.format(1) }}"),
    "template: power": _template("{{ 9 ** (9 ** 9) }}"),
    "template: center": _template("{{ 'a' | center(10 ** 10) }}"),
    "template: join": _template("{{ range(100000) | join('x' * 1000000) }}"),
    "template: replace": _template("{{ ('a' * 1000000) | replace('', 'b' * 1000000) }}"),
    "template: doubled text": _doubled("ns.x + ns.x"),
    "template: doubled list": _doubled("[ns.x, ns.x]", "[1]"),
    "template: squared": _doubled("ns.x * ns.x", "3"),
    "template: nested loops": _template(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "template: recursion": _template("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}"),
    "template: long output": _template("{% for a in range(99999) %}" + "x" * 100_000 + "{% endfor %}"),
    "template: words": _template("{{ lipsum(n=1000000000) }}"),
    "template: syntax": _template("{% for %}"),
    "template: undefined": _template("{{ nothing.x }}"),
    "template: nesting": _template("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}"),
    "template: huge": _template(" " * 50_000_000),
    "template: not UTF-8": _content("chat_template.jinja", b"\xff\xfe{{ x }}"),
    "processor: size 30,000": _images(size={"height": 30_000, "width": 30_000}),
    "processor: size of a text": _images(size="large"),
    "processor: 10^9 image tokens": _fields("processor_config.json", image_seq_length=10**9),
    "processor: negative mean": _images(image_mean=[-1e300] * 3),
    "processor: zero deviation": _images(image_std=[0, 0, 0]),
    "processor: one channel": _images(image_mean=[0.5]),
    "processor: infinite factor": _content("preprocessor_config.json", '{"rescale_factor": 1e999}'),
    "processor: another class": _processor_class,
    "config: a list": _content("config.json", "[]"),
    "config: nesting": _content("config.json", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    "config: duplicate": _twice,
    "config: not UTF-8": _content("config.json", b'{"model_type": "\xff"}'),
    "config: 1 GB": _sparse("config.json"),
    "config: cut off": _content("config.json", '{"model_type": "gem'),
    "config: 10^9 layers": _text(num_hidden_layers=10**9, layer_types=None),
    "config: 100 layers": _text(num_hidden_layers=100, layer_types=None),
    "config: 10^9 hidden": _text(hidden_size=10**9),
    "config: other hidden": _text(hidden_size=65_536),
    "config: 10^9 tokens": _text(vocab_size=10**9),
    "config: huge integer": _text(vocab_size=10**400),
    "config: no heads": _text(num_attention_heads=0),
    "config: negative heads": _text(head_dim=-8),
    "config: no window": _text(sliding_window=0),
    "config: NaN": _text(rms_norm_eps=float("nan")),
    "config: text for a number": _text(hidden_size="256"),
    "config: no text": _config(text_config=[]),
    "config: rope": _text(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": -1.0}}),
    "config: vision layers": _vision(num_hidden_layers=10**6),
    "config: vision size": _vision(image_size=30_000),
    "config: no patches": _vision(patch_size=100_000),
    "config: image tokens": _config(mm_tokens_per_image=10**9),
    "config: activation": _text(hidden_activation="no such function"),
    "generation: tokens": _fields("generation_config.json", eos_token_id=[10**12]),
    "generation: a list": _content("generation_config.json", "[1]"),
    "tokenizer: a list": _content("tokenizer.json", "[]"),
    "tokenizer: nesting": _content("tokenizer.json", '{"model": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    "tokenizer: 1 GB": _sparse("tokenizer.json"),
    "tokenizer: growing texts": _tokenizer_steps,
    "tokenizer config: a list": _content("tokenizer_config.json", "[]"),
    "tokenizer config: types": _fields("tokenizer_config.json", bos_token=17, extra_special_tokens=7),
    "special tokens: a number": _content("special_tokens_map.json", "7"),
    "adapter": _adapter,
    "quantization: unknown": _config(quantization_config={"quant_method": ["x"] * 1000}),
    "quantization: a list": _config(quantization_config=["gptq"] * 1000),
    "code": _config(attn_implementation="someone/kernel"),
    "index: parent": _index("../outside.safetensors"),
    "index: absolute": _index("/dev/zero"),
    "index: missing": _index("other.safetensors"),
    "index: a list": _content(_INDEX, '{"weight_map": []}'),
    "weights: FIFO": _special(_WEIGHTS, os.mkfifo),
    "weights: device": _special(_WEIGHTS, lambda path: path.symlink_to("/dev/zero")),
    "weights: directory": _special(_WEIGHTS, Path.mkdir),
    "weights: link": _special(_WEIGHTS, lambda path: path.symlink_to(mini_directory() / _WEIGHTS)),
    "weights: link to itself": _special(_WEIGHTS, lambda path: path.symlink_to(path.name)),
    "config: FIFO": _special("config.json", os.mkfifo),
    "template: FIFO": _special("chat_template.jinja", os.mkfifo),
    "tokenizer: device": _special("tokenizer.json", lambda path: path.symlink_to("/dev/zero")),
    "header: huge": _long_header,
    "header: beyond the file": _header(lambda _: None, length=1 << 40),
    "header: overlap": _tensor(data_offsets=[0, 1 << 34]),
    "header: negative": _tensor(data_offsets=[-8, 8]),
    "header: type": _tensor(dtype="F9"),
    "header: shape": _tensor(shape=[1 << 39, 1 << 39]),
    "header: duplicate": _header(lambda header: json.dumps(header)[:-1] + ', "x": 1, "x": 2}'),
    "header: not an object": _header(lambda _: "[]"),
    "weights: cut off": lambda folder: os.truncate(folder / _WEIGHTS, 100_000),
    "weights: empty": _content(_WEIGHTS, b""),
}
"""What is changed, by name."""

_MODEL = ("--model", "model", "--device", "cpu")
_SMALL = ("--kv-cache-gb", "0.1", "--max-num-seqs", "2")
_COMMANDS = {
    "ask": ["ask", "doc.png", "-p", "What?", "--max-new-tokens", "1", *_MODEL],
    "serve": ["serve", "--port", "0", *_SMALL, *_MODEL],
    "batch": ["batch", "doc.png", "-p", "What?", "-o", "out.jsonl", "--max-new-tokens", "1", *_SMALL, *_MODEL],
    "quantize": ["quantize", "model", "quantized", "--quantization", "int8", "--no-verify"],
    "plan": ["plan", "--model", "model", "--gpu", "l4", "--count", "2"],
    "generate": ["ask", "doc.png", "-p", "What?", "--max-new-tokens", "1", "--runner", "generate", *_MODEL],
    "pipeline": ["ask", "doc.png", "-p", "What?", "--max-new-tokens", "1", "--runner", "pipeline", *_MODEL],
}


def checkpoint_cases() -> list[tuple[str, str]]:
    """Return (recipe, command) of each case: ``ask`` on every recipe, then another command on every recipe."""
    others = cycle(name for name in _COMMANDS if name != "ask")
    return [(recipe, "ask") for recipe in RECIPES] + [(recipe, next(others)) for recipe in RECIPES]


def run_checkpoints(part: Part, scratch: Path) -> None:
    """Run the cases of a part, each on a new copy of the checkpoint."""
    write_samples(scratch / "s", count=1)
    cases = checkpoint_cases()
    for index in part.cases:
        recipe, command = cases[index]
        folder = scratch / "work"
        folder.mkdir()
        shutil.copy(next((scratch / "s").glob("*.png")), folder / "doc.png")
        shutil.copytree(mini_directory(), folder / "model")
        RECIPES[recipe](folder / "model")
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        memory = _MEMORY + pages * os.sysconf("SC_PAGE_SIZE")
        ended = run_child(panscan(_COMMANDS[command]), folder, deadline=_DEADLINE, memory=memory)
        shutil.rmtree(folder)
        case = Case(
            index,
            recipe.partition(":")[0],
            command,
            _outcome(ended, command),
            _detail(ended),
            ended.code,
            round(ended.seconds, 2),
            round(ended.peak_mb),
        )
        part.add(case, {"err": ended.err.encode()} if case.failed else None)


def _outcome(ended: Ended, command: str) -> str:
    """Return what became of a command: a hostile checkpoint is refused in one line, with exit code 2 or 3."""
    outcome = outcome_of(ended)
    if ended.peak_mb > _MEMORY / 1e6:
        return "too much memory"
    if outcome == "answered" and command not in ("plan", "quantize"):  # which read no tokenizer and no template
        return "accepted"
    if outcome == "refused" and ended.code not in (2, 3):
        return "wrong code"
    lines = [line for line in ended.err.splitlines() if line.startswith("panscan: ")]
    return "no single message" if outcome == "refused" and len(lines) != 1 else outcome


def _write(path: Path, data: str | bytes) -> None:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
