"""Names of KV cache blocks by content: chained hashes of token ids and of the images among them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as Rows

from panscan.engine.sequence import Sequence

__all__ = ["block_hash", "extend_hashes"]


def block_hash(parent: bytes, ids: Rows[int], images: Rows[tuple[int, bytes]]) -> bytes:
    """The name of a block's content, and of all that stands before it: 32 bytes of SHA-256.

    Every part goes in with its length, so that different arguments never make the same message.

    Args:
        parent: name of the block before; empty for the first.
        ids: the block's token ids.
        images: of each image block that starts here, where it does, relative to this block, and its view's key: keys
            and values of an image token depend on the whole image. Later blocks of it have this one as an ancestor.
    """
    message = [struct.pack("<I", len(parent)), parent, struct.pack(f"<I{len(ids)}q", len(ids), *ids)]
    for offset, key in images:
        message += [struct.pack("<qI", offset, len(key)), key]
    return hashlib.sha256(b"".join(message)).digest()


def extend_hashes(sequence: Sequence, block_size: int) -> None:
    """Give ``sequence.hashes`` the names of all full blocks of its ids that are known so far."""
    hashes, ids = sequence.hashes, sequence.ids
    known = len(ids) - sequence.pending
    images: dict[int, list[tuple[int, bytes]]] = {}
    for span in sequence.layout.within(len(hashes) * block_size, known):
        images.setdefault(span.start // block_size, []).append((span.start % block_size, span.key))
    for block in range(len(hashes), known // block_size):
        start = block * block_size
        parent = hashes[-1] if hashes else b""
        hashes.append(block_hash(parent, ids[start : start + block_size], images.get(block, ())))
