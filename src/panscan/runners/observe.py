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
from panscan.model.inputs import collate, prepare, read_images
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


@dataclass
class ObservationRecorder:
    """Records logits and hidden states of one ``generate()`` call, and chooses its tokens.

    Args:
        loaded: the model that is called.
        forced: forced tokens of each row of the batch.
        padding: number of padding tokens on the left of each row.
        hidden_only: compute no logits at the prompt positions, of which there may be many.
        keep_hidden: keep final hidden states of every step too. Not for compiled models or prompts of several passes.
    """

    loaded: Loaded
    forced: Sequence[ForcedTokens]
    padding: Sequence[int]
    keep_hidden: bool = False
    hidden_only: bool = False
    _chosen: list[list[int]] = field(init=False)
    _scores: list[torch.Tensor] = field(default_factory=list)
    _at_positions: list[list[torch.Tensor]] = field(init=False)
    _last: list[torch.Tensor] = field(default_factory=list)
    _seen: int = 0

    def __post_init__(self) -> None:
        self._chosen = [[] for _ in self.forced]
        self._at_positions = [[] for _ in self.forced]
        self._own = self.loaded.model.generation_config
        self._suppressed = self._own.suppress_tokens or []

    def __enter__(self) -> Self:
        # generate() takes missing values from the checkpoint's settings, which would mask or scale scores.
        self.loaded.model.generation_config = GenerationConfig(pad_token_id=self._own.pad_token_id)
        self._hook = self.loaded.model.model.register_forward_hook(self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        self.loaded.model.generation_config = self._own

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of ``generate()``."""
        return {
            "logits_processor": LogitsProcessorList([self._step]),
            "stopping_criteria": StoppingCriteriaList([self._done]),
        }

    def observations(self) -> list[Observation]:
        """Return what was recorded, by row."""
        return [self._observation(row) for row in range(len(self.forced))]

    def _forward(self, _module: Any, _inputs: Any, output: Any) -> None:
        """Record the observed positions of one forward pass; a prompt may take several."""
        hidden = output[0]
        passed = range(self._seen, self._seen + hidden.shape[1])
        for row, (forced_tokens, pad) in enumerate(zip(self.forced, self.padding, strict=True)):
            inside = [position + pad - self._seen for position in forced_tokens.positions if position + pad in passed]
            self._at_positions[row].append(hidden[row, inside])
        self._seen += hidden.shape[1]
        if self.keep_hidden:
            self._last.append(hidden[:, -1].float().cpu())

    def _step(self, _ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.keep_hidden:
            self._hook.remove()  # before decode, which may be compiled
        self._scores.append(scores.float().cpu())
        choice = [self._choose(row, scores[row]) for row in range(len(self.forced))]
        forced = torch.full_like(scores, float("-inf"))
        return forced.scatter_(1, torch.tensor(choice, device=scores.device)[:, None], 0.0)

    def _choose(self, row: int, scores: torch.Tensor) -> int:
        forced_tokens, chosen = self.forced[row], self._chosen[row]
        if self._ended(row):
            return int(self._own.pad_token_id)
        if forced_tokens.tokens is not None:
            chosen.append(forced_tokens.tokens[len(chosen)])
        else:
            allowed = scores.clone()
            allowed[self._suppressed] = float("-inf")
            chosen.append(int(allowed.argmax()))
        return chosen[-1]

    def _ended(self, row: int) -> bool:
        forced_tokens, chosen = self.forced[row], self._chosen[row]
        ended = forced_tokens.tokens is None and bool(chosen) and chosen[-1] in self.loaded.eos_ids
        return ended or len(chosen) == forced_tokens.limit

    def _done(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        done = all(map(self._ended, range(len(self.forced))))
        return torch.full((input_ids.shape[0],), done, dtype=torch.bool, device=input_ids.device)

    def _observation(self, row: int) -> Observation:
        tokens = self._chosen[row]
        answer = torch.stack([scores[row] for scores in self._scores[: len(tokens)]])
        observation = Observation(tokens, self.forced[row].positions, answer)
        if self.forced[row].positions:
            hidden = torch.cat(self._at_positions[row])
            observation.image_hidden = hidden.float().cpu()
            if not self.hidden_only:
                observation.image = self.loaded.model.get_output_embeddings()(hidden).float().cpu()
        if self.keep_hidden:
            observation.answer_hidden = torch.stack([last[row] for last in self._last[: len(tokens)]])
        return observation


@torch.no_grad()
def observe(
    loaded: Loaded,
    settings: Settings,
    batch: Sequence[Request],
    forced: Sequence[ForcedTokens] | None = None,
    *,
    steps: int = 0,
    dtype: torch.dtype | None = None,
    answers: Sequence[Sequence[int]] | None = None,
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
        answers: known answers, not empty and without image tokens. One prefill of prompt and answer then returns the
            hidden states before each of their tokens, and no logits.
    """
    on_device = settings.preprocess == "device"
    prepared = [
        prepare(read_images(item), loaded.reader, loaded.device, dtype or loaded.dtype, on_device=on_device)
        for item in batch
    ]
    if answers is not None:
        first = [len(item.prompt.ids) - 1 for item in prepared]
        forced = [
            ForcedTokens([tokens[-1]], list(range(start, start + len(tokens))), 1)
            for start, tokens in zip(first, answers, strict=True)
        ]
        for item, tokens in zip(prepared, answers, strict=True):
            item.prompt = replace(item.prompt, ids=[*item.prompt.ids, *tokens[:-1]])
    keep_hidden = forced is None
    if forced is None:
        forced = [
            ForcedTokens(None, sample_image_positions(item.prompt.ids, loaded.reader.prompts.soft_id), steps)
            for item in prepared
        ]
    inputs = collate(prepared, loaded)
    padding = [inputs["input_ids"].shape[1] - len(item.prompt.ids) for item in prepared]
    with ObservationRecorder(loaded, forced, padding, keep_hidden, hidden_only=answers is not None) as recorder:
        loaded.model.generate(**inputs, **recorder.arguments(), generation_config=observation_config(loaded, settings))
        return recorder.observations()
