"""Whether tests of the Triton kernels can run: imported first by those that do."""

import platform
from importlib.util import find_spec
from typing import Any

import pytest
import torch

# Where the dev extra brings Triton it has to be there: its absence must not pass for a green suite.
if find_spec("triton") is None and (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    pytest.skip("Triton has no package for this platform", allow_module_level=True)

from triton import language
from triton.runtime import interpreter

_patch_language = interpreter._patch_lang


def _patch_language_once(function: Any) -> Any:
    """Skip what a launch has done: else the interpreter looks for builtins at each call, for half of its time."""
    used = [module for module in (language, language.core) if module in function.__globals__.values()]
    if any(language.core.is_builtin(module.load) for module in used):
        return _patch_language(function)
    return interpreter._LangPatchScope()


interpreter._patch_lang = _patch_language_once

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter: test_gpu.py has it for a GPU")
"""Of tests whose tensors are on the CPU, where only the interpreter takes them (see the suite's conftest)."""
