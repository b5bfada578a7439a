"""Gemma 3's published shapes: parameters, attention pairs and cached bytes, as short formulas. No tensor library.

What passes over them cost is counted by :mod:`panscan.plan.cost`.

The numbers are those of ``_VARIANTS`` and ``_VISION_CONFIG`` in Transformers' conversion script
(``src/transformers/models/gemma3/convert_gemma3_weights.py``), which also adds 64 rows to the vocabulary of the
models that see. A multiply-add counts as two FLOPs; norms, activations, softmax and rotations are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from panscan.core import RecordsError
from panscan.core.model_names import IMAGE_TOKENS, VIEW_SIDE
from panscan.core.text import listed

PATTERN = 6
"""Of the published models, every sixth layer is global."""


def decoder_working_bytes(
    *, hidden: int, intermediate: int, vocabulary: int, tokens: int, rows: int, width: int
) -> int:
    """Return a generous bound on the bytes that a pass of the decoder needs beside weights and caches.

    Per token four hidden states and three of the MLP's width; per row the logits as computed and three float32 copies;
    and half as much again for what the allocator cannot use.

    Args:
        hidden: size of the hidden states.
        intermediate: width of the MLP, on this device.
        vocabulary: rows of the whole output matrix.
        tokens: rows that go through the layers at once.
        rows: rows whose logits are computed.
        width: bytes of an activation.
    """
    needed = tokens * (4 * hidden + 3 * intermediate) * width + rows * vocabulary * (width + 3 * 4)
    return needed + needed // 2


def vision_working_bytes(*, patches: int, hidden: int, intermediate: int, views: int, width: int) -> int:
    """Return a generous bound on the bytes that encoding ``views`` views at once needs beside the weights.

    Per patch four hidden states and three of the MLP's width, and half as much again for what the allocator cannot
    use.

    Args:
        patches: patches of one view.
        hidden: size of the tower's hidden states.
        intermediate: width of its MLP.
        views: views at once.
        width: bytes of an activation.
    """
    return views * patches * (4 * hidden + 3 * intermediate) * width * 3 // 2


def split_reason(*, heads: int, kv_heads: int, intermediate: int, size: int) -> str | None:
    """Return why a decoder cannot be split over ``size`` ranks, and the sizes that divide it; None if it can.

    Args:
        heads: attention heads.
        kv_heads: heads of keys and values.
        intermediate: width of the MLP.
        size: number of ranks, at least 1.
    """
    counts = {"attention heads": heads, "KV heads": kv_heads, "MLP columns": intermediate}
    if all(count % size == 0 for count in counts.values()):
        return None
    fitting = [other for other in range(1, size) if all(count % other == 0 for count in counts.values())]
    has = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"--tensor-parallel-size {size} does not divide the model's {has}: use {listed(fitting)}"


@dataclass(frozen=True, slots=True)
class TextShape:
    """The decoder. Every ``pattern``-th layer is global, the others see ``window`` positions, their own included.

    ``query_scale`` is ``query_pre_attn_scalar``; ``rope_factor`` divides the positions of the global layers.
    """

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    window: int
    query_scale: int
    max_positions: int
    rope_factor: float | None = None
    rope_theta_global: float = 1e6
    rope_theta_local: float = 1e4
    pattern: int = PATTERN

    @property
    def global_layers(self) -> int:
        return self.layers // self.pattern

    @property
    def local_layers(self) -> int:
        return self.layers - self.global_layers

    def layer_matrices(self) -> int:
        """Weights of one layer's products: hidden x head size x (2 heads + 2 kv heads) + 3 x hidden x intermediate."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    def parameters(self) -> int:
        """Vocabulary x hidden (once: tied) + layers x (matrices + 4 norms of hidden + 2 of head size) + final norm."""
        norms = 4 * self.hidden + 2 * self.head_size
        return self.vocabulary * self.hidden + self.layers * (self.layer_matrices() + norms) + self.hidden

    def attention_pairs(self, tokens: int) -> int:
        """Pairs (query, key) that a causal prompt of ``tokens`` looks at, summed over layers, for one head.

        A global layer has n(n + 1) / 2; a local one lacks (n - w)(n - w + 1) / 2 of them beyond its window w. Image
        blocks look both ways and add at most i(i - 1) / 2 per layer for i image tokens: not counted.
        """
        causal = tokens * (tokens + 1) // 2
        beyond = max(0, tokens - self.window)
        return self.layers * causal - self.local_layers * (beyond * (beyond + 1) // 2)


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The SigLIP tower, without a head. ``image_size`` and ``patch_size`` are pixels of a square's side."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    image_size: int
    patch_size: int = 14

    @property
    def patches(self) -> int:
        """Patches of one view; each is one position of the tower."""
        return (self.image_size // self.patch_size) ** 2

    def layer_matrices(self) -> int:
        """Weights of one layer's products, without biases: 4 x hidden^2 + 2 x hidden x intermediate."""
        return sum(inputs * outputs for inputs, outputs in self.matrices())

    def matrices(self) -> list[tuple[int, int]]:
        """Inputs and outputs of one layer's matrices: query, key, value and output, and the MLP's two."""
        return [*[(self.hidden, self.hidden)] * 4, (self.hidden, self.intermediate), (self.intermediate, self.hidden)]

    def attention_flops(self) -> int:
        """Scores and values of one view: layers x 4 x patches^2 x hidden."""
        return self.layers * 4 * self.patches**2 * self.hidden

    def patch_matrix(self) -> int:
        """Weights of the patch embedding: 3 x patch size^2 x hidden."""
        return 3 * self.patch_size**2 * self.hidden

    def parameters(self) -> int:
        """Patch and position embeddings + layers x (matrices + their biases + 2 layer norms) + final layer norm."""
        embeddings = self.patch_matrix() + self.hidden + self.patches * self.hidden
        biases = 5 * self.hidden + self.intermediate
        return embeddings + self.layers * (self.layer_matrices() + biases + 4 * self.hidden) + 2 * self.hidden


@dataclass(frozen=True, slots=True)
class Shape:
    """A whole model. Without ``vision`` it reads text only; ``image_tokens`` are the soft tokens of one view."""

    name: str
    text: TextShape
    vision: VisionShape | None = None
    image_tokens: int = IMAGE_TOKENS

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Shape:
        """The shape that ``dataclasses.asdict`` made these values of, as ``load`` records keep them.

        Raises:
            RecordsError: they are another version's: a field is unknown, missing or of another kind.
        """
        try:
            shape = msgspec.convert(values, cls)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter: lone surrogates
            raise RecordsError(f"a shape of another version: {error}") from error
        parts = (cls, values), (TextShape, values["text"]), (VisionShape, values.get("vision") or {})
        if unknown := [name for kind, part in parts for name in part if name not in kind.__dataclass_fields__]:
            raise RecordsError(f"a shape has no field {unknown[0]!r}: it is another version's")
        return shape

    def parameters(self) -> int:
        """Decoder + tower + projector (vision hidden x text hidden, and a norm of vision hidden); tied weights once."""
        if self.vision is None:
            return self.text.parameters()
        projector = self.vision.hidden * self.text.hidden + self.vision.hidden
        return self.text.parameters() + self.vision.parameters() + projector

    def block_pairs(self) -> int:
        """Pairs (query, key) that an image block of i tokens adds to a causal layer: i(i - 1) / 2."""
        return self.image_tokens * (self.image_tokens - 1) // 2

    def vision_flops(self, views: int) -> float:
        """Tower and projector over ``views`` views; 0 for a text-only model.

        Per view of n patches: 2n x (patch matrix + layers x layer matrices) + layers x 4 x n^2 x hidden (scores and
        values) + 2 x image tokens x vision hidden x text hidden.
        """
        if self.vision is None:
            return 0.0
        patches, hidden = self.vision.patches, self.vision.hidden
        linear = 2 * patches * (self.vision.patch_matrix() + self.vision.layers * self.vision.layer_matrices())
        return float(
            views * (linear + self.vision.attention_flops() + 2 * self.image_tokens * hidden * self.text.hidden)
        )


SIGLIP = VisionShape(hidden=1152, intermediate=4304, layers=27, heads=16, image_size=VIEW_SIDE)
"""The tower of every published model with vision."""

_TEXT_VOCABULARY = 262_144
_VOCABULARY = _TEXT_VOCABULARY + 64


def _small(hidden: int, intermediate: int, layers: int) -> TextShape:
    """What the two text-only models have in common."""
    return TextShape(
        _TEXT_VOCABULARY,
        hidden,
        intermediate,
        layers,
        heads=4,
        kv_heads=1,
        head_size=256,
        window=512,
        query_scale=256,
        max_positions=32_768,
    )


def _large(hidden: int, layers: int, heads: int, head_size: int, query_scale: int) -> TextShape:
    """What the models that see have in common."""
    return TextShape(
        _VOCABULARY,
        hidden,
        4 * hidden,
        layers,
        heads,
        heads // 2,
        head_size,
        window=1024,
        query_scale=query_scale,
        max_positions=131_072,
        rope_factor=8.0,
    )


_MINI_TEXT = TextShape(
    vocabulary=512,
    hidden=256,
    intermediate=576,
    layers=7,
    heads=4,
    kv_heads=2,
    head_size=64,
    window=768,
    query_scale=64,
    max_positions=32_768,
)
_MINI_VISION = VisionShape(hidden=192, intermediate=512, layers=6, heads=6, image_size=192, patch_size=8)

_TINY_TEXT = TextShape(
    vocabulary=1024,
    hidden=128,
    intermediate=384,
    layers=7,
    heads=4,
    kv_heads=2,
    head_size=32,
    window=128,
    query_scale=32,
    max_positions=32_768,
    rope_factor=8.0,
)
_TINY_VISION = VisionShape(hidden=144, intermediate=288, layers=2, heads=2, image_size=224)

SHAPES: dict[str, Shape] = {
    "270m": Shape("270m", _small(hidden=640, intermediate=2048, layers=18)),
    "1b": Shape("1b", _small(hidden=1152, intermediate=6912, layers=26)),
    "4b": Shape("4b", _large(hidden=2560, layers=34, heads=8, head_size=256, query_scale=256), SIGLIP),
    "12b": Shape("12b", _large(hidden=3840, layers=48, heads=16, head_size=256, query_scale=256), SIGLIP),
    "27b": Shape("27b", _large(hidden=5376, layers=62, heads=32, head_size=128, query_scale=168), SIGLIP),
    "mini": Shape("mini", _MINI_TEXT, _MINI_VISION, image_tokens=144),
    "tiny": Shape("tiny", _TINY_TEXT, _TINY_VISION, image_tokens=64),
}
"""The published shapes, and those of :data:`BUNDLED`."""


TEXT_FIELDS = {
    "vocab_size": "vocabulary",
    "hidden_size": "hidden",
    "intermediate_size": "intermediate",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_size",
    "sliding_window": "window",
    "query_pre_attn_scalar": "query_scale",
    "max_position_embeddings": "max_positions",
}
"""Transformers' names of the fields of :class:`TextShape`."""
VISION_FIELDS = {
    "hidden_size": "hidden",
    "intermediate_size": "intermediate",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "image_size": "image_size",
    "patch_size": "patch_size",
}
"""Transformers' names of the fields of :class:`VisionShape`."""


def text_shape(fields: Any, **others: Any) -> TextShape:
    """Return the decoder of a configuration whose attributes are named as in Transformers, with ``others`` of ours."""
    return TextShape(**{ours: getattr(fields, name) for name, ours in TEXT_FIELDS.items()}, **others)


def vision_shape(fields: Any) -> VisionShape:
    """Return the tower of a configuration whose attributes are named as in Transformers."""
    return VisionShape(**{ours: getattr(fields, name) for name, ours in VISION_FIELDS.items()})


def first_global_layer(kinds: Sequence[str]) -> int:
    """Return the number of the first global layer. Without any: the published one, or one more than there are layers.

    Args:
        kinds: kind of each layer, as in a configuration: ``full_attention`` or ``sliding_attention``.
    """
    return kinds.index("full_attention") + 1 if "full_attention" in kinds else max(PATTERN, len(kinds) + 1)


def shape_named(model: str) -> Shape | None:
    """Return the shape of a model by its name, such as ``27b`` or ``google/gemma-3-27b-it``; None if it names none."""
    name = model.lower()
    return SHAPES.get(name) or next((shape for size, shape in SHAPES.items() if f"gemma-3-{size}" in name), None)
