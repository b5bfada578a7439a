"""Sizes of recorded passes: for how many rows the engine records CUDA graphs. Integers only."""

from __future__ import annotations

MOST_CHUNK_ROWS = 512
"""Rows of a recorded pass in addition to its decode rows, at most."""
MOST_CHUNKS = 16
"""Recorded passes have fewer chunks behind their decode rows than this."""

Size = tuple[int, int]
"""Rows of a recorded pass: decode rows, and the rows of longer chunks behind them."""


def decode_sizes(most: int) -> list[int]:
    """Return the numbers of rows to record decode passes for, ascending; the last is ``most``.

    Padding costs little while a pass waits for weights, so they are at most 8 rows apart up to 64, and 16 above.
    """
    sizes = [*(1, 2, 4), *range(8, 64, 8), *range(64, most, 16)]
    return [size for size in sizes if size < most] + [most]


def graph_sizes(decode_rows: int, chunk_rows: int) -> list[Size]:
    """Return the sizes to record: decode rows alone, short chunks alone (questions about cached images, last chunks of
    prompts), and both together. Longer passes keep the device busy while their kernels are launched one by one.

    A TPOT target leads to many passes of one image span (256 tokens) and some text: their sizes are close together.

    Args:
        decode_rows: maximum decode rows per pass.
        chunk_rows: maximum other rows per pass.
    """
    short = [rows for rows in (32, 64, 128, 256, 288, 352, MOST_CHUNK_ROWS) if rows <= chunk_rows]
    beside = sorted({min(rows, decode_rows) for rows in (16, 32, 48, 64, decode_rows)})
    alone = [(rows, 0) for rows in decode_sizes(decode_rows)] + [(0, rows) for rows in short]
    return alone + [(single, rows) for single in beside for rows in short[1:]]
