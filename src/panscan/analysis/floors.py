"""The floor of a cell: the least time that its machine's two ceilings allow for the work in its records.

The formulas are those of :class:`panscan.plan.cost.Roofline`; here, records become requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from panscan.core import RecordsError
from panscan.core.groups import grouped
from panscan.core.weight_formats import FORMATS, Format, layers_name
from panscan.model.shapes import Shape
from panscan.plan.cost import RequestCounts, Roofline, Variant
from panscan.plan.gpus import reported_gpu
from panscan.records.metrics import Metrics
from panscan.records.request_records import RequestRecord
from panscan.records.store import Run
from panscan.settings import ALL_AT_ONCE

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_UNKNOWN_FORMAT = Format("", products="unknown")  # of another version
_HALF_TYPES = ("bfloat16", "float16")
"""Types whose measured product data sheets compare with narrower ones."""
_MIXED = ("generate_batch", *ALL_AT_ONCE)
"""Runners that mix prefill and decode in one pass."""


@dataclass(frozen=True, slots=True)
class Floor:
    """What no program can get below on this machine, comparable with the cell's metrics of the same names.

    Stage times are means over requests in milliseconds. Requests of a batch share the time of its stages. A runner that
    mixes prefill and decode has no batches: its stages are those of a request that runs alone.

    Args:
        vision_ms: the tower and projector over the views.
        prefill_ms: the decoder over the prompts.
        decode_ms: the steps after the first token, up to the longest answer.
        e2e_ms: all stages; where all requests are submitted at once, also the wait for those that take less work.
        request_throughput: requests over the time of all batches, or of all mixed passes; of replicas, the sum.
    """

    vision_ms: float
    prefill_ms: float
    decode_ms: float
    e2e_ms: float
    request_throughput: float


class _Batch(NamedTuple):
    """Floors of requests that were submitted together, in seconds.

    Args:
        requests: their number.
        floors: vision, prefill, decode and E2E, means over the requests.
        seconds: the time of all.
    """

    requests: int
    floors: list[float]
    seconds: float


def floor_of(run: Run, cell: str) -> Floor | None:
    """Return the floor of a cell from its ``load`` record and its requests' counts. Requests that failed are left out.

    Runner ``pipeline`` answers one request at a time, so each is its own batch there. Of a mixed runner, tokens found
    in the prefix cache and views of an image that another request of the repeat has too are no work.

    Returns:
        None where the ceilings or the work are not known: no load record, shape or rates in it, or a shape of another
        version; no request succeeded; ``tp_plan`` (the rates are of one device); TF32; and quantisations whose products
        have an unknown rate, as that of fp8 and int8 on a GPU that :mod:`panscan.plan.gpus` does not know.
    """
    settings, roofline = run.cells[cell].settings, roofline_of(run, cell)
    runner = settings.get("runner")
    groups = grouped(
        ((record.replica, record.repeat, record.batch, record.request if runner == "pipeline" else ""), record)
        for record in run.answered(cell)
    )
    if roofline is None or not groups:
        return None
    limits = (settings.get("max_num_seqs"), settings.get("max_concurrency")) if runner == "engine" else (None, None)
    batches = {}
    for key, records in groups.items():
        requests = _counts(records, shared=runner in _MIXED)
        batches[key] = _mixed(roofline, requests, limits) if runner in _MIXED else _batch(roofline, requests)
    return _cell_floor(batches)


def compared(floor: Floor, metrics: Metrics) -> dict[str, tuple[float | None, float | None]]:
    """Return (floor, measured) of each metric with a floor, by its name.

    Vision that could not be seen from outside is in the measured prefill, and so in that stage's floor.
    """
    values = metrics.values
    seen = values["mean_vision_ms"] is not None
    floors: dict[str, float | None] = {
        "mean_vision_ms": floor.vision_ms if seen else None,
        "mean_prefill_ms": floor.prefill_ms + (0.0 if seen else floor.vision_ms),
        "mean_decode_ms": floor.decode_ms,
        "mean_e2el_ms": floor.e2e_ms,
        "request_throughput": floor.request_throughput,
    }
    return {name: (least, values[name]) for name, least in floors.items()}


def ratios(floor: Floor, metrics: Metrics) -> dict[str, float]:
    """How many times its floor each metric is, by the metric's name; for ``request_throughput`` the floor's over it.

    A stage without a floor (no views, one output token) or that was not measured is absent.
    """
    pairs = {
        name: pair[:: -1 if name != "request_throughput" else 1] for name, pair in compared(floor, metrics).items()
    }
    return {name: above / below for name, (above, below) in pairs.items() if above is not None and below}


def roofline_of(run: Run, cell: str) -> Roofline | None:
    """Return the ceilings that a cell's model ran under; None if they are not known."""
    load, settings = run.loads.get(cell), run.cells[cell].settings
    if load is None or load.shape is None or load.dtype not in _DTYPES or settings.get("tp_plan"):
        return None
    if not load.flops_per_s or not load.bytes_per_s:
        return None
    on_gpu, asked, weights = load.device.startswith("cuda"), settings.get("quantization"), load.weights or ""
    weights, tower = layers_name(weights), settings.get("quantize_vision")
    formats = [FORMATS.get(asked, _UNKNOWN_FORMAT)] if asked else []
    formats += [FORMATS[weights]] if weights in FORMATS else []  # others are words, such as "int4, groups of 128"
    kind = next((known.name for known in formats if known.products == "narrow"), None)
    half = on_gpu and load.dtype in _HALF_TYPES
    narrow, tower_narrow = (
        1.0 if part is None else _narrow_rate(run, part) if half else None for part in (kind, tower)
    )
    tf32 = settings.get("tf32") and load.dtype == "float32" and on_gpu
    unknown = " and " in weights or any(known.products == "unknown" for known in formats)  # "int8 and int4, ..."
    if tf32 or narrow is None or tower_narrow is None or unknown:
        return None
    try:
        shape = Shape.from_dict(load.shape)
    except RecordsError:  # another version's: what it cost is not known here, and the rest of the run is
        return None
    cache, head = settings.get("kv_cache_dtype") or "auto", settings.get("quantize_head")
    variant = Variant(shape, kind, None, cache, dtype=_DTYPES[load.dtype], quantize_head=head, quantize_vision=tower)
    gpus = settings.get("tensor_parallel_size") or 1 if on_gpu else 1  # processes of a CPU share its rates
    return Roofline(variant, gpus * load.flops_per_s, gpus * load.bytes_per_s, load.weight_bytes, narrow, tower_narrow)


def _narrow_rate(run: Run, kind: str) -> float | None:
    """Return how many times faster than the measured product an 8-bit one is; None if the GPU is not known."""
    gpus = run.header.machine.gpus
    gpu = reported_gpu((gpus[0].name or "") if gpus else "")
    return None if gpu is None or kind not in gpu.flops_per_s else gpu.flops_per_s[kind] / gpu.half_rate


def _counts(records: Sequence[RequestRecord], *, shared: bool) -> list[RequestCounts]:
    """Return what requests ask of the model.

    Args:
        records: requests that were submitted together.
        shared: whether they share what they have in common: prefixes, as recorded, and encoded images.
    """
    encoded: set[str] = set()
    requests = []
    for record in records:
        cached, views = 0, record.views or 0
        if shared:
            cached, views = record.cached_tokens or 0, 0 if encoded.intersection(record.image_sha256) else views
            encoded.update(record.image_sha256)
        requests.append(RequestCounts(views, record.prompt_tokens or 0, record.output_tokens, cached))
    return requests


def _batch(roofline: Roofline, requests: Sequence[RequestCounts]) -> _Batch:
    """Return the floors of a batch: one stage after the other, for all its requests together."""
    stages = (
        roofline.vision_seconds(sum(request.views for request in requests)),
        roofline.prefill_seconds(requests),
        roofline.decode_seconds(requests),
    )
    return _Batch(len(requests), [*stages, sum(stages)], sum(stages))


def _mixed(roofline: Roofline, requests: Sequence[RequestCounts], limits: Sequence[int | None]) -> _Batch:
    """Return the floors of requests in mixed passes.

    No order of requests that share the arithmetic rate completes them earlier on average than the shortest one first;
    that counts where none is submitted only when another has ended.

    Args:
        roofline: ceilings of the machine.
        requests: all requests of a repeat.
        limits: requests of a pass at most, and requests in flight at most; None: no limit.
    """
    number, (_, concurrency) = len(requests), limits
    stages = np.mean([roofline.alone_seconds(request) for request in requests], axis=0).tolist()
    e2e = sum(stages)
    if concurrency is None or concurrency >= number:
        flops = np.sort([roofline.request_flops(request) for request in requests])
        e2e = max(e2e, float(flops.cumsum().mean()) / roofline.flops_per_s)
    seconds = roofline.mixed_seconds(requests, min(limit for limit in (*limits, number) if limit is not None))
    return _Batch(number, [*stages, e2e], seconds)


def _cell_floor(batches: Mapping[tuple[Any, ...], _Batch]) -> Floor:
    """Return the floor of a cell from those of its batches, by (replica, ...)."""
    requests, floors, _ = zip(*batches.values(), strict=True)
    done: dict[Any, int] = defaultdict(int)
    busy: dict[Any, float] = defaultdict(float)
    for (replica, *_), (number, _, seconds) in batches.items():
        done[replica] += number
        busy[replica] += seconds
    throughput = sum(done[replica] / busy[replica] for replica in done)
    vision, prefill, decode, e2e = (1e3 * np.average(floors, axis=0, weights=requests)).tolist()
    return Floor(vision, prefill, decode, e2e, throughput)
