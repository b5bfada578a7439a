"""KV cache memory: the device's memory, the process's limit, and the tensors of the blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import psutil
import torch

from panscan.engine.scheduling.kv_sizes import DeviceMemory

if TYPE_CHECKING:
    from panscan.model.text_layers import LayerFacts

__all__ = ["KVCache", "limit_process_memory", "measure_memory"]

_limits: dict[int, list[float]] = {}  # by GPU: the limits of this process's engines; the lowest applies


def measure_memory(device: torch.device) -> DeviceMemory:
    """Return the memory of a device. MPS shares the computer's memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total, free, torch.cuda.memory_reserved(device))
    memory = psutil.virtual_memory()
    return DeviceMemory(memory.total, memory.available)


def limit_process_memory(device: torch.device, bound: int) -> Callable[[], None]:
    """Limit the memory that PyTorch may reserve on an NVIDIA GPU; return a function that removes the limit.

    Beyond the limit, allocations raise ``torch.OutOfMemoryError``. The CUDA context is not counted. Other devices have
    no limit.

    Args:
        device: the device.
        bound: bytes.
    """
    if device.type != "cuda":
        return lambda: None
    index = torch.cuda.current_device() if device.index is None else device.index
    limits = _limits.setdefault(index, [])
    limits.append(min(1.0, bound / torch.cuda.mem_get_info(index)[1]))
    torch.cuda.set_per_process_memory_fraction(min(limits), index)

    def lift(limit: float = limits[-1]) -> None:
        limits.remove(limit)
        torch.cuda.set_per_process_memory_fraction(min(limits, default=1.0), index)

    return lift


class KVCache:
    """Keys and values of every layer: ``k[layer]`` and ``v[layer]`` are ``[blocks x block size, kv heads, D]``.

    Block b of a kind is rows ``[b x block size, (b + 1) x block size)`` of all layers of that kind. Each kind has one
    block more than requested; ``spare`` holds its number for global and for local layers. Rows that only pad a pass
    use it.

    Args:
        layers: shape, dtype and device of each layer's keys and values.
        blocks: numbers of blocks for global and for local layers.
        block_size: tokens per block.
    """

    def __init__(self, layers: Sequence[LayerFacts], blocks: tuple[int, int], block_size: int) -> None:
        self.spare = blocks

        def rows(layer: LayerFacts) -> torch.Tensor:
            shape = (blocks[layer.local] + 1) * block_size, layer.kv_heads, layer.head_size
            return torch.empty(
                shape, dtype=layer.kv_dtype, device=layer.device
            )  # CPU pages are committed on first write

        self.k = [rows(layer) for layer in layers]
        self.v = [rows(layer) for layer in layers]
