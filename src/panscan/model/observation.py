"""The input and output of an observation: forced tokens, and next-token distributions along them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan

import torch

IMAGE_POSITIONS = 32  # per request
TOP_LOGPROBS = 20
"""Log-probabilities per position of a runner that reports only the most probable tokens; vLLM's default limit."""


@dataclass(slots=True)
class ForcedTokens:
    """The tokens to force in a request's answer, and the prompt positions to observe.

    Args:
        tokens: tokens to force; None for the model's own greedy tokens, up to ``steps``.
        positions: ascending prompt positions, without padding, whose distributions to return.
        steps: maximum number of tokens.
    """

    tokens: list[int] | None
    positions: list[int]
    steps: int

    @property
    def limit(self) -> int:
        """Maximum number of tokens of the answer."""
        return self.steps if self.tokens is None else min(self.steps, len(self.tokens))


@dataclass(slots=True)
class Observation:
    """What a model computed for one request. Tensors are on the CPU.

    Args:
        tokens: the forced tokens, or the model's own.
        positions: prompt positions, as in :class:`ForcedTokens`.
        answer: float32 ``[tokens, vocabulary]``: the logits before each token.
        image: float32 ``[positions, vocabulary]``: the logits at the prompt positions; None if there are none.
        answer_hidden: float32 ``[tokens, hidden]``: final hidden states before each token, if requested.
        image_hidden: float32 ``[positions, hidden]``: final hidden states at the prompt positions.
        top_logprobs: minimum number of known values per row, if not all: ``answer`` and ``image`` then hold natural
            log-probabilities of some tokens, and NaN for the others.
    """

    tokens: list[int]
    positions: list[int]
    answer: torch.Tensor
    image: torch.Tensor | None = None
    answer_hidden: torch.Tensor | None = None
    image_hidden: torch.Tensor | None = None
    top_logprobs: int | None = None

    def reported(self) -> Observation:
        """Return what remains if only the :data:`TOP_LOGPROBS` most probable tokens of each position are reported."""
        image = None if self.image is None else _most_probable(self.image)
        return replace(self, answer=_most_probable(self.answer), image=image, top_logprobs=TOP_LOGPROBS)


def _most_probable(logits: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of each row's most probable tokens, float32, and NaN for the others."""
    known = logits.double().log_softmax(-1).float().topk(min(TOP_LOGPROBS, logits.shape[-1]), dim=-1)
    return torch.full_like(logits, nan).scatter(-1, known.indices, known.values)


def sample_image_positions(ids: Sequence[int], soft_id: int | None) -> list[int]:
    """Return up to ``IMAGE_POSITIONS`` positions of image tokens, sampled with their number as the seed."""
    tokens = [position for position, token in enumerate(ids) if token == soft_id]
    chosen = random.Random(len(tokens)).sample(range(len(tokens)), min(IMAGE_POSITIONS, len(tokens)))
    return [tokens[index] for index in sorted(chosen)]
