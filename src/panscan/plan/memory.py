"""Memory of one GPU: what weights, passes and caches take, and how many tokens fit. The engine's own formulas."""

from __future__ import annotations

from dataclasses import dataclass

from panscan.core import UnsupportedError
from panscan.engine.options import EngineOptions
from panscan.engine.scheduling.kv_sizes import DeviceMemory, MemoryBudget, MemoryFacts, choose_blocks
from panscan.plan.cost import Variant
from panscan.plan.gpus import Gpu

__all__ = ["MemoryPlan", "concurrent_requests", "memory_plan"]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one GPU by purpose, and what its KV cache holds.

    Args:
        weights: bytes of the weights.
        working: bytes that passes need at once, CUDA graphs not included.
        graphs: bytes of CUDA graphs.
        vision_cache: bytes of encoded views that are kept.
        kv_bytes: bytes of the KV cache.
        global_tokens: tokens that the KV cache holds in global layers.
        local_tokens: tokens that it holds in local layers.
        fits: whether the model runs with these options.
        reason: why it does not fit; None if it does.
    """

    weights: int
    working: int
    graphs: int
    vision_cache: int
    kv_bytes: int
    global_tokens: int
    local_tokens: int
    fits: bool
    reason: str | None


_FIXED = 700 << 20  # CUDA context and libraries, outside PyTorch's allocator
_SLACK = 1.2
_WORKSPACE = 256 << 20
_PIXEL_SHARE = 250
_MOST_CHUNK_ROWS = 512


def memory_plan(variant: Variant, gpu: Gpu, options: EngineOptions | None = None) -> MemoryPlan:
    """Return what the engine would allocate on an otherwise empty GPU.

    Args:
        variant: what runs.
        gpu: where it runs.
        options: sizes; None: the defaults.
    """
    options = options or EngineOptions()
    shape, text = variant.shape, variant.text
    on_gpu = gpu.capability is not None
    budget = MemoryBudget.of(options, gpu.memory_bytes)
    weights = variant.weight_bytes()
    graphs = _pass_bytes(variant, options.max_num_seqs + _MOST_CHUNK_ROWS) if on_gpu else 0
    working = int(_SLACK * _largest(variant, options)) + _WORKSPACE + (budget.bytes // _PIXEL_SHARE if on_gpu else 0)
    vision_cache = round(options.vision_cache_gb * 1e9) if shape.vision else 0
    facts = MemoryFacts(
        shape=variant.kv_shape(), device="cuda:0" if on_gpu else "cpu", working_bytes=working + graphs,
        view_bytes=shape.image_tokens * text.hidden * variant.width if shape.vision else 0, window=text.window,
        image_tokens=shape.image_tokens if shape.vision else 0, max_positions=text.max_positions,
        processes=1 if on_gpu else variant.tensor_parallel_size,
    )  # fmt: skip
    memory = DeviceMemory(gpu.memory_bytes, gpu.memory_bytes - weights - _FIXED, weights)
    tokens, reason = (0, 0), None
    try:
        blocks = choose_blocks(facts, options, memory)
        tokens = blocks[0] * options.block_size, blocks[1] * options.block_size
    except UnsupportedError as error:
        reason = str(error)
    kv_bytes = tokens[0] * facts.shape.global_bytes + tokens[1] * facts.shape.local_bytes
    return MemoryPlan(
        weights, working, graphs, vision_cache, kv_bytes, *tokens, fits=reason is None, reason=reason
    )  # fmt: skip


def concurrent_requests(plan: MemoryPlan, variant: Variant, tokens: int, block_size: int = 2) -> int:
    """Return how many requests of ``tokens`` tokens the KV cache holds at once."""
    if not plan.fits:
        return 0
    local = min(tokens, variant.text.window + 2 * block_size)
    return min(plan.global_tokens // max(1, tokens), plan.local_tokens // max(1, local))


def _pass_bytes(variant: Variant, rows: int) -> int:
    text = variant.text
    inner = text.intermediate // variant.tensor_parallel_size
    return rows * (4 * text.hidden + 3 * inner) * variant.width * 3 // 2


def _largest(variant: Variant, options: EngineOptions) -> int:
    """Return the bytes of the largest pass: the vision batch or the logits and the layers."""
    shape, vision = variant.shape, variant.shape.vision
    rows = options.prefill_chunk_size + shape.image_tokens + options.max_num_seqs
    text = _pass_bytes(variant, rows) + options.max_num_seqs * variant.text.vocabulary * (variant.width + 20)
    if vision is None:
        return text
    states = vision.patches * (4 * vision.hidden + 3 * vision.intermediate)
    return max(text, options.vision_batch_size * states * variant.width)
