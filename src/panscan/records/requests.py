"""One measured request: its part of a record, and the times derived from it, whatever answered it.

Nothing here knows of cells, plans or loaded models: an engine, ``generate()`` or a server elsewhere leave the same
time stamps (:class:`panscan.core.Stamps`) and counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

from panscan.core import RecordsError, Result, Stamps
from panscan.records.schema import Record

__all__ = ["STAGES", "RequestMetrics", "request_fields"]

STAGES = ("load", "preprocess", "queue", "vision", "prefill", "decode")
_STAMPS = frozenset(field.name for field in fields(Stamps))


def request_fields(result: Result) -> Record:
    """Return the measurements of one request as fields of a ``request`` record."""
    return {
        "views": result.views,
        "crops": result.crops,
        "image_tokens": result.image_tokens,
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "output_tokens": result.output_tokens,
        "finish_reason": result.finish_reason,
        "stamps": asdict(result.stamps),
        "error": None if result.error is None else str(result.error),
    }


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request, in seconds.

    The stages add up to ``e2e``. ``queue`` is all waiting (for a thread, an engine's first pass, a lock, or blocks
    after a preemption), ``vision`` the time in the vision tower, ``prefill`` the rest of the way to the first token,
    ``decode`` of that to the last. A stage whose boundary was not stamped is None, and its
    time is in the next one. ``tpot`` is None below two output tokens. Without token stamps there is no ttft, e2e,
    prefill or decode.

    Of a load run, times are those of content chunks, which may hold several tokens: ``ttft`` is that of the first
    chunk, ``itl`` the gaps between chunks, and ``tpot`` the time from the first to the last chunk over the tokens.
    """

    output_tokens: int
    ttft: float | None
    e2e: float | None
    tpot: float | None
    itl: tuple[float, ...]
    load: float | None
    preprocess: float | None
    queue: float | None
    vision: float | None
    prefill: float | None
    decode: float | None

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> RequestMetrics:
        """Derive the times of a ``request`` record.

        Raises:
            RecordsError: there are token stamps, but not one for each output token, or for each chunk.
        """
        stamps, count = record["stamps"], record["output_tokens"]
        tokens: list[float] = stamps["tokens"]
        stamped, noun = (record["chunks"], "chunks") if "chunks" in record else (count, "output tokens")
        if tokens and len(tokens) != stamped:
            raise RecordsError(f"request {record['request']!r}: {stamped} {noun}, {len(tokens)} token stamps")
        seen = Stamps(**{name: value for name, value in stamps.items() if name in _STAMPS})
        return cls(
            output_tokens=count,
            ttft=seen.ttft,
            e2e=seen.e2e,
            tpot=(tokens[-1] - tokens[0]) / (count - 1) if tokens and count >= 2 else None,
            itl=tuple(later - earlier for earlier, later in pairwise(tokens)),
            **seen.stages(),
        )
