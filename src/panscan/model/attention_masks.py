"""Which positions attend to which in Transformers' Gemma 3, measured on the attention that an implementation computes.

A model of two small layers, with the layer kinds, the sliding window and the class of a checkpoint, runs the prompt's
layout through Transformers' own code. Its scores are all 0, so the output of a query is the mean of the values that it
attends to, and chosen values show which ones those are. This works for any implementation: for masks, for
``is_causal`` without a mask, and for what a kernel decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from panscan.core import UnsupportedError
from panscan.core.errors import brief
from panscan.model.build import build_model, one_layer_config
from panscan.model.machine import resolve_device
from panscan.model.runtime import set_attention
from panscan.model.support import attention_reason

LayerKind = Literal["global", "local"]
KINDS: Mapping[LayerKind, str] = {"global": "full_attention", "local": "sliding_attention"}
"""Transformers' names of the kinds of layers."""
Attend = Callable[[torch.Tensor], Mapping[LayerKind, torch.Tensor]]
"""Attention to be measured: from values ``[tokens, PROBE_COLUMNS]`` to each query's mean of the values that it attends
to, float32 ``[queries, PROBE_COLUMNS]`` on the CPU, by layer kind."""
Masks = dict[LayerKind, NDArray[np.bool_]]
"""Which positions attend to which, by layer kind: bool ``[queries, keys]``."""
PROBE_COLUMNS = 256
"""Columns of values in one run; the largest head size that flash attention takes."""
_HIDDEN = 16
_TOLERANCE = 0.3  # of the least deviation that one key more or less causes


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
) -> Masks:
    """Return which positions of a prompt attend to which, by layer kind: bool ``[queries, keys]``.

    Args:
        image: bool ``[tokens]``: which positions of the prompt are image tokens. A run of them is one view.
        implementation: of attention, e.g. ``sdpa``.
        config: the checkpoint's configuration (:func:`panscan.model.checkpoint.load_config`); not changed.
        device: as in settings.
        kernel: run the implementation's kernel. Otherwise Transformers prepares the mask and the arguments for it, and
            PyTorch operators attend to what they mean: for flash attention, which is not installed everywhere.

    Raises:
        UnsupportedError: the implementation cannot run here.
        torch.OutOfMemoryError: the prompt is too long for the memory that is free.
    """
    where = resolve_device(device)
    if kernel and (reason := kernel_reason(implementation, device)) is not None:
        raise UnsupportedError(f"--attention: {reason}")
    model = _probe_model(config, _dtype(implementation, where), where)
    types = torch.from_numpy(image.astype(np.int64))[None].to(where)
    with torch.inference_mode(), _switched(model, implementation, kernel):
        try:
            return measured_mask(
                lambda values: _means(model, types, values), image, model.get_decoder().config.sliding_window
            )
        except torch.OutOfMemoryError:
            raise
        except (ImportError, ValueError, RuntimeError) as error:  # kernels are loaded and compiled in their first run
            if not kernel:
                raise
            raise UnsupportedError(f"--attention {implementation}: {brief(error)}") from error


def measured_mask(attend: Attend, image: NDArray[np.bool_], window: int) -> Masks:
    """Return which positions attend to which, by layer kind: bool ``[queries, keys]``, for any attention.

    Random signs as values tell sets of keys apart. So one run shows whether a layer has the mask that Gemma 3 defines,
    or that of causal attention. If not, all keys are measured one by one, in ``tokens / PROBE_COLUMNS`` runs.

    Args:
        attend: the attention, with scores of 0.
        image: bool ``[tokens]``: which positions are image tokens. A run of them is one view.
        window: positions that a local layer attends to, the query's own included.
    """
    tokens = len(image)
    signs = torch.randint(0, 2, (tokens, PROBE_COLUMNS), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    masks: Masks = {}
    for kind, means in attend(signs).items():
        for mask in _usual_masks(image, window if kind == "local" else tokens):
            expected = mask.astype(np.float32) @ signs.numpy() / mask.sum(1, keepdims=True)
            if np.sqrt(np.mean((means.numpy() - expected) ** 2, axis=1)).max() < _TOLERANCE / tokens:
                masks[kind] = mask
                break
        else:
            return _measured_by_key(attend, tokens)
    return masks


def _usual_masks(image: NDArray[np.bool_], window: int) -> Iterator[NDArray[np.bool_]]:
    """Yield the mask that Gemma 3 defines for a window, then the causal one."""
    key = np.arange(len(image))
    query = key[:, None]
    view = np.cumsum(image & ~np.append(False, image[:-1]))  # each image token's
    near = key > query - window
    yield near & ((key <= query) | (image & image[:, None] & (view == view[:, None])))
    yield near & (key <= query)


def _measured_by_key(attend: Attend, tokens: int) -> Masks:
    """Return masks key by key: only a key's own column is 1 at it, so a mean above 0 shows that it counts."""
    columns: dict[LayerKind, list[NDArray[np.bool_]]] = {}
    for start in range(0, tokens, PROBE_COLUMNS):
        keys = torch.arange(start, min(start + PROBE_COLUMNS, tokens))
        values = torch.zeros(tokens, PROBE_COLUMNS)
        values[keys, keys - start] = 1
        for kind, means in attend(values).items():
            columns.setdefault(kind, []).append(means[:, : len(keys)].numpy() > 0)
    return {kind: np.concatenate(parts, axis=1) for kind, parts in columns.items()}


def _dtype(implementation: str, device: torch.device) -> torch.dtype:
    """Return bfloat16 for GPU kernels, which may fail in float32; it can represent a weight of 1 / tokens."""
    half = device.type == "cuda" and implementation not in ("eager", "sdpa")
    return torch.bfloat16 if half else torch.float32


def _probe_model(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a model of one layer of each of the configuration's kinds, with one head and attention scores of 0."""
    small = one_layer_config(config)
    text = small.get_text_config()
    text.num_attention_heads = text.num_key_value_heads = 1
    text.head_dim, text.hidden_size, text.intermediate_size = PROBE_COLUMNS, _HIDDEN, _HIDDEN
    if hasattr(small, "vision_config"):
        vision = small.vision_config
        vision.num_attention_heads = 1
        vision.hidden_size, vision.intermediate_size = _HIDDEN, _HIDDEN
    small._attn_implementation = "eager"
    model = build_model(small, dtype, device).eval()
    for layer in model.get_decoder().layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
    return model


def _means(model: Any, types: torch.Tensor, values: torch.Tensor) -> dict[LayerKind, torch.Tensor]:
    """Return each query's mean of values: see :data:`Attend`.

    Args:
        model: of :func:`_probe_model`.
        types: int64 ``[1, tokens]``: 1 at image tokens.
        values: ``[tokens, PROBE_COLUMNS]``.
    """
    shown = values[None].to(types.device, model.dtype)
    weights: dict[LayerKind, torch.Tensor] = {}
    hooks = []
    decoder = model.get_decoder()
    kinds = list(decoder.config.layer_types)
    for kind, name in KINDS.items():
        if name not in kinds:
            continue
        module = decoder.layers[kinds.index(name)].self_attn

        def keep(_module: Any, inputs: tuple[torch.Tensor], kind: LayerKind = kind) -> None:
            weights[kind] = inputs[0][0].float().cpu()

        hooks.append(module.v_proj.register_forward_hook(lambda *_: shown))
        hooks.append(module.o_proj.register_forward_pre_hook(keep))
    embeds = torch.zeros(1, types.shape[1], _HIDDEN, dtype=model.dtype, device=types.device)
    inputs = {"token_type_ids": types} if hasattr(model.config, "vision_config") else {}
    try:
        model.model(inputs_embeds=embeds, attention_mask=torch.ones_like(types), **inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return weights


@contextmanager
def _switched(model: Any, implementation: str, kernel: bool) -> Iterator[None]:
    """Make a model compute with an implementation, or with Transformers' preparation for it, while in the block.

    Raises:
        UnsupportedError: Transformers or its kernels refuse it on this machine.
    """
    if kernel:
        set_attention(model, implementation)
        yield
        return
    if implementation not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise UnsupportedError(f"--attention {implementation}: Transformers prepares no mask under this name")
    model.config._attn_implementation = implementation  # set_attn_implementation() would look for the kernel
    ALL_ATTENTION_FUNCTIONS[implementation] = flash_reference  # shadows the registered function
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[implementation]


def flash_reference(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **options: Any
) -> Any:
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
    attended = attended.expand(len(query), 1, *attended.shape[-2:])
    return sdpa_attention_forward(module, query, key, value, attended, **options)
