"""A level as the JSON of ``vllm bench serve --save-result``, by vLLM's definitions, for tools that read it.

They differ from those of panscan's reports: the first token is the first event with a choice, which may only name the
role; the last one may only have the finish reason; goodput ignores the wait for ``--max-concurrency``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import accumulate, pairwise

import numpy as np

from panscan.core.foreign import JsonObject
from panscan.load.chat import RequestOutcome
from panscan.load.generator import LevelResult
from panscan.load.options import LoadLevel, LoadOptions


def vllm_result(model: str, options: LoadOptions, level: LoadLevel, result: LevelResult) -> JsonObject:
    """Return a level as vLLM writes it: times are those of successful requests, 0 where there are none.

    Args:
        model: name of the model at the endpoint.
        options: percentiles, times and limits.
        level: what was asked for.
        result: what came of it.
    """
    done = [outcome for outcome in result.exchanges if outcome.error is None and outcome.events]
    seconds = max(result.ended - result.started, 1e-9)
    prompt_tokens = sum(outcome.prompt_tokens or 0 for outcome in done)
    output_tokens = sum(outcome.output_tokens for outcome in done)
    times = [_times(outcome) for outcome in done]
    good = sum(all(1e3 * time[name] <= limit for name, limit in options.goodput.items()) for time in times)
    # Of two changes at the same time, the end of a request comes first.
    changes = sorted(change for outcome in done for change in ((outcome.accepted, 1), (outcome.events[-1], -1)))
    fields: JsonObject = {
        "date": datetime.fromtimestamp(result.started).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai-chat",
        "backend": "openai-chat",
        "label": None,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": len(result.exchanges),
        "request_rate": "inf" if level.rate is None else level.rate,
        "burstiness": level.burstiness or 1.0,
        "max_concurrency": level.max_concurrency,
        "duration": seconds,
        "completed": len(done),
        "failed": len(result.exchanges) - len(done),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / seconds,
        "request_goodput": good / seconds if options.goodput else None,
        "output_throughput": output_tokens / seconds,
        "total_token_throughput": (prompt_tokens + output_tokens) / seconds,
        "max_output_tokens_per_s": _most_per_second(done),
        "max_concurrent_requests": max(accumulate(change for _, change in changes), default=0),
    }
    samples: dict[str, Sequence[float]] = {
        "ttft": [time["ttft"] for time in times],
        "tpot": [time["tpot"] for time, outcome in zip(times, done, strict=True) if outcome.output_tokens > 1],
        "itl": [later - sooner for outcome in done for sooner, later in pairwise(outcome.events)],
        "e2el": [time["e2el"] for time in times],
        "client_queue_time": [outcome.queued for outcome in done],
    }
    names = [*options.percentile_metrics, *(["client_queue_time"] if level.max_concurrency is not None else [])]
    return fields | {key: value for name in names for key, value in _statistics(name, samples[name], options).items()}


def _times(outcome: RequestOutcome) -> Mapping[str, float]:
    """Return the seconds that vLLM compares with ``--goodput``; TPOT is 0 for a single token."""
    ttft, latency = (outcome.events[index] - outcome.accepted for index in (0, -1))
    tpot = (latency - ttft) / (outcome.output_tokens - 1) if outcome.output_tokens > 1 else 0.0
    return {"ttft": ttft, "tpot": tpot, "e2el": latency}


def _most_per_second(done: Sequence[RequestOutcome]) -> float:
    """Return the most events in one of the seconds since the first request."""
    start = min((outcome.accepted for outcome in done), default=0.0)
    seconds = [int(event - start) for outcome in done for event in outcome.events]
    return float(np.bincount(seconds).max()) if seconds else 0.0


def _statistics(name: str, seconds: Sequence[float], options: LoadOptions) -> dict[str, float]:
    sample = 1e3 * np.array(seconds or [0.0])
    return {
        f"mean_{name}_ms": float(sample.mean()),
        f"median_{name}_ms": float(np.median(sample)),
        f"std_{name}_ms": float(sample.std()),
        **{f"p{rank:g}_{name}_ms": float(np.percentile(sample, rank)) for rank in options.metric_percentiles},
    }
