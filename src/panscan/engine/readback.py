"""Results on their way from a device to the host, and moments of its work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Readback", "record_event", "side_stream"]


def record_event(device: torch.device, *, blocking: bool = False) -> Any:
    """Record and return a ``torch.cuda.Event`` after all work enqueued on the device so far.

    Args:
        device: an NVIDIA GPU.
        blocking: whether a waiting thread sleeps instead of spinning.
    """
    event: Any = torch.cuda.Event  # its calls have no types
    event = event(enable_timing=True, blocking=blocking)
    event.record(torch.cuda.current_stream(device))
    return event


def side_stream(device: torch.device) -> Any:
    """A new ``torch.cuda.Stream`` (it has no types either) of an NVIDIA GPU."""
    stream: Any = torch.cuda.Stream
    return stream(device)


@dataclass(frozen=True, slots=True)
class Readback:
    """Tensors on their way to the host.

    Args:
        host: where they arrive.
        done: a CUDA event, reached when they are there; None: they are.
    """

    host: tuple[torch.Tensor, ...]
    done: Any

    @classmethod
    def of(cls, *tensors: torch.Tensor) -> Readback:
        """Send tensors off behind what their device has to do before."""
        if not tensors or tensors[0].device.type != "cuda":
            return cls(tuple(tensor.cpu() for tensor in tensors), None)
        host = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors)
        for place, tensor in zip(host, tensors, strict=True):
            place.copy_(tensor, non_blocking=True)
        return cls(host, record_event(tensors[0].device, blocking=True))

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The tensors on the host, when they are there."""
        if self.done is not None:
            self.done.synchronize()
        return self.host
