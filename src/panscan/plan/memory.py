"""Memory of one GPU: what weights, passes and caches take, and how many tokens the KV cache holds.

The engine measures its largest pass at startup; here it is derived from the shape. Everything else is the engine's own
arithmetic (:mod:`panscan.engine.scheduling.kv_sizes`).
"""

from __future__ import annotations

from dataclasses import dataclass

from panscan.core import UnsupportedError
from panscan.engine.options import EngineOptions
from panscan.engine.scheduling.graph_sizes import graph_sizes
from panscan.engine.scheduling.kv_blocks import KVBlocks
from panscan.engine.scheduling.kv_sizes import (
    DeviceMemory,
    MemoryBudget,
    MemoryFacts,
    choose_slabs,
    gpu_working_bytes,
    pass_rows,
)
from panscan.model.shapes import decoder_working_bytes, vision_working_bytes
from panscan.plan.cost import Variant
from panscan.plan.gpus import Gpu

_CONTEXT = 600 << 20  # CUDA context and libraries, outside PyTorch's allocator
_FRAGMENTS = 250_000_000  # bytes that PyTorch's allocator reserves and cannot release, whatever the decoder
_DENSE_HOLES, _OTHER_HOLES = 0.16, 0.083  # of one dense MLP matrix, per decoder layer: likewise
_PIXEL_CHANNELS = 3


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one GPU by purpose, and what its KV cache holds.

    Args:
        weights: bytes of the weights.
        working: bytes that stay free for passes, CUDA graphs not included.
        graphs: bytes that stay free for CUDA graphs.
        vision_cache: bytes of encoded views that are kept.
        kv_bytes: bytes of the KV cache.
        slabs: slabs of the KV cache.
        fits: whether the engine runs with these options.
        reason: why it does not, and what to change; None if it does.
    """

    weights: int
    working: int
    graphs: int
    vision_cache: int
    kv_bytes: int
    slabs: int
    fits: bool
    reason: str | None


def memory_plan(variant: Variant, gpu: Gpu, options: EngineOptions | None = None) -> MemoryPlan:
    """Return what the engine allocates on a GPU that does nothing else; on a CPU, with all ranks in its memory.

    Args:
        variant: what runs.
        gpu: where it runs.
        options: sizes; None: the defaults. ``kv_cache_dtype`` is the variant's.
    """
    options = options or EngineOptions()
    facts, graphs = _memory_facts(variant, gpu, options)
    weights, budget = variant.weight_bytes(), MemoryBudget.of(options, gpu.memory_bytes)
    vision_cache = round(options.vision_cache_gb * 1e9) if facts.view_bytes else 0
    slabs, reason = 0, gpu.refusal(variant.weights, variant.kv_cache_dtype, variant.dtype, variant.quantize_vision)
    if reason is None:
        try:
            if facts.on_gpu:
                budget.check_weights(weights, facts.device)
            reserved = weights + _fragments(variant) if facts.on_gpu else 0
            taken = reserved + _CONTEXT if facts.on_gpu else facts.sharers * weights
            device = DeviceMemory(gpu.memory_bytes, max(0, gpu.memory_bytes - taken), reserved)
            slabs = choose_slabs(facts, options, device)
        except UnsupportedError as error:
            reason = str(error)
    return MemoryPlan(
        weights=weights,
        working=facts.working_bytes - graphs,
        graphs=graphs,
        vision_cache=vision_cache,
        kv_bytes=slabs * facts.shape.slab_bytes(options.block_size),
        slabs=slabs,
        fits=reason is None,
        reason=reason,
    )


def concurrent_requests(plan: MemoryPlan, variant: Variant, tokens: int, options: EngineOptions | None = None) -> int:
    """Return how many requests of ``tokens`` tokens each, prompt and answer, the engine computes at once, at most
    ``max_num_seqs``."""
    if not plan.fits:
        return 0
    options = options or EngineOptions()
    blocks = KVBlocks(variant.kv_shape(), plan.slabs, block_size=options.block_size, window=variant.text.window)
    return min(blocks.concurrent(max(1, tokens), options.prefill_chunk_size), options.max_num_seqs)


def _fragments(variant: Variant) -> int:
    """Return the bytes that PyTorch's allocator reserves beyond the weights and cannot release.

    The engine joins query, key and value, and gate and up, into one tensor each. The joined tensors land in segments of
    freed ones, which stay reserved. Those are largest where dense weights of one GPU are joined; quantised weights and
    shards are filled matrix by matrix. Fitted to the 27B and 4B shapes on one and two GPUs, in four kinds of weights:
    0.3 to 2.5 GB, off by 0.12 GB in the median and by 0.7 GB at most.
    """
    text = variant.text
    share = _DENSE_HOLES if variant.weights is None and variant.tensor_parallel_size == 1 else _OTHER_HOLES
    return _FRAGMENTS + round(share * text.layers * text.hidden * text.intermediate * variant.width)


def _memory_facts(variant: Variant, gpu: Gpu, options: EngineOptions) -> tuple[MemoryFacts, int]:
    """Return what the model needs besides its weights, and the part that is for CUDA graphs."""
    shape, text, vision = variant.shape, variant.text, variant.shape.vision
    image_tokens = shape.image_tokens if vision else 0
    rows, on_gpu, graphs = pass_rows(options, image_tokens), gpu.capability is not None, 0
    if on_gpu:
        sizes = graph_sizes(options.max_num_seqs, options.prefill_chunk_size, variant.tensor_parallel_size)
        budget = MemoryBudget.of(options, gpu.memory_bytes)
        held = 8 * text.vocabulary * budget.recorded_rows(variant.weight_bytes(), options.max_num_seqs)
        graphs = _bound(variant, max(map(sum, sizes)), 0) + held
        # Sampling takes float32 logits, two sets of scores, and a byte per score for each of four steps of a mask.
        sampler = 16 * options.max_num_seqs * text.vocabulary
        largest = max(_decoder_bytes(variant, rows), sampler, _vision_bytes(variant, options))
        working = gpu_working_bytes(largest_pass=largest, graphs=graphs, pixels=budget.pixel_bytes)
    else:
        working = _bound(variant, rows, options.max_num_seqs)
        if vision is not None:
            working += vision_working_bytes(
                patches=vision.patches,
                hidden=vision.hidden,
                intermediate=vision.intermediate,
                views=options.vision_batch_size,
                width=variant.width,
            )
    facts = MemoryFacts(
        shape=variant.kv_shape(),
        device=gpu.label,
        on_gpu=on_gpu,
        working_bytes=working,
        view_bytes=image_tokens * text.hidden * variant.width,
        max_positions=text.max_positions,
        sharers=1 if on_gpu else variant.tensor_parallel_size,
    )
    return facts, graphs


def _bound(variant: Variant, tokens: int, rows: int) -> int:
    text = variant.text
    return decoder_working_bytes(
        hidden=text.hidden,
        intermediate=text.intermediate // variant.tensor_parallel_size,
        vocabulary=text.vocabulary,
        tokens=tokens,
        rows=rows,
        width=variant.width,
    )


def _decoder_bytes(variant: Variant, rows: int) -> int:
    """Return the bytes that a pass of ``rows`` rows allocates at once.

    It peaks in the MLP of a layer. Per row: embedding, residual, norm and the attention's output (4 hidden states);
    queries, keys and values as projected, rotated queries, attended values; gate and up, and their product. 8-bit
    products of gate and up are sums of 4 bytes.
    """
    text, size, width = variant.text, variant.tensor_parallel_size, variant.width
    heads = text.head_size * (3 * text.heads + 2 * text.kv_heads) // size
    inner = text.intermediate // size
    sums = variant.weight_format.sum_bytes or width
    return rows * ((4 * text.hidden + heads + inner) * width + 2 * inner * sums)


def _vision_bytes(variant: Variant, options: EngineOptions) -> int:
    """Return the bytes that encoding ``vision_batch_size`` views allocates at once.

    Per patch: residual, sum and norm (3 hidden states) and either queries, keys, values, attended values and their
    projection (5), or the MLP's width and its output (1); with 8-bit products, one byte more for each of the MLP's
    columns; and the pixels.
    """
    vision = variant.shape.vision
    if vision is None:
        return 0
    quantized = 0 if variant.quantize_vision is None else vision.intermediate
    mlp = (4 * vision.hidden + vision.intermediate) * variant.width + quantized
    patch = max(8 * vision.hidden * variant.width, mlp)
    pixels = _PIXEL_CHANNELS * vision.image_size**2 * variant.width
    return options.vision_batch_size * (vision.patches * patch + pixels)
