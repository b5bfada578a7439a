"""What vLLM takes and gives, and what panscan makes of it: arguments, results, observations. No vLLM is needed here."""

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
    "LIKELIEST",
    "check_prompt",
    "llm_arguments",
    "observation_of",
    "prompt_ids",
    "result_of",
    "sampling_arguments",
]

LIKELIEST = 20
"""Log-probabilities of a position that the verdict sees; vLLM's default limit."""
_SHARES = {"cuda": 0.9, "cpu": 0.4}  # of a device's memory, vLLM's; the verdict's output matrix needs some too
_IMAGES = 16  # of a prompt
_LONGEST = 32_768  # tokens of a request: vLLM reserves room for one as long as its context

LogprobRow = Mapping[int, Any]
"""Of one position, as vLLM has it: token id to an object with ``logprob`` and ``rank`` (1 is the likeliest)."""


def llm_arguments(
    settings: Settings, source: str, dtype: torch.dtype, positions: int, *, images: bool, device: str
) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM``.

    Args:
        settings: of the cell.
        source: the checkpoint's directory or hub id.
        dtype: of the weights.
        positions: of the model's context.
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
        "max_logprobs": LIKELIEST,
        "disable_log_stats": False,  # without them a request has no times
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
        SettingError: a JSON schema, which this runner does not support.
    """
    if sampling.json_schema is not None:
        raise SettingError("runner vllm does not offer json_schema: use the runner engine")
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
    """Token ids with one image mark for each image, which vLLM replaces by the blocks of its views.

    Raises:
        SettingError: a raw prompt, or a special token in the user's text, which vLLM would obey.
    """
    if request.raw:
        raise SettingError("runner vllm takes chats, not raw prompts: use the runner generate")
    if (special := reader.prompts.special_in(request)) is not None:
        raise SettingError(f"runner vllm would obey {special} in the user's text: use the runner generate")
    tokenizer = reader.tokenizer
    text = tokenizer.apply_chat_template(conversation(request), tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def result_of(request: Request, planned: tuple[Sequence[ViewPlan], Prompt], output: Any, stamps: Stamps) -> Result:
    """A result of vLLM's ``RequestOutput``.

    Args:
        request: what was asked.
        planned: its views and its prompt, as panscan makes them.
        output: with one completion.
        stamps: what is known without vLLM; token times are added.

    Raises:
        PanscanError: vLLM's prompt is another, or it gave up.
    """
    plans, prompt = planned
    check_prompt(request, prompt.ids, output.prompt_token_ids)
    [answer] = output.outputs
    if answer.finish_reason not in ("stop", "length"):
        raise PanscanError(f"request {request.id!r}: vLLM ended it: {answer.finish_reason}")
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
    """What vLLM's ``prompt_logprobs`` of a prompt with the answer behind it show.

    Args:
        forced_tokens: prompt positions to return.
        answer: the tokens behind the prompt.
        prompt_tokens: without the answer.
        rows: of each position the distribution that its own token was drawn from; the first has none.
        vocabulary: rows of the embedding.
    """
    at_answer = range(prompt_tokens, prompt_tokens + len(answer))
    found = Observation(list(answer), forced_tokens.positions, _known(rows, at_answer, vocabulary), likeliest=LIKELIEST)
    if forced_tokens.positions:
        found.image = _known(rows, [position + 1 for position in forced_tokens.positions], vocabulary)
    return found


def _known(rows: Sequence[LogprobRow | None], at: Sequence[int], vocabulary: int) -> torch.Tensor:
    """Log-probabilities float32 ``[len(at), vocabulary]``, NaN where there is none. vLLM's own NaN become -inf: they
    are no answer, and must not pass for unknown."""
    found = torch.full((len(at), vocabulary), math.nan)
    for index, position in enumerate(at):
        row = rows[position] or {}
        values = [-math.inf if math.isnan(each.logprob) else each.logprob for each in row.values()]
        found[index, list(row)] = torch.tensor(values)
    return found


def _stamp(stamps: Stamps, metrics: Any, count: int) -> None:
    """Add what vLLM's ``RequestStateStats`` tell, if there are any: when the request was queued and scheduled, and its
    ``count`` tokens.

    Arrival and the time to the first token are by the wall clock of this process, the others by the clock of vLLM's.
    """
    if metrics is None or not count:
        return
    first = metrics.arrival_time + metrics.first_token_latency
    gap = (metrics.last_token_ts - metrics.first_token_ts) / max(1, count - 1)
    stamps.tokens = [first + index * gap for index in range(count)]
    if metrics.queued_ts and metrics.scheduled_ts:  # 0: vLLM did not note it
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
    """Whether vLLM's processor made the prompt that panscan makes.

    Raises:
        PanscanError: it did not.
    """
    if list(ours) != list(theirs):
        raise PanscanError(
            f"request {request.id!r}: vLLM's prompt is another: {len(theirs)} tokens, panscan's has {len(ours)}"
        )
