"""What the loop and the executors of its passes exchange: facts, results, pixels and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from panscan.core import EngineError, PanscanError, TokenLogprobs, UnsupportedError, View
from panscan.core.errors import brief, error_line
from panscan.engine.scheduling.batch import FlatBatch, SamplingRow
from panscan.engine.scheduling.kv_sizes import KVShape
from panscan.model.machine import is_out_of_memory


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    """Properties of a model runner that the loop needs, as plain values.

    Args:
        device: type of the device: cuda, cpu or mps.
        overlaps: whether the device computes a pass while the host prepares the next one.
        window: positions that a local layer attends to, the row's own included; None: there is no local layer.
        max_positions: the model's context length.
        kv_shape: layers of each kind, and their keys and values.
        slabs: slabs of the KV cache.
        view_bytes: size of one encoded view; 0 for a text-only model.
        pixel_bytes: pixels that may wait on the GPUs of all ranks; None: pixels are in host memory.
        decisions: startup choices with reasons, and startup timings, one line each.
    """

    device: str
    overlaps: bool
    window: int | None
    max_positions: int
    kv_shape: KVShape
    slabs: int
    view_bytes: int
    pixel_bytes: int | None
    decisions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PassResult:
    """What one pass computed, on the host.

    Args:
        tokens: the token of each sampled row.
        logprobs: log-probabilities of sampled rows that ask for them, by index among these.
        finished_at: time at which the result reached the host, in seconds of :func:`panscan.core.now`.
        vision: start and end of encoding its views, on the same clock; None if it encoded none.
        logits: float32 ``[observed, vocabulary]``: logits of the observed rows; None without.
        answers: float32 ``[observed samples, vocabulary]``: logits of observed sampled rows; None without.
        scores: log-probabilities of the scored rows, in order.
    """

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs]
    finished_at: float
    vision: tuple[float, float] | None = None
    logits: torch.Tensor | None = None
    answers: torch.Tensor | None = None
    scores: list[TokenLogprobs] = field(default_factory=list)


WaitForPass = Callable[[], PassResult]
"""Waits until the device has computed a launched pass, and returns its result. Raises whatever failed on the device."""


class PixelIntake(Protocol):
    """The receiver of pixels (see :class:`panscan.engine.views.PixelStore`). Thread-safe."""

    def put(self, levels: NDArray[np.uint8], views: Mapping[int, View], /) -> None:
        """Compute and keep the pixels of an image's views under their handles."""

    def forget(self, handles: Iterable[int], /) -> None:
        """Drop the pixels of these handles, which are no longer needed."""


class PassExecutor(Protocol):
    """An executor of passes: a :class:`panscan.engine.model_runner.ModelRunner`, or the ranks that have one each."""

    @property
    def facts(self) -> RunnerFacts:
        """Properties that the loop needs."""

    @property
    def pixels(self) -> PixelIntake:
        """Pixels that wait for the vision tower."""

    def execute(self, batch: FlatBatch, /) -> WaitForPass:
        """Launch a pass, to run after all earlier ones."""

    def sample(self, rows: tuple[SamplingRow, ...], /) -> None:
        """Sample the tokens of the last launched pass, whose batch had no ``sampling``."""

    def stop(self) -> None:
        """Release the device."""


def pass_error(error: Exception) -> PanscanError:
    """Return the error of a request in a failed pass.

    Raises:
        EngineError: no later pass can run: the ranks were closed, or the device has failed. CUDA reports an illegal
            access or a lost device to every later call too.
    """
    if isinstance(error, EngineError):
        raise error
    if isinstance(error, PanscanError):
        return error
    text = brief(error, 300)
    if is_out_of_memory(error):
        fix = "lower --prefill-chunk-size, --vision-batch-size, --max-num-seqs or --kv-cache-gb"
        return UnsupportedError(f"out of memory in an engine pass: {fix} ({text})")
    if isinstance(error, RuntimeError) and "CUDA error" in str(error):
        raise EngineError(f"the device has failed: {text}") from error
    return PanscanError(f"an engine pass failed: {error_line(error, 300)}")
