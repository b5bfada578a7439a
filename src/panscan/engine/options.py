"""What an engine is told once: sizes of its passes and caches."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from panscan.core.ranges import Range
from panscan.settings import RANGES, Settings

__all__ = ["EngineOptions"]

_CHUNK = 2048  # tokens: a prompt of seven views in one pass
_BLOCK = 2  # tokens: a prefix is taken over up to a block's end; Gemma 3 writes two tokens behind an image
_RANGES = {**RANGES, "block_size": Range(whole=True, least=1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Sizes of an engine's passes and caches.

    Args:
        attention_backend: of paged attention; see :func:`panscan.engine.startup.choose_backend`.
        prefill_chunk_size: prompt tokens of one pass, of all requests together; an image block that is longer is taken
            whole.
        max_num_seqs: requests that compute at once.
        kv_cache_gb: 10^9 bytes of keys and values; None: most of the memory that is free.
        vision_cache_gb: 10^9 bytes of encoded views that are kept, those of the present pass among them.
        vision_batch_size: views that go through the vision tower at once.
        prefix_caching: requests that begin alike share keys and values.
        preprocess: ``cpu`` or ``device``, as in ``--preprocess``.
        fast_start: compile nothing.
        block_size: tokens of one cache block.
        overlap: launch a pass before the tokens of the one before are known; None: if all else is done that makes
            passes fast on a GPU (see :class:`panscan.engine.startup.Startup`).

    Raises:
        SettingError: a size out of its range.
    """

    attention_backend: str = "auto"
    prefill_chunk_size: int = _CHUNK
    max_num_seqs: int = 128
    kv_cache_gb: float | None = None
    vision_cache_gb: float = 1.0
    vision_batch_size: int = 16
    prefix_caching: bool = True
    preprocess: Literal["cpu", "device"] = "cpu"
    fast_start: bool = False
    block_size: int = _BLOCK
    overlap: bool | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in _RANGES and not (value is None and item.default is None):
                _RANGES[item.name].check(item.name, value)

    @classmethod
    def of(cls, settings: Settings) -> EngineOptions:
        """Those that settings name."""
        return cls(
            attention_backend=settings.attention_backend,
            prefill_chunk_size=_CHUNK if settings.prefill_chunk_size is None else settings.prefill_chunk_size,
            max_num_seqs=settings.max_num_seqs,
            kv_cache_gb=settings.kv_cache_gb,
            vision_cache_gb=settings.vision_cache_gb,
            vision_batch_size=settings.vision_batch_size,
            prefix_caching=settings.prefix_caching,
            preprocess="device" if settings.preprocess == "device" else "cpu",
            fast_start=settings.fast_start,
        )
