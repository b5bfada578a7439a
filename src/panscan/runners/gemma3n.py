"""Gemma 3n through Transformers' ``generate()``, for profiles."""

from __future__ import annotations

from panscan.core import UnsupportedError
from panscan.model.gemma3n import load_gemma3n, prepare_gemma3n
from panscan.model.inputs import Prepared, Read
from panscan.model.machine import resolve_device, resolve_dtype
from panscan.runners.generate import GenerateRunner
from panscan.settings import Settings, axes

__all__ = ["Gemma3nRunner"]

_NOT_HERE = ("quantization", "device_map", "max_memory", "tp_plan", "prefill_chunk_size")


class Gemma3nRunner(GenerateRunner):
    """Gemma 3n through ``generate()``: without pan and scan, prepared by the checkpoint's own processor."""

    @classmethod
    def from_settings(cls, settings: Settings) -> Gemma3nRunner:
        """Load what settings name.

        Raises:
            ModelError: the checkpoint is not available.
            UnsupportedError: a setting that Gemma 3n does not have here, or a missing device or package.
        """
        for name in _NOT_HERE:
            if getattr(settings, name) != axes()[name].default:
                raise UnsupportedError(f"--{axes()[name].flag} is not supported for Gemma 3n: leave it out")
        device = resolve_device(settings.device)
        dtype = resolve_dtype(settings.dtype, device)
        runner = cls(load_gemma3n(settings.model, device, dtype, settings.revision), settings)
        runner.configure(settings)
        return runner

    def _prepare(self, read: Read) -> Prepared:
        return prepare_gemma3n(read, self.loaded)
