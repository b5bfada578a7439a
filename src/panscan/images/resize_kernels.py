"""A Triton kernel that cuts and resizes the views of a page with Pillow's bits. Imported only with Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from panscan.core import View
from panscan.core.jit import kernel
from panscan.images.resample import WEIGHT_BITS, columns_first, filter_weights
from panscan.images.transfer import upload

_BITS, _HALF = tl.constexpr(WEIGHT_BITS), tl.constexpr(1 << (WEIGHT_BITS - 1))
_ROWS, _COLUMNS = 8, 512  # of the levels that a program writes


def resized(page: torch.Tensor, views: Sequence[View], size: int) -> torch.Tensor:
    """Return what :func:`panscan.images.pixels.resized_pil` returns: levels of views, uint8 ``[views, size, size, 3]``.

    Args:
        page: uint8 ``[height, width, 3]``, contiguous, of less than 2 GiB.
        views: boxes in pixels of the page.
        size: side of a view.
    """
    levels = page.new_empty(len(views), size, size, 3)
    for view, square in zip(views, levels, strict=True):
        left, top, right, bottom = view.box
        part = page[top:bottom, left:right]
        if columns_first(right - left, bottom - top, size):
            _filter_along(1, _filter_along(0, part, part.new_empty(size, right - left, 3)), square)
        else:
            rows = part if right - left == size else _filter_along(1, part, part.new_empty(bottom - top, size, 3))
            _filter_along(0, rows, square)
    return levels


def _filter_along(axis: int, part: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Resize one axis of levels ``[height, width, 3]``, 0 or 1, to that of ``out``; return ``out``."""
    weights = upload(filter_weights(part.shape[axis], out.shape[axis]), part.device)
    rows, columns = out.shape[0], 3 * out.shape[1]
    # The whole page and an offset: a pointer into it may not be aligned, and another kernel would be compiled for it.
    base = part.as_strided((1,), (1,), 0)
    _filter[(triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS))](
        base,
        weights,
        out,
        part.storage_offset(),
        part.stride(0),
        rows,
        columns,
        weights.shape[1] - 1,
        axis=axis,
        block_rows=_ROWS,
        block_columns=_COLUMNS,
    )
    return out


@kernel(any_value=["at", "stride", "rows", "columns", "taps"])
def _filter(
    source,
    weights,
    out,
    at,
    stride,
    rows,
    columns,
    taps,
    axis: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    """Write a tile of ``out [rows, columns]``, whose columns are pixels of three levels."""
    row = (tl.program_id(0) * block_rows + tl.arange(0, block_rows))[:, None]
    column = (tl.program_id(1) * block_columns + tl.arange(0, block_columns))[None, :]
    mask = (row < rows) & (column < columns)
    if axis:
        tap_weights, inside, step = weights + column // 3 * (taps + 1), column < columns, 3
        start = source + at + row * stride + 3 * tl.load(tap_weights, inside, 0) + column % 3
    else:
        tap_weights, inside, step = weights + row * (taps + 1), row < rows, stride
        start = source + at + tl.load(tap_weights, inside, 0) * stride + column
    total = tl.full((block_rows, block_columns), _HALF, tl.int32)
    for tap in range(taps):
        total += tl.load(start + tap * step, mask, 0).to(tl.int32) * tl.load(tap_weights + 1 + tap, inside, 0)
    tl.store(out + row * columns + column, tl.minimum(tl.maximum(total >> _BITS, 0), 255).to(tl.uint8), mask)
