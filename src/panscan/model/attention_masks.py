"""Which positions attend to which in Transformers' Gemma 3, measured on the attention that an implementation computes.

A model of two small layers, with the layer kinds, the sliding window and the class of a checkpoint, runs the prompt's
layout through Transformers' own code. Its scores are all 0, so a query gives the same weight to every key that it
attends to, and values with a single 1 show which keys those are. This works for any implementation: for masks, for
``is_causal`` without a mask, and for what a kernel decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from panscan.core import UnsupportedError
from panscan.model.machine import resolve_device
from panscan.model.outline import build_model
from panscan.model.support import attention_reason

__all__ = ["LayerKind", "effective_mask", "kernel_reason"]

LayerKind = Literal["global", "local"]
_KINDS: Mapping[LayerKind, str] = {"global": "full_attention", "local": "sliding_attention"}
_COLUMNS = 256  # keys that one run of the model tells apart; the largest head size that flash attention takes


def kernel_reason(implementation: str, device: str = "cpu") -> str | None:
    """Return why an implementation's kernel cannot run here; None if it can.

    Args:
        implementation: a name of :data:`panscan.settings.ATTENTION` or of the kernels hub.
        device: as in settings.
    """
    where = resolve_device(device)
    return attention_reason(implementation, where, _dtype(implementation, where))


def effective_mask(
    image: NDArray[np.bool_], implementation: str, config: Any, *, device: str = "cpu", kernel: bool = True
) -> dict[LayerKind, NDArray[np.bool_]]:
    """Return which positions of a prompt attend to which, by layer kind: bool ``[queries, keys]``.

    Takes time in proportion to the cube of the number of tokens: about a second for 1,000 on a CPU.

    Args:
        image: bool ``[tokens]``: which positions of the prompt are image tokens. A run of them is one view.
        implementation: of attention, e.g. ``sdpa``.
        config: the checkpoint's configuration (:func:`panscan.model.checkpoint.load_config`); not changed.
        device: as in settings.
        kernel: run the implementation's kernel. Otherwise Transformers prepares the mask and the arguments for it, and
            PyTorch operators attend to what they mean: for flash attention, which is not installed everywhere.

    Raises:
        UnsupportedError: the implementation cannot run here.
    """
    where = resolve_device(device)
    if kernel and (reason := attention_reason(implementation, where, _dtype(implementation, where))) is not None:
        raise UnsupportedError(f"--attention {implementation}: {reason}")
    model = _probe_model(config, _dtype(implementation, where), where)
    types = torch.from_numpy(image.astype(np.int64))[None].to(where)
    masks = {kind: np.zeros((len(image), len(image)), np.bool_) for kind in _kinds(model)}
    with torch.inference_mode(), _switched(model, implementation, kernel):
        for start in range(0, len(image), _COLUMNS):
            for kind, weights in _weights(model, types, start).items():
                masks[kind][:, start : start + _COLUMNS] = weights > 0
    return masks


def _dtype(implementation: str, device: torch.device) -> torch.dtype:
    """Half precision where a kernel takes nothing else; a weight of 1 / tokens is well above its smallest number."""
    half = device.type == "cuda" and ("flash" in implementation or "/" in implementation)
    return torch.bfloat16 if half else torch.float32


def _probe_model(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a model of one layer of each of the configuration's kinds, with one head and attention scores of 0."""
    small = deepcopy(config)
    text = small.get_text_config()
    text.layer_types = sorted(set(text.layer_types))
    text.num_hidden_layers = len(text.layer_types)
    text.num_attention_heads = text.num_key_value_heads = 1
    text.head_dim, text.hidden_size, text.intermediate_size = _COLUMNS, 16, 16
    text.vocab_size, text.pad_token_id = 8, None
    if hasattr(small, "vision_config"):
        vision = small.vision_config
        vision.num_hidden_layers, vision.num_attention_heads = 1, 1
        vision.hidden_size, vision.intermediate_size = 16, 16
    small._attn_implementation = "eager"
    model = build_model(small, dtype, device).eval()
    for layer in _text(model).layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
    return model


def _text(model: Any) -> Any:
    return getattr(model.model, "language_model", model.model)


def _kinds(model: Any) -> dict[LayerKind, Any]:
    """Return the attention module of each layer kind."""
    types = list(_text(model).config.layer_types)
    return {kind: _text(model).layers[types.index(name)].self_attn for kind, name in _KINDS.items() if name in types}


def _weights(model: Any, types: torch.Tensor, start: int) -> dict[LayerKind, NDArray[np.float32]]:
    """Return attention weights ``[queries, columns]`` on the keys from ``start``, by layer kind.

    Args:
        model: of :func:`_probe_model`.
        types: int64 ``[1, tokens]``: 1 at image tokens.
        start: first key.
    """
    tokens = types.shape[1]
    values = torch.zeros(1, tokens, _COLUMNS, dtype=model.dtype, device=types.device)
    keys = torch.arange(start, min(start + _COLUMNS, tokens), device=types.device)
    values[0, keys, keys - start] = 1
    found: dict[LayerKind, NDArray[np.float32]] = {}
    hooks = []
    for kind, module in _kinds(model).items():

        def keep(_module: Any, inputs: tuple[torch.Tensor], kind: LayerKind = kind) -> None:
            found[kind] = inputs[0][0, :, : len(keys)].float().cpu().numpy()

        hooks.append(module.v_proj.register_forward_hook(lambda *_: values))
        hooks.append(module.o_proj.register_forward_pre_hook(keep))
    embeds = torch.zeros(1, tokens, 16, dtype=model.dtype, device=types.device)
    shown = {"token_type_ids": types} if hasattr(model.config, "vision_config") else {}
    try:
        model.model(inputs_embeds=embeds, attention_mask=torch.ones_like(types), **shown)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@contextmanager
def _switched(model: Any, implementation: str, kernel: bool) -> Iterator[None]:
    """Make a model compute with an implementation, or with Transformers' preparation for it, while in the block.

    Raises:
        UnsupportedError: Transformers or its kernels refuse it on this machine.
    """
    if kernel:
        try:
            model.set_attn_implementation(implementation)
        except (ImportError, ValueError, RuntimeError, OSError) as error:
            raise UnsupportedError(f"--attention {implementation}: {' '.join(str(error).split())[:200]}") from error
    else:
        if implementation not in ALL_MASK_ATTENTION_FUNCTIONS:
            raise UnsupportedError(f"--attention {implementation}: Transformers prepares no mask under this name")
        model.config._attn_implementation = implementation  # set_attn_implementation() would look for the kernel
    with nullcontext() if kernel else _reference_kernel(implementation):
        yield


@contextmanager
def _reference_kernel(implementation: str) -> Iterator[None]:
    """Replace a kernel by PyTorch operators that attend to what a flash-attention kernel would, while in the block."""
    ALL_ATTENTION_FUNCTIONS[implementation] = _flash_reference  # shadows the registered function
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[implementation]


def _flash_reference(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attend as a flash-attention kernel does to these arguments: causal, within a window, and not to padding.

    Args:
        module: of attention.
        query: ``[batch, heads, queries, D]``.
        key: ``[batch, kv_heads, keys, D]``.
        value: like ``key``.
        mask: bool ``[batch, keys]``: which are no padding; None: all.
        options: as Transformers passes them to attention.
    """
    keys = torch.arange(key.shape[2], device=key.device)
    last = keys[key.shape[2] - query.shape[2] :, None]
    attended = (keys <= last) if module.is_causal else torch.ones_like(keys <= last)
    if (window := options.get("sliding_window")) is not None:
        attended &= keys > last - window
    if mask is not None:
        attended = attended & mask[:, None, None, :].bool()
    output = scaled_dot_product_attention(query, key, value, attended, scale=options.get("scaling"))
    return output.transpose(1, 2).contiguous(), None
