"""What an engine holds and has done, as figures."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Stats"]


@dataclass(frozen=True, slots=True)
class Stats:
    """What an engine holds now, and what it has done since it was made.

    Args:
        running: requests that compute.
        waiting: prepared requests that wait for their turn.
        steps: passes through the model.
        prompt_tokens: computed in prefill; those of a preempted request as often as they were computed.
        cached_tokens: of prompts, taken over from requests before.
        output_tokens: written.
        preemptions: times that a request gave its blocks back, to be computed again.
        views_encoded: views that went through the vision tower.
        views_reused: views that were needed and did not have to.
        vision_cache_bytes: of encoded views that are kept.
        kv_blocks_used: of global and of local layers; those that only wait to be reused are not used.
        kv_blocks: of global and of local layers.
        block_size: tokens of a block.
    """

    running: int
    waiting: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    views_encoded: int
    views_reused: int
    vision_cache_bytes: int
    kv_blocks_used: tuple[int, int]
    kv_blocks: tuple[int, int]
    block_size: int
