"""Conversion between panscan's and vLLM's objects: arguments, results, observations. Does not import vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from panscan.core import PanscanError, Request, Result, Sampling, SettingError, Stamps, TokenLogprobs
from panscan.images.views import ViewPlan
from panscan.model.checkpoint import Reader
from panscan.model.observation import ForcedTokens, Observation
from panscan.model.prompt import Prompt, conversation
from panscan.settings import Settings

__all__ = [
    "TOP_LOGPROBS",
    "check_prompt",
    "llm_arguments",
    "observation_of",
    "prompt_ids",
    "result_of",
    "sampling_arguments",
]

TOP_LOGPROBS = 20
"""Log-probabilities per position for the verdict; vLLM's default limit."""
_SHARES = {"cuda": 0.9, "cpu": 0.4}  # vLLM's share of a device's memory; the verdict's output matrix needs some too
_IMAGES = 16  # maximum per prompt
_LONGEST = 32_768  # tokens per request: vLLM reserves memory for a request of the full context length

LogprobRow = Mapping[int, Any]
"""vLLM's log-probabilities of one position: token id to an object with ``logprob`` and ``rank`` (1 is the highest)."""


def llm_arguments(
    settings: Settings, source: str, dtype: torch.dtype, positions: int, *, images: bool, device: str
) -> dict[str, Any]:
    """Return the keyword arguments of ``vllm.LLM``.

    Args:
        settings: settings of the cell.
        source: directory or hub id of the checkpoint.
        dtype: dtype of the weights.
        positions: context length of the model.
        images: whether the checkpoint reads images.
        device: ``cuda`` or ``cpu``.
    """
    chosen: dict[str, Any] = {
        "model": source,
        "revision": settings.revision,
        "tokenizer_revision": settings.revision,
        "dtype": str(dtype).removeprefix("torch."),
        "load_format": "dummy" if settings.random_weights else "auto",
        "max_model_len": min(positions, _LONGEST),
        "gpu_memory_utilization": _SHARES[device],
        "enable_prefix_caching": True,
        "max_logprobs": TOP_LOGPROBS,
        "disable_log_stats": False,  # needed for the times of requests
    }
    if images:
        chosen["limit_mm_per_prompt"] = {"image": _IMAGES}
        chosen["mm_processor_kwargs"] = settings.pan_and_scan.processor_kwargs()
    if settings.vllm_attention is not None:
        chosen["attention_backend"] = settings.vllm_attention
    return chosen


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """Return the keyword arguments of ``vllm.SamplingParams``.

    Raises:
        SettingError: the request has a JSON schema.
    """
    if sampling.json_schema is not None:
        raise SettingError("runner vllm: json_schema is not supported; use the runner engine")
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or 0,
        "top_p": sampling.top_p or 1.0,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty or 1.0,
        "seed": sampling.seed,
        "ignore_eos": sampling.ignore_eos,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": sampling.logprobs,
    }


def prompt_ids(request: Request, reader: Reader) -> list[int]:
    """Return token ids with one placeholder per image, which vLLM replaces by the image blocks of its views.

    Raises:
        SettingError: the prompt is raw, or contains a special token that vLLM would interpret.
    """
    if request.raw:
        raise SettingError("runner vllm: raw prompts are not supported; use the runner generate")
    if (special := reader.prompts.special_in(request)) is not None:
        raise SettingError(
            f"runner vllm: the prompt contains {special}, which vLLM would interpret; use the runner generate"
        )
    text = reader.prompts.render(conversation(request))
    ids: list[int] = reader.tokenizer.encode(text, add_special_tokens=False)
    return ids


def result_of(request: Request, planned: tuple[Sequence[ViewPlan], Prompt], output: Any, stamps: Stamps) -> Result:
    """Return the result of vLLM's ``RequestOutput``.

    Args:
        request: answered request.
        planned: the request's views and prompt, as panscan plans them.
        output: vLLM's output with one completion.
        stamps: timestamps taken outside vLLM; token times are added.

    Raises:
        PanscanError: vLLM created a different prompt, or did not finish the answer.
    """
    plans, prompt = planned
    check_prompt(request, prompt.ids, output.prompt_token_ids)
    [answer] = output.outputs
    if answer.finish_reason not in ("stop", "length"):
        raise PanscanError(f"request {request.id!r}: vLLM did not finish it: {answer.finish_reason}")
    ids = list(answer.token_ids)
    _stamp(stamps, output.metrics, len(ids))
    return Result(
        id=request.id,
        text=answer.text,
        token_ids=ids,
        finish_reason=answer.finish_reason,
        views=sum(len(plan.views) for plan in plans),
        crops=sum(plan.crops for plan in plans),
        image_tokens=prompt.image_tokens,
        prompt_tokens=len(prompt.ids),
        stamps=stamps,
        cached_tokens=output.num_cached_tokens or 0,
        logprobs=_logprobs(ids, answer.logprobs, request.sampling.logprobs),
    )


def observation_of(
    forced_tokens: ForcedTokens,
    answer: Sequence[int],
    prompt_tokens: int,
    rows: Sequence[LogprobRow | None],
    vocabulary: int,
) -> Observation:
    """Return the observation from vLLM's ``prompt_logprobs`` of a prompt followed by the answer.

    Args:
        forced_tokens: prompt positions to return.
        answer: tokens appended to the prompt.
        prompt_tokens: length of the prompt without the answer.
        rows: per position, the distribution that predicts its token; None for the first.
        vocabulary: number of rows of the embedding.
    """
    at_answer = range(prompt_tokens, prompt_tokens + len(answer))
    found = Observation(
        list(answer), forced_tokens.positions, _known_logprobs(rows, at_answer, vocabulary), top_logprobs=TOP_LOGPROBS
    )
    if forced_tokens.positions:
        found.image = _known_logprobs(rows, [position + 1 for position in forced_tokens.positions], vocabulary)
    return found


def _known_logprobs(rows: Sequence[LogprobRow | None], at: Sequence[int], vocabulary: int) -> torch.Tensor:
    """Return log-probabilities float32 ``[len(at), vocabulary]``, NaN where unknown.

    NaN from vLLM becomes -inf: it is a wrong value, not an unknown one.
    """
    found = torch.full((len(at), vocabulary), math.nan)
    for index, position in enumerate(at):
        row = rows[position] or {}
        values = [-math.inf if math.isnan(each.logprob) else each.logprob for each in row.values()]
        found[index, list(row)] = torch.tensor(values)
    return found


def _stamp(stamps: Stamps, metrics: Any, count: int) -> None:
    """Add the times in vLLM's ``RequestStateStats``, if any: queued, scheduled, and the ``count`` tokens.

    Arrival and time to first token use the clock of this process, the other times that of vLLM's process.
    """
    if metrics is None or not count:
        return
    first = metrics.arrival_time + metrics.first_token_latency
    gap = (metrics.last_token_ts - metrics.first_token_ts) / max(1, count - 1)
    stamps.tokens = [first + index * gap for index in range(count)]
    if metrics.queued_ts and metrics.scheduled_ts:  # 0: not recorded
        stamps.preprocessed = first - (metrics.first_token_ts - metrics.queued_ts)
        stamps.scheduled = first - (metrics.first_token_ts - metrics.scheduled_ts)


def _logprobs(ids: Sequence[int], rows: Sequence[LogprobRow] | None, top: int | None) -> list[TokenLogprobs] | None:
    if rows is None or top is None:
        return None
    found = []
    for token, row in zip(ids, rows, strict=True):
        ranked = sorted(row.items(), key=lambda item: item[1].rank)[:top]
        found.append(TokenLogprobs(row[token].logprob, tuple((each, value.logprob) for each, value in ranked)))
    return found


def check_prompt(request: Request, ours: Sequence[int], theirs: Sequence[int]) -> None:
    """Check that vLLM's processor created the same prompt as panscan.

    Raises:
        PanscanError: the prompts differ.
    """
    if list(ours) != list(theirs):
        raise PanscanError(
            f"request {request.id!r}: vLLM's prompt differs: {len(theirs)} tokens, panscan's has {len(ours)}"
        )
