"""The cost model: FLOPs, bytes and messages of passes on one GPU, and the least time that they take.

Everything that predicts a time or a floor counts here: layouts and simulations of ``panscan plan``, ``bench
--dry-run``, the floors of a report, and benchmarks. Without a tensor library.

A tensor-parallel group of n GPUs splits heads, MLP width and vocabulary (:mod:`panscan.model.sharding`); each GPU holds
the whole vision tower and encodes one n-th of the views. A multiply-add is two FLOPs; norms, activations, softmax and
rotations are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from math import ceil

import numpy as np
from numpy.typing import NDArray

from panscan.core import SettingError
from panscan.core.weight_formats import Format, format_named, weight_words
from panscan.engine.scheduling.kv_sizes import KVShape, head_bytes
from panscan.model.shapes import Shape, TextShape, split_reason

Floats = NDArray[np.float64]
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of an unquantised weight or an activation."""
VIEW_COST, OUTPUT_COST = 440.0, 4.0
"""Cost of a view and of an output token in prompt tokens, to compare requests: the 4B model's tower takes 3.5 TFLOP per
view, its prefill 7.8 GFLOP per token. A decode step is limited by memory bandwidth and shared by a batch."""


@dataclass(frozen=True)
class Variant:
    """A model as one GPU runs it.

    Args:
        shape: the whole model.
        weights: quantisation of the decoder layers' matrices, a value of ``--quantization``; None: none.
        group_size: input channels per int4 scale; None: the largest that divides every matrix.
        kv_cache_dtype: type of keys and values: a value of ``--kv-cache-dtype``; ``auto``: that of activations.
        tensor_parallel_size: GPUs that share the model.
        dtype: type of everything else: bf16, fp16 or fp32.
        quantize_head: quantisation of the embedding, which is the output matrix; None: none.
        quantize_vision: quantisation of the vision tower's matrices; None: none.

    Raises:
        SettingError: a size that does not divide the model.
    """

    shape: Shape
    weights: str | None = None
    group_size: int | None = None
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    dtype: str = "bf16"
    quantize_head: str | None = None
    quantize_vision: str | None = None

    def __post_init__(self) -> None:
        text, size = self.text, self.tensor_parallel_size
        reason = split_reason(heads=text.heads, kv_heads=text.kv_heads, intermediate=text.intermediate, size=size)
        if reason is not None:
            raise SettingError(reason)
        self.scale_group()

    @property
    def weight_format(self) -> Format:
        """Format of the decoder layers' matrices."""
        return format_named(self.weights)

    @property
    def width(self) -> int:
        """Bytes of an activation."""
        return DTYPE_BYTES[self.dtype]

    @property
    def weights_name(self) -> str:
        """Type of the weights: the quantisation, or the type of everything else; and of a quantised head and tower."""
        return " + ".join(weight_words(self.weights or self.dtype, self.quantize_head, self.quantize_vision))

    @property
    def text(self) -> TextShape:
        """The decoder's shape."""
        return self.shape.text

    def matrices(self) -> list[tuple[int, int]]:
        """Return (inputs, outputs) of each matrix of one decoder layer on one GPU."""
        text, size = self.text, self.tensor_parallel_size
        query, key = text.heads * text.head_size // size, text.kv_heads * text.head_size // size
        inner = text.intermediate // size
        hidden = text.hidden
        attention = [(hidden, query), (hidden, key), (hidden, key), (query, hidden)]
        return [*attention, (hidden, inner), (hidden, inner), (inner, hidden)]

    def vocabulary(self) -> int:
        """Return the rows of the output matrix on one GPU, padding included."""
        return ceil(self.text.vocabulary / self.tensor_parallel_size)

    @cached_property  # a simulation asks for every pass
    def layer_bytes(self) -> int:
        """The bytes of one decoder layer's matrices on one GPU, scales included."""
        group = self.scale_group()
        return sum(self.weight_format.matrix_bytes(*matrix, self.width, group) for matrix in self.matrices())

    def text_bytes(self) -> int:
        """Return the bytes of the decoder on one GPU: layers, norms, and the embedding, which is the output matrix."""
        text = self.text
        norms = text.parameters() - text.vocabulary * text.hidden - text.layers * text.layer_matrices()
        return text.layers * self.layer_bytes + self.head_bytes() + norms * self.width

    def head_bytes(self) -> int:
        """Return the bytes of the embedding on one GPU, scales included."""
        return format_named(self.quantize_head).matrix_bytes(self.text.hidden, self.vocabulary(), self.width)

    def vision_bytes(self) -> int:
        """Return the bytes of the vision tower and the projector, which every GPU holds whole."""
        dense = (self.shape.parameters() - self.text.parameters()) * self.width
        vision = self.shape.vision
        if vision is None or self.quantize_vision is None:
            return dense
        kind, matrices = format_named(self.quantize_vision), vision.matrices()
        quantized = sum(kind.matrix_bytes(inputs, outputs, self.width) for inputs, outputs in matrices)
        return dense + vision.layers * (quantized - vision.layer_matrices() * self.width)

    def weight_bytes(self) -> int:
        """Return the bytes of all weights on one GPU."""
        return self.text_bytes() + self.vision_bytes()

    def kv_shape(self) -> KVShape:
        """Return the layers and the bytes of one token in one of them, on one GPU."""
        text = self.text
        width, scaled = self.width if self.kv_cache_dtype == "auto" else 1, self.kv_cache_dtype == "int8"
        token = text.kv_heads // self.tensor_parallel_size * head_bytes(text.head_size, width, scaled=scaled)
        return KVShape(token, text.global_layers, text.local_layers)

    def scale_group(self) -> int | None:
        """Return the input channels per scale; None for formats without groups.

        Raises:
            SettingError: the size does not divide every matrix.
        """
        asked = self.group_size if self.weight_format.grouped else None
        return self.weight_format.group_size(asked, [inputs for inputs, _ in self.matrices()])


@dataclass(frozen=True, slots=True)
class Work:
    """Counts of a pass or a phase on one GPU. Sums with ``+``.

    Args:
        products: FLOPs of products in the weights' 8-bit type.
        tower: FLOPs of products in the 8-bit type of a quantised vision tower.
        dense: FLOPs of products in the activations' type: vision, output matrix; with dense and int4 weights, all.
        attention: FLOPs of attention scores and values.
        weight_bytes: bytes of weights read, each once.
        kv_bytes: bytes of keys and values read and written.
        activation_bytes: bytes of activations read and written between products.
        link_bytes: bytes that this GPU sends to its peers.
        reductions: number of messages between the GPUs: all-reduces and all-gathers.
    """

    products: float = 0.0
    tower: float = 0.0
    dense: float = 0.0
    attention: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    activation_bytes: float = 0.0
    link_bytes: float = 0.0
    reductions: int = 0

    def flops(self, narrow: float = 1.0, tower_narrow: float = 1.0) -> float:
        """FLOPs, with products of ``narrow`` times the rate counted as the unquantised ones that take as long."""
        return self.dense + self.attention + self.products / narrow + self.tower / tower_narrow

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))


def vision_work(variant: Variant, views: int) -> Work:
    """Return the work of encoding ``views`` views together, on the GPU that encodes most of them.

    GPUs share the views and send each other the features. Activations: per patch and layer, 20 hidden states and 4 of
    the MLP's width.
    """
    shape, vision, size = variant.shape, variant.shape.vision, variant.tensor_parallel_size
    if vision is None or views < 1:
        return Work()
    encoded = ceil(views / size)
    attention = encoded * vision.attention_flops()
    states = encoded * vision.patches * vision.layers * (20 * vision.hidden + 4 * vision.intermediate)
    features = encoded * shape.image_tokens * variant.text.hidden * variant.width
    tower = 0.0
    if variant.quantize_vision is not None:
        tower = 2.0 * encoded * vision.patches * vision.layers * vision.layer_matrices()
    return Work(
        tower=tower,
        dense=shape.vision_flops(encoded) - attention - tower,
        attention=attention,
        weight_bytes=variant.vision_bytes(),
        activation_bytes=states * variant.width,
        link_bytes=features * (size - 1),
        reductions=int(size > 1),
    )


def pass_work(
    variant: Variant,
    *,
    decode_contexts: Sequence[int] = (),
    prefill: Sequence[tuple[int, int]] = (),
    sampled: int | None = None,
    views: int = 0,
) -> Work:
    """Return the work of one pass of the decoder, without vision.

    Activations: per row and layer, 12 hidden states, 6 of the MLP's width, 6 of all queries and 4 of all keys.

    Args:
        decode_contexts: tokens of each decoding sequence, the new one included.
        prefill: chunks of prompts, as positions [start, end).
        sampled: rows whose logits are computed; None: decode rows and one of each chunk.
        views: image spans in the chunks, whose tokens attend to all of their span.
    """
    text, size, width = variant.text, variant.tensor_parallel_size, variant.width
    rows = len(decode_contexts) + sum(end - start for start, end in prefill)
    if not rows:
        return Work()
    sampled = len(decode_contexts) + len(prefill) if sampled is None else sampled
    layers = 2.0 * rows * text.layers * text.layer_matrices() / size
    logits = 2.0 * sampled * variant.vocabulary() * text.hidden
    quantized = variant.weight_format.products == "narrow"
    kv = variant.kv_shape()
    pairs, read = _attention(text, decode_contexts, prefill, views * variant.shape.block_pairs())
    inner = text.head_size * (6 * text.heads + 4 * text.kv_heads) + 6 * text.intermediate
    states = text.layers * (12 * text.hidden + inner / size)
    unread = 0 if sampled else variant.head_bytes()
    summed = 2 * (size - 1) / size * rows * text.hidden * width * (1 + 2 * text.layers)
    joined = (size - 1) * sampled * variant.vocabulary() * width
    return Work(
        products=layers if quantized else 0.0,
        dense=logits + (0.0 if quantized else layers),
        attention=4.0 * text.heads * text.head_size * pairs / size,
        weight_bytes=variant.text_bytes() - unread,
        kv_bytes=kv.layer_bytes * (kv.global_layers * (read[0] + rows) + kv.local_layers * (read[1] + rows)),
        activation_bytes=rows * states * width,
        link_bytes=summed + joined,
        reductions=(1 + 2 * text.layers + (sampled > 0)) if size > 1 else 0,
    )


def _attention(
    text: TextShape, decode_contexts: Sequence[int], prefill: Sequence[tuple[int, int]], block_pairs: int
) -> tuple[int, tuple[int, int]]:
    """Return the (query, key) pairs over all layers, and the tokens read in a global and in a local layer."""
    window = text.window
    seen = sum(decode_contexts)
    local = sum(context if context < window else window for context in decode_contexts)
    pairs = text.global_layers * seen + text.local_layers * local + text.layers * block_pairs
    for start, end in prefill:
        pairs += text.attention_pairs(end) - text.attention_pairs(start)
        seen += end
        local += min(end, end - start + window - 1)
    return pairs, (seen, local)


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """What a request asks of a model.

    Args:
        views: views that are encoded for it.
        prompt_tokens: tokens of its prompt.
        output_tokens: tokens of its answer.
        cached_tokens: tokens at the start of the prompt whose keys and values are known already.
    """

    views: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0

    @property
    def steps(self) -> int:
        """Decode steps: the first token is prefill's."""
        return max(0, self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Roofline:
    """The least time that work takes on a machine with two ceilings, whatever program computes it.

    A phase takes the longer of its arithmetic and of reading its weights, keys and values. Real tokens only: padding is
    not work that had to be done.

    Args:
        variant: the model as one device with these rates runs it.
        flops_per_s: rate of a large product of unquantised operands.
        bytes_per_s: rate of a large copy.
        weight_bytes: size of all weights as stored.
        narrow: how many times faster products of 8-bit operands are.
        tower_narrow: the same for a quantised vision tower.
    """

    variant: Variant
    flops_per_s: float
    bytes_per_s: float
    weight_bytes: int
    narrow: float = 1.0
    tower_narrow: float = 1.0

    @property
    def text_bytes(self) -> int:
        """Bytes of the decoder: all but an unquantised tower."""
        return max(0, self.weight_bytes - self.variant.vision_bytes())

    @property
    def vision_bytes(self) -> int:
        """Bytes of the tower, at least: all but an unquantised decoder."""
        return max(0, self.weight_bytes - self.variant.text.parameters() * self.variant.width)

    def vision_seconds(self, views: int) -> float:
        """Return the time of encoding views together; 0 without any."""
        return self._seconds(self._vision_flops(views), self.vision_bytes) if views else 0.0

    def prefill_seconds(self, requests: Sequence[RequestCounts]) -> float:
        """Return the time of the decoder over all prompts together."""
        return self._seconds(self._prefill_flops(requests), self.text_bytes)

    def decode_seconds(self, requests: Sequence[RequestCounts]) -> float:
        """Return the time of all steps after the first token, of requests that begin together.

        Each step reads the decoder once. A request takes no part after its last token.
        """
        steps = max((request.steps for request in requests), default=0)
        read, flops = np.full(steps, float(self.text_bytes)), np.zeros(steps)
        for request in requests:
            computed, kv_bytes = self._decode_steps(request)
            flops[: request.steps] += computed
            read[: request.steps] += kv_bytes
        return float(np.maximum(read / self.bytes_per_s, flops / self.flops_per_s).sum())

    def alone_seconds(self, request: RequestCounts) -> tuple[float, float, float]:
        """Return the times of vision, prefill and decode of a request that runs alone."""
        flops, kv_bytes = self._decode_steps(request)
        decode = self._seconds(float(flops.sum()), request.steps * self.text_bytes + float(kv_bytes.sum()))
        return self.vision_seconds(request.views), self.prefill_seconds([request]), decode

    def mixed_seconds(self, requests: Sequence[RequestCounts], most: int) -> float:
        """Return the time of all requests in passes that mix prefill and decode in any order.

        Args:
            requests: all requests.
            most: requests that one pass may compute, which sets how often the decoder is read at least.
        """
        tokens = [max(1, request.output_tokens) for request in requests]
        passes = max(*tokens, ceil(sum(tokens) / most))
        vision = self.vision_bytes if any(request.views for request in requests) else 0
        kv_bytes = sum(float(self._decode_steps(request)[1].sum()) for request in requests)
        return self._seconds(sum(map(self.request_flops, requests)), vision + passes * self.text_bytes + kv_bytes)

    def request_flops(self, request: RequestCounts) -> float:
        """Return all FLOPs of a request, from its views to its last token."""
        decode = float(self._decode_steps(request)[0].sum())
        return self._vision_flops(request.views) + self._prefill_flops([request]) + decode

    def _vision_flops(self, views: int) -> float:
        return vision_work(self.variant, views).flops(tower_narrow=self.tower_narrow)

    def _prefill_flops(self, requests: Sequence[RequestCounts]) -> float:
        chunks = [(request.cached_tokens, request.prompt_tokens) for request in requests]
        return pass_work(self.variant, prefill=chunks).flops(self.narrow)

    def _decode_steps(self, request: RequestCounts) -> tuple[Floats, Floats]:
        """Return the FLOPs of each step after the first token, and the bytes of keys and values that it reads."""
        text = self.variant.text
        contexts = request.prompt_tokens + 1.0 + np.arange(request.steps)
        pairs = text.global_layers * contexts + text.local_layers * np.minimum(contexts, text.window)
        attention = 4.0 * text.heads * text.head_size * pairs
        return _step_flops(self.variant, self.narrow) + attention, self.variant.kv_shape().layer_bytes * pairs

    def _seconds(self, flops: float, read: float) -> float:
        return max(flops / self.flops_per_s, read / self.bytes_per_s)


@lru_cache(maxsize=256)
def _step_flops(variant: Variant, narrow: float) -> float:
    """Return the FLOPs of a decode step of one request, without attention."""
    return pass_work(variant, decode_contexts=[0]).flops(narrow)
