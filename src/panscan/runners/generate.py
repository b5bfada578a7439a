"""Runner ``generate``: Transformers' ``generate()``, with a timestamp for each stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from msgspec import structs
from transformers import CompileConfig, GenerationConfig, StoppingCriteriaList

from panscan.core import Message, Request, Result, Sampling, SettingError, Stamps, now
from panscan.core.request import request_list
from panscan.core.sampling import STRUCTURED
from panscan.engine.detokenizer import Detokenizer
from panscan.model.bundled import warn_of_demonstration
from panscan.model.checkpoint import Loaded
from panscan.model.inputs import Prepared, collate, count_views, prepare, read_images
from panscan.model.load import load_for
from panscan.model.machine import memory_advice
from panscan.model.observation import ForcedTokens, Observation
from panscan.model.phases import phase
from panscan.model.runtime import apply_attention, apply_compile, forbid_tf32
from panscan.model.support import require_supported
from panscan.runners.base import Runner, batches
from panscan.runners.clock import DeviceClock, TokenClock, marked_steps, timed_vision
from panscan.runners.observe import observe
from panscan.settings import Settings, settings_from

_UNSUPPORTED = (  # fields of Sampling that only other runners support
    "logprobs",
    "prompt_logprobs",
    *STRUCTURED,
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
)


def generation_config(
    sampling: Sampling,
    loaded: Loaded,
    cache: str,
    prefill_chunk_size: int | None = None,
    decode_compile: str | None = None,
) -> GenerationConfig:
    """Return the configuration of one ``generate()`` call: the requests' settings and the checkpoint's token ids.

    Args:
        sampling: sampling settings of the batch.
        loaded: the model.
        cache: ``dynamic`` or ``static``.
        prefill_chunk_size: prompt tokens per pass; None: the whole prompt.
        decode_compile: see :attr:`GenerateRunner.decode_compile`.
    """
    stored = loaded.model.generation_config
    chosen: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "do_sample": not sampling.greedy,
        "pad_token_id": stored.pad_token_id,
        # An id outside the vocabulary is never generated; with None, generate() would use the checkpoint's ids.
        "eos_token_id": sorted(_end_ids(sampling, loaded)) or loaded.model.config.get_text_config().vocab_size,
        "suppress_tokens": stored.suppress_tokens,
        "prefill_chunk_size": prefill_chunk_size,
    }
    if not sampling.greedy:
        # The default of generate() is top_k=50; 0 disables it.
        chosen |= {"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0, **sampling.filters()}
    if sampling.repetition_penalty is not None:
        chosen["repetition_penalty"] = sampling.repetition_penalty
    if cache != "dynamic":
        chosen["cache_implementation"] = cache
    if decode_compile == "off":
        chosen["disable_compile"] = True
    elif decode_compile is not None:
        chosen["compile_config"] = CompileConfig(mode=decode_compile)
        chosen["compile_config"]._compile_all_devices = True  # otherwise Transformers silently skips CPUs
    return GenerationConfig(**chosen)


def one_sampling(batch: Sequence[Request], runner: str, *refused: str) -> Sampling:
    """Return the sampling settings that all requests of a batch share.

    Args:
        batch: at least one request.
        runner: name of the runner in messages.
        refused: further fields of :class:`Sampling` that the runner does not support.

    Raises:
        SettingError: the batch is empty, the settings differ, or they use an unsupported field.
    """
    if not request_list(batch):
        raise SettingError("a batch needs at least one request")
    for request in batch:
        if request.tool_use is not None:
            raise SettingError(f"runner {runner}: tools are not supported; use the runner engine")
        for name in (*refused, *_UNSUPPORTED):
            if getattr(request.sampling, name) != getattr(Sampling(), name):
                raise SettingError(f"runner {runner}: {name} is not supported; use the runner engine")
    if any(request.sampling != batch[0].sampling for request in batch):
        raise SettingError("generate() supports one set of sampling settings per batch: submit separate batches")
    return batch[0].sampling


class GenerateRunner(Runner):
    """Gemma 3 through Transformers' ``generate()``.

    ``decode_compile``: compilation of the decode step with a static cache: ``off``, or a mode of ``torch.compile``;
    None: Transformers' default (``reduce-overhead`` on an NVIDIA GPU, off elsewhere).

    Example:
        >>> runner = GenerateRunner.from_pretrained("mini")
        >>> [result] = runner.generate([Request(prompt="What is the total?", images=["receipt.png"])])
        >>> result.text, result.views, result.prompt_tokens
    """

    def __init__(self, loaded: Loaded, settings: Settings) -> None:
        self.loaded = loaded
        self.settings = settings
        self._attention: str | None = loaded.model.config._attn_implementation
        self._compiled: str | None = None
        self.decode_compile: str | None = None

    @classmethod
    def from_pretrained(cls, model: str = "mini", **settings: Any) -> GenerateRunner:
        """Load a checkpoint.

        Args:
            model: ``mini``, ``tiny``, a directory or a hub id.
            settings: settings as on the command line.

        Raises:
            ModelError: the checkpoint cannot be loaded.
            SettingError: an unknown setting or value.
            UnsupportedError: this machine does not support the settings.
        """
        named = settings_from({"model": model, **settings})
        warn_of_demonstration(named)
        return cls.from_settings(named)

    @classmethod
    def from_settings(cls, settings: Settings) -> GenerateRunner:
        """Load the model that the settings name, and configure the runner.

        Raises: as :meth:`from_pretrained`.
        """
        require_supported(settings)
        runner = cls(load_for(settings), settings)
        runner.configure(settings)
        return runner

    def configure(self, settings: Settings) -> None:
        """Switch the loaded model to other settings of attention and compilation."""
        self._check_change(settings)
        if self._attention != settings.attention:
            self._attention = None  # if the switch fails, the next call retries it
            apply_attention(self.loaded.model, settings.attention)
            self._attention = settings.attention
        if self._compiled != settings.compile:
            apply_compile(self.loaded.model, settings.compile)
            self._compiled = settings.compile
        forbid_tf32()
        self.settings = settings

    def request(self, prompt: str | Sequence[Message], images: Sequence[Any] = (), **fields: Any) -> Request:
        """Return a request with this runner's settings as defaults; see :meth:`panscan.settings.Settings.request`."""
        return self.settings.request(prompt, images, fields)

    def generate(self, requests: Iterable[Request]) -> list[Result]:
        """Answer requests in batches of ``batch_size``, and return results in the order of the requests.

        Raises:
            ImageError: an image cannot be read.
            SettingError: a request is invalid, for example a prompt with a missing image.
            UnsupportedError: out of memory; the message says what to lower.
        """
        todo = list(requests)
        equal = self.settings.equal_views
        views = [count_views(request) if equal else 0 for request in todo]
        results: dict[int, Result] = {}
        for batch in batches(views, self.settings.batch_size, equal_views=equal):
            with memory_advice():
                results |= zip(batch, self.run([todo[index] for index in batch]), strict=True)
        return [results[index] for index in range(len(todo))]

    @torch.no_grad()
    def run(self, batch: Sequence[Request]) -> list[Result]:
        """Answer one batch in one ``generate()`` call. All requests must have the same sampling settings."""
        sampling = one_sampling(batch, "generate")
        stamps = Stamps(accepted=now())
        with phase("load"):
            read = [read_images(request) for request in batch]
        stamps.loaded = now()
        with phase("preprocess"):
            prepared = [self._prepare(item) for item in read]
            inputs = collate(prepared, self.loaded)
        clock = DeviceClock(self.loaded)
        stamps.preprocessed = now()
        tokens = TokenClock(clock)
        criteria: list[Any] = [tokens]
        if sampling.stop:
            criteria.append(_StopTexts(sampling.stop, self.loaded.reader.tokenizer, len(batch)))
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        with timed_vision(self.loaded.model, clock) as vision, marked_steps(self.loaded.model):
            output = self.loaded.model.generate(
                **inputs,
                generation_config=generation_config(
                    sampling, self.loaded, self.settings.cache, self.settings.prefill_chunk_size, self.decode_compile
                ),
                stopping_criteria=StoppingCriteriaList(criteria),
            )
        times = clock.read()
        stamps.end = now()
        if vision:
            stamps.vision_start, stamps.vision = (times[mark] for mark in vision)
        steps = [times[mark] for mark in tokens.marks]
        width = inputs["input_ids"].shape[1]
        rows = output[:, width:].tolist()
        return [finished(item, row, stamps, steps, self.loaded) for item, row in zip(prepared, rows, strict=True)]

    def observe(self, batch: Sequence[Request], forced: Sequence[ForcedTokens]) -> list[Observation]:
        """Return next-token distributions of one batch along forced tokens, as this runner computes them."""
        return observe(self.loaded, self.settings, batch, forced)

    def _prepare(self, read: Request) -> Prepared:
        loaded, on_device = self.loaded, self.settings.preprocess == "device"
        return prepare(read, loaded.reader, loaded.device, loaded.dtype, on_device=on_device)


class _StopTexts:
    """A stopping criterion that stops rows whose answer contains a stop text, detected as in the engine.

    Transformers' ``stop_strings`` first processes the whole vocabulary (seconds for Gemma's). It also matches the names
    of special tokens, and texts that begin in the prompt and end in the answer.
    """

    def __init__(self, stop: Sequence[str], tokenizer: Any, rows: int) -> None:
        self._texts = [Detokenizer(tokenizer, stop) for _ in range(rows)]

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        for text, token in zip(self._texts, input_ids[:, -1].tolist(), strict=True):
            text.push(token)
        return torch.tensor([text.stopped for text in self._texts], device=input_ids.device)


def _end_ids(sampling: Sampling, loaded: Loaded) -> frozenset[int]:
    """Return the ids of tokens that end an answer."""
    return (frozenset() if sampling.ignore_eos else loaded.eos_ids) | frozenset(sampling.stop_token_ids)


def finished(item: Prepared, row: list[int], stamps: Stamps, steps: list[float], loaded: Loaded) -> Result:
    """Return the result of one request of a batch: its row up to its end, and the times of these steps.

    The token that ends the answer is included, because it was computed.
    """
    sampling = item.request.sampling
    text, ends = Detokenizer(loaded.reader.tokenizer, sampling.stop), _end_ids(sampling, loaded)
    ids: list[int] = []
    stopped = False
    for token in row:
        ids.append(token)
        text.push(token)
        if stopped := text.stopped or token in ends:
            break
    text.finish()
    return item.result(
        text=text.text,
        token_ids=ids,
        finish_reason="stop" if stopped else "length",
        stamps=structs.replace(stamps, tokens=steps[: len(ids)]),
    )
