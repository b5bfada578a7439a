"""What answers requests behind the HTTP server: an engine in a process of its own, or replicas on a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from panscan.core import Request, Stats, Stream
from panscan.images.views import PromptCost

__all__ = ["ModelInfo", "ServeBackend", "TokenCounts", "Work"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of a loaded model.

    Args:
        runner: what answers: ``engine`` or ``generate``.
        max_model_len: context length, tokens.
        cost: prompt tokens of an image; None for a text-only model.
        vocab_size: number of token ids.
        dtype: of the weights, as in ``--dtype``.
        max_concurrency: requests that compute at once.
        decisions: what was chosen at startup and why, one line each.
    """

    runner: str
    max_model_len: int
    cost: PromptCost | None
    vocab_size: int
    dtype: str
    max_concurrency: int
    decisions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """A prompt, counted with the checkpoint's tokenizer.

    Args:
        ids: token ids of the whole prompt; image tokens included.
        image_tokens: how many of them are image tokens.
        views: views of all images.
    """

    ids: tuple[int, ...]
    image_tokens: int
    views: int


@dataclass(frozen=True, slots=True)
class Work:
    """What is known of a request before it is computed: what a router decides by.

    Args:
        views: views that the vision tower would encode.
        prompt_tokens: an estimate of the prompt's length, from its views and characters.
        max_new_tokens: output tokens at most.
        keys: digests of its images, in order: requests that share them share cached views and prefixes.
    """

    views: int
    prompt_tokens: int
    max_new_tokens: int
    keys: tuple[bytes, ...] = ()


class ServeBackend(Protocol):
    """Answers requests. All methods belong to one event loop."""

    @property
    def info(self) -> ModelInfo | None:
        """Properties of the model; None until it has loaded."""
        ...

    @property
    def ready(self) -> bool:
        """Whether a request that is submitted now would be computed now."""
        ...

    @property
    def retried(self) -> int:
        """Requests that were computed again because a process died."""
        ...

    async def start(self) -> None:
        """Load the model and return when the first request can be computed.

        Raises:
            PanscanError: the model cannot be loaded.
        """
        ...

    async def close(self) -> None:
        """Cancel what runs and free everything."""
        ...

    def submit(self, request: Request, work: Work, *, stream: bool) -> Stream:
        """Begin to answer a request and return its stream.

        Args:
            request: its images are bytes of files (:class:`panscan.images.files.PageBytes`); its id is unique.
            work: what is known of it.
            stream: whether the events will be read. Otherwise only ``Stream.result()`` may be awaited, and the request
                is computed again elsewhere if its process dies.

        Raises:
            QueueFullError: too many requests wait.
            EngineError: no process can answer.
        """
        ...

    async def count(self, request: Request) -> TokenCounts:
        """Count the tokens of a prompt without computing it.

        Raises:
            SettingError: the prompt is malformed or too long.
            ImageError: an image cannot be read.
            EngineError: no process can answer.
        """
        ...

    async def token_texts(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes that each token stands for; empty for special tokens.

        Raises:
            EngineError: no process can answer.
        """
        ...

    async def stats(self) -> Mapping[str, Stats]:
        """Return the figures of each engine, by replica; without those that do not answer in time."""
        ...
