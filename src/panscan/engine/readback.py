"""Copies of results from a device to the host, and CUDA events and streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Readback", "record_event", "side_stream"]


def record_event(device: torch.device, *, blocking: bool = False) -> Any:
    """Record and return a ``torch.cuda.Event`` after the work enqueued so far on the current stream.

    Args:
        device: an NVIDIA GPU.
        blocking: a thread that waits for the event sleeps instead of spinning.
    """
    event: Any = torch.cuda.Event  # its calls have no types
    event = event(enable_timing=True, blocking=blocking)
    event.record(torch.cuda.current_stream(device))
    return event


def side_stream(device: torch.device) -> Any:
    """Return a new ``torch.cuda.Stream`` of an NVIDIA GPU."""
    stream: Any = torch.cuda.Stream  # it has no types
    return stream(device)


@dataclass(frozen=True, slots=True)
class Readback:
    """Tensors that are being copied to the host.

    Args:
        host: copies on the host.
        done: CUDA event, reached when the copies are complete; None: they are complete.
    """

    host: tuple[torch.Tensor, ...]
    done: Any

    @classmethod
    def of(cls, *tensors: torch.Tensor) -> Readback:
        """Enqueue copies of tensors behind the work of their device."""
        if not tensors or tensors[0].device.type != "cuda":
            return cls(tuple(tensor.cpu() for tensor in tensors), None)
        host = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors)
        for copy, tensor in zip(host, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        return cls(host, record_event(tensors[0].device, blocking=True))

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Wait for the copies and return them."""
        if self.done is not None:
            self.done.synchronize()
        return self.host
