"""A kit with which another project tests its server: a small checkpoint, pages, reference answers, and a script.

The script (:mod:`panscan.verify.kit_script`) needs neither panscan nor a model: the kit has log-probabilities of the
reference and of each known fault along the reference's answers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from itertools import chain
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

import panscan
from panscan.core import InputError, Request, SettingError
from panscan.core.activity import activity
from panscan.core.files import write_errors, write_file
from panscan.core.foreign import JsonObject
from panscan.model.bundled import mini_directory
from panscan.settings import Settings
from panscan.verdict.evidence import Distributions, coarse_kl, moved_margin
from panscan.verdict.judgement import CLOSE_RATIO, EXACT_RATIO, clear_margin
from panscan.verify.hypotheses import HYPOTHESES, REFERENCE
from panscan.verify.local import LocalModel, open_local
from panscan.workload.probes import kit_probes

_TOKENS = 8  # of an answer
_ASKED, _STORED = 5, 20  # log-probabilities per position: as many as every server reports, and of each computation
_COMPUTATIONS = sorted(
    (tried for tried in (REFERENCE, *HYPOTHESES) if not tried.approximate), key=lambda tried: len(tried.changes)
)
"""Fewest changes first: of computations that explain answers equally, the script names the first."""
_README = """\
# Test kit for servers of Gemma 3

Serve the model in `checkpoint/`, then run `python check.py http://127.0.0.1:8000` (Python 3.9 or later, no packages).
Exit code 0: the server computes what Transformers computes in float32 with eager attention. 1: it does not, and the
output names the likely fault.

The script asks about ten pages, each without pan and scan and with it (`mm_processor_kwargs` of chat completions; vLLM
needs `--trust-request-mm-kwargs`), greedily and with `top_logprobs: {asked}`. For a server that never crops, use
`--no-pan-and-scan`.

`kit.json` has, for each question, the reference's greedy answer, and the log-probabilities of the {stored} most
probable tokens at each of its positions, computed by the reference and with each known fault. An answer is compared up
to its first token that is not the reference's. The unit is the rounding noise of bfloat16: up to {close:g} times it is
correct, if no token differs that the reference clearly prefers and no known fault explains the answers better.

Written by panscan {version}. All files are under the Apache License 2.0 (`LICENSE`).
"""


@dataclass(frozen=True, slots=True)
class _KitAnswer:
    """A question, and the distributions of all computations along the reference's answer."""

    request: Request
    tokens: list[int]
    length: int
    computed: dict[str, Distributions]
    noisy: Distributions

    @property
    def truth(self) -> Distributions:
        """The reference's distributions."""
        return self.computed[REFERENCE.name]

    def divergences(self, other: Distributions) -> list[float]:
        """Return what a server that computes ``other`` would diverge by at each position, in nats."""
        reports = [{token: float(row[token]) for token in _best(row, _ASKED)} for row in other]
        return [coarse_kl(row, report) for row, report in zip(self.truth, reports, strict=True)]

    def question(self, local: LocalModel, margin: float) -> JsonObject:
        """Return what the script knows about the question, as JSON values."""
        second, first = np.partition(self.truth, -2)[:, -2:].T
        return {
            "name": self.request.id,
            "prompt": self.request.prompt,
            "mm_processor_kwargs": self.request.pan_and_scan.processor_kwargs(),
            "prompt_tokens": self.length,
            "noise": fmean(self.divergences(self.noisy)),
            "tokens": [_spelling(token, local) for token in self.tokens],
            "clear": (first - second > margin).tolist(),
            "log_probabilities": {
                name: [_reported(row, local) for row in rows] for name, rows in self.computed.items()
            },
        }


def export_kit(directory: Path, *, pages: Sequence[int] = range(10)) -> None:
    """Compute and write a kit, which is complete once ``kit.json`` exists.

    Args:
        directory: where to write it; created, or empty.
        pages: which of the ten pages, from 0.

    Raises:
        SettingError: the directory is not empty.
        InputError: the files cannot be written, or the installation lacks its licence.
    """
    licence = distribution("panscan").read_text("licenses/LICENSE")
    if licence is None:
        raise InputError("this installation of panscan lacks its LICENSE: install panscan again")
    with write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise SettingError(f"--export-kit {directory}: the directory is not empty: choose another path")
    with open_local(Settings(model="mini", device="cpu", dtype="fp32")) as local:
        assert local.view_size is not None  # it reads images
        probes, answers = [kit_probes(local.view_size)[page] for page in pages], []
        for number, pair in enumerate(probes, start=1):
            with activity(f"page {number} of {len(probes)}"):
                answers.append([_kit_answer(local, request) for request in pair])
        files = {f"pages/{number:02}.png": bytes(plain.images[0]) for number, (plain, _) in enumerate(probes, start=1)}
        kit = _kit(dict(zip(files, answers, strict=True)), local)
    readme = _README.format(asked=_ASKED, stored=_STORED, close=CLOSE_RATIO, version=panscan.__version__)
    files |= {
        "check.py": Path(__file__).with_name("kit_script.py").read_bytes(),
        "LICENSE": licence.encode(),
        "README.md": readme.encode(),
        "kit.json": json.dumps(kit).encode(),
    }
    with write_errors(directory):
        shutil.copytree(mini_directory(), directory / "checkpoint")
        (directory / "pages").mkdir()
    for name, data in files.items():
        write_file(directory / name, data)


def _kit_answer(local: LocalModel, request: Request) -> _KitAnswer:
    tokens = local.greedy(request, _TOKENS)
    computed = {fault.name: local.log_probabilities(request, tokens, fault) for fault in _COMPUTATIONS}
    truth = computed[REFERENCE.name]
    changed = {name: rows for name, rows in computed.items() if rows is truth or not np.array_equal(rows, truth)}
    length = local.prompt_tokens(request, REFERENCE)
    return _KitAnswer(request, tokens, length, changed, local.noise(request, tokens))


def _kit(pages: dict[str, list[_KitAnswer]], local: LocalModel) -> JsonObject:
    """Return the contents of ``kit.json``: fields of requests, limits, computations and questions."""
    answers = list(chain.from_iterable(pages.values()))

    def mean(rows: Iterable[Distributions]) -> float:
        return fmean(chain.from_iterable(map(_KitAnswer.divergences, answers, rows)))

    noise = mean(answer.noisy for answer in answers)
    margin = clear_margin(max(moved_margin(answer.truth, answer.noisy) for answer in answers))
    return {
        "version": 1,
        "fields": {"max_tokens": _TOKENS, "temperature": 0, "logprobs": True, "top_logprobs": _ASKED},
        "noise": noise,
        "limits": {"exact": EXACT_RATIO, "close": CLOSE_RATIO},
        "end_tokens": [local.tokens.text(token).decode() for token in sorted(local.tokens.eos_ids)],
        "correct": [fault.name for fault in _COMPUTATIONS if fault.equivalent],
        "computations": {
            fault.name: {
                "title": fault.title,
                "cause": fault.cause,
                "deviation": mean(answer.computed.get(fault.name, answer.truth) for answer in answers) / noise,
            }
            for fault in _COMPUTATIONS
        },
        "pages": [
            {"file": file, "questions": [answer.question(local, margin) for answer in asked]}
            for file, asked in pages.items()
        ],
    }


def _best(row: NDArray[np.float32], count: int) -> list[int]:
    best: list[int] = row.argsort()[::-1][:count].tolist()
    return best


def _spelling(token: int, local: LocalModel) -> str:
    """Return how the script spells a token: its text; nothing for an end token, of which servers write none."""
    return "" if token in local.tokens.eos_ids else local.tokens.text(token).decode("utf-8", "backslashreplace")


def _reported(row: NDArray[np.float32], local: LocalModel) -> dict[str, float]:
    """Return the most probable tokens with their log-probabilities; tokens of one spelling are one."""
    logprobs: dict[str, float] = {}
    for token in _best(row, _STORED):
        spelling = _spelling(token, local)
        logprobs[spelling] = round(float(np.logaddexp(logprobs.get(spelling, -np.inf), row[token])), 7)
    return logprobs
