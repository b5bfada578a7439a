"""Sizes of recorded passes: for how many rows the engine records CUDA graphs. Integers only."""

from __future__ import annotations

MOST_CHUNKS = 16
"""Recorded passes have fewer chunks behind their decode rows than this."""

_SHORT = (32, 64, 128, 256, 288, 352, 512)
_LONG = (640, 896, 1152, 1408, 1664, 2048)
"""Rows of longer chunks. The long ones are pages of two to six views (256 tokens each), and a full pass."""

Size = tuple[int, int]
"""Rows of a recorded pass: decode rows, and the rows of longer chunks behind them."""


def most_chunk_rows(ranks: int) -> int:
    """Return the maximum rows of a recorded pass in addition to its decode rows.

    One GPU computes a longer pass for longer than the host needs to launch its kernels one by one. Several GPUs share
    the computation, but each needs all launches: 27B in int8 on two H100 answered a lone request of 1,102 tokens
    after 81 ms or after 140 ms, as fast as the hosts launched.

    Args:
        ranks: GPUs that share the layers.
    """
    return _SHORT[-1] if ranks == 1 else _LONG[-1]


def decode_sizes(most: int) -> list[int]:
    """Return the numbers of rows to record decode passes for, ascending; the last is ``most``.

    Padding costs little while a pass waits for weights, so they are at most 8 rows apart up to 64, and 16 above.
    """
    sizes = [*(1, 2, 4), *range(8, 64, 8), *range(64, most, 16)]
    return [size for size in sizes if size < most] + [most]


def graph_sizes(decode_rows: int, chunk_rows: int, ranks: int = 1) -> list[Size]:
    """Return the sizes to record: decode rows alone, chunks alone (questions about cached images, last chunks of
    prompts, on several GPUs also whole prompts), and both together.

    A TPOT target leads to many passes of one image span (256 tokens) and some text: their sizes are close together.

    Args:
        decode_rows: maximum decode rows per pass.
        chunk_rows: maximum other rows per pass.
        ranks: GPUs that share the layers.
    """
    short = [rows for rows in _SHORT if rows <= chunk_rows]
    long = [rows for rows in _LONG if rows <= min(chunk_rows, most_chunk_rows(ranks))]
    alone = [(rows, 0) for rows in decode_sizes(decode_rows)] + [(0, rows) for rows in short + long]
    mixed = [
        (min(decode, decode_rows), rows)
        for chunks, counts in ((short[1:], (16, 32, 48, 64)), (long, (32, 64)))
        for decode in (*counts, decode_rows)
        for rows in chunks
    ]
    return alone + sorted(set(mixed))
