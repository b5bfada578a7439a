"""Switches of a loaded model that need no reload: attention implementation, torch.compile, TF32."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from panscan.core import PanscanWarning, UnsupportedError
from panscan.core.errors import brief


def apply_attention(model: Any, name: str) -> None:
    """Switch every part of the model to an attention implementation.

    Raises:
        UnsupportedError: Transformers or its kernels refuse it on this machine.
    """
    if "flash" in name:
        warnings.warn(
            f"--attention {name}: Transformers' flash masks ignore Gemma 3's image blocks, so image tokens become"
            " causal and answers may differ",
            PanscanWarning,
            stacklevel=2,
        )
    if name == "flex_attention" and model.device.type == "cpu":
        warnings.warn(
            "--attention flex_attention: on a CPU, PyTorch compiles it once per sequence length, and only for a few"
            " lengths; the others run unfused, so speeds measured here do not apply to GPUs",
            PanscanWarning,
            stacklevel=2,
        )
    set_attention(model, name)
    _forget_compilations(model)


def set_attention(model: Any, name: str) -> None:
    """Switch to an attention implementation, without warnings, and without regard to what is compiled.

    Raises:
        UnsupportedError: as :func:`apply_attention`.
    """
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError, RuntimeError, OSError) as error:
        raise UnsupportedError(f"--attention {name}: {brief(error)}") from error


def apply_compile(model: Any, mode: str | None) -> None:
    """Compile the language model and the vision tower, or undo it. The first calls after it are slow.

    Whole modules, not ``model.forward``: what happens between them (merging image embeddings) depends on the data.
    """
    _forget_compilations(model)
    for module in _compilable(model):
        module._compiled_call_impl = None  # nn.Module.compile has no counterpart that undoes it
        if mode is not None:
            module.compile(mode=mode)


@contextmanager
def reference_computation(model: Any) -> Iterator[None]:
    """Eager attention, nothing compiled and no TF32 inside the block, which computes the reference.

    The model's configuration is restored afterwards.
    """
    attention = model.config._attn_implementation
    compiled = [(module, module._compiled_call_impl) for module in _compilable(model)]
    precision, allowed = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        forbid_tf32()
        apply_compile(model, None)
        apply_attention(model, "eager")
        yield
    finally:
        if attention != "eager":
            apply_attention(model, attention)
        for module, implementation in compiled:
            module._compiled_call_impl = implementation
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = allowed


def _compilable(model: Any) -> list[Any]:
    """The modules that :func:`apply_compile` compiles: the vision tower, where there is one, and the language model."""
    parts = (getattr(model.model, "vision_tower", None), model.get_decoder())
    return [part for part in parts if part is not None]


def _forget_compilations(model: Any) -> None:
    """Start from nothing, and fail rather than fall back to eager: a cell must be what its label says.

    The limit of compilations is per function and shared by everything in the process; the default of 8 is less than the
    prompt lengths of a handful of documents. FlexAttention on a CPU is the exception: compiling fails there at a second
    length while lengths are symbols, and one compilation for each length takes too long.
    """
    strict = model.config._attn_implementation != "flex_attention" or model.device.type != "cpu"
    torch.compiler.reset()
    torch._dynamo.config.automatic_dynamic_shapes = strict
    torch._dynamo.config.fail_on_recompile_limit_hit = strict
    torch._dynamo.config.recompile_limit = 256 if strict else 8


def forbid_tf32() -> None:
    """Compute float32 matrix products and convolutions in float32, in the whole process."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def quiet_libraries() -> None:
    """Progress bars, retries and advice of other libraries would tear ours apart; their errors still come through."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
