"""Names of KV cache blocks by content: chained hashes of token ids and of the images among them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as Rows

from panscan.engine.layout import Span
from panscan.engine.sequence import Sequence

__all__ = ["block_hash", "extend_hashes"]

_NAME = 32  # bytes of a hash


def block_hash(parent: bytes, ids: Rows[int], images: Rows[tuple[int, bytes]]) -> bytes:
    """The name of a block's content, and of all that stands before it: 32 bytes of SHA-256.

    Every part goes in with its length, so that different arguments never make the same message.

    Args:
        parent: name of the block before; empty for the first.
        ids: the block's token ids.
        images: of each image block that starts here, where it does, relative to this block, and what tells it: keys
            and values of an image token depend on the whole image. Later blocks of it have this one as an ancestor.
    """
    message = [struct.pack("<I", len(parent)), parent, struct.pack(f"<I{len(ids)}q", len(ids), *ids)]
    for offset, key in images:
        message += [struct.pack("<qI", offset, len(key)), key]
    return hashlib.sha256(b"".join(message)).digest()


def extend_hashes(sequence: Sequence, block_size: int) -> None:
    """Give ``sequence.hashes`` the names of all full blocks of its ids that are known so far.

    A block that lies within an image block is told by the view, and how far it is from where that began: its name is
    that of the last block before it that does not, and a number. Hashing hundreds of them takes a millisecond.
    """
    hashes, ids = sequence.hashes, sequence.ids
    known = len(ids) - sequence.pending
    while len(hashes) < known // block_size:
        start = len(hashes) * block_size
        parent = hashes[-1] if hashes else b""
        inside = sequence.layout.around(start)
        if inside is None or start + block_size > inside.end:
            images = [
                (span.start - start, _told(span)) for span in sequence.layout.within(start, start + block_size)
            ]  # fmt: skip
            hashes.append(block_hash(parent, ids[start : start + block_size], images))
            continue
        stem, first = parent[:_NAME], int.from_bytes(parent[_NAME:], "little") + 1
        blocks = min(inside.end, known) // block_size - len(hashes)
        hashes.extend(stem + number.to_bytes(4, "little") for number in range(first, first + blocks))


def _told(span: Span) -> bytes:
    """A view, and how long its image block is."""
    return (span.end - span.start).to_bytes(4, "little") + span.key
