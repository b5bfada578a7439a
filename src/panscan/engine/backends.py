"""Which backend of paged attention an engine takes on a machine, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from panscan.core import SettingError, UnsupportedError
from panscan.engine import triton_attention
from panscan.engine.attention import Backend
from panscan.engine.segments import SegmentsBackend
from panscan.model.decoder import LayerFacts
from panscan.settings import ATTENTION_BACKENDS, nearest

__all__ = ["Choice", "choose_backend"]


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend, its name, and why it is that one."""

    name: str
    reason: str
    backend: Backend


def choose_backend(name: str, layers: Sequence[LayerFacts]) -> Choice:
    """The backend of paged attention for a model's layers.

    Args:
        name: ``triton`` (ours), ``sdpa`` (PyTorch's, sequence by sequence), or ``auto``: ours on NVIDIA GPUs that take
            them, PyTorch's elsewhere.
        layers: what is attended on.

    Raises:
        SettingError: an unknown name.
        UnsupportedError: the kernels that are asked for cannot run here.
    """
    if name not in ATTENTION_BACKENDS:
        known = ", ".join(ATTENTION_BACKENDS)
        raise SettingError(f"--attention-backend takes {known}; got {name!r}{nearest(name, ATTENTION_BACKENDS)}")
    if name == "sdpa":
        return Choice("sdpa", "asked for", SegmentsBackend())
    reason = _no_triton(layers)
    if name == "auto":
        if any(layer.device.type != "cuda" for layer in layers):
            reason = "layers are not on NVIDIA GPUs"
        if reason is not None:
            return Choice("sdpa", reason, SegmentsBackend())
    if reason is not None:
        raise UnsupportedError(f"--attention-backend triton: {reason}; auto takes what runs")
    [heads] = {(layer.head_size, layer.dtype) for layer in layers}
    why = "asked for" if name == "triton" else "layers are on NVIDIA GPUs"
    return Choice("triton", why, triton_attention.TritonBackend(*heads))


def _no_triton(layers: Sequence[LayerFacts]) -> str | None:
    kinds = {(layer.head_size, layer.dtype, layer.device) for layer in layers}
    if len({kind[:2] for kind in kinds}) > 1:
        return "layers differ in head size or precision"
    reasons = (triton_attention.unsupported_reason(*kind) for kind in kinds)
    return next((reason for reason in reasons if reason is not None), None)
