"""The vision tower and the projector of a loaded Gemma 3, run faster than its own ``forward`` runs them.

The modules are Transformers', called one by one. SigLIP's embeddings leave with the tokens of a view next to each
other in memory instead of the values of a token, and every residual after them inherits it: they are copied once.
Four parts are computed another way while the tower runs: attention by the kernel that this machine is fastest with,
the patch convolution as one product, and on a GPU the activation at the end of the product before it, and each sum
together with the layer norm behind it. What is left are products: there is nothing to compile.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from panscan.core import UnsupportedError
from panscan.model.fused import is_plain

__all__ = ["VisionTower", "choose_vision_attention", "fastest"]

log = logging.getLogger("panscan.engine")

_NAME = "panscan_vision_"
_KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_HEADS, _PATCHES = 16, 4096  # of one view, in every published model that sees
_ROUNDS, _CALLS = 5, 8  # timed, after a round that is not; of several calls, so that the launch of one does not count

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Query, key and value ``[views, heads, patches, head size]`` and the scale of the scores, to ``[views, patches, heads,
head size]``."""

AddNorm = Callable[[torch.Tensor, torch.Tensor | None, nn.LayerNorm], tuple[torch.Tensor, torch.Tensor]]
"""A sum (of nothing, where there is no second part) and its layer norm."""

_StandIn = tuple[nn.Module, type[nn.Module], type[nn.Module]]
"""A module, its own class, and the class that it has while the tower runs."""


class VisionTower:
    """The tower and projector of a loaded ``Gemma3ForConditionalGeneration``.

    Between calls the model is as it was: ``generate()`` and the float32 truth run Transformers' own. While views are
    encoded, no other thread may run it. ``attention`` and ``reason``: the kernel, and why it was chosen
    (:func:`choose_vision_attention`). ``add_norm``: what computes sums and layer norms.

    A tower that is quantised, or has hooks (accelerate's, when it is spread over devices or offloaded), runs as it is.

    Args:
        model: in evaluation mode. Later calls find projections that :func:`panscan.model.fused.fuse_projections` fused.

    Raises:
        UnsupportedError: the model reads text only.
    """

    def __init__(self, model: Any) -> None:
        tower = getattr(model.model, "vision_tower", None)
        if tower is None:
            raise UnsupportedError("the model reads text only: it has no vision tower")
        self._tower, self._projector = tower, model.model.multi_modal_projector
        self._plain = _is_plain_tower(tower, self._projector)
        self._stand_ins = _stand_ins(tower) if self._plain else []
        self.add_norm = _choose_add_norm(tower.post_layernorm.weight.device)
        weight = tower.embeddings.patch_embedding.weight
        head_size = tower.config.hidden_size // tower.config.num_attention_heads
        self.attention, self.reason = choose_vision_attention(weight.device, head_size, weight.dtype)

    @torch.no_grad()
    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encoded views ``[views, image_tokens, hidden]`` of pixels ``[views, 3, size, size]``, as
        ``model.get_image_features(pixels).pooler_output`` has them, in the tower's type."""
        with self._installed():
            return torch.cat([self._views(piece) for piece in torch.split(pixels, _pieces(len(pixels)))])

    def _views(self, pixels: torch.Tensor) -> torch.Tensor:
        hidden = self._tower.embeddings(pixels).contiguous()
        encode = self._encoded if self._plain else self._encoded_by_layers
        features: torch.Tensor = self._projector(encode(hidden))
        return features

    def _encoded(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the layers do, with each sum put off until the norm behind it."""
        part: torch.Tensor | None = None
        for layer in self._tower.encoder.layers:
            hidden, normed = self.add_norm(hidden, part, layer.layer_norm1)
            part, _ = layer.self_attn(hidden_states=normed, attention_mask=None)
            hidden, normed = self.add_norm(hidden, part, layer.layer_norm2)
            part = layer.mlp(normed)
        return self.add_norm(hidden, part, self._tower.post_layernorm)[1]

    def _encoded_by_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self._tower.encoder.layers:
            hidden = layer(hidden, None)
        normed: torch.Tensor = self._tower.post_layernorm(hidden)
        return normed

    @contextmanager
    def _installed(self) -> Iterator[None]:
        config = self._tower.config
        before = config._attn_implementation
        config._attn_implementation = _NAME + self.attention
        try:
            for module, _, stand_in in self._stand_ins:
                module.__class__ = stand_in
            yield
        finally:
            for module, own, _ in self._stand_ins:
                module.__class__ = own
            config._attn_implementation = before


def choose_vision_attention(device: torch.device, head_size: int, dtype: torch.dtype) -> tuple[str, str]:
    """The name of the attention kernel for the tower, and the reason.

    On NVIDIA the fastest of PyTorch's ``cudnn``, ``flash`` and ``efficient`` and our own ``hopper`` for one view of the
    published models, measured here and now; ``math`` if none takes it. Elsewhere ``default``, PyTorch's own choice.
    """
    if device.type != "cuda":
        return "default", "the weights are not on an NVIDIA GPU"
    generator = torch.Generator(device).manual_seed(0)
    drawn = torch.randn(1, _PATCHES, 3, _HEADS, head_size, device=device, dtype=dtype, generator=generator)
    query, key, value = (part.transpose(1, 2) for part in drawn.unbind(2))
    candidates = {name: _by_library([kernel]) for name, kernel in _KERNELS.items()}
    if (hopper := _hopper(device, dtype)) is not None:
        candidates["hopper"] = hopper
    with torch.cuda.device(device):
        return fastest({name: _milliseconds(attend, query, key, value) for name, attend in candidates.items()})


def _hopper(device: torch.device, dtype: torch.dtype) -> Attend | None:
    """Our kernel for Hopper GPUs, if it can run there."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    try:
        from panscan.model import vision_attention
    except (ImportError, AttributeError):  # it is written in Gluon, an experimental part of Triton that may change
        return None
    return vision_attention.attend if vision_attention.supported(device, dtype) else None


def _by_library(kernels: list[SDPBackend]) -> Attend:
    """Scaled dot product attention by the first of these kernels that takes the problem; PyTorch's choice if empty."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        with sdpa_kernel(kernels, set_priority=True) if kernels else nullcontext():
            output = functional.scaled_dot_product_attention(query, key, value, scale=scale)
        return output.transpose(1, 2)

    return attend


def fastest(times: Mapping[str, float | None]) -> tuple[str, str]:
    """The kernel with the least milliseconds (None: it refused), the first of equals, and all of them as the reason."""
    taken = {name: time for name, time in times.items() if time is not None}
    told = ", ".join(f"{name} {time:.2f} ms" if time is not None else f"{name} refused" for name, time in times.items())
    name = min(taken, key=taken.__getitem__) if taken else "math"
    return name, f"one view of {_PATCHES} patches: {told}"


def _milliseconds(attend: Attend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> float | None:
    """Of one call, the median of a few rounds of calls; None if the kernel refuses."""
    times: list[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch tells at length why a kernel refuses
        for _ in range(1 + _ROUNDS):
            start, end = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types for it
                for _ in range(2)
            )
            start.record()
            try:
                for _ in range(_CALLS):
                    attend(query, key, value, query.shape[-1] ** -0.5)
            except Exception as error:  # whatever a library or Triton's compiler raises: another kernel takes its place
                log.debug("a vision attention kernel refused: %s: %s", type(error).__name__, error)
                return None
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / _CALLS)
    return median(times[1:])


def _pieces(views: int) -> list[int]:
    """Powers of two that sum up to ``views``, the largest first.

    cuDNN builds a plan for each number of views that it meets, so there should be few. The batch is cut, not padded:
    one view of the published models is 4,096 rows of every product already.
    """
    return [1 << bit for bit in reversed(range(views.bit_length())) if views >> bit & 1]


def _choose_add_norm(device: torch.device) -> AddNorm:
    if device.type == "cuda" and find_spec("triton") is not None:
        from panscan.model.norm_kernels import add_norm

        return add_norm
    return _add_norm


def _add_norm(
    hidden: torch.Tensor, part: torch.Tensor | None, norm: nn.LayerNorm
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    total = hidden if part is None else hidden + part
    return total, norm(total)


def _is_plain_tower(tower: Any, projector: nn.Module) -> bool:
    """Whether nothing but Transformers' modules computes here, on values that are there: no hooks, no quantisation."""
    modules = [*tower.modules(), *projector.modules()]
    layers = tower.encoder.layers.named_modules()
    return (
        not any(hasattr(module, "_hf_hook") for module in modules)
        and all(is_plain(layer, SiglipEncoderLayer) for layer in tower.encoder.layers)
        and all(type(p) is nn.Parameter and not p.is_meta for part in (tower, projector) for p in part.parameters())
        and all(isinstance(module, nn.Linear) for name, module in layers if name.endswith(("_proj", "fc1", "fc2")))
    )


def _stand_ins(tower: Any) -> list[_StandIn]:
    config, patches = tower.config, tower.embeddings.patch_embedding
    found: list[_StandIn] = []
    whole = patches.kernel_size == patches.stride and config.image_size % config.patch_size == 0
    if whole and is_plain(patches, nn.Conv2d):
        found.append((patches, nn.Conv2d, _PatchProduct))
    for mlp in (layer.mlp for layer in tower.encoder.layers):
        weight = mlp.fc1.weight
        # In float32 it would show how cuBLAS computes its tanh, which it does not say.
        short = weight.device.type == "cuda" and weight.dtype in (torch.bfloat16, torch.float16)
        if short and config.hidden_act == "gelu_pytorch_tanh" and is_plain(mlp.fc1, nn.Linear):
            found.append((mlp.fc1, nn.Linear, _ActivatedProduct))
            found.append((mlp.activation_fn, type(mlp.activation_fn), _Activated))
    return found


class _PatchProduct(nn.Conv2d):
    """A convolution whose kernel is its stride, as one product over unfolded patches."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        views, channels, height, width = input.shape
        high, wide = self.kernel_size
        tiles = input.reshape(views, channels, height // high, high, width // wide, wide)
        patches = tiles.permute(0, 2, 4, 1, 3, 5).flatten(3)
        weight = self.weight.flatten(1)
        padding = (0, -weight.shape[1] % 8)  # rows of 16 bytes: SigLIP's 588 values end in between
        product = functional.linear(functional.pad(patches, padding), functional.pad(weight, padding), self.bias)
        return product.permute(0, 3, 1, 2)


class _ActivatedProduct(nn.Linear):
    """A product with the tanh approximation of GELU at its end.

    On CUDA ``_addmm_activation`` means that approximation (``addmm_out_cuda_impl`` in PyTorch's ``Blas.cpp``, and the
    decomposition in ``torch/_decomp/decompositions.py``); on a CPU it means the exact GELU.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = torch._addmm_activation(self.bias, input.flatten(0, -2), self.weight.t(), use_gelu=True)
        return rows.view(*input.shape[:-1], self.out_features)


class _Activated(nn.Module):
    """What is left of an activation that has been computed with the product before it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input


def _attention(attend: Attend) -> Callable[..., tuple[torch.Tensor, None]]:
    """Attention as Transformers calls it. Which kernel is part of a compiled graph, so that no cache on disk takes it
    for another's."""

    def forward(
        _module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: None,
        *, scaling: float, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        return attend(query, key, value, scaling), None

    return forward


def _by_hopper(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    from panscan.model.vision_attention import attend

    return attend(query, key, value, scale)


for _name, _kernel in _KERNELS.items():
    AttentionInterface.register(_NAME + _name, _attention(_by_library([_kernel, SDPBackend.MATH])))
AttentionInterface.register(_NAME + "hopper", _attention(_by_hopper))
AttentionInterface.register(_NAME + "math", _attention(_by_library([SDPBackend.MATH])))
AttentionInterface.register(_NAME + "default", _attention(_by_library([])))
