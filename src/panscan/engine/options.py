"""Engine options: sizes of passes and caches, checked, with the engine's defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from panscan.core import SettingError
from panscan.core.option import Range
from panscan.settings import KV_CACHE_DTYPES, PREFILL_CHUNK_SIZE, Settings, axes

_BLOCK = 2  # tokens: prefixes are reused in whole blocks, and Gemma 3 writes two tokens after an image
_BLOCK_SIZES = Range(integer=True, ge=1, le=65_536)


def _default(name: str) -> Any:
    return axes()[name].default


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Sizes of an engine's passes and caches.

    Most are settings under the same name, with the same defaults and ranges (:class:`panscan.settings.Settings` has
    their help). These differ, or are the engine's own:

    Args:
        prefill_chunk_size: maximum prompt tokens per pass, over all requests; a longer image span is computed whole.
        block_size: tokens per KV cache block.
        memory_sharers: engines that share the device's memory equally, this one included.
        memory_holders: those among them that were created before this one.
        overlap: launch a pass before the tokens of the previous one are known; None: where the device computes while
            the host prepares the next pass (see :class:`panscan.engine.model_runner.RunnerFacts`).
        force_tokens: append tokens that a grammar forces without sampling them. Answers do not depend on it.

    Raises:
        SettingError: a size out of range, or an unknown KV cache dtype.
    """

    attention_backend: str = _default("attention_backend")
    prefill_chunk_size: int = PREFILL_CHUNK_SIZE
    max_num_seqs: int = _default("max_num_seqs")
    gpu_memory_utilization: float = _default("gpu_memory_utilization")
    gpu_memory_gb: float | None = _default("gpu_memory_gb")
    kv_cache_gb: float | None = _default("kv_cache_gb")
    kv_cache_dtype: str = _default("kv_cache_dtype")
    vision_cache_gb: float = _default("vision_cache_gb")
    image_memory_gb: float = _default("image_memory_gb")
    tpot_target_ms: float | None = _default("tpot_target_ms")
    vision_batch_size: int = _default("vision_batch_size")
    prefix_caching: bool = _default("prefix_caching")
    preprocess: str = _default("preprocess")
    block_size: int = _BLOCK
    memory_sharers: int = 1
    memory_holders: int = 0
    overlap: bool | None = None
    force_tokens: bool = True

    def __post_init__(self) -> None:
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise SettingError(f"--kv-cache-dtype takes {' or '.join(KV_CACHE_DTYPES)}; got {self.kv_cache_dtype!r}")
        _BLOCK_SIZES.check("block_size", self.block_size)
        for item in fields(self):
            value, allowed = getattr(self, item.name), axes()[item.name].range if item.name in axes() else None
            if allowed is not None and not (value is None and item.default is None):
                allowed.check(item.name, value)

    @classmethod
    def of(cls, settings: Settings) -> EngineOptions:
        """Return the options in ``settings``; a chunk size of None means the engine's default."""
        shared = {item.name: getattr(settings, item.name) for item in fields(cls) if item.name in axes()}
        if shared["prefill_chunk_size"] is None:
            del shared["prefill_chunk_size"]
        return cls(**shared)
