"""How the kernels of paged attention are cut for a head size and a precision. No tensors, no Triton."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HEAD_SIZES", "Sizes", "choose_splits", "decode_sizes", "prefill_sizes"]

HEAD_SIZES = (16, 32, 64, 128, 256)
_FEWEST_ROWS = 16  # of a tensor core's product
_MOST_SPLITS = 16
_THREE_STAGES = 160_000  # bytes of shared memory: sm80 has 166,912, sm90 232,448


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one kernel: query rows and keys of a product, warps of a program, and stages of its loop over keys."""

    rows: int
    keys: int
    warps: int
    stages: int


def prefill_sizes(head_size: int, itemsize: int, shared_bytes: int) -> Sizes:
    """Those of the prefill kernel.

    Head size 128 in 16 bits: the fastest of those that were measured on an H200. The others were not measured. They
    stay in the registers, and in 99 KiB of shared memory, all that sm86, sm89 and sm120 have, by one stage less there.

    Args:
        head_size: one of ``HEAD_SIZES``.
        itemsize: bytes of a value.
        shared_bytes: that one program may use of a multiprocessor's shared memory.
    """
    stages = 3 if shared_bytes >= _THREE_STAGES else 2
    if itemsize == 4:
        return Sizes(64, 32, 8, stages) if head_size < 256 else Sizes(32, 16, 8, stages)
    return Sizes(64, 64, 4, stages) if head_size < 256 else Sizes(64, 32, 8, stages)


def decode_sizes(head_size: int, itemsize: int, group: int) -> Sizes:
    """Those of the decode kernel, as :func:`prefill_sizes`. ``group``: query heads of a kv head, which are its rows.

    Head sizes 128 and 256 in 16 bits: the fastest of those that were measured on an H200.
    """
    rows = max(_FEWEST_ROWS, 1 << (group - 1).bit_length())
    if itemsize == 4:
        return Sizes(rows, 32 if head_size < 256 else 16, 4, 4)
    return Sizes(rows, 64 if head_size < 256 else 32, 2, 4)


def choose_splits(programs: int, wanted: int) -> int:
    """Parts that the keys of each program are cut into, each a program of its own: a power of two, at most 16, the
    least that makes as many programs as wanted.

    Whatever the lengths: so a captured graph stays right as they grow.
    """
    splits = 1
    while splits < _MOST_SPLITS and programs * splits < wanted:
        splits *= 2
    return splits
