"""SigLIP and Gemma 3's image projector, written once for every device: pixels in, features of image tokens out.

The weights are those of a loaded Transformers model; query, key and value share one product
(:mod:`panscan.model.linear.products`). Each sum is computed together with the layer norm behind it, and the patch
convolution is one product. On NVIDIA GPUs the fastest attention kernel is measured at startup.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.activations import ACT2FN
from transformers.models.siglip.modeling_siglip import (
    SiglipAttention,
    SiglipEncoder,
    SiglipEncoderLayer,
    SiglipMLP,
    SiglipVisionEmbeddings,
    SiglipVisionModel,
)
from typing_extensions import override

from panscan.core import UnsupportedError
from panscan.model.linear.multiply import apply_scales, has_kernels
from panscan.model.linear.products import Linear, PlainLinear, Rows, is_plain, linear_of, runs_own_forward
from panscan.model.linear.quantized import QuantizedLinear, WeightFormat, quantized_linear
from panscan.model.linear.tuning import gpu_seconds, runs
from panscan.model.shapes import SIGLIP, vision_working_bytes
from panscan.model.sharding import SINGLE_RANK, Ranks

_LIBRARY_KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
ATTENTION_KERNELS = (*_LIBRARY_KERNELS, "hopper", "math", "default")
"""Names of the attention kernels that :func:`choose_vision_attention` chooses from."""
_TANH_GELU = type(ACT2FN["gelu_pytorch_tanh"])
_ATTENTION_MATRICES, _MLP_MATRICES = ("q_proj", "k_proj", "v_proj", "out_proj"), ("fc1", "fc2")
_FP8_STEP = 16  # of the sides of float8 matrices on a GPU
_ROUNDS, _CALLS = 5, 4  # timed rounds, after one that is not, of several calls each
_AHEAD_CYCLES = 6_000_000  # about 3 ms; the host needs up to 0.3 ms per launch of our kernel, which runs for 0.2

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""From query, key and value ``[views, heads, patches, head size]`` and the scale of the scores to ``[views, patches,
heads, head size]``."""


class VisionLayers:
    """The vision tower and the projector of a loaded ``Gemma3ForConditionalGeneration``.

    The model is unchanged, except that query, key and value weights become blocks of one tensor: it still serves
    ``generate()`` and the float32 reference. Products, norms and embeddings that are quantised, offloaded or hooked are
    called as modules. If a larger module (a layer, its attention or MLP) is hooked or replaced, Transformers' own
    ``forward`` encodes the views. Hooks must be there at construction.

    Attributes:
        attention: name of the attention kernel (:func:`choose_vision_attention`).
        reason: why that kernel was chosen.
        image_tokens: tokens of one encoded view.

    Args:
        model: in evaluation mode.
        attention: name of the attention kernel; None chooses one, the same on every rank. Ignored if Transformers' own
            ``forward`` runs.
        ranks: the processes that share the model.

    Raises:
        UnsupportedError: the model reads text only.
    """

    def __init__(self, model: Any, attention: str | None = None, ranks: Ranks = SINGLE_RANK) -> None:
        tower = getattr(model.model, "vision_tower", None)
        if tower is None:
            raise UnsupportedError("the model reads text only: it has no vision tower")
        self._config = tower.config
        self._patches = (tower.config.image_size // tower.config.patch_size) ** 2
        self._dtype: torch.dtype = tower.dtype
        self._projector = model.model.multi_modal_projector
        self._encode: Callable[[torch.Tensor], torch.Tensor]
        self.image_tokens: int = model.config.mm_tokens_per_image
        if (
            runs_own_forward(tower, SiglipVisionModel)
            and runs_own_forward(tower.encoder, SiglipEncoder)
            and all(
                runs_own_forward(layer, SiglipEncoderLayer)
                and runs_own_forward(layer.self_attn, SiglipAttention)
                and runs_own_forward(layer.mlp, SiglipMLP)
                for layer in tower.encoder.layers
            )
        ):
            self.attention, self.reason = attention or "", "as requested"
            if attention is None:
                weight, config = tower.embeddings.patch_embedding.weight, tower.config
                head_size = config.hidden_size // config.num_attention_heads
                self.attention, self.reason = choose_vision_attention(weight.device, head_size, weight.dtype)
            [agreed] = ranks.all_reduce_min([ATTENTION_KERNELS.index(self.attention)])  # each rank measures separately
            self.attention = ATTENTION_KERNELS[agreed]
            self._encode = _Encoder(tower, _attention_kernel(self.attention), self._patches)
        else:
            self.attention, self.reason = "default", "modules are hooked or replaced: Transformers' own forward runs"
            self._encode = lambda pixels: tower(pixel_values=pixels).last_hidden_state

    @torch.no_grad()
    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return features ``[views, image_tokens, hidden]`` of pixels ``[views, 3, size, size]``, in the tower's type.

        They are those of ``model.get_image_features(pixels).pooler_output``.
        """
        pieces = torch.split(pixels, self.batch_sizes(len(pixels)))
        return torch.cat([self._projector(self._encode(piece)) for piece in pieces])

    def batch_sizes(self, views: int) -> list[int]:
        """Return how many views are encoded at once, one batch after the other, for a given number of views.

        cuDNN builds a plan for each batch size that it meets, so there should be few: powers of two, the largest
        first. With ``default``, PyTorch may choose cuDNN. The batch is cut, not padded: one view of the published
        models is 4,096 rows of every product already.
        """
        if self.attention not in ("cudnn", "default"):
            return [views]
        return [1 << bit for bit in reversed(range(views.bit_length())) if views >> bit & 1]

    def working_bytes(self, views: int) -> int:
        """Return a generous bound on the bytes that encoding needs (see :func:`vision_working_bytes`)."""
        config = self._config
        return vision_working_bytes(
            patches=self._patches,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            views=views,
            width=self._dtype.itemsize,
        )


def choose_vision_attention(device: torch.device, head_size: int, dtype: torch.dtype) -> tuple[str, str]:
    """Return the name of the attention kernel for the tower, and the reason.

    On NVIDIA GPUs it is the fastest of PyTorch's ``cudnn``, ``flash`` and ``efficient`` and our own ``hopper``,
    measured with one view of the published models, or ``math`` if all refuse. Elsewhere it is ``default``: PyTorch
    chooses.

    Args:
        device: of the weights.
        head_size: values of one head.
        dtype: of the activations.
    """
    if device.type != "cuda":
        return "default", "the weights are not on an NVIDIA GPU"
    generator = torch.Generator(device).manual_seed(0)
    drawn = torch.randn(1, SIGLIP.patches, 3, SIGLIP.heads, head_size, device=device, dtype=dtype, generator=generator)
    query, key, value = (part.transpose(1, 2) for part in drawn.unbind(2))
    candidates = {name: _by_library([kernel]) for name, kernel in _LIBRARY_KERNELS.items()}
    if (hopper := _hopper(device, dtype)) is not None:
        candidates["hopper"] = hopper
    with torch.cuda.device(device):
        return fastest({name: _milliseconds(attend, query, key, value) for name, attend in candidates.items()})


def _attention_kernel(name: str) -> Attend:
    """Return a kernel by the name that :func:`choose_vision_attention` gives it."""
    if name == "hopper":
        from panscan.model.gemma3 import vision_attention

        return vision_attention.attend
    if name in _LIBRARY_KERNELS:
        return _by_library([_LIBRARY_KERNELS[name], SDPBackend.MATH])
    return _by_library({"math": [SDPBackend.MATH], "default": []}[name])


def _hopper(device: torch.device, dtype: torch.dtype) -> Attend | None:
    """Return our kernel for Hopper GPUs, or None on an NVIDIA GPU where it cannot run."""
    if find_spec("triton") is None:
        return None
    try:
        from panscan.model.gemma3 import vision_attention
    except (ImportError, AttributeError):  # it uses Gluon, an experimental part of Triton that may change
        return None
    return vision_attention.attend if vision_attention.supported(device, dtype) else None


def _by_library(kernels: list[SDPBackend]) -> Attend:
    """Return PyTorch's attention by the first of these kernels that supports the inputs; PyTorch's choice if empty."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        with sdpa_kernel(kernels, set_priority=True) if kernels else nullcontext():
            output = functional.scaled_dot_product_attention(query, key, value, scale=scale)
        return output.transpose(1, 2)

    return attend


def fastest(times: Mapping[str, float | None]) -> tuple[str, str]:
    """Return the kernel with the lowest time, the first of equals, and all times as the reason.

    Args:
        times: milliseconds by kernel; None if it refused. If all did, the result is ``math``.
    """
    measured = {name: time for name, time in times.items() if time is not None}
    listed = ", ".join(f"{name} refused" if time is None else f"{name} {time:.2f} ms" for name, time in times.items())
    name = min(measured, key=measured.__getitem__) if measured else "math"
    return name, f"one view of {SIGLIP.patches} patches: {listed}"


def _milliseconds(attend: Attend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> float | None:
    """Return the milliseconds of one call, the median of a few rounds of calls; None if the kernel refuses."""
    calls = [partial(attend, query, key, value, query.shape[-1] ** -0.5)] * _CALLS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns at length why a kernel refuses
        if not runs(partial(gpu_seconds, calls), "vision attention"):
            return None
        return median(1e3 * gpu_seconds(calls, _AHEAD_CYCLES) / _CALLS for _ in range(_ROUNDS))


class _Encoder:
    """The tower: from pixels to last hidden states ``[views, patches, width]``, normed.

    In between, the patches of all views are rows ``[T, width]``, one view after the other.
    """

    def __init__(self, tower: Any, attend: Attend, patches: int) -> None:
        self._embedding = _Embedding(tower.embeddings)
        self._parts: list[tuple[_SumNorm, _Attention | _Mlp]] = []  # each behind the norm of its input
        for layer in tower.encoder.layers:
            attention, mlp = _Attention(layer.self_attn, attend, patches), _Mlp(layer.mlp)
            self._parts += [
                (_SumNorm(layer.layer_norm1, attention.input_dtype), attention),
                (_SumNorm(layer.layer_norm2, mlp.input_dtype), mlp),
            ]
        self._last_norm = _SumNorm(tower.post_layernorm)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        embedded, output = self._embedding(pixels), None
        hidden = embedded.flatten(0, 1)
        for norm, part in self._parts:
            hidden, normed = norm(hidden, output)
            output = part(normed, hidden.dtype)
        _, last = self._last_norm(hidden, output)
        assert isinstance(last, torch.Tensor)  # no product follows
        return last.view(embedded.shape)


class _Embedding:
    """Patch and position embeddings: contiguous hidden states ``[views, patches, width]`` of pixels."""

    def __init__(self, embeddings: Any) -> None:
        self._embeddings = embeddings
        convolution = embeddings.patch_embedding
        self._is_product = (
            runs_own_forward(embeddings, SiglipVisionEmbeddings)
            and is_plain(convolution, nn.Conv2d)
            and convolution.kernel_size == convolution.stride
            and embeddings.image_size % embeddings.patch_size == 0
        )

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        embeddings = self._embeddings
        if not self._is_product:
            hidden: torch.Tensor = embeddings(pixels)
            return hidden.contiguous()  # the transposed output of the convolution
        convolution = embeddings.patch_embedding
        views, channels, height, width = pixels.shape
        high, wide = convolution.kernel_size
        tiles = pixels.to(convolution.weight.dtype).reshape(views, channels, height // high, high, width // wide, wide)
        patches = tiles.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        weight = convolution.weight.flatten(1)
        padding = (0, -weight.shape[1] % 8)  # rows of a multiple of 16 bytes: SigLIP's have 588 values
        patches = functional.linear(functional.pad(patches, padding), functional.pad(weight, padding), convolution.bias)
        embedded: torch.Tensor = patches + embeddings.position_embedding(embeddings.position_ids)
        return embedded


class _SumNorm:
    """A sum and its layer norm: one Triton kernel on NVIDIA GPUs, else PyTorch's operators.

    Args:
        norm: the layer norm.
        input_dtype: type to which the kernel quantises the norm, for the product behind it; None: it stays dense.
    """

    def __init__(self, norm: Any, input_dtype: torch.dtype | None = None) -> None:
        self._norm, self._input_dtype = norm, input_dtype
        self._has_kernel = is_plain(norm, nn.LayerNorm) and has_kernels(norm.weight.device)

    def __call__(self, hidden: torch.Tensor, part: torch.Tensor | None) -> tuple[torch.Tensor, Rows]:
        """Return ``hidden + part`` (None adds nothing) and its norm, all of one shape ``[T, width]``."""
        if self._has_kernel:
            from panscan.model.layer_kernels import add_layer_norm

            # The output of a module that is not ours may have any strides.
            part = None if part is None else part.contiguous()
            return add_layer_norm(hidden, part, self._norm, self._input_dtype)
        total = hidden if part is None else hidden + part
        return total, self._norm(total)


class _Attention:
    """Bidirectional attention of the patches of each view.

    ``input_dtype``: type of quantised inputs that are accepted in addition to dense ones; None: only dense inputs.
    """

    def __init__(self, attention: Any, attend: Attend, patches: int) -> None:
        self._attend = attend
        self._qkv = linear_of(attention.q_proj, attention.k_proj, attention.v_proj)
        self._out = linear_of(attention.out_proj)
        self._heads = (-1, patches, 3, attention.num_heads, attention.head_dim)
        self._scale: float = attention.scale
        self.input_dtype = self._qkv.input_dtype

    def __call__(self, normed: Rows, dtype: torch.dtype) -> torch.Tensor:
        qkv = apply_scales(self._qkv.product(normed, dtype), dtype)
        query, key, value = qkv.reshape(self._heads).transpose(1, 3).unbind(2)
        return self._out(self._attend(query, key, value, self._scale).flatten(2).flatten(0, 1))


class _Mlp:
    """Two products with an activation in between, which a GPU computes at the end of the first, or as it quantises the
    input of the second.

    ``input_dtype``: as of :class:`_Attention`.
    """

    def __init__(self, mlp: Any) -> None:
        self._fc1, self._fc2 = linear_of(mlp.fc1), linear_of(mlp.fc2)
        self._activation: Callable[[torch.Tensor], Rows] | None = mlp.activation_fn
        if runs_own_forward(mlp.activation_fn, _TANH_GELU):
            self._fuse_gelu()
        self.input_dtype = self._fc1.input_dtype

    def _fuse_gelu(self) -> None:
        """Compute GELU with one of the products, where a GPU can."""
        first, second = self._fc1, self._fc2
        # Never in float32, where results would depend on how cuBLAS approximates tanh, which is not documented.
        if (
            isinstance(first, PlainLinear)
            and first.bias is not None
            and first.weight.is_cuda
            and first.weight.dtype in (torch.bfloat16, torch.float16)
        ):
            self._fc1, self._activation = _GeluLinear(first.weight, first.bias), None
        elif isinstance(second, QuantizedLinear) and second.input_dtype and has_kernels(second.weight.device):
            from panscan.model.layer_kernels import gelu_rows

            self._activation = partial(gelu_rows, input_dtype=second.input_dtype)

    def __call__(self, normed: Rows, dtype: torch.dtype) -> torch.Tensor:
        hidden = apply_scales(self._fc1.product(normed, dtype), dtype)
        activated = hidden if self._activation is None else self._activation(hidden)
        return apply_scales(self._fc2.product(activated, dtype), dtype)


class _GeluLinear(Linear):
    """A product with the tanh approximation of GELU at its end.

    On CUDA ``_addmm_activation`` means that approximation (``addmm_out_cuda_impl`` in PyTorch's ``Blas.cpp``, and the
    decomposition in ``torch/_decomp/decompositions.py``); on a CPU it means the exact GELU.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        self._weight, self._bias = weight, bias

    @override
    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = torch._addmm_activation(self._bias, input, self._weight.t(), use_gelu=True)
        return rows


@torch.no_grad()
def quantize_vision_tower(model: Any, kind: str) -> None:
    """Quantise the matrices of a loaded model's vision tower in place: those of attention and MLP in all layers.

    Patch embedding and projector stay as they are: together they take 0.3% of the tower's products.

    Args:
        model: a Gemma 3 that reads images, in any precision; its layers may be on any device.
        kind: ``int8`` or ``fp8``.

    Raises:
        UnsupportedError: the tower is quantised already, or a GPU cannot multiply matrices of its sizes.
    """
    weight_format = WeightFormat(kind)
    for layer in model.model.vision_tower.encoder.layers:
        for parent, names in ((layer.self_attn, _ATTENTION_MATRICES), (layer.mlp, _MLP_MATRICES)):
            for name in names:
                setattr(parent, name, _quantized(getattr(parent, name), weight_format))
    model.quantized_tower = kind


def _quantized(linear: Any, weight_format: WeightFormat) -> QuantizedLinear:
    """Return a plain ``nn.Linear`` with quantised weights on the same device."""
    option = f"--quantize-vision {weight_format.kind}"
    if not is_plain(linear, nn.Linear):
        raise UnsupportedError(f"{option}: the checkpoint's vision tower is quantised or changed already; leave it out")
    outputs, inputs = linear.weight.shape
    quantized = quantized_linear(inputs, outputs, weight_format, bias=linear.bias, device=linear.weight.device)
    is_float8 = quantized.weight.is_cuda and quantized.weight.is_floating_point()
    if is_float8 and (inputs % _FP8_STEP or outputs % _FP8_STEP):
        raise UnsupportedError(
            f"{option}: GPUs multiply float8 matrices whose sides are multiples of {_FP8_STEP}; the vision tower has"
            f" one of {outputs} x {inputs}: use int8"
        )
    quantized.quantize(linear.weight)
    return quantized
