"""panscan runs and measures Gemma 3 with pan and scan, on Hugging Face Transformers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from panscan.core import PanAndScan, PanscanError, Request, Result, Sampling

if TYPE_CHECKING:
    from panscan.engine.engine import Engine
    from panscan.runners.generate import GenerateRunner

__all__ = ["Engine", "GenerateRunner", "PanAndScan", "PanscanError", "Request", "Result", "Sampling", "__version__"]
__version__ = "0.1.0"

# Torch takes seconds to import; `panscan --help` and `import panscan` must not.
_LAZY = {"Engine": "panscan.engine.engine", "GenerateRunner": "panscan.runners.generate"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
