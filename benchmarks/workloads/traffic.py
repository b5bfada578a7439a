"""Traffic: W1's pages with each way to choose tokens in turns. What sampling, log-probabilities and JSON cost.

    python -m benchmarks.workloads.traffic --model-shape 4b --random-weights --repeats 3 --output traffic.json
    python -m benchmarks.workloads.traffic --model tiny --num-requests 4 --max-new-tokens 8 --output traffic.json

The first line reproduces records/traffic-4b.json on an H200. The last one checks on a CPU that the workload runs. All
kinds answer the same questions with the same number of tokens, prefix caching off. Each round has one turn of every
kind, and the next round begins with another kind; the ratio of a round is a kind's throughput over that of the greedy
turn of the same round. The schema is an array that cannot end before the maximum of tokens. A model with random weights
has a bundled tokenizer, whose vocabulary is far smaller than Gemma's 262,144: masks of a real checkpoint cost more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.workloads.common import Asked, ask, base_record, open_runners, parse, save, say, verdicts
from benchmarks.workloads.figures import spread
from benchmarks.workloads.turns import turn_of, with_tokens
from panscan.core import Request, Sampling, SettingError
from panscan.runners.engine import EngineRunner

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
_SCHEMA = json.dumps({"type": "array", "items": _LINE, "minItems": 200})
_ONE_IN = 16


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
        "logprobs": all_with(replace(free, logprobs=5)),
        "json": all_with(schema),
        "json_one_in_16": [
            replace(request, sampling=free if index % _ONE_IN else schema) for index, request in enumerate(requests)
        ],
    }


def measure(runner: EngineRunner, kinds: dict[str, list[Request]], repeats: int) -> dict[str, Any]:
    """Return all turns of each kind, and the ratios to the greedy turn of the same round; the first round warms up."""
    names = list(kinds)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(repeats + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            say(f"round {number} of {repeats}: {name}")
            turn = turn_of(runner.run, kinds[name], runner)
            tokens = turn["output_tokens_per_s"] * turn["seconds"]
            expected = sum(request.sampling.max_new_tokens for request in kinds[name])
            if round(tokens) != expected:
                raise SettingError(f"{name}: {tokens:.0f} output tokens, not {expected}: lower --max-new-tokens")
            if number:
                turns[name].append(turn)
    speeds = {name: [turn["requests_per_s"] for turn in done] for name, done in turns.items()}
    ratios = {
        name: spread([speed / greedy for speed, greedy in zip(speeds[name], speeds["greedy"], strict=True)])
        for name in names
    }
    return {"turns": turns, "ratio_to_greedy": ratios}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, compare, write the record."""
    work = parse("traffic", __doc__ or "", argv, requests=128, max_new_tokens=128, prefix_caching=False)
    if work.runners != ("engine",):
        raise SettingError("--runner takes engine: the kinds of traffic are requests to the engine")
    runner = open_runners(work)["engine"]
    assert isinstance(runner, EngineRunner)  # as named
    requests = ask(work, runner.loaded, [Asked(seed, seed) for seed in range(work.num_requests)])
    verdict = verdicts(work, {"engine": runner}, requests)
    [one] = runner.run([with_tokens(requests[0], 1)])
    measured = measure(runner, kinds_of(requests), work.repeats)
    for name, ratio in measured["ratio_to_greedy"].items():
        say(f"{name}: {ratio['median']:.3f} of greedy")
    record = base_record(work, runner.loaded, one) | {"vocabulary": len(runner.loaded.reader.prompts.tokenizer)}
    save(work, record | {"verdict": verdict, "measured": {"engine": measured}})
    runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
