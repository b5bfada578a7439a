"""Memory of passes and of the KV cache, as sizes. Integers only; the tensors are in ``engine.attention``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from panscan.core import UnsupportedError
from panscan.engine.options import EngineOptions

if TYPE_CHECKING:
    from panscan.model.layers import LayerFacts


_CPU_SHARE = 0.9  # share of the available memory; passes need the rest
_CPU_BYTES = 4_000_000_000  # unless --kv-cache-gb asks for more: a laptop has other work
_GPU_MARGIN = 0.01  # share of a GPU's memory for libraries that allocate outside PyTorch's allocator
_SLACK = 1.2  # factor on the working memory of the largest pass: the allocator cannot use all that it reserves
_PIXEL_SHARE = 250  # 1/250 of the memory limit is for pixels that wait: 33 views of 40 GB
_FIXED_BYTES = 256 << 20  # workspaces of products, and small tensors of passes in flight


class KVShape(NamedTuple):
    """Bytes of one token's keys and values, summed over all global layers and over all local layers."""

    global_bytes: int
    local_bytes: int

    @classmethod
    def of(cls, layers: Sequence[LayerFacts]) -> Self:
        """Return the sums over the layers."""
        sums = [0, 0]
        for layer in layers:
            token = head_bytes(layer.head_size, layer.kv_dtype.itemsize, scaled=layer.scaled)
            sums[layer.local] += layer.kv_heads * token
        return cls(*sums)


def head_bytes(size: int, itemsize: int, *, scaled: bool) -> int:
    """Return the bytes of one token's key and value of one head; ``scaled``: each has a float32 scale."""
    return 2 * (size * itemsize + 4 * scaled)


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What a model needs besides its weights, on the device that holds it.

    Args:
        shape: bytes of one token's keys and values on this device; with tensor parallelism, of this rank's heads.
        device: name of the device in messages, such as ``cuda:0``.
        on_gpu: whether it is an NVIDIA GPU.
        working_bytes: most bytes that a pass, with its vision batch and CUDA graphs, needs at once.
        view_bytes: bytes of one encoded view; 0 for a text-only model, which has no vision cache.
        window: positions that a local layer attends to.
        image_tokens: tokens of one image span.
        max_positions: most tokens of one sequence.
        sharers: engines that share the memory of the device, and on a CPU their ranks.
        holders: those among them that hold their KV cache already, if the free memory is without it.
    """

    shape: KVShape
    device: str
    on_gpu: bool
    working_bytes: int
    view_bytes: int
    window: int
    image_tokens: int
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


def choose_blocks(facts: MemoryFacts, options: EngineOptions, memory: DeviceMemory) -> tuple[int, int]:
    """Return the numbers of blocks for global and for local layers.

    The KV cache gets ``options.kv_cache_gb``. By default, it gets the :class:`MemoryBudget` or the free memory of a
    GPU, whichever is less, minus the working memory of passes and the vision cache; on other devices at most 4 GB.

    Args:
        facts: memory needs of the model. Its weights are loaded; the KV and vision caches are not yet allocated.
        options: sizes.
        memory: the device's memory, without what the allocator can release.

    Raises:
        UnsupportedError: ``kv_cache_gb`` does not fit, or the memory holds not one block.
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
    try:
        return split_blocks(
            facts.shape,
            bytes=wanted,
            block_size=options.block_size,
            max_num_seqs=options.max_num_seqs,
            window=facts.window,
            chunk=options.prefill_chunk_size + facts.image_tokens,
            max_tokens=facts.max_positions,
        )
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}; {_memory_advice(facts, options, limit)}") from None


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
        least = options.block_size * (facts.shape.global_bytes + facts.shape.local_bytes) / 1e9
        return f"raise it to at least {1.01 * least:.3g} GB, or leave it out"  # 1%: not rounded below it
    plain = EngineOptions()
    sizes = ("vision_cache_gb", "vision_batch_size", "max_num_seqs", "prefill_chunk_size")
    names = [name for name in sizes if getattr(options, name) > getattr(plain, name)] or ["vision_cache_gb"]
    lower = " or ".join(f"--{name.replace('_', '-')}" for name in names)
    if limit is None:
        return f"{facts.device} has too little free memory: free some, or lower {lower}"
    return f"{limit} leaves too little of {facts.device}: raise {limit.split()[0]}, or lower {lower}"


def split_blocks(
    shape: KVShape, *, bytes: int, block_size: int, max_num_seqs: int, window: int, chunk: int, max_tokens: int
) -> tuple[int, int]:
    """Return the numbers of blocks for global and for local layers that ``bytes`` hold.

    Local layers need every sequence's window, which begins and ends inside blocks, and the chunks of one pass:
    max_num_seqs x (window + 2 x block size) + chunk tokens. Beyond that, up to half of the memory keeps windows of
    finished requests, without which their prefixes cannot be reused. Local layers never get more tokens than global
    layers. Those get the rest, at most what ``max_num_seqs`` sequences of ``max_tokens`` fill.

    Raises:
        UnsupportedError: less than one block of each.
    """
    global_block, local_block = shape.global_bytes * block_size, shape.local_bytes * block_size
    most = max_num_seqs * -(-max_tokens // block_size)
    needed = min(most, -(-(max_num_seqs * (window + 2 * block_size) + chunk) // block_size))
    if local_block:
        needed = max(needed, min(most, max(bytes, 0) // (2 if global_block else 1) // local_block))
    equal = max(bytes, 0) // (global_block + local_block)
    if equal < 1:
        raise UnsupportedError(
            f"--kv-cache-gb: {max(bytes, 0) / 1e9:.3g} GB hold no block of keys and values;"
            f" one takes {(global_block + local_block) / 1e9:.3g} GB"
        )
    if equal < needed:
        return equal, equal
    return min(most, (bytes - needed * local_block) // global_block) if global_block else most, needed
