"""Next-token distributions of a loaded model along given tokens, observed in ``generate()``. Used by the verdict.

A logits processor records the scores of each step and forces the next token; it works with every cache and with
compiled models. A forward hook on the model's core records the prompt's final hidden states at the requested
positions. It is removed before the first decode step, unless the hidden states of all steps are recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from panscan.core import Request
from panscan.model.checkpoint import Loaded
from panscan.model.inputs import Prepared, collate, prepare, read_images
from panscan.model.observation import ForcedTokens, Observation, sample_image_positions
from panscan.settings import Settings


def greedy_config(loaded: Loaded, tokens: int, **changes: Any) -> GenerationConfig:
    """Return the configuration of a greedy call that no token ends: its end token is outside the vocabulary."""
    return GenerationConfig(
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=loaded.model.generation_config.pad_token_id,
        eos_token_id=loaded.model.config.get_text_config().vocab_size,
        **changes,
    )


def observation_config(loaded: Loaded, settings: Settings) -> GenerationConfig:
    """Return the generation config of an observed call: nothing that changes scores, and the cell's own cache size."""
    cache = {} if settings.cache == "dynamic" else {"cache_implementation": settings.cache}
    chunk = settings.prefill_chunk_size
    return greedy_config(loaded, settings.max_new_tokens, prefill_chunk_size=chunk, **cache)


class ObservationRecorder:
    """Records logits and hidden states of one ``generate()`` call, and chooses its tokens.

    Args:
        loaded: the model that is called.
        forced: forced tokens of each row of the batch.
        padding: number of padding tokens on the left of each row.
        keep_hidden: keep final hidden states of every step too. Not for compiled models or prompts of several passes.
    """

    def __init__(
        self, loaded: Loaded, forced: Sequence[ForcedTokens], padding: Sequence[int], *, keep_hidden: bool = False
    ) -> None:
        self._loaded, self._keep_hidden = loaded, keep_hidden
        self._rows = [_Row(tokens, pad) for tokens, pad in zip(forced, padding, strict=True)]
        self._config = loaded.model.generation_config
        self._seen = 0  # positions of the passes so far

    def __enter__(self) -> Self:
        # generate() takes missing values from the checkpoint's settings, which would mask or scale scores.
        self._loaded.model.generation_config = GenerationConfig(pad_token_id=self._config.pad_token_id)
        self._hook = self._loaded.model.model.register_forward_hook(self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        self._loaded.model.generation_config = self._config

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of ``generate()``."""
        return {
            "logits_processor": LogitsProcessorList([self._step]),
            "stopping_criteria": StoppingCriteriaList([self._done]),
        }

    def observations(self) -> list[Observation]:
        """Return what was recorded, by row."""
        return [self._observation(row) for row in self._rows]

    def _forward(self, _module: Any, _inputs: Any, output: Any) -> None:
        """Record the observed positions of one forward pass; a prompt may take several."""
        passed = range(self._seen, self._seen + output[0].shape[1])
        for row, hidden in zip(self._rows, output[0], strict=True):
            columns = [position + row.padding for position in row.forced.positions]
            row.hidden.append(hidden[[column - passed.start for column in columns if column in passed]])
            if self._keep_hidden:
                row.last.append(hidden[-1].float().cpu())
        self._seen = passed.stop

    def _step(self, _ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self._keep_hidden:
            self._hook.remove()  # before decode, which may be compiled
        choice = [self._choose(row, row_scores) for row, row_scores in zip(self._rows, scores, strict=True)]
        forced = torch.full_like(scores, float("-inf"))
        return forced.scatter_(1, torch.tensor(choice, device=scores.device)[:, None], 0.0)

    def _choose(self, row: _Row, scores: torch.Tensor) -> int:
        if self._ended(row):
            return int(self._config.pad_token_id)
        row.scores.append(scores.float().cpu())
        if row.forced.tokens is not None:
            token = row.forced.tokens[len(row.tokens)]
        else:
            allowed = scores.clone()
            allowed[self._config.suppress_tokens or []] = float("-inf")
            token = int(allowed.argmax())
        row.tokens.append(token)
        return token

    def _ended(self, row: _Row) -> bool:
        ended = row.forced.tokens is None and bool(row.tokens) and row.tokens[-1] in self._loaded.eos_ids
        return ended or len(row.tokens) == row.forced.limit

    def _done(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        done = all(map(self._ended, self._rows))
        return torch.full((input_ids.shape[0],), done, dtype=torch.bool, device=input_ids.device)

    def _observation(self, row: _Row) -> Observation:
        observation = Observation(row.tokens, row.forced.positions, torch.stack(row.scores))
        if row.forced.positions:
            hidden = torch.cat(row.hidden)
            observation.image_hidden = hidden.float().cpu()
            observation.image = self._loaded.model.get_output_embeddings()(hidden).float().cpu()
        if self._keep_hidden:
            observation.answer_hidden = torch.stack(row.last[: len(row.tokens)])
        return observation


@dataclass(slots=True)
class _Row:
    """What is recorded of one row of a batch.

    Args:
        forced: tokens to force, and positions to observe.
        padding: number of padding tokens on the left.
        tokens: the answer's tokens so far.
        scores: before each of them, float32 ``[vocabulary]``, on the CPU.
        hidden: final hidden states at the observed positions of each pass.
        last: final hidden states at the end of each pass, if they are kept.
    """

    forced: ForcedTokens
    padding: int
    tokens: list[int] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    last: list[torch.Tensor] = field(default_factory=list)


@torch.no_grad()
def observe(
    loaded: Loaded,
    settings: Settings,
    batch: Sequence[Request],
    forced: Sequence[ForcedTokens] | None = None,
    *,
    steps: int = 0,
    dtype: torch.dtype | None = None,
) -> list[Observation]:
    """Return observations of one ``generate()`` call.

    Args:
        loaded: the model, with attention and compilation already set.
        settings: cache, padding, preprocessing and chunking of the call.
        batch: requests of one batch.
        forced: the tokens of each answer. None: the model's own greedy tokens, up to ``steps``, with hidden states
            and a sample of image positions.
        steps: maximum number of tokens, if ``forced`` is None.
        dtype: dtype of the pixels; None: the model's own.
    """
    prepared = _prepared(loaded, settings, batch, dtype)
    keep_hidden = forced is None
    if forced is None:
        forced = [
            ForcedTokens(None, sample_image_positions(item.prompt.ids, loaded.reader.prompts.soft_id), steps)
            for item in prepared
        ]
    inputs = collate(prepared, loaded)
    padding = [inputs["input_ids"].shape[1] - len(item.prompt.ids) for item in prepared]
    with ObservationRecorder(loaded, forced, padding, keep_hidden=keep_hidden) as recorder:
        loaded.model.generate(**inputs, **recorder.arguments(), generation_config=observation_config(loaded, settings))
        return recorder.observations()


@torch.no_grad()
def prefill_states(
    loaded: Loaded,
    settings: Settings,
    batch: Sequence[Request],
    answers: Sequence[Sequence[int]],
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Return the final hidden states before each token of known answers, from one prefill of prompts and answers.

    Args:
        loaded: the model, with attention and compilation already set.
        settings: preprocessing.
        batch: requests of one batch.
        answers: tokens of each answer; not empty and without image tokens.
        dtype: dtype of the pixels; None: the model's own.

    Returns:
        Hidden states of each answer, float32 ``[tokens, hidden]``, on the CPU.
    """
    prepared = _prepared(loaded, settings, batch, dtype)
    for item, tokens in zip(prepared, answers, strict=True):
        item.prompt = replace(item.prompt, ids=[*item.prompt.ids, *tokens[:-1]])
    inputs = collate(prepared, loaded)
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    hidden = loaded.model.model(**inputs, position_ids=positions, use_cache=False).last_hidden_state
    # Copied, because a view of the pass's tensor would keep the states of the whole batch.
    rows = (row[-len(tokens) :] for row, tokens in zip(hidden, answers, strict=True))
    return [row.to("cpu", torch.float32, copy=True) for row in rows]


def _prepared(
    loaded: Loaded, settings: Settings, batch: Sequence[Request], dtype: torch.dtype | None
) -> list[Prepared]:
    on_device = settings.preprocess == "device"
    return [
        prepare(read_images(item), loaded.reader, loaded.device, dtype or loaded.dtype, on_device=on_device)
        for item in batch
    ]
