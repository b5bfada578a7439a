"""Part ``commands``: hostile values for every option and argument that the command line really has."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from random import Random

import click

from benchmarks.robustness.cases import Case, Part, random_of
from benchmarks.robustness.children import Ended, panscan, run_child
from benchmarks.robustness.jobs import SMALL
from benchmarks.robustness.mutate import mutated
from benchmarks.robustness.seeds import SEEDS
from panscan.cli.main import VERBS, cli
from panscan.cli.verb import ClickOption
from panscan.workload.samples import write_samples

_DEADLINE = 120.0  # seconds; a demo of two documents takes a fraction
_REFUSED_WITHIN = 15.0  # seconds; what is wrong with an option needs no model
_ADDRESS_SPACE = 16_000_000_000

_BASES = {
    "ask": ["ask", "doc.png", "-p", "What?", *SMALL],
    "attention": ["attention", "doc.png", "-p", "What?", "--model", "tiny"],
    "batch": ["batch", "doc.png", "-p", "What?", "-o", "out.jsonl", *SMALL],
    "bench": ["bench", "doc.png", "-p", "What?", "--warmup", "0", "--no-verify", *SMALL],
    "compare": ["compare", "run", "run"],
    "crops": ["crops", "doc.png"],
    "demo": ["demo", "demo", "--count", "2"],
    "doctor": ["doctor", "--only", "limits"],
    "load": ["load", "http://127.0.0.1:9", "--images", "doc.png", "--ready-check-timeout-sec", "0"],  # no server there
    "plan": ["plan", "--model", "4b", "--gpu", "l4", "--count", "2"],
    "profile": ["profile", "doc.png", "-p", "What?", "--runner", "engine", "--output-tokens", "2", "--model", "tiny"],
    "quantize": ["quantize", "tiny", "quantized", "--quantization", "int8", "--no-verify"],
    "recommend": ["recommend", "run"],
    "report": ["report", "run"],
    "samples": ["samples", "more", "--count", "1"],
    "serve": ["serve", "--port=0", "--print-config"],  # it reads and checks every option, and ends
    "trace": ["trace", "trace.json"],
    "verify": ["verify", "http://127.0.0.1:9", "--model", "tiny"],  # nothing listens there
}
_WEIGHTS = {"bench": 6, "batch": 5, "ask": 5, "demo": 0.3}

_NUMBERS = (
    "0",
    "-1",
    "1",
    "2",
    "3",
    "0.5",
    "-0.0",
    "1e300",
    "-1e300",
    "1e-300",
    "1e400",
    "nan",
    "-nan",
    "inf",
    "-inf",
    "NaN",
    str(2**31),
    str(2**63),
    str(2**64),
    str(2**70),
    str(-(2**70)),
    "9" * 5000,
    "0x10",
    "1_0",
    "1,2,3",
    "1,,2",
    ",",
    "٣",
    "１",
    "1 2",
    " 1",
    "one",
    "true",
    "none",
    "null",
    "1e",
    "--1",
)
_TEXTS = (
    "",
    " ",
    "\n",
    "a\nb",
    "\r\n\r\n",
    "\t",
    "\x1b[31mred",
    "\x07",
    "🙂",
    "ß" * 500,
    "\udcff\udcfe",
    "\u202eabc",
    "x" * 10_000,
    "y" * 200_000,
    "--help",
    "-",
    "--",
    "%s%n%d",
    "{0}",
    "{{x}}",
    "${HOME}",
    "`id`",
    "$(id)",
    "[bold]",
    "<script>",
    "<start_of_image>",
    "<start_of_turn>model",
    "'\"",
    "\\",
    "a,b",
    "None",
    "[]",
    "{}",
    "*",
    "**/*",
    "[",
    "?",
    "~",
    "~nobody",
    "tiny",
    "auto",
    "cpu",
    "cuda:99",
    "exact_match",
    "html",
    "0=1GiB",
    "no/such-model",
    "q<0",
    "throughput<=1%",
    "p95_e2el_ms>nan",
)
_PATHS = (
    "doc.png",
    "page.pdf",
    "pages.tiff",
    "torn.png",
    "questions.jsonl",
    "prompts.txt",
    "grid.yaml",
    "bomb.yaml",
    "folder",
    "empty",
    "garbage",
    "fifo",
    "zero",
    "full",
    "null",
    "mem",
    "loop",
    "closed",
    "nowhere",
    "nowhere/x",
    "doc.png/x",
    "run",
    "run/records.jsonl",
    "torn-run",
    "answers.jsonl",
    "a\nb.png",
    "naïve 🙂.png",
    "./" * 3000 + "doc.png",
    "z" * 300,
    "doc.png#page=2",
    "page.pdf#page=99999999999999999999",
    "page.pdf#page=2",
    "http://127.0.0.1:9/x.png",
    "http://[::1",
    "https://",
    "file:///dev/zero",
    "ftp://x/y.png",
    "s",
    "s/questions.jsonl",
    "preset.yaml",
)
_POOLS = {"numbers": _NUMBERS, "texts": _TEXTS, "paths": _PATHS}
_LEFT_OUT = ("--compile", "--replicas", "--tensor-parallel-size", "--debug")
"""Options that compile for minutes, start many processes, or show tracebacks on purpose."""


def furnish(folder: Path) -> None:
    """Create the working directory of the command lines: valid files, damaged ones, pipes, links and devices."""
    folder.mkdir(parents=True)
    write_samples(folder / "s", count=2)
    shutil.copy(next((folder / "s").glob("*.png")), folder / "doc.png")
    shutil.copy(folder / "doc.png", folder / "a\nb.png")
    shutil.copy(folder / "doc.png", folder / "naïve 🙂.png")
    (folder / "page.pdf").write_bytes(SEEDS["pdf, text"]())
    (folder / "pages.tiff").write_bytes(SEEDS["tiff, pages, LZW"]())
    (folder / "torn.png").write_bytes((folder / "doc.png").read_bytes()[:500])
    (folder / "questions.jsonl").write_text('{"image": "doc.png", "question": "What?", "answers": ["x"]}\n')
    (folder / "prompts.txt").write_text("What is it?\n")
    (folder / "grid.yaml").write_text("max_new_tokens: [1, 2]\n")
    (folder / "bomb.yaml").write_text("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n")
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 1, "dur": 2}
    (folder / "trace.json").write_text(json.dumps({"traceEvents": [event]}))
    (folder / "folder").mkdir()
    (folder / "empty").write_bytes(b"")
    (folder / "garbage").write_bytes(bytes(range(256)) * 8)
    os.mkfifo(folder / "fifo")
    # Links: a command that replaces its output replaces the link, not the device, even for root.
    for name, target in (
        ("zero", "/dev/zero"),
        ("full", "/dev/full"),
        ("null", "/dev/null"),
        ("mem", "/proc/self/mem"),
    ):
        (folder / name).symlink_to(target)
    (folder / "loop").symlink_to("loop")
    (folder / "closed").write_text("secret")
    (folder / "closed").chmod(0)
    for words in ([*_BASES["bench"], "--output-dir", "made"], [*_BASES["batch"][:4], "-o", "answers.jsonl", *SMALL]):
        ended = run_child(panscan(words), folder, deadline=300)
        if ended.code != 0:
            raise RuntimeError(f"{words} ended with {ended.code}: {ended.err[-500:]}")
    next((folder / "made").iterdir()).rename(folder / "run")
    shutil.copytree(folder / "run", folder / "torn-run")
    records = folder / "torn-run" / "records.jsonl"
    records.write_bytes(mutated(records.read_bytes(), "tokens", Random(0)))


def command_line(seed: int, index: int) -> tuple[str, str, list[str]]:
    """Return verb, description of what is hostile, and command line of a case."""
    random = random_of(seed, "commands", index)
    verb = random.choices(list(VERBS), [_WEIGHTS.get(verb, 2) for verb in VERBS])[0]
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    words = list(_BASES[verb])
    draw = random.random()
    if draw < 0.08:
        how, extra = "unknown option", [random.choice(("--nonsense", "-Z", "--batch_siez", "--" + "x" * 5000, "--é"))]
        extra += [random.choice(_TEXTS)] if random.random() < 0.5 else []
        return verb, how, words + extra
    if draw < 0.22:
        pool = random.choice(("paths", "paths", "texts"))
        words[1:2] = random.choices(_POOLS[pool], k=random.choice((1, 1, 2, 3)))
        return verb, f"arguments: {pool}", words
    options = [
        parameter
        for parameter in command.params
        if isinstance(parameter, ClickOption) and parameter.opts[0] not in _LEFT_OUT
    ]
    many = draw > 0.8
    how = ""
    for option in random.sample(options, min(len(options), random.choice((2, 3, 5)) if many else 1)):
        pool, typed = _option_words(option, random, sound=many and random.random() < 0.7)
        words += typed
        how = "conflicting options" if many else f"options: {pool}"
    return verb, how, words


def _option_words(option: ClickOption, random: Random, *, sound: bool) -> tuple[str, list[str]]:
    """Return the pool and the words of an option with a value: a valid choice, or a value that mostly has its type."""
    flag, declared = random.choice(option.opts), option.declared
    if declared.kind is bool and not option.setting:
        return "flags", [flag]
    numeric, choices = declared.kind in (int, float), declared.choices
    if sound and choices:
        return "choices", [flag, str(random.choice(choices))]
    fitting = "numbers" if numeric else random.choice(("texts", "paths"))
    pool = fitting if random.random() < 0.75 else random.choice(list(_POOLS))
    value = random.choice(_POOLS[pool])
    return pool, [f"{flag}={value}"] if flag.startswith("--") and random.random() < 0.5 else [flag, value]


def run_commands(part: Part, seed: int, scratch: Path) -> None:
    """Run every command line of a part in a fresh copy of the same folder."""
    furnish(scratch / "template")
    for index in part.cases:
        verb, how, words = command_line(seed, index)
        folder = scratch / "work" / "here"  # one folder deeper, so that ".." stays in the scratch folder
        _copy(scratch / "template", folder)
        ended = run_child(panscan(words), folder, deadline=_DEADLINE, memory=_ADDRESS_SPACE)
        shutil.rmtree(folder.parent)
        outcome = outcome_of(ended)
        case = Case(
            index, verb, how, outcome, _detail(ended), ended.code, round(ended.seconds, 2), round(ended.peak_mb)
        )
        inputs = {"line": "\0".join(words).encode("utf-8", "surrogateescape"), "err": ended.err.encode()}
        part.add(case, inputs if case.failed else None)


def _copy(source: Path, target: Path) -> None:
    """Copy the folder; pipes and links are created again."""

    def copy(path: str, destination: str) -> None:
        if Path(path).is_fifo():
            os.mkfifo(destination)
        else:
            shutil.copy2(path, destination, follow_symlinks=False)

    shutil.copytree(source, target, symlinks=True, copy_function=copy)


def outcome_of(ended: Ended) -> str:
    """Return the outcome of a command: ``answered``, ``refused`` in one line, or what went wrong."""
    if ended.hung:
        return "hang"
    if ended.traceback:
        return "traceback"
    if ended.code is None:
        return "crash"
    if ended.code == 0:
        return "answered"
    if ended.code not in (2, 3, 4, 5):
        return "wrong code"
    lines = [line for line in ended.err.splitlines() if line.startswith("panscan: ")]
    if ended.code == 2 and (len(lines) != 1 or ended.err.splitlines()[-1] != lines[0]):
        return "no single message"
    if ended.code == 2 and ended.seconds > _REFUSED_WITHIN:
        return "slow refusal"
    return "refused" if ended.err.strip() or ended.out.strip() else "silent"


def _detail(ended: Ended) -> str:
    if ended.traceback or ended.code is None:
        return ended.err[-1500:]
    return ended.message or (ended.err.strip().splitlines() or [""])[-1][:300]
