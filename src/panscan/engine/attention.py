"""What one pass asks of attention, and the interface of the backends that answer. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from panscan.engine.layout import Segment
from panscan.engine.sequence import Step

if TYPE_CHECKING:
    import torch

__all__ = ["AttentionRows", "Backend", "ChunkRows", "Plan"]


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """One chunk's rows: positions ``[start, end)``, as segments, and the block tables of global and local layers."""

    start: int
    end: int
    segments: tuple[Segment, ...]
    tables: tuple[Sequence[int], Sequence[int]]

    @classmethod
    def spare(cls, rows: int, blocks: tuple[int, int], block_size: int) -> ChunkRows:
        """Text of a sequence that stands in one block (of each kind) alone, positions in the places of others: rows
        that pad a pass, or try one out."""
        tables = tuple([block] * -(-rows // block_size) for block in blocks)
        return cls(0, rows, (Segment(0, rows, image=False),), (tables[0], tables[1]))


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """The rows of one pass, chunk after chunk.

    A row at position p sees keys ``[lo, hi)`` of its sequence: ``hi`` is the end of its image block for an image token
    and p + 1 for text; ``lo`` is ``max(0, p - window + 1)`` in local layers and 0 in global ones.

    Args:
        chunks: in the order of their rows.
        block_size: tokens of a block. Position p of a sequence is in slot
            ``table[p // block_size] * block_size + p % block_size`` of a layer's keys and values.
        window: positions that a local layer sees, its own included.
    """

    chunks: tuple[ChunkRows, ...]
    block_size: int
    window: int

    @classmethod
    def of(cls, step: Step, block_size: int, window: int) -> AttentionRows:
        """Those of a step, with its sequences' tables as they are now."""
        chunks = tuple(
            ChunkRows(
                chunk.start,
                chunk.end,
                tuple(chunk.sequence.layout.segments(chunk.start, chunk.end)),
                chunk.sequence.tables,
            )
            for chunk in step.chunks
        )
        return cls(chunks, block_size, window)

    def first_key(self, position: int, *, local: bool) -> int:
        """``lo`` of a row at ``position``."""
        return max(0, position - self.window + 1) if local else 0

    def slots(self, *, local: bool) -> list[int]:
        """Where each row's key and value go."""
        size = self.block_size
        return [
            chunk.tables[local][at // size] * size + at % size
            for chunk in self.chunks
            for at in range(chunk.start, chunk.end)
        ]


class Plan(Protocol):
    """What a backend made of one pass, for the layers of one kind on one device."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        k_cache: torch.Tensor, v_cache: torch.Tensor, scaling: float,
    ) -> torch.Tensor:  # fmt: skip
        """Write the rows' keys and values to their slots of the cache, then attend to what is there.

        Args:
            query: ``[1, heads, T, D]``.
            key: ``[1, kv heads, T, D]``; so is ``value``.
            value: of the rows.
            k_cache: ``[slots, kv heads, D]`` of this layer; so is ``v_cache``. Rows of nobody's blocks are not read.
            v_cache: values.
            scaling: of the scores.

        Returns:
            ``[1, T, heads, D]``.
        """
        ...


class Backend(Protocol):
    """One way to compute paged attention."""

    def plan(self, rows: AttentionRows, *, local: bool, device: torch.device) -> Plan:
        """Whatever is the same for all layers of a kind, computed once per pass."""
        ...
