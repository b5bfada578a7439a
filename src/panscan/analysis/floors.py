"""The floor of a cell: the least time and memory that its machine's two ceilings allow for the work in its records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panscan.core import RecordsError
from panscan.model.shapes import Shape
from panscan.records.metrics import Metrics
from panscan.records.schema import RequestRecord
from panscan.records.store import Run
from panscan.settings import ALL_AT_ONCE

__all__ = ["Floor", "floor_of", "ratios"]

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_OTHER_ARITHMETIC = ("fp8", "int8", "bnb-8bit", "torchao-float8")
"""Quantisations that also multiply in a narrower format, and so faster than the product that was measured."""


@dataclass(frozen=True, slots=True)
class Floor:
    """What no program can get below on this machine, comparable with the cell's metrics of the same names.

    Stage times are means over requests of their batch's time, in milliseconds: requests of a batch share its stages.

    Args:
        vision_ms: the tower and projector over the batch's views.
        prefill_ms: the decoder over every prompt of the batch.
        decode_ms: the steps after the first token, up to the batch's longest answer.
        request_throughput: requests over the sum of their batches' times; of replicas, the sum.
        memory_bytes: weights, and keys and values of the most demanding batch.
    """

    vision_ms: float
    prefill_ms: float
    decode_ms: float
    request_throughput: float
    memory_bytes: int

    @property
    def e2e_ms(self) -> float:
        """The three stages; loading and preprocessing have no floor."""
        return self.vision_ms + self.prefill_ms + self.decode_ms


def floor_of(run: Run, cell: str) -> Floor | None:
    """The floor of a cell from its ``load`` record and its requests' counts, with the formulas of
    :class:`panscan.model.shapes.Shape`. Real ids only: padding is not work that had to be done.

    With F and B the ceilings (FLOP/s, bytes/s), the time of a batch is the sum of

    - vision: max(``vision_flops``(views) / F, the tower's weights / B);
    - prefill: max(sum of ``prefill_flops``(prompt) / F, the decoder's weights / B);
    - decode: over steps i = 1, 2, ... up to the longest answer less one, max(``decode_bytes`` / B, sum of
      ``decode_flops`` / F) with contexts of prompt + i tokens. A request takes no part after its own last token.

    Weights have their stored size (``weight_bytes``), less the other part's parameters at the size of ``dtype``:
    panscan quantises the decoder alone. Keys and values have the size of ``dtype``. Runner ``pipeline`` answers one
    request at a time, so each is its own batch there. Requests that failed are left out.

    Returns:
        None where the ceilings or the work are not known: no load record, shape or rates in it, or a shape of another
        version; no request succeeded; ``tp_plan`` (the rates are of one device); TF32 and the quantisations that
        multiply in a narrower format (quicker than the measured product); and runners ``generate_batch``,
        ``engine`` and ``vllm``, which mix prefill and decode in one step.
    """
    machine = _machine(run, cell)
    done = run.answered(cell)
    if machine is None or not done:
        return None
    alone = run.cells[cell].get("runner") == "pipeline"
    groups: dict[tuple[Any, ...], list[RequestRecord]] = defaultdict(list)
    for record in done:
        batch = record.replica, record.repeat, record.batch
        groups[(*batch, record.request) if alone else batch].append(record)
    work = _CellWork(machine, max((record.prompt_tokens or 0) + record.output_tokens for record in done))
    times = {batch: work.seconds(records) for batch, records in groups.items()}
    vision, prefill, decode = (
        sum(len(groups[batch]) * times[batch][stage] for batch in groups) / len(done) * 1e3 for stage in range(3)
    )
    throughput = 0.0
    for replica in {batch[0] for batch in groups}:
        own = [batch for batch in groups if batch[0] == replica]
        throughput += sum(len(groups[batch]) for batch in own) / sum(sum(times[batch]) for batch in own)
    memory = machine.weight_bytes + max(work.cache_bytes(records) for records in groups.values())
    return Floor(vision, prefill, decode, throughput, memory)


def ratios(floor: Floor, metrics: Metrics) -> dict[str, float]:
    """How many times its floor each metric is, by the metric's name; for ``request_throughput`` the floor's over it.

    A stage without a floor (no views, one output token) or that was not measured is absent. Vision that could not be
    seen from outside is in the measured prefill, and so in that stage's floor.
    """
    values = metrics.values
    unseen = floor.vision_ms if values["mean_vision_ms"] is None else 0.0
    pairs = {
        "mean_vision_ms": (values["mean_vision_ms"], floor.vision_ms),
        "mean_prefill_ms": (values["mean_prefill_ms"], floor.prefill_ms + unseen),
        "mean_decode_ms": (values["mean_decode_ms"], floor.decode_ms),
        "mean_e2el_ms": (values["mean_e2el_ms"], floor.e2e_ms),
        "request_throughput": (floor.request_throughput, values["request_throughput"]),
        "peak_allocated_bytes": (values["peak_allocated_bytes"], float(floor.memory_bytes)),
    }
    return {name: above / below for name, (above, below) in pairs.items() if above is not None and below}


@dataclass(frozen=True, slots=True)
class _Machine:
    shape: Shape
    width: int  # bytes of an unquantised weight, key or value
    weight_bytes: int
    flops_per_s: float
    bytes_per_s: float

    @property
    def text_bytes(self) -> int:
        others = self.shape.parameters() - self.shape.text.parameters()
        return max(0, self.weight_bytes - others * self.width)

    @property
    def vision_bytes(self) -> int:
        return max(0, self.weight_bytes - self.shape.text.parameters() * self.width)


def _machine(run: Run, cell: str) -> _Machine | None:
    load, settings = run.loads.get(cell), run.cells[cell]
    if load is None or load.shape is None or load.dtype not in _BYTES:
        return None
    kinds = settings.get("quantization"), load.weights
    quicker = any(kind in _OTHER_ARITHMETIC for kind in kinds) or (
        settings.get("tf32") and load.dtype == "float32" and load.device.startswith("cuda")
    )
    if quicker or settings.get("tp_plan") or settings.get("runner") in ("generate_batch", *ALL_AT_ONCE):
        return None
    if not load.flops_per_s or not load.bytes_per_s:
        return None
    try:
        shape = Shape.from_dict(load.shape)
    except RecordsError:  # another version's: what it cost is not known here, and the rest of the run is
        return None
    return _Machine(shape, _BYTES[load.dtype], load.weight_bytes, load.flops_per_s, load.bytes_per_s)


class _CellWork:
    """Times of batches. What a token at each context costs is tabled once, up to ``longest`` tokens."""

    def __init__(self, machine: _Machine, longest: int) -> None:
        self._machine = machine
        shape = machine.shape
        self._kv: NDArray[np.float64] = np.array([shape.kv_bytes(n, machine.width) for n in range(longest + 1)], float)
        self._flops: NDArray[np.float64] = np.array([shape.decode_flops(n) for n in range(longest + 1)])

    def seconds(self, batch: Sequence[RequestRecord]) -> tuple[float, float, float]:
        """Vision, prefill and decode of one batch."""
        machine, shape = self._machine, self._machine.shape
        views = sum(record.views or 0 for record in batch)
        vision = max(shape.vision_flops(views) / machine.flops_per_s, machine.vision_bytes / machine.bytes_per_s)
        prefill = sum(shape.prefill_flops(record.prompt_tokens or 0) for record in batch) / machine.flops_per_s
        read = machine.text_bytes / machine.bytes_per_s
        return vision if views else 0.0, max(prefill, read), self._decode(batch)

    def _decode(self, batch: Sequence[RequestRecord]) -> float:
        steps = max(0, *(record.output_tokens - 1 for record in batch))
        read, computed = np.full(steps, float(self._machine.text_bytes)), np.zeros(steps)
        for record in batch:
            own, prompt = max(0, record.output_tokens - 1), record.prompt_tokens or 0
            read[:own] += self._kv[prompt + 1 : prompt + own + 1]
            computed[:own] += self._flops[prompt + 1 : prompt + own + 1]
        slowest = np.maximum(read / self._machine.bytes_per_s, computed / self._machine.flops_per_s)
        return float(slowest.sum())

    def cache_bytes(self, batch: Sequence[RequestRecord]) -> int:
        """Keys and values at each request's end; the last token's are never computed."""
        return sum(int(self._kv[(record.prompt_tokens or 0) + max(0, record.output_tokens - 1)]) for record in batch)
