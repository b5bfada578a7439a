"""A load level as the JSON that ``vllm bench serve --save-result`` writes, for tools that read it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from panscan.load.chat import Endpoint, RequestOutcome
from panscan.load.generator import LevelResult
from panscan.load.options import LoadLevel, LoadOptions


def vllm_result(
    level: LoadLevel, result: LevelResult, endpoint: Endpoint, options: LoadOptions, goodput: float | None
) -> dict[str, Any]:
    """Return the metrics of a level under vLLM's key names.

    As in vLLM, times are those of successful requests, and a sample without values has the mean and percentiles 0.

    Args:
        level: measured level.
        result: outcomes of its requests.
        endpoint: endpoint that received them.
        options: options of the run.
        goodput: requests per second that meet the limits of ``options``; unlike in vLLM, the wait for a slot of
            ``--max-concurrency`` counts.
    """
    done = [outcome for outcome in result.exchanges if outcome.error is None]
    seconds = max(result.ended - result.started, 1e-9)
    prompt_tokens = sum(outcome.prompt_tokens or 0 for outcome in done)
    output_tokens = sum(outcome.output_tokens for outcome in done)
    changes = sorted(change for outcome in result.exchanges for change in ((outcome.accepted, 1), (outcome.end, -1)))
    fields: dict[str, Any] = {
        "date": datetime.fromtimestamp(result.started).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai-chat",
        "backend": "openai-chat",
        "label": None,
        "model_id": endpoint.model,
        "tokenizer_id": endpoint.model,
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
        "request_goodput": goodput if options.goodput else None,
        "output_throughput": output_tokens / seconds,
        "total_token_throughput": (prompt_tokens + output_tokens) / seconds,
        "max_concurrent_requests": max(accumulate(change for _, change in changes), default=0),
    }
    for name in options.percentile_metrics:
        values = [value for outcome in done for value in _times(outcome)[name]]
        fields |= _statistics(name, values, options.metric_percentiles)
    if level.max_concurrency is not None:
        waits = [outcome.queued * 1e3 for outcome in done]
        fields |= _statistics("client_queue_time", waits, options.metric_percentiles)
    return fields


def _times(exchange: RequestOutcome) -> dict[str, list[float]]:
    """Return the values of each metric of a request, in milliseconds."""
    stamps, count = exchange.tokens, exchange.output_tokens
    if not stamps:
        return {"ttft": [], "tpot": [], "itl": [], "e2el": []}
    tpot = [1e3 * (stamps[-1] - stamps[0]) / (count - 1)] if count > 1 else []
    return {
        "ttft": [1e3 * (stamps[0] - exchange.accepted)],
        "tpot": tpot,
        "itl": [1e3 * (later - earlier) for earlier, later in pairwise(stamps)],
        "e2el": [1e3 * (stamps[-1] - exchange.accepted)],
    }


def _statistics(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    sample = np.array(values or [0.0])
    return {
        f"mean_{name}_ms": float(sample.mean()),
        f"median_{name}_ms": float(np.median(sample)),
        f"std_{name}_ms": float(sample.std()),
        **{f"p{percentile:g}_{name}_ms": float(np.percentile(sample, percentile)) for percentile in percentiles},
    }
