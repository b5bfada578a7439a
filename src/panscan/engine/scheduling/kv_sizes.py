"""Memory of passes and of the KV cache, as sizes. Integers only; the tensors are in ``engine.attention``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Self

from panscan.core import UnsupportedError
from panscan.engine.options import EngineOptions

if TYPE_CHECKING:
    from panscan.model.layers import LayerFacts


_CPU_SHARE = 0.9  # share of the available memory; passes need the rest
_CPU_BYTES = 4_000_000_000  # unless --kv-cache-gb asks for more: a laptop has other work
_GPU_MARGIN = 0.01  # share of a GPU's memory for libraries that allocate outside PyTorch's allocator
_SLACK = 1.2  # factor on the working memory of the largest pass: the allocator cannot use all that it reserves
_MUCH_LEFT = 16e9  # bytes
_PIXEL_SHARE = 250  # 1/250 of the memory limit is for pixels that wait: 33 views of 40 GB
_FIXED_BYTES = 256 << 20  # workspaces of products, and small tensors of passes in flight


class KVShape(NamedTuple):
    """The layers of each kind, and the bytes of one token's keys and values in one layer.

    One pool of memory serves both kinds. It consists of slabs of ``cells`` cells; a cell has one layer's keys and
    values of one block of tokens. A slab has as many blocks of all layers of one kind as fit.
    """

    layer_bytes: int
    global_layers: int
    local_layers: int

    @property
    def cells(self) -> int:
        """Cells per slab: the least that waste less than a 25th, for either kind."""
        counts = [count for count in self[1:] if count]
        sizes = range(max(counts), prod(counts) + 1, max(counts))
        return next(cells for cells in sizes if all(25 * (cells % count) < cells for count in counts))

    @property
    def slab_blocks(self) -> tuple[int, int]:
        """Blocks of global and of local layers per slab; 0: there is no such layer."""
        blocks, local = (layers and self.cells // layers for layers in self[1:])
        return blocks, local

    @classmethod
    def of(cls, layers: Sequence[LayerFacts]) -> Self:
        """Return the shape of a model's layers, whose keys and values have one size and type."""
        local, first = sum(layer.local for layer in layers), layers[0]
        token = head_bytes(first.head_size, first.kv_dtype.itemsize, scaled=first.scaled)
        return cls(first.kv_heads * token, len(layers) - local, local)

    def slab_bytes(self, block_size: int) -> int:
        """Return the bytes of a slab."""
        return self.cells * self.layer_bytes * block_size

    def slabs(self, tokens: int, block_size: int) -> int:
        """Return the slabs that a sequence fills if all its blocks are kept."""
        return sum(-(-tokens // (block_size * count)) for count in self.slab_blocks if count)


def lane_cells(slabs: int) -> int:
    """Return how far apart the cells of a slab are: a lane has the same cell of every slab, of a spare one too.

    So the cells of one layer are close together, as the translation of addresses wants it. The number is a multiple of
    4, so that scales are aligned.
    """
    return slabs // 4 * 4 + 4


def head_bytes(size: int, itemsize: int, *, scaled: bool) -> int:
    """Return the bytes of one token's key and value of one head; ``scaled``: each has a float32 scale."""
    return 2 * (size * itemsize + 4 * scaled)


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What a model needs besides its weights, on the device that holds it.

    Args:
        shape: layers, and their keys and values on this device; with tensor parallelism, of this rank's heads.
        device: name of the device in messages, such as ``cuda:0``.
        on_gpu: whether it is an NVIDIA GPU.
        working_bytes: most bytes that a pass, with its vision batch and CUDA graphs, needs at once.
        view_bytes: bytes of one encoded view; 0 for a text-only model, which has no vision cache.
        max_positions: most tokens of one sequence.
        sharers: engines that share the memory of the device, and on a CPU their ranks.
        holders: those among them that hold their KV cache already, if the free memory is without it.
    """

    shape: KVShape
    device: str
    on_gpu: bool
    working_bytes: int
    view_bytes: int
    max_positions: int
    sharers: int = 1
    holders: int = 0


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device in bytes: in total, free, and reserved by this process's allocator (0 on CPU and MPS)."""

    total: int
    free: int
    reserved: int = 0


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes of a GPU's memory that PyTorch may reserve in this process, and the option that sets the limit."""

    bytes: int
    option: str

    @property
    def pixel_bytes(self) -> int:
        """Bytes of pixels that may wait on the GPU."""
        return self.bytes // _PIXEL_SHARE

    def recorded_rows(self, held: int, most: int) -> int:
        """Return how many rows the sampler's CUDA graphs take: 2 MB for each with Gemma's vocabulary; none where
        weights leave little memory: its caches need it, and few requests run at once.

        Args:
            held: bytes of the weights.
            most: rows of a pass.
        """
        return min(most, 128) if self.bytes - held >= _MUCH_LEFT else 0

    def check_weights(self, held: int, device: str) -> None:
        """Refuse weights that leave nothing for passes and caches.

        Args:
            held: bytes of the weights.
            device: name of the device in the message.

        Raises:
            UnsupportedError: the weights take the whole budget.
        """
        if held >= self.bytes:
            raise UnsupportedError(
                f"{self.option}: the model's weights take {held / 1e9:.3g} GB of {device}: raise it, or use"
                " --tensor-parallel-size"
            )

    @classmethod
    def of(cls, options: EngineOptions, total: int) -> Self:
        """Return the lower limit of ``gpu_memory_utilization`` x ``total`` bytes and ``gpu_memory_gb``."""
        share = int(options.gpu_memory_utilization * total)
        if options.gpu_memory_gb is None or options.gpu_memory_gb * 1e9 >= share:
            return cls(share, f"--gpu-memory-utilization {options.gpu_memory_utilization:g}")
        return cls(int(options.gpu_memory_gb * 1e9), f"--gpu-memory-gb {options.gpu_memory_gb:g}")


def pass_rows(options: EngineOptions, image_tokens: int) -> int:
    """Return the rows of the largest pass: a chunk that ends inside an image span, which is taken whole, and a row of
    every other sequence."""
    return options.prefill_chunk_size + image_tokens + options.max_num_seqs


def gpu_working_bytes(*, largest_pass: int, graphs: int, pixels: int) -> int:
    """Return the bytes of a GPU to keep free of caches.

    Args:
        largest_pass: bytes that the largest pass allocates.
        graphs: bytes of the CUDA graphs.
        pixels: bytes of pixels that wait for the vision tower.
    """
    return int(_SLACK * largest_pass) + graphs + _FIXED_BYTES + pixels


def choose_slabs(facts: MemoryFacts, options: EngineOptions, memory: DeviceMemory) -> int:
    """Return the number of slabs of the KV cache, at most what ``max_num_seqs`` sequences of any length fill.

    The KV cache gets ``options.kv_cache_gb``. By default, it gets the :class:`MemoryBudget` or the free memory of a
    GPU, whichever is less, minus the working memory of passes and the vision cache; on other devices at most 4 GB.

    Args:
        facts: memory needs of the model. Its weights are loaded; the KV and vision caches are not yet allocated.
        options: sizes.
        memory: the device's memory, without what the allocator can release.

    Raises:
        UnsupportedError: ``kv_cache_gb`` does not fit, or the memory holds not one block of each kind of layer.
    """
    room, limit = _room(facts, options, memory)
    wanted = room if options.kv_cache_gb is None else round(options.kv_cache_gb * 1e9)
    if wanted > room:
        size, left = f"--kv-cache-gb {options.kv_cache_gb:g}", f"{max(room, 0) / 1e9:.3g} GB"
        if limit is None:
            fix = "lower it, or leave it out to use most of the free memory"
            raise UnsupportedError(f"{size}: {facts.device} has room for {left}; {fix}")
        fix = f"raise {limit.split()[0]}, or lower --kv-cache-gb"
        raise UnsupportedError(f"{limit}: {facts.device} has room for {left}, less than {size}; {fix}")
    shape, block_size = facts.shape, options.block_size
    slab, least = shape.slab_bytes(block_size), shape.slabs(1, block_size)
    if wanted < least * slab:
        raise UnsupportedError(
            f"--kv-cache-gb: {max(wanted, 0) / 1e9:.3g} GB hold no block of keys and values;"
            f" one takes {least * slab / 1e9:.3g} GB; {_memory_advice(facts, options, limit)}"
        )
    return min(wanted // slab, options.max_num_seqs * shape.slabs(facts.max_positions, block_size))


def _room(facts: MemoryFacts, options: EngineOptions, memory: DeviceMemory) -> tuple[int, str | None]:
    """Return the bytes available for the KV cache (may be negative) and the limiting option; None: free memory."""
    vision_cache = round(options.vision_cache_gb * 1e9) if facts.view_bytes else 0
    if facts.on_gpu:
        budget = MemoryBudget.of(options, memory.total)
        within, free = budget.bytes - memory.reserved, memory.free - int(_GPU_MARGIN * memory.total)
        needed = facts.working_bytes + vision_cache
        shared = min(within, free) - facts.holders * needed  # of which they have allocated little yet
        return shared // (facts.sharers - facts.holders) - needed, budget.option if within <= free else None
    free = memory.free // facts.sharers
    room = int(_CPU_SHARE * free)
    if options.kv_cache_gb is None:  # an explicit size may leave less to passes: the CPU can swap
        room = min(min(room, free - facts.working_bytes) - vision_cache, _CPU_BYTES // facts.sharers)
    return room, None


def _memory_advice(facts: MemoryFacts, options: EngineOptions, limit: str | None) -> str:
    """Return what to change so that the KV cache holds a block."""
    if options.kv_cache_gb is not None:
        least = facts.shape.slabs(1, options.block_size) * facts.shape.slab_bytes(options.block_size) / 1e9
        return f"raise it to at least {1.01 * least:.3g} GB, or leave it out"  # 1%: not rounded below it
    lower = "lower --vision-cache-gb, --vision-batch-size, --max-num-seqs or --prefill-chunk-size"
    if limit is None:
        return f"{facts.device} has too little free memory: free some, or {lower}"
    return f"{limit} leaves too little of {facts.device}: raise {limit.split()[0]}, or {lower}"
