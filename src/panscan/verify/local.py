"""What the same weights answer on this machine, under the reference and under each hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from panscan.core import Request
from panscan.settings import Settings
from panscan.verify.hypotheses import Hypothesis

__all__ = ["LocalModel"]


class LocalModel:
    """A checkpoint on this machine, asked one request at a time. Use it as a context manager."""

    @classmethod
    def open(cls, settings: Settings) -> LocalModel:
        """Load the checkpoint that ``settings`` name.

        Raises:
            ModelError: it cannot be loaded.
            UnsupportedError: its weights are quantised, offloaded or split, or the device is missing.
        """
        raise NotImplementedError

    def __enter__(self) -> Self:
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise NotImplementedError

    @property
    def vocabulary(self) -> int:
        """Columns of the distributions."""
        raise NotImplementedError

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        raise NotImplementedError

    def hypotheses(self, request: Request) -> list[Hypothesis]:
        """Return the hypotheses that change this request, most frequent first, without the reference."""
        raise NotImplementedError

    def log_probabilities(self, request: Request, tokens: Sequence[int], hypothesis: Hypothesis) -> NDArray[np.float32]:
        """Return natural log-probabilities ``[tokens, vocabulary]`` before each token of a given answer."""
        raise NotImplementedError

    def noise(self, request: Request, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the same for the reference computed in bfloat16: the rounding error of a correct server."""
        raise NotImplementedError

    def greedy(self, request: Request, steps: int) -> list[int]:
        """Return the reference's own answer: at most ``steps`` tokens, with the end token if it was reached."""
        raise NotImplementedError

    def prompt_tokens(self, request: Request, hypothesis: Hypothesis) -> int:
        """Return the length of the prompt under a hypothesis."""
        raise NotImplementedError

    def token_ids(self, text: str | bytes) -> list[int]:
        """Return every token id whose text is ``text``, ascending; empty if there is none."""
        raise NotImplementedError

    def token_text(self, token: int) -> bytes:
        """Return the UTF-8 bytes that a token stands for, as an endpoint writes them."""
        raise NotImplementedError
