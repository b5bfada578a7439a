"""The memory of keys and values: how many blocks fit, and the tensors that they are rows of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from panscan.core import UnsupportedError
from panscan.engine.options import EngineOptions
from panscan.model.decoder import Decoder, LayerFacts

__all__ = ["KVCache", "KVShape", "choose_blocks", "free_bytes", "split_blocks"]

_SHARE = 0.9  # of what is free; passes need the rest
_CPU_BYTES = 4_000_000_000  # unless more is asked for: a laptop has other work


@dataclass(frozen=True, slots=True)
class KVShape:
    """Bytes of one token's keys and values, in all global layers together and in all local ones."""

    global_bytes: int
    local_bytes: int

    @classmethod
    def of(cls, layers: Sequence[LayerFacts]) -> KVShape:
        """2 x kv heads x head size x bytes per value, summed over the layers of each kind."""
        sums = [0, 0]
        for layer in layers:
            sums[layer.local] += 2 * layer.kv_heads * layer.head_size * layer.dtype.itemsize
        return cls(*sums)


def choose_blocks(decoder: Decoder, options: EngineOptions) -> tuple[int, int]:
    """How many blocks global and local layers get: ``options.kv_cache_gb``, or most of the memory that is free.

    Of a model whose layers are spread over devices, every device must hold its layers' share.

    Raises:
        UnsupportedError: more was asked for than is free, or what there is holds not one block.
    """
    whole = KVShape.of(decoder.layers)
    counts = []
    for device in {layer.device: None for layer in decoder.layers}:
        shape = KVShape.of([layer for layer in decoder.layers if layer.device == device])
        part = (shape.global_bytes + shape.local_bytes) / (whole.global_bytes + whole.local_bytes)
        wanted = _wanted(decoder, options, device, part)
        try:
            blocks = split_blocks(
                shape, bytes=wanted, block_size=options.block_size, max_num_seqs=options.max_num_seqs,
                window=decoder.window, chunk=options.prefill_chunk_size + decoder.image_tokens,
                max_tokens=decoder.max_positions,
            )  # fmt: skip
        except UnsupportedError as error:
            advice = f"{device} has too little free memory: make some free, or lower {_raised(options)}"
            if options.kv_cache_gb is not None:
                least = options.block_size * (shape.global_bytes + shape.local_bytes) / part / 1e9
                advice = f"raise it to at least {1.01 * least:.3g} GB, or leave it out"  # 1%: not rounded below it
            raise UnsupportedError(f"{error}; {advice}") from None
        counts.append((shape, blocks))
    return _least(counts, 0), _least(counts, 1)


def _raised(options: EngineOptions) -> str:
    """The sizes that leave no memory: those above their defaults, or the one that is easiest to do without."""
    plain = EngineOptions()
    sizes = ("vision_cache_gb", "vision_batch_size", "max_num_seqs", "prefill_chunk_size")
    names = [name for name in sizes if getattr(options, name) > getattr(plain, name)] or ["vision_cache_gb"]
    return " or ".join(f"--{name.replace('_', '-')}" for name in names)


def _wanted(decoder: Decoder, options: EngineOptions, device: torch.device, part: float) -> int:
    """Bytes of a device that its share of the cache is to take."""
    room = free_bytes(device)
    if options.kv_cache_gb is None:
        room = min(room, free_bytes(device, share=1.0) - _passes(decoder, options))
        room -= round(options.vision_cache_gb * 1e9) if decoder.view_bytes and device == decoder.device else 0
        return room if device.type == "cuda" else min(room, round(_CPU_BYTES * part))
    wanted = round(options.kv_cache_gb * 1e9 * part)
    if wanted > room:
        raise UnsupportedError(
            f"--kv-cache-gb {options.kv_cache_gb:g}: {device} has room for {room / part / 1e9:.3g} GB; lower it,"
            " or leave it out to take most of what is free"
        )
    return wanted


def _least(counts: Sequence[tuple[KVShape, tuple[int, int]]], kind: int) -> int:
    """The least number of blocks of a kind on the devices that have such layers; 0 if none has."""
    sizes = ((shape.global_bytes, shape.local_bytes)[kind] for shape, _ in counts)
    return min((blocks[kind] for size, (_, blocks) in zip(sizes, counts, strict=True) if size), default=0)


def split_blocks(
    shape: KVShape, *, bytes: int, block_size: int, max_num_seqs: int, window: int, chunk: int, max_tokens: int
) -> tuple[int, int]:
    """Blocks of global and of local layers that ``bytes`` hold.

    Local layers need every sequence's window, which begins and ends inside blocks, and the chunks of one pass:
    max_num_seqs x (window + 2 x block size) + chunk tokens. What they get beyond that, up to half of the memory, keeps
    windows of requests that are gone, without which a prefix cannot be taken over. They never get more tokens than
    global layers. Those get the rest, at most what ``max_num_seqs`` sequences of ``max_tokens`` fill.

    Raises:
        UnsupportedError: not one block of each.
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


def _passes(decoder: Decoder, options: EngineOptions) -> int:
    """Bytes that passes of these sizes need."""
    tokens = options.prefill_chunk_size + decoder.image_tokens + options.max_num_seqs
    return decoder.working_bytes(tokens=tokens, rows=options.max_num_seqs, views=options.vision_batch_size)


def free_bytes(device: torch.device, share: float = _SHARE) -> int:
    """A share of the bytes that are free on a device. MPS shares the computer's memory."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return int(share * free)


class KVCache:
    """Keys and values of every layer: ``k[layer]`` and ``v[layer]`` are ``[blocks x block size, kv heads, D]``.

    Block b of a kind is rows ``[b x block size, (b + 1) x block size)`` of all layers of that kind. There is one block
    more than was asked for, ``spare`` (its numbers): nobody's, for rows that only pad a pass.

    Args:
        decoder: whose layers say shapes, types and devices.
        blocks: of global and of local layers.
        block_size: tokens of a block.
    """

    def __init__(self, decoder: Decoder, blocks: tuple[int, int], block_size: int) -> None:
        self.spare = blocks

        def rows(layer: LayerFacts) -> torch.Tensor:
            shape = (blocks[layer.local] + 1) * block_size, layer.kv_heads, layer.head_size
            return torch.empty(shape, dtype=layer.dtype, device=layer.device)  # a CPU gives pages as they are written

        self.k = [rows(layer) for layer in decoder.layers]
        self.v = [rows(layer) for layer in decoder.layers]
