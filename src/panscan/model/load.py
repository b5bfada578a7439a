"""Settings become a loaded model: placed, quantised and in the precision that they name."""

from __future__ import annotations

import warnings
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from panscan.core import PanscanWarning, UnsupportedError
from panscan.core.weight_formats import FORMATS, WEIGHT_KINDS
from panscan.model.adapters import adapted_tensors, weights_in
from panscan.model.checkpoint import (
    Loaded,
    Placement,
    adapted_reader,
    already_quantized,
    keep_head,
    load_config,
    load_meta_model,
    load_model,
    load_random,
    load_shard_of,
    model_reads_images,
    stored_format,
)
from panscan.model.formats.bitsandbytes import transformers_config
from panscan.model.hub import model_source
from panscan.model.layers import quantize_vision_tower, text_layers, vision_layers
from panscan.model.linear.quantized import WeightFormat
from panscan.model.linear.vocabulary import quantize_vocabulary
from panscan.model.machine import measure_memory, release_memory, resolve_device, resolve_dtype
from panscan.model.shapes import SHAPES, text_shape
from panscan.model.sharding import check_divides
from panscan.model.untrusted.headers import key_of
from panscan.settings import Settings


def load_for(settings: Settings) -> Loaded:
    """Load the model that settings name, placed and quantised as they say.

    With a tensor parallel size, the whole model: on the first GPU, or on the host if that GPU has no room for it.

    Raises:
        ModelError: the checkpoint is not available, or is already quantised and settings request a quantisation.
        UnsupportedError: the group size does not divide the model.
    """
    _check_quantization(settings)
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, device)
    if dtype == torch.float16:
        message = "--dtype fp16: Gemma 3 is known to overflow in it; bf16 has the same size and speed"
        warnings.warn(message, PanscanWarning, stacklevel=1)
    if settings.tensor_parallel_size > 1 and device.type == "cuda":
        with suppress(torch.OutOfMemoryError):
            return _load(settings, device, dtype)
        release_memory()
        return _load(settings, torch.device("cpu"), dtype, drawn_on=device)
    return _load(settings, device, dtype)


def load_shard(settings: Settings, rank: int, size: int) -> Loaded:
    """Load one rank's part of the model that settings name, on the rank's device.

    Raises:
        ModelError: the checkpoint cannot be loaded.
        UnsupportedError: ``size`` does not divide the model.
    """
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, device)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
    return _load(settings, device, dtype, rank, size)


def _load(
    settings: Settings,
    device: torch.device,
    dtype: torch.dtype,
    rank: int = 0,
    size: int = 1,
    drawn_on: torch.device | None = None,
) -> Loaded:
    """Return the model that settings name, or a rank's part of it, with the parts quantised that they name."""
    weight_format = requested_format(settings)
    if settings.random_weights:
        assert settings.model_shape is not None  # Settings holds this
        loaded = load_random(
            settings.model_name,
            settings.model_shape,
            dtype,
            device,
            rank=rank,
            size=size,
            drawn_on=drawn_on,
            weight_format=weight_format,
        )
        loaded.vocab_size = SHAPES[settings.model_shape].text.vocabulary
    elif size > 1 or weight_format is not None:
        loaded = load_shard_of(
            settings.model, rank, size, dtype, device, revision=settings.revision, weight_format=weight_format
        )
    else:
        quantization = transformers_config(settings.quantization, dtype)
        placement = Placement(device, dtype, settings.device_map, settings.max_memory, quantization)
        loaded = load_model(settings.model, placement, revision=settings.revision)
    if settings.quantize_head is not None:
        quantize_vocabulary(loaded.model)
    if settings.quantize_vision is not None:
        quantize_vision_tower(loaded.model, settings.quantize_vision)
    return loaded


def load_meta_model_for(settings: Settings, *, head: bool = False) -> Loaded:
    """Build the model that settings name on the meta device, for an engine whose ranks hold the weights.

    Args:
        settings: settings of the model.
        head: load the embedding and output matrix onto the host, which turn a reference's hidden states into logits.

    Raises:
        ModelError: as :func:`load_for`.
        UnsupportedError: the tensor parallel size does not divide the model.
    """
    _check_quantization(settings)
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, device)
    if settings.random_weights:
        assert settings.model_shape is not None  # Settings holds this
        loaded = load_random(settings.model_name, settings.model_shape, dtype, torch.device("meta"))
        if head:
            from panscan.model.bundled.random_weights import drawn_embedding

            keep_head(loaded.model, drawn_embedding(loaded.model, dtype, device).cpu())
    else:
        host = torch.device("cpu")
        loaded = load_meta_model(settings.model, dtype, host, revision=settings.revision, embedding=head)
    loaded.model.hf_device_map = {"": str(device)}
    check_divides(loaded.model.config, settings.tensor_parallel_size)
    return loaded


def takes_adapters(settings: Settings, wanted: Settings) -> bool:
    """Return whether a model loaded for settings becomes that of others if its adapters are replaced in place.

    Raises:
        ModelError: an adapter is not available.
    """
    placed = settings.tensor_parallel_size > 1 or settings.device_map is not None or settings.random_weights
    placed = placed or settings.quantize_head is not None or settings.quantize_vision is not None
    if placed or settings.quantization not in (None, *WEIGHT_KINDS) or settings.runner == "vllm":
        return False
    if replace(wanted, model=settings.model).load_key != settings.load_key:
        return False
    one, other = (model_source(part.model, part.revision) for part in (settings, wanted))
    return bool(one.adapters or other.adapters) and (one.base, one.revision) == (other.base, other.revision)


def replace_adapters(loaded: Loaded, settings: Settings, wanted: Settings) -> bool:
    """Merge the adapters of other settings into a loaded model, in place of its current ones.

    Args:
        loaded: the model. Only tensors that either adapters change are read again; do not use it after an error.
        settings: settings for which it was loaded.
        wanted: settings for which :func:`takes_adapters` is true.

    Returns:
        False, without a change, if adapters separate its output matrix from the embedding: load the model again.

    Raises:
        ModelError: an adapter is damaged or belongs to another base, or the base is quantised.
    """
    before, after = (adapted_tensors(part.model, part.revision) for part in (settings, wanted))
    if before.unties or after.unties:
        return False
    after.merge_into(loaded.model, before.keys, loaded.rounded)
    loaded.reader = adapted_reader(loaded.reader, wanted.model, wanted.revision)
    return True


def with_adapters_of(base: Loaded, wanted: Settings) -> Loaded:
    """Return a second model with the adapters of other settings, which shares all tensors that they do not change.

    Args:
        base: a model without adapters; the fused weights of its layers are shared, too.
        wanted: settings for which :func:`takes_adapters` is true.

    Raises:
        ModelError: as :func:`replace_adapters`.
        UnsupportedError: the device has too little memory for the changed tensors.
    """
    text_layers(base.model)  # fuses weights, so that the views are shared
    if base.reader.reads_images:
        vision_layers(base.model)
    changed = adapted_tensors(wanted.model, wanted.revision)
    keys, needed = changed.keys, 0
    shared: dict[int, Any] = {}
    for name, weight in weights_in(base.model):
        tensors = [weight] if isinstance(weight, torch.Tensor) else [*weight.buffers()]
        if key_of(name) in keys:
            needed += sum(tensor.nbytes for tensor in tensors)
        elif isinstance(weight, torch.nn.Parameter):  # a second parameter, because fusing replaces the data of one
            shared[id(weight)] = torch.nn.Parameter(weight.data, requires_grad=False)
        else:
            shared |= {id(tensor): tensor for tensor in tensors}
    release_memory()
    _, free, _ = measure_memory(base.device)
    if needed > free:
        raise UnsupportedError(
            f"--model {wanted.model}: the merged copies of the matrices that its adapter changes need"
            f" {needed / 1e9:.3g} GB, and {base.device} has {free / 1e9:.3g} GB free: serve fewer adapters, or start a"
            " server for each on its own GPU"
        )
    model = deepcopy(base.model, shared)
    changed.merge_into(model, rounded=base.rounded)
    reader = adapted_reader(base.reader, wanted.model, wanted.revision)
    return replace(base, model=model, reader=reader)


def _check_quantization(settings: Settings) -> None:
    """Raise if settings quantise what is already quantised, or the vision tower of a model that reads text only."""
    if settings.quantize_vision is not None and not model_reads_images(settings):
        raise UnsupportedError(f"--quantize-vision {settings.quantize_vision}: the model reads text only; leave it out")
    if settings.quantization is None or settings.random_weights:
        return
    if (method := stored_format(settings.model, settings.revision)) is not None:
        raise already_quantized(settings.model, method, settings.quantization)


def requested_format(settings: Settings) -> WeightFormat | None:
    """Return the weight format that ``--quantization`` requests; None for bitsandbytes and without quantisation.

    Without ``--quantization-group-size``, groups have 128 input channels, or fewer if 128 does not divide a matrix or a
    rank's part of one.

    Raises:
        ModelError: the checkpoint is not available.
        UnsupportedError: the group size does not divide the model; raised before any weight is loaded.
    """
    if settings.quantization not in WEIGHT_KINDS:
        return None
    widths: list[int] = []
    if FORMATS[settings.quantization].grouped:
        if settings.model_shape is not None:
            text = SHAPES[settings.model_shape].text
        else:
            text = text_shape(load_config(settings.model, settings.revision).get_text_config())
        split, ranks = (text.intermediate, text.heads * text.head_size), settings.tensor_parallel_size
        parts = (width // ranks for width in split if width % ranks == 0)  # others are refused with a better reason
        widths = [text.hidden, *split, *parts]
    return WeightFormat.fitting(settings.quantization, settings.quantization_group_size, widths, UnsupportedError)
