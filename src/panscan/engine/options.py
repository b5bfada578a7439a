"""Engine options: sizes of passes and caches, checked, with the engine's defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields

from panscan.core.option import integers
from panscan.settings import PREFILL_CHUNK_SIZE, EngineTable, Settings, axes

_BLOCK = 2  # tokens: prefixes are reused in whole blocks, and Gemma 3 writes two tokens after an image
_BLOCK_SIZES = integers(1, 65_536)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(EngineTable):
    """Sizes of an engine's passes and caches: the settings of :class:`panscan.settings.EngineTable`, which have their
    help, and these, which differ or are the engine's own.

    Args:
        prefill_chunk_size: maximum prompt tokens per pass, over all requests; a longer image span is computed whole.
        preprocess: as in :class:`panscan.settings.Settings`.
        block_size: tokens per KV cache block.
        memory_sharers: engines that share the device's memory equally, this one included.
        memory_holders: those among them that were created before this one.
        overlap: launch a pass before the tokens of the previous one are known; None: where the device computes while
            the host prepares the next pass (see :class:`panscan.engine.model_runner.RunnerFacts`).
        force_tokens: append tokens that a grammar forces without sampling them. Answers do not depend on it.

    Raises:
        SettingError: a size out of range, or an unknown name.
    """

    prefill_chunk_size: int = PREFILL_CHUNK_SIZE
    preprocess: str = Settings.preprocess
    block_size: int = _BLOCK
    memory_sharers: int = 1
    memory_holders: int = 0
    overlap: bool | None = None
    force_tokens: bool = True

    def __post_init__(self) -> None:
        _BLOCK_SIZES.check("block_size", self.block_size)
        for name in _shared_names():
            axes()[name].check(getattr(self, name))

    @classmethod
    def of(cls, settings: Settings) -> EngineOptions:
        """Return the options in ``settings``; a chunk size of None means the engine's default."""
        shared = {name: getattr(settings, name) for name in _shared_names()}
        if shared["prefill_chunk_size"] is None:
            del shared["prefill_chunk_size"]
        return cls(**shared)


def _shared_names() -> list[str]:
    return [item.name for item in fields(EngineOptions) if item.name in axes()]
