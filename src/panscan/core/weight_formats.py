"""Weight formats without a tensor library: names, packages, sizes, costs and words, as one table.

Everybody asks these objects. What a GPU must support stands in :mod:`panscan.core.gpu_features`, what a format does
with tensors in :mod:`panscan.model.formats`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from panscan.core.errors import PanscanError, SettingError
from panscan.core.text import listed

GROUP_SIZES = (128, 64, 32)
"""Supported input channels per scale of 4-bit weights, preferred size first."""
_BLOCK = 256  # input channels that grouped weights are padded to (panscan.model.linear.quantized.BLOCK)
_SCALE_BYTES = 4  # float32 scale of each output channel


@dataclass(frozen=True, slots=True)
class Format:
    """A weight format: of a model in memory, of a checkpoint's files, or a quantisation that Transformers loads.

    Args:
        name: value of ``--quantization``, or the ``quant_method`` of a checkpoint.
        title: name in messages, with the variants that can be read.
        bits: bits per stored weight; None: those of the activations, or various.
        grouped: whether :data:`GROUP_SIZES` input channels share a scale, and products have dense inputs; otherwise,
            each output channel has a scale.
        products: type of the products: that of the activations, a narrower one, or unknown.
        sum_bytes: bytes of a product before it is scaled; None: those of an activation.
        package: package that loads the format.
        instead: formats to use where this one does not fit the model.
        words: description in a model card.
    """

    name: str
    title: str = ""
    bits: int | None = None
    grouped: bool = False
    products: Literal["dense", "narrow", "unknown"] = "dense"
    sum_bytes: int | None = None
    package: str | None = None
    instead: str = ""
    words: str = ""

    def missing_package(self) -> str | None:
        """Return which package the format lacks on this machine, and how to install it; None if none."""
        if self.package is None or find_spec(self.package):
            return None
        return f"--quantization {self.name} needs {self.package}: pip install {self.package}"

    def group_size(
        self, asked: int | None, widths: Collection[int], error: type[PanscanError] = SettingError
    ) -> int | None:
        """Return the requested group size or, without one, the largest that divides every matrix.

        Args:
            asked: requested size; None: choose one.
            widths: input channels of the matrices.
            error: error for sizes that do not divide them.

        Returns:
            None for formats without groups.

        Raises:
            SettingError: a size is requested for a format without groups.
        """
        if not self.grouped:
            if asked is not None:
                raise SettingError(group_size_refusal(asked))
            return None
        fitting = [size for size in GROUP_SIZES if all(width % size == 0 for width in widths)]
        size = asked or next(iter(fitting), GROUP_SIZES[0])
        if size in fitting:
            return size
        wide = next((width for width in widths if width % size), None)
        reason = f"groups of {size} " + (
            "are not supported" if wide is None else f"do not divide {wide} input channels"
        )
        use = " or ".join(map(str, fitting)) or f"--quantization {self.instead}"
        raise error(f"--quantization-group-size {size}: {reason}; use {use}")

    def matrix_bytes(self, inputs: int, outputs: int, width: int, group_size: int | None = None) -> int:
        """Return the bytes of a matrix in memory, scales included.

        Args:
            inputs: input channels.
            outputs: output channels.
            width: bytes of an activation.
            group_size: input channels per scale; grouped formats only.
        """
        if self.bits is None:
            return inputs * outputs * width
        if not self.grouped:
            return outputs * (inputs * self.bits // 8 + _SCALE_BYTES)
        scales = inputs // (group_size or GROUP_SIZES[0])
        return outputs * (-(-inputs // _BLOCK) * _BLOCK * self.bits // 8 + scales * width)


_OURS = (
    Format(
        "fp8",
        bits=8,
        products="narrow",
        words="float8_e4m3 weights per output channel, inputs per token",
    ),
    Format(
        "int8",
        bits=8,
        products="narrow",
        sum_bytes=4,
        words="8-bit integer weights per output channel, inputs per token (W8A8)",
    ),
    Format(
        "int4",
        bits=4,
        grouped=True,
        instead="int8 or fp8",
        words="4-bit weights in groups of {group_size}, bf16 products (W4A16)",
    ),
)
_BY_TRANSFORMERS = (
    Format("bnb-8bit", bits=8, products="unknown", package="bitsandbytes"),
    Format("bnb-4bit", bits=4, package="bitsandbytes"),
)
_STORED = (
    Format("compressed-tensors", "compressed-tensors (W4A16, W8A16, W8A8, FP8)", products="unknown"),
    Format("gptq", "GPTQ"),
    Format("awq", "AWQ (gemm)"),
    Format("torchao", "torchao (int8, int4, float8)", products="unknown"),
    Format("bitsandbytes", "bitsandbytes", package="bitsandbytes"),
)
_TOWER = "vision tower"
HEAD_WORDS = "int8 head"
"""Name of a quantised embedding and output matrix, which follows that of the decoder's format."""
TOWER_KINDS = ("int8", "fp8")
"""Values of ``--quantize-vision``."""
DENSE = Format("dense")
"""Unquantised weights."""
FORMATS: Mapping[str, Format] = {known.name: known for known in (*_OURS, *_BY_TRANSFORMERS, *_STORED)}
"""Quantised formats by name."""
WEIGHT_KINDS = tuple(known.name for known in _OURS)
"""panscan's own quantisations, supported by every runner except vLLM."""
QUANTIZATION = (*WEIGHT_KINDS, *(known.name for known in _BY_TRANSFORMERS))
"""Values of ``--quantization``."""
STORED_FORMATS = tuple(known.name for known in _STORED)
"""Formats of quantised checkpoints, by ``quant_method``."""


def format_named(name: str | None) -> Format:
    """Return the format with this name; None: unquantised weights."""
    return DENSE if name is None else FORMATS[name]


def weight_words(layers: str | None, head: str | None = None, tower: str | None = None) -> tuple[str, ...]:
    """Return the names of quantised parts of a model, such as ``int4``, ``int8 head``, ``fp8 vision tower``.

    Args:
        layers: format of the decoder layers; None or empty: unquantised.
        head: quantisation of the embedding and output matrix.
        tower: quantisation of the vision tower.
    """
    words = layers, HEAD_WORDS if head else None, f"{tower} {_TOWER}" if tower else None
    return tuple(filter(None, words))


def layers_name(words: str) -> str:
    """Return the decoder layers' part of joined :func:`weight_words`; empty if the layers are unquantised."""
    for part in (*(f"{kind} {_TOWER}" for kind in TOWER_KINDS), HEAD_WORDS):
        words = words.removesuffix(part).removesuffix(", ")
    return words


def group_size_refusal(size: int | None) -> str:
    """Return the message for a group size with a format that has no groups."""
    grouped = listed([name for name in QUANTIZATION if FORMATS[name].grouped])
    return f"--quantization-group-size {size}: only {grouped} has groups; add --quantization {grouped}"
