"""How many requests the KV cache holds at once: with one pool for both kinds of layers, and with two, as it had before.

Run ``python -m benchmarks.kv_capacity``; docs/ten-a100.md has the table.
"""

from __future__ import annotations

from benchmarks.markdown import table
from panscan.engine.options import EngineOptions
from panscan.engine.scheduling.kv_blocks import KVBlocks
from panscan.engine.scheduling.kv_sizes import KVShape
from panscan.model.shapes import SHAPES
from panscan.plan.cost import Variant
from panscan.plan.gpus import gpu_named
from panscan.plan.memory import concurrent_requests, memory_plan

_CARDS = (
    ("bf16, H100", None, "h100", 1),
    ("bf16, two A100 40 GB", None, "a100-40gb", 2),
    ("int8, A100 40 GB", "int8", "a100-40gb", 1),
    ("int4, RTX 4090", "int4", "rtx4090", 1),
)
_TOKENS = 1230, 2300, 4600


def two_pools(blocks: KVBlocks, shape: KVShape, tokens: int, window: int, options: EngineOptions) -> int:
    """Return how many requests of ``tokens`` two pools of the same memory held, at most ``max_num_seqs``.

    The pool of local layers had the windows of ``max_num_seqs`` requests and a chunk, or half of the memory. If that
    was more than equally many tokens for both kinds of layers, it had as many as the other.
    """
    size, seqs = options.block_size, options.max_num_seqs
    memory = blocks.pool.count * shape.cells  # in cells
    windows = -(-(seqs * (window + 2 * size) + options.prefill_chunk_size + 256) // size)
    local = max(windows, memory // 2 // shape.local_layers)
    equal = memory // (shape.global_layers + shape.local_layers)
    first, second = (equal, equal)
    if equal >= local:
        first, second = (memory - local * shape.local_layers) // shape.global_layers, local
    request_blocks = -(-tokens // size)
    return min(first // request_blocks, second // min(request_blocks, window // size + 2), seqs)


def kv_capacity() -> str:
    """Return the table of requests that fit."""
    rows, options = [], EngineOptions()
    for name in ("4b", "12b", "27b"):
        for cards, weights, gpu, gpus in _CARDS:
            for cache in ("auto", "int8"):
                variant = Variant(SHAPES[name], weights, tensor_parallel_size=gpus, kv_cache_dtype=cache)
                plan = memory_plan(variant, gpu_named(gpu))
                shape, window = variant.kv_shape(), variant.text.window
                blocks = KVBlocks(shape, plan.slabs, block_size=options.block_size, window=window)
                counts = [
                    (two_pools(blocks, shape, tokens, window, options), concurrent_requests(plan, variant, tokens))
                    for tokens in _TOKENS
                ]
                if counts[-1][0] < options.max_num_seqs:
                    size = f"{plan.kv_bytes / 1e9:.1f}"
                    fits = [f"{before} / {after}" for before, after in counts]
                    rows.append([name.upper(), cards, "bf16" if cache == "auto" else cache, size, *fits])
    headings = ["model", "weights, GPUs", "KV cache", "KV cache GB/GPU", *(f"{tokens:,}" for tokens in _TOKENS)]
    note = (
        "Requests at once by their tokens, prompt and answer, before / after: with a pool of memory for each kind of"
        f" layers / with one pool; at most {options.max_num_seqs} (`--max-num-seqs`), which all combinations that are"
        " not listed reach. Computed by the functions of the engine's startup, as by `panscan plan`."
    )
    return f"{table(headings, rows, text=(0, 1, 2))}\n\n{note}"


if __name__ == "__main__":
    print(kv_capacity())
