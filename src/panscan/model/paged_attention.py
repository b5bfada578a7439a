"""The seam of paged attention: a name under which Transformers calls whatever is attending at the moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local as per_thread
from typing import Any

import torch
from transformers import AttentionInterface

__all__ = ["NAME", "Attend", "attending"]

NAME = "panscan_paged"

Attend = Callable[[bool, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""``attend(local, query [1, heads, T, D], key and value [1, kv heads, T, D], k_cache, v_cache, scaling)``, which writes
the caches and gives ``[1, T, heads, D]``. ``local``: of a layer with a sliding window."""


class _Present(per_thread):
    attend: Attend | None = None


_present = _Present()


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Have layers of this thread attend by ``attend`` while in the ``with`` block.

    It does not reach them as an argument: torch.compile would make a graph for each function that it sees.
    """
    before, _present.attend = _present.attend, attend
    try:
        yield
    finally:
        _present.attend = before


def _attend(
    local: bool, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, scaling: float,
) -> torch.Tensor:  # fmt: skip
    if _present.attend is None:
        raise RuntimeError(f"attention {NAME!r} outside of an engine's pass")
    return _present.attend(local, query, key, value, k_cache, v_cache, scaling)


@torch.library.custom_op("panscan::attend", mutates_args=("k_cache", "v_cache"))
def _compiled(
    local: bool, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, scaling: float,
) -> torch.Tensor:  # fmt: skip
    """What a compiled layer calls: opaque to the compiler, so that a plan may be anything. Contiguous, as promised."""
    return _attend(local, query, key, value, k_cache, v_cache, scaling).contiguous()


@_compiled.register_fake
def _(_local: bool, query: torch.Tensor, *_: Any) -> torch.Tensor:
    batch, heads, rows, size = query.shape
    return query.new_empty((batch, rows, heads, size))


def _forward(
    _module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: None,
    *, k_cache: torch.Tensor, v_cache: torch.Tensor, scaling: float, sliding_window: int | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    call = _compiled if torch.compiler.is_compiling() else _attend
    return call(sliding_window is not None, query, key, value, k_cache, v_cache, scaling), None


AttentionInterface.register(NAME, _forward)
