"""Traffic: W1's pages with each way to choose tokens in turns. What sampling, log-probabilities and JSON cost.

    python -m benchmarks.workloads.traffic --model-shape 4b --random-weights --repeats 3 --output traffic.json
    python -m benchmarks.workloads.traffic --model-shape 4b --random-weights --brief --runner vllm --output vllm.json
    python -m benchmarks.workloads.traffic --model tiny --num-requests 4 --max-new-tokens 8 --output traffic.json

The first line reproduces records/traffic-4b.json. The last one checks on a CPU that the workload runs. With --brief,
which vLLM requires, there are only the kinds ``greedy``, ``gemma_defaults`` and ``json``, and no arrivals. All
kinds answer the same questions with the same number of tokens, prefix caching off. Each round has one turn of every
kind, and the next round begins with another kind; the ratio of a round is a kind's throughput over that of the greedy
turn of the same round. The schema is an array that cannot end before the maximum of tokens; its forced tokens are
sampled except in the turns of ``json_forced``. A model with random weights has a bundled tokenizer of 1,024 tokens, to
which words are added up to the size of Gemma's, so that masks cost as much. At the end, requests arrive one by one
while all others decode: ``accepted_to_preparing_ms``.

For a comparison with older code, run the same file with ``PYTHONPATH`` set to that code: what it lacks is left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from threading import Event
from time import sleep
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.workloads.common import (
    RequestSeeds,
    Work,
    ask,
    base_record,
    open_runners,
    parse,
    save,
    say,
    shown,
    verdicts,
)
from benchmarks.workloads.figures import spread
from benchmarks.workloads.turns import turn_of, with_tokens
from panscan.core import Request, Result, Sampling, SettingError, TokenEvent
from panscan.model.checkpoint import Loaded
from panscan.model.support import require_supported
from panscan.runners.engine import EngineRunner
from panscan.runners.vllm import VllmRunner
from panscan.settings import Settings

_LINE = {
    "type": "object",
    "properties": {
        "item": {"type": "string", "maxLength": 24},
        "quantity": {"type": "integer", "minimum": 1, "maximum": 999},
        "price": {"type": "number"},
    },
    "required": ["item", "quantity", "price"],
    "additionalProperties": False,
}
_SCHEMA = json.dumps({"type": "array", "items": _LINE, "minItems": 60})
_ONE_IN = 16
_VOCABULARY = 262_144  # of Gemma 3
_PROBES = 32  # requests that arrive at full load
_GAP_SECONDS = 0.05  # between them
_BRIEF = ("greedy", "gemma_defaults", "json")


def kinds_of(requests: Sequence[Request]) -> dict[str, list[Request]]:
    """Return the same requests with each way to choose tokens."""
    free = requests[0].sampling
    schema = replace(free, ignore_eos=False, json_schema=_SCHEMA)

    def all_with(sampling: Sampling) -> list[Request]:
        return [replace(request, sampling=sampling) for request in requests]

    return {
        "greedy": all_with(free),
        "temperature": all_with(replace(free, temperature=1.0)),
        "gemma_defaults": all_with(replace(free, temperature=1.0, top_k=64, top_p=0.95)),
        "top_p": all_with(replace(free, temperature=1.0, top_p=0.95)),
        "penalties": all_with(replace(free, frequency_penalty=0.5, presence_penalty=0.5)),
        "logprobs": all_with(replace(free, logprobs=5)),
        "json": all_with(schema),
        "json_forced": all_with(schema),
        "json_one_in_16": [
            replace(request, sampling=free if index % _ONE_IN else schema) for index, request in enumerate(requests)
        ],
    }


def widen(loaded: Loaded) -> None:
    """Add words to the tokenizer of a model with random weights, up to Gemma's number of tokens."""
    tokenizer = loaded.reader.tokenizer
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = backend["model"]["vocab"]
    most = min(_VOCABULARY, loaded.model.config.get_text_config().vocab_size)
    first = 1 + max((*vocabulary.values(), *(token["id"] for token in backend["added_tokens"])))
    generator = np.random.default_rng(0)
    frequencies = 1 / np.arange(1, 27)  # as uneven as those of letters: words share their beginnings
    letters = (97 + generator.choice(26, (4 * most, 14), p=frequencies / frequencies.sum())).astype(np.uint8)
    lengths = generator.binomial(12, 0.5, 4 * most) + 1  # 7 on average
    words = dict.fromkeys(row[:length].tobytes().decode() for row, length in zip(letters, lengths, strict=True))
    new = (word for word in words if word not in vocabulary)
    vocabulary |= dict(zip(new, range(first, most), strict=False))
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(backend))


class ConstrainedVllm(VllmRunner):
    """vLLM with the widened tokenizer, and with a JSON schema for all requests while ``schema`` is set.

    Args:
        settings: settings of the runner.
        options: keyword arguments of ``vllm.LLM``.
    """

    schema: str | None = None

    def __init__(self, settings: Settings, options: Mapping[str, Any]) -> None:
        super().__init__(settings, options)
        if settings.random_weights:  # vLLM reads the tokenizer from this folder, which is the runner's own
            widen(self.loaded)
            self.loaded.reader.tokenizer.save_pretrained(self._source)

    def _generate(self, prompts: Sequence[dict[str, Any]], arguments: Sequence[dict[str, Any]]) -> list[Any]:
        if self.schema is not None:
            from vllm.sampling_params import StructuredOutputsParams

            arguments = [row | {"structured_outputs": StructuredOutputsParams(json=self.schema)} for row in arguments]
        return super()._generate(prompts, arguments)


def open_runner(work: Work) -> EngineRunner | ConstrainedVllm:
    """Return the runner that a command line names, ready to answer."""
    if work.runners == ("vllm",):
        require_supported(work.settings)
        vllm = ConstrainedVllm(work.settings, work.vllm_options)
        vllm.configure(work.settings)
        return vllm
    runner = open_runners(work)["engine"]
    assert isinstance(runner, EngineRunner)  # as named
    return runner


def prepare(runner: EngineRunner | ConstrainedVllm, kind: str, requests: Sequence[Request]) -> Sequence[Request]:
    """Set a runner's options for a kind, and return the requests as the runner takes them."""
    if isinstance(runner, EngineRunner):
        force(runner, on=kind == "json_forced")
        return requests
    runner.schema = requests[0].sampling.json_schema
    return [replace(request, sampling=replace(request.sampling, json_schema=None)) for request in requests]


def force(runner: EngineRunner, *, on: bool) -> None:
    """Switch forced tokens on or off. A second engine would not fit in the memory of the first."""
    loop = runner.engine._worker.loop
    if hasattr(loop.options, "force_tokens"):
        loop.options = replace(loop.options, force_tokens=on)


def arrivals(runner: EngineRunner, requests: Sequence[Request]) -> dict[str, float]:
    """Return percentiles of the time from acceptance to preparation, in milliseconds, of requests that arrive one by
    one while all others decode."""
    finished, decoding = SimpleQueue[Result](), [Event() for _ in requests]

    def notice(event: Event, _token: TokenEvent) -> None:
        event.set()

    for request, event in zip(requests, decoding, strict=True):
        runner.engine.start(request, partial(notice, event), finished.put)
    for event in decoding:
        event.wait()
    probes = SimpleQueue[Result]()
    for request in requests[:_PROBES]:
        runner.engine.start(with_tokens(request, 1), None, probes.put)
        sleep(_GAP_SECONDS)
    stamps = [probes.get().stamps for _ in requests[:_PROBES]]
    for _ in requests:
        finished.get()
    waits = [1e3 * (times.preparing - times.accepted) for times in stamps if times.preparing is not None]
    return {f"p{share}": float(np.percentile(waits, share)) for share in (50, 95, 100)}


def measure(runner: EngineRunner | ConstrainedVllm, kinds: dict[str, list[Request]], repeats: int) -> dict[str, Any]:
    """Return all turns of each kind, and the ratios to the greedy turn of the same round; the first round warms up."""
    names = list(kinds)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(repeats + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            say(f"round {number} of {repeats}: {name}")
            turn = turn_of(runner.run, prepare(runner, name, kinds[name]), runner)
            tokens = turn["output_tokens_per_s"] * turn["seconds"]
            expected = sum(request.sampling.max_new_tokens for request in kinds[name])
            if round(tokens) != expected:
                raise SettingError(f"{name}: {tokens:.0f} output tokens, not {expected}: lower --max-new-tokens")
            if number:
                turns[name].append(turn)
    speeds = {name: [turn["requests_per_s"] for turn in measured] for name, measured in turns.items()}
    ratios = {
        name: spread([speed / greedy for speed, greedy in zip(speeds[name], speeds["greedy"], strict=True)])
        for name in names
    }
    return {"turns": turns, "ratio_to_greedy": ratios}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, compare, write the record."""
    work = parse("traffic", __doc__ or "", argv, requests=128, max_new_tokens=128, prefix_caching=False)
    if work.runners not in (("engine",), ("vllm",)):
        raise SettingError("--runner takes engine or vllm: the kinds of traffic are requests to an engine")
    runner = open_runner(work)
    requests = ask(work, runner.loaded, [RequestSeeds(seed, seed) for seed in range(work.num_requests)])
    verdict = verdicts(work, {work.runners[0]: runner}, requests)
    if isinstance(runner, EngineRunner) and work.settings.random_weights:
        widen(runner.loaded)
    [result] = runner.run([with_tokens(requests[0], 1)])
    kinds = kinds_of(requests)
    measured = measure(runner, {name: kinds[name] for name in _BRIEF} if work.brief else kinds, work.repeats)
    for name, ratio in measured["ratio_to_greedy"].items():
        say(f"{name}: {ratio['median']:.3f} of greedy")
    if isinstance(runner, ConstrainedVllm):
        measured["arguments"] = shown(runner.arguments)
    elif not work.brief:
        longer = [with_tokens(request, 4 * work.settings.max_new_tokens) for request in requests]
        measured["accepted_to_preparing_ms"] = arrivals(runner, longer)
        say(f"accepted to preparing at full load: {measured['accepted_to_preparing_ms']['p95']:.1f} ms (p95)")
    record = base_record(work, runner.loaded, result) | {"vocabulary": len(runner.loaded.reader.tokenizer)}
    save(work, record | {"verdict": verdict, "measured": {work.runners[0]: measured}})
    runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
