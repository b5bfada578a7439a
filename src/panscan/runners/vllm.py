"""Runner ``vllm``: an installed vLLM (0.24 or later), used offline, for comparison. Not a dependency.

It needs an NVIDIA GPU, or vLLM for CPUs. CI does not run it, but tests its pure parts with objects like those that vLLM
returns. It was run manually on vLLM 0.32 for CPUs.

vLLM has its own weights, processor (with pan and scan) and scheduler, in a separate process, so the peak memory in the
records does not include it. vLLM reports a request's arrival, first and last token; the times between are interpolated,
so inter-token latencies are means.

The verdict covers only the most probable tokens, in prefill: vLLM cannot force tokens, so the reference's answer is
appended to the prompt and the log-probabilities of prompt tokens are read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from panscan.core import (
    PanscanError,
    Request,
    Result,
    Sampling,
    SettingError,
    Stamps,
    UnsupportedError,
    now,
)
from panscan.core.errors import brief
from panscan.core.sampling import FILTERS, STRUCTURED
from panscan.images.views import ViewPlan
from panscan.model.adapters import write_merged
from panscan.model.bundled import bundled_directory
from panscan.model.bundled.random_weights import write_shape
from panscan.model.checkpoint import Reader, load_meta_model
from panscan.model.hub import model_source
from panscan.model.inputs import Prepared, plan_request, read_images
from panscan.model.machine import release_memory, resolve_device, resolve_dtype
from panscan.model.observation import TOP_LOGPROBS, ForcedTokens, Observation
from panscan.model.prompt import Prompt
from panscan.runners.base import Runner, check_interpreted, processor_rounding
from panscan.settings import Settings

_RESET_TRIES = 10
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # vLLM forks unless CUDA is initialized here, but a fork cannot use CUDA once this process has looked for a GPU.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
"""Defaults of vLLM's environment: no telemetry, and a new interpreter for its engine."""
_SHARES = {"cuda": 0.9, "cpu": 0.4}  # vLLM's share of a device's memory; the verdict's output matrix needs some too
_IMAGES = 16  # maximum per prompt
_LONGEST = 32_768  # tokens per request: vLLM reserves memory for a request of the full context length

Arguments = dict[str, Any]
"""Keyword arguments of a call of vLLM, or one of its prompts."""
LogprobRow = Mapping[int, Any]
"""vLLM's log-probabilities of one position: token id to an object with ``logprob`` and ``rank`` (1 is the highest)."""


class VllmRunner(Runner):
    """Gemma 3 through ``vllm.LLM``. ``loaded`` has only the model's configuration, reader and output matrix.

    :meth:`configure` starts the LLM (up to a minute), and restarts it for other pan-and-scan settings, which affect
    vLLM's memory plan.

    Args:
        settings: settings of the cell.
        options: keyword arguments of ``vllm.LLM`` that override those derived from the settings.

    Raises:
        ModelError: the checkpoint cannot be loaded.
    """

    def __init__(self, settings: Settings, options: Mapping[str, Any] | None = None) -> None:
        self.settings = settings
        self._options = dict(options or {})
        drawn = settings.random_weights
        adapted = not drawn and bool(model_source(settings.model, settings.revision).adapters)
        self._folder = TemporaryDirectory(prefix="panscan-vllm-") if drawn or adapted else None
        self._source = settings.model if self._folder is None else self._folder.name
        if adapted:  # vLLM's own adapters leave out the vision tower and embeddings
            write_merged(settings.model, Path(self._source), settings.revision)
        if drawn:
            assert settings.model_shape is not None  # Settings holds this
            write_shape(settings.model_shape, Path(self._source))
        device = resolve_device(settings.device)
        dtype = resolve_dtype(settings.dtype, device)
        self.loaded = load_meta_model(
            self._source, dtype, device, revision=None if adapted else settings.revision, embedding=not drawn
        )
        self._llm: Any = None
        self.arguments: Arguments = {}
        """Keyword arguments of the running ``vllm.LLM``."""

    def configure(self, settings: Settings) -> None:
        """Switch to other settings of the same weights."""
        self._check_change(settings)
        self.settings = settings
        positions = self.loaded.model.config.get_text_config().max_position_embeddings
        arguments = llm_arguments(
            settings,
            str(bundled_directory(self._source) or Path(self._source).expanduser()),
            self.loaded.dtype,
            positions,
            images=self.loaded.reader.reads_images,
            device=self.loaded.device.type,
        )
        arguments |= self._options
        if self._llm is None or arguments != self.arguments:
            self.drop()
            for name, value in _ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            from vllm import LLM

            with _one_line_errors():
                self._llm, self.arguments = LLM(**arguments), arguments

    def run(self, batch: Sequence[Request]) -> list[Result]:
        """Answer all requests at once, with empty caches.

        Raises: as :meth:`answer`.
        """
        self._empty_caches()
        return self.answer(batch)

    def answer(self, requests: Sequence[Request]) -> list[Result]:
        """Answer all requests at once, without emptying the caches.

        Raises:
            SettingError: vLLM does not support a request.
            PanscanError: vLLM created a different prompt, or failed.
        """
        accepted = now()
        read = [read_images(request, copy=False) for request in requests]
        prompts = [self._prompt(item) for item in read]
        loaded = now()
        sampling = [sampling_arguments(item.sampling) for item in read]
        if self.settings.random_weights:
            # Most tokens are unknown to the bundled tokenizer, and vLLM decodes all since the last known one each step.
            sampling = [arguments | {"detokenize": False} for arguments in sampling]
        outputs = self._generate(prompts, sampling)
        end = now()
        return [
            result_of(item, plan_request(item, self.loaded.reader), output, Stamps(accepted, loaded=loaded, end=end))
            for item, output in zip(read, outputs, strict=True)
        ]

    def pixels(self, settings: Settings) -> str:
        """Return the rounding of the processor: ``device`` with torchvision, which vLLM requires, else ``cpu``."""
        return processor_rounding(self.loaded.reader)

    def observe(self, batch: Sequence[Request], forced: Sequence[ForcedTokens]) -> list[Observation]:
        """Return the log-probabilities of the most probable tokens along forced tokens, appended to the prompt.

        Raises:
            UnsupportedError: there are no tokens to force; vLLM's own tokens cannot be observed.
            PanscanError: vLLM created a different prompt.
        """
        read = [read_images(request, copy=False) for request in batch]
        if any(forced_tokens.tokens is None for forced_tokens in forced):
            raise UnsupportedError("runner vllm: its own tokens cannot be observed")
        answers = [(forced_tokens.tokens or [])[: forced_tokens.steps] for forced_tokens in forced]
        prompts = [self._prompt(item, answer) for item, answer in zip(read, answers, strict=True)]
        wanted = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": TOP_LOGPROBS}
        observations = []
        for item, prompt, forced_tokens, answer in zip(read, prompts, forced, answers, strict=True):
            [output] = self._generate([prompt], [wanted])  # one by one: logits of whole prompts are gigabytes
            ids = plan_request(item, self.loaded.reader)[1].ids
            check_prompt(item, [*ids, *answer], output.prompt_token_ids)
            vocabulary = self.loaded.model.config.get_text_config().vocab_size
            observations.append(observation_of(forced_tokens, answer, len(ids), output.prompt_logprobs, vocabulary))
        return observations

    def drop(self) -> None:
        """Shut down the LLM; the meta model stays loaded."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            release_memory()

    def close(self) -> None:
        """End vLLM's process and free all memory."""
        super().close()
        if self._folder is not None:
            self._folder.cleanup()

    def _empty_caches(self) -> None:
        """Empty vLLM's caches of prefixes, pixels and encoded views.

        Raises:
            PanscanError: the prefix cache is still in use.
        """
        self._llm.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()
        # Returns False while a step still holds blocks of the last batch.
        if not any(self._llm.reset_prefix_cache() for _ in range(_RESET_TRIES)):
            raise PanscanError("vLLM did not empty its prefix cache: blocks are still in use")

    def _prompt(self, read: Request, answer: Sequence[int] = ()) -> Arguments:
        """Return a request as vLLM's prompt.

        Raises:
            SettingError: vLLM does not support the request.
        """
        if read.pan_and_scan != self.settings.pan_and_scan:
            raise SettingError("runner vllm: all requests must have the runner's pan-and-scan settings")
        prompt: Arguments = {"prompt_token_ids": [*prompt_ids(read, self.loaded.reader), *answer]}
        return prompt | ({"multi_modal_data": {"image": list(read.images)}} if read.images else {})

    def _generate(self, prompts: Sequence[Arguments], arguments: Sequence[Arguments]) -> list[Any]:
        from vllm import SamplingParams

        with _one_line_errors():
            params = [SamplingParams(**options) for options in arguments]
            outputs: list[Any] = self._llm.generate(list(prompts), params, use_tqdm=False)
        return outputs


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Convert vLLM's validation errors to one line; other exceptions pass through.

    Raises:
        UnsupportedError: vLLM refused an argument or a prompt.
    """
    try:
        yield
    except ValueError as error:  # from pydantic
        raise UnsupportedError(f"vLLM: {brief(error, 300)}") from error


def llm_arguments(
    settings: Settings, source: str, dtype: torch.dtype, positions: int, *, images: bool, device: str
) -> Arguments:
    """Return the keyword arguments of ``vllm.LLM``.

    Args:
        settings: settings of the cell.
        source: directory or hub id of the checkpoint.
        dtype: dtype of the weights.
        positions: context length of the model.
        images: whether the checkpoint reads images.
        device: ``cuda`` or ``cpu``.
    """
    chosen: Arguments = {
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


_VLLM_FILTERS = {"top_k", "top_p", "min_p"}


def sampling_arguments(sampling: Sampling) -> Arguments:
    """Return the keyword arguments of ``vllm.SamplingParams``.

    Raises:
        SettingError: vLLM does not support an option of the request.
    """
    filters = {name: off[0] for name, off in FILTERS.items() if name in _VLLM_FILTERS} | sampling.filters()
    for name in (*STRUCTURED, "logprobs", "prompt_logprobs", *(filters.keys() - _VLLM_FILTERS)):
        if getattr(sampling, name) is not None:
            raise SettingError(f"runner vllm: {name} is not supported; use the runner engine")
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        **filters,
        "repetition_penalty": sampling.repetition_penalty or 1.0,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "logit_bias": sampling.logit_bias,
        "seed": sampling.seed,
        "ignore_eos": sampling.ignore_eos,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
    }


def prompt_ids(request: Request, reader: Reader) -> list[int]:
    """Return token ids with one placeholder per image, which vLLM replaces by the image blocks of its views.

    Raises:
        SettingError: the prompt is raw, or contains a special token that vLLM would interpret.
    """
    if request.tool_use is not None:
        raise SettingError("runner vllm: tools are not supported; use the runner engine")
    check_interpreted(request, reader, "vllm", "vLLM")
    text = reader.prompts.render(request)
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
    return Prepared(request, list(plans), prompt, None).result(
        text=answer.text,
        token_ids=ids,
        finish_reason=answer.finish_reason,
        stamps=stamps,
        cached_tokens=output.num_cached_tokens or 0,
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
    observation = Observation(
        list(answer), forced_tokens.positions, _known_logprobs(rows, at_answer, vocabulary), top_logprobs=TOP_LOGPROBS
    )
    if forced_tokens.positions:
        observation.image = _known_logprobs(rows, [position + 1 for position in forced_tokens.positions], vocabulary)
    return observation


def _known_logprobs(rows: Sequence[LogprobRow | None], at: Sequence[int], vocabulary: int) -> torch.Tensor:
    """Return log-probabilities float32 ``[len(at), vocabulary]``, NaN where unknown.

    NaN from vLLM becomes -inf: it is a wrong value, not an unknown one.
    """
    logprobs = torch.full((len(at), vocabulary), math.nan)
    for index, position in enumerate(at):
        row = rows[position] or {}
        values = [-math.inf if math.isnan(entry.logprob) else entry.logprob for entry in row.values()]
        logprobs[index, list(row)] = torch.tensor(values)
    return logprobs


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


def check_prompt(request: Request, expected: Sequence[int], actual: Sequence[int]) -> None:
    """Check that vLLM's processor created the same prompt as panscan.

    Raises:
        PanscanError: the prompts differ.
    """
    if list(expected) != list(actual):
        raise PanscanError(
            f"request {request.id!r}: vLLM's prompt differs: {len(actual)} tokens, panscan's has {len(expected)}"
        )
