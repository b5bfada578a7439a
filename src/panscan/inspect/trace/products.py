"""Matrix multiplications whose shapes the profiler recorded: their FLOPs and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

# Types as the profiler writes them: bytes per element, and the name of the product rate in panscan.plan.gpus.
_TYPES = {
    "float": (4, "fp32"),
    "double": (8, "fp64"),
    "c10::BFloat16": (2, "bf16"),
    "c10::Half": (2, "fp16"),
    "c10::Float8_e4m3fn": (1, "fp8"),
    "c10::Float8_e5m2": (1, "fp8"),
    "signed char": (1, "int8"),
}
_OUTPUT_BYTES = {"aten::_int_mm": 4, "aten::_scaled_mm": 2}  # wider than the inputs
_LEFT = {"aten::addmm": 1, "aten::baddbmm": 1, "aten::addmv": 1}  # position of the left factor, 0 elsewhere
_OPERATORS = ("aten::mm", "aten::bmm", "aten::mv", "aten::_int_mm", "aten::_scaled_mm", *_LEFT)

_LARGEST = 2**40


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix multiplication: operator, sizes and type.

    Args:
        operator: name of the operator, such as ``aten::mm``.
        batch: number of multiplications in one call; 1 unless batched.
        rows, inner, columns: sizes of a rows x inner by inner x columns product.
        dtype: type of the inputs: bf16, fp16, fp32, fp64, fp8 or int8.
        flops: floating-point operations of one call, two per multiplication.
        bytes: bytes of the factors and the result, each counted once.
    """

    operator: str
    batch: int
    rows: int
    inner: int
    columns: int
    dtype: str
    flops: float
    bytes: float

    @property
    def label(self) -> str:
        """``mm 1x2560 @ 2560x10240 bf16``."""
        name = self.operator.rpartition("::")[2]
        batch = f"{self.batch}x " if self.batch > 1 else ""
        return f"{name} {batch}{self.rows}x{self.inner} @ {self.inner}x{self.columns} {self.dtype}"


def product_of(operator: str, shapes: object, types: object) -> Product | None:
    """Return the matrix multiplication of an operator call.

    Args:
        operator: name of the operator.
        shapes: ``Input Dims`` of the call.
        types: ``Input type`` of the call.

    Returns:
        None if the operator is not a matrix multiplication, or its shapes or types were not recorded.
    """
    if operator not in _OPERATORS or not isinstance(shapes, list) or not isinstance(types, list):
        return None
    at = _LEFT.get(operator, 0)
    if len(shapes) < at + 2 or len(types) < at + 2 or str(types[at]) not in _TYPES:
        return None
    sizes = _sizes(shapes[at], shapes[at + 1])
    if sizes is None:
        return None
    batch, rows, inner, columns = sizes
    width, dtype = _TYPES[str(types[at])]
    result = _OUTPUT_BYTES.get(operator, width) * rows * columns
    moved = batch * (width * (rows * inner + inner * columns) + result)
    return Product(operator, *sizes, dtype, flops=2.0 * prod(sizes), bytes=float(moved))


def _sizes(left: object, right: object) -> tuple[int, int, int, int] | None:
    """Return (batch, rows, inner, columns) of two factors; None unless they fit."""
    a, b = _shape(left), _shape(right)
    if len(b) == 1:
        b = (*b, 1)  # a vector is a matrix with one column
    if len(a) != len(b) or len(a) not in (2, 3) or a[-1] != b[-2] or a[:-2] != b[:-2]:
        return None
    return prod(a[:-2]), a[-2], a[-1], b[-1]


def _shape(sizes: object) -> tuple[int, ...]:
    """Return a shape; empty if it is none, or a size is 0 or absurd."""
    if not isinstance(sizes, list) or len(sizes) > 3:
        return ()
    return tuple(sizes) if all(type(size) is int and 0 < size < _LARGEST for size in sizes) else ()
