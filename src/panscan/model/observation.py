"""What the verdict asks of a model and gets: next-token distributions along given tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["IMAGE_POSITIONS", "ForcedTokens", "Observation", "image_places"]

IMAGE_POSITIONS = 32  # per request


@dataclass(slots=True)
class ForcedTokens:
    """The tokens that a request's answer is made to take.

    Args:
        tokens: forced one after the other; None for the model's own greedy tokens, up to ``steps``.
        places: positions in the prompt, without padding, whose distributions are wanted, ascending.
        steps: tokens at most.
    """

    tokens: list[int] | None
    places: list[int]
    steps: int


@dataclass(slots=True)
class Observation:
    """What a model computed for one request. Tensors are on the CPU.

    Args:
        tokens: those that were forced, or its own choice.
        places: of the prompt, as in :class:`ForcedTokens`.
        answer: float32 ``[tokens, vocabulary]``: the logits before each token.
        image: float32 ``[places, vocabulary]``: the logits at the places of the prompt; None where none were asked for.
        answer_hidden: float32 ``[tokens, hidden]``: final hidden states before each token, if they were asked for.
        image_hidden: float32 ``[places, hidden]``.
        likeliest: how many of each row are known at least, if not all: ``answer`` and ``image`` then hold natural
            log-probabilities of some tokens, and NaN for the others.
    """

    tokens: list[int]
    places: list[int]
    answer: torch.Tensor
    image: torch.Tensor | None = None
    answer_hidden: torch.Tensor | None = None
    image_hidden: torch.Tensor | None = None
    likeliest: int | None = None


def image_places(ids: Sequence[int], soft_id: int | None) -> list[int]:
    """Some of the positions of image tokens in a prompt: a draw that depends on nothing but their number."""
    tokens = [place for place, token in enumerate(ids) if token == soft_id]
    chosen = random.Random(len(tokens)).sample(range(len(tokens)), min(IMAGE_POSITIONS, len(tokens)))
    return [tokens[index] for index in sorted(chosen)]
