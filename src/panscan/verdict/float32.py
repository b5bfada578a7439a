"""The same weights in float32, one part of the model at a time: used to compute the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from panscan.core import Sampling, UnsupportedError
from panscan.model.linear.quantized import QuantizedLinear, is_quantized

_DRAWN = 64  # values of each parameter that the digest looks at
_HEAD_ROWS = 32_768  # of the output matrix that are float32 at once


@contextmanager
def converted_model(
    model: Any, dtype: torch.dtype = torch.float32, linear: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Iterator[None]:
    """Make every part of a loaded model compute in ``dtype`` while in the ``with`` block.

    Each layer's weights are converted when it is entered and put back when it is left, so a model of any size needs
    room for one converted layer (or the output matrix) beside itself. bfloat16 loses nothing on its way to float32.

    Args:
        model: a Transformers model.
        dtype: of weights and activations.
        linear: new values of the matrices of decoder layers, from their values in float32 ``[outputs, inputs]``.

    Raises:
        UnsupportedError: the weights cannot be converted here: quantised, offloaded or split over processes.
    """
    _refuse(model)
    decoder = set(getattr(model.model, "language_model", model.model).layers)
    with ExitStack() as stack:
        for part in _float32_parts(model):
            changed = linear if part in decoder else None
            if changed is not None or any(parameter.dtype != dtype for parameter in part.parameters()):
                stack.enter_context(_converted_on_entry(part, dtype, changed))
        yield


def _refuse(model: Any) -> None:
    reasons = {
        "the weights are quantised": is_quantized(model),
        "some weights are offloaded": any(parameter.is_meta for parameter in model.parameters()),
        "the weights are split over processes": any(hasattr(p, "full_tensor") for p in model.parameters()),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedError(reason)


def _float32_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The largest modules that hold no list of layers: layers, embeddings, projector, norms, the output matrix."""
    for child in module.children():
        if any(isinstance(inner, nn.ModuleList) for inner in child.modules()):
            yield from _float32_parts(child)
        else:
            yield child


@contextmanager
def _converted_on_entry(
    part: nn.Module, dtype: torch.dtype, linear: Callable[[torch.Tensor], torch.Tensor] | None
) -> Iterator[None]:
    originals: dict[nn.Parameter, torch.Tensor] = {}
    matrices = {module.weight for module in part.modules() if isinstance(module, nn.Linear)} if linear else set()

    def enter(*_: Any) -> None:
        for parameter in part.parameters():
            originals[parameter] = parameter.data
            values = linear(parameter.data.float()) if linear and parameter in matrices else parameter.data
            parameter.data = values.to(dtype)

    def leave(*_: Any) -> None:
        for parameter, data in originals.items():
            parameter.data = data
        originals.clear()

    hooks = part.register_forward_pre_hook(enter), part.register_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def one_view_at_a_time(model: Any) -> Iterator[None]:
    """Let the vision tower read views one by one: eager attention over 4,096 patches takes a gigabyte for each."""
    tower = getattr(model.model, "vision_tower", None)
    if tower is None:
        yield
        return
    original, instance_forward = tower.forward, vars(tower).get("forward")  # accelerate puts its own there

    def forward(pixel_values: torch.Tensor, **options: Any) -> Any:
        outputs = [original(pixel_values=view, **options) for view in torch.split(pixel_values, 1)]
        outputs[0].last_hidden_state = torch.cat([output.last_hidden_state for output in outputs])
        return outputs[0]

    tower.forward = forward
    try:
        yield
    finally:
        del tower.forward
        if instance_forward is not None:
            tower.forward = instance_forward


def head_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Next-token logits, float32 ``[positions, vocabulary]``, of final hidden states float32 ``[positions, hidden]``.

    The output matrix is upcast block by block, never in TF32, whatever a cell has switched on. Of a model split over
    processes, all of them must call this.

    Raises:
        UnsupportedError: the output matrix is quantised.
    """
    head = model.get_output_embeddings()
    if isinstance(head, QuantizedLinear):
        raise UnsupportedError("the output matrix is quantised")
    weight = head.weight.detach()
    if hasattr(weight, "full_tensor"):
        weight = weight.full_tensor()
    hidden = hidden.to(weight.device)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        blocks = [functional.linear(hidden, rows.float()) for rows in weight.split(_HEAD_ROWS)]
    finally:
        torch.set_float32_matmul_precision(precision)
    return torch.cat(blocks, dim=-1)


def warped_scores(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Scores after temperature, ``top_k``, ``top_p`` and ``min_p``, filtered by Transformers' own warpers.

    Args:
        scores: float32 ``[rows, vocabulary]``.
        sampling: not greedy.
    """
    warpers: dict[Any, float | None] = {
        TemperatureLogitsWarper: sampling.temperature,
        TopKLogitsWarper: sampling.top_k,
        TopPLogitsWarper: sampling.top_p,
        MinPLogitsWarper: sampling.min_p,
    }
    ids = torch.empty(len(scores), 0, dtype=torch.long)
    for warper, value in warpers.items():
        if value is not None:
            scores = warper(value)(ids, scores)
    return scores


def weights_digest(model: Any) -> str:
    """A fingerprint of the loaded values: of each parameter and buffer, the shape and 64 values spread over it.

    A model loaded in bfloat16 differs from itself loaded in float32 by its scale of embeddings, a buffer that Gemma
    rounds to its precision (from 73.3 to 73.5 in the 27B model), so each has its own reference. The rotary
    frequencies, which every machine computes for itself, count without their last bits.

    Raises:
        UnsupportedError: as :func:`converted_model`.
    """
    _refuse(model)
    digest = sha256()
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()], key=itemgetter(0)):
        flat = tensor.detach().reshape(-1)
        flat = flat.bfloat16() if "inv_freq" in name else flat
        step = max(1, flat.numel() // _DRAWN)
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(flat[::step][:_DRAWN].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
