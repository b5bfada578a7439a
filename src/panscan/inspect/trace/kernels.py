"""GPU activities by name and matrix multiplications by shape: time, achieved rates, and the GPU's limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from panscan.inspect.trace.columns import OPERATOR, Columns
from panscan.inspect.trace.figures import KernelTime, ProductTime
from panscan.inspect.trace.gpu import KINDS
from panscan.inspect.trace.intervals import Floats, Ints
from panscan.inspect.trace.products import Product
from panscan.plan.gpus import Gpu, reported_gpu


def gpu_of(metadata: Mapping[str, Any]) -> tuple[str | None, Gpu | None]:
    """Return the name of the first GPU in a trace's metadata and its data sheet, as far as known."""
    devices = metadata.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices else None
    name = first.get("name") if isinstance(first, dict) else None
    if not isinstance(name, str) or not isinstance(first, dict):
        return None, None
    return name, reported_gpu(name, first.get("totalGlobalMem"))


def kernel_times(columns: Columns, kinds: Ints, gpu: Gpu | None, most: int) -> tuple[tuple[KernelTime, ...], float]:
    """Return the activities that take longest, by name, and the milliseconds of all others.

    Args:
        columns: events of the trace.
        kinds: kind of each activity.
        gpu: limits to compare with.
        most: number of names.
    """
    data, size = columns.gpu, len(columns.names)
    if not len(data.start):
        return (), 0.0
    duration = data.end - data.start
    total, count = np.bincount(data.name, duration, size), np.bincount(data.name, minlength=size)
    work = _recorded_work(columns, gpu)
    first_kind = np.zeros(size, dtype=np.int64)
    first_kind[data.name] = kinds
    found = []
    order = np.argsort(-total, kind="stable")[:most]
    for name in order[count[order] > 0].tolist():
        seconds = float(total[name]) / 1e6
        known = seconds > 0 and work.activities[name] == count[name]
        achieved = [float(part[name]) / seconds if known and part[name] else None for part in work[:3]]
        found.append(
            KernelTime(
                name=columns.names[name],
                kind=KINDS[first_kind[name]],
                count=int(count[name]),
                total_ms=seconds * 1e3,
                mean_us=float(total[name] / count[name]),
                share=float(total[name] / max(duration.sum(), 1e-9)),
                bytes_per_s=achieved[0],
                flops_per_s=achieved[1],
                ceiling_share=achieved[2],
            )
        )
    return tuple(found), float(total.sum()) / 1e3 - sum(kernel.total_ms for kernel in found)


class _Work(NamedTuple):
    """Recorded work by name; each array has one element per name.

    Args:
        bytes: bytes of copies, fills and matrix multiplications.
        flops: FLOPs of matrix multiplications.
        least_s: seconds that the GPU needs for the multiplications at its limits; 0: unknown.
        activities: number of activities whose work is known.
    """

    bytes: Floats
    flops: Floats
    least_s: Floats
    activities: Floats


def _recorded_work(columns: Columns, gpu: Gpu | None) -> _Work:
    """Return the work that the trace has. That of an operator with several kernels is not split among them."""
    data, products = columns.gpu, columns.products
    product = _products_of_activities(columns)
    _, inverse, kernels = np.unique(data.external, return_inverse=True, return_counts=True)
    product = np.where(kernels[inverse] == 1, product, len(products))
    flops = np.array([*(matrix_product.flops for matrix_product in products), 0.0])
    moved = np.array([*(matrix_product.bytes for matrix_product in products), 0.0])
    least = np.array([*(max(_bounds(matrix_product, gpu).values(), default=0.0) for matrix_product in products), 0.0])

    def by_name(values: npt.NDArray[Any]) -> Floats:
        return np.bincount(data.name, values, len(columns.names)).astype(np.float64)

    known = (product < len(products)) | (data.bytes > 0)
    return _Work(by_name(moved[product] + data.bytes), by_name(flops[product]), by_name(least[product]), by_name(known))


def _products_of_activities(columns: Columns) -> Ints:
    """Return the index of the multiplication that launched each activity; the number of them if none did."""
    none = len(columns.products)
    ids = np.array(sorted(columns.product_of_external), dtype=np.int64)
    if not len(ids):
        return np.full(len(columns.gpu.start), none, dtype=np.int64)
    products = np.array([columns.product_of_external[id] for id in ids.tolist()], dtype=np.int64)
    at = np.minimum(np.searchsorted(ids, columns.gpu.external), len(ids) - 1)
    return np.where(ids[at] == columns.gpu.external, products[at], none)


def _bounds(product: Product, gpu: Gpu | None) -> dict[str, float]:
    """Return the seconds that a GPU needs at least for the FLOPs and for the bytes; empty if either is unknown."""
    if gpu is None or product.dtype not in gpu.flops_per_s:
        return {}
    return {"compute": product.flops / gpu.flops_per_s[product.dtype], "bandwidth": product.bytes / gpu.bytes_per_s}


def product_times(columns: Columns, gpu: Gpu | None, most: int) -> tuple[ProductTime, ...]:
    """Return the slowest matrix multiplications; on a trace without GPU events, the time of the operators.

    Args:
        columns: events of the trace.
        gpu: limits to compare with; without GPU events they are not used.
        most: number of matrix multiplications.
    """
    if not columns.products:
        return ()
    size = len(columns.products)
    if len(columns.gpu.start):
        product, time = _products_of_activities(columns), columns.gpu.end - columns.gpu.start
        rows = np.flatnonzero(product < size)
        calls = np.unique(np.stack((product[rows], columns.gpu.external[rows])), axis=1)[0]
    else:
        gpu, product, time = None, columns.cpu.product, columns.cpu.end - columns.cpu.start
        rows = np.flatnonzero((product >= 0) & (columns.cpu.kind == OPERATOR))
        calls = product[rows]
    total, count = np.bincount(product[rows], time[rows], size), np.bincount(calls, minlength=size)
    order = [index for index in np.argsort(-total, kind="stable")[:most].tolist() if total[index] > 0]
    return tuple(_product_time(columns.products[i], int(count[i]), float(total[i]) / 1e6, gpu) for i in order)


def _product_time(product: Product, count: int, seconds: float, gpu: Gpu | None) -> ProductTime:
    bounds = _bounds(product, gpu)
    bound = max(bounds, key=lambda name: bounds[name]) if bounds else None
    return ProductTime(
        label=product.label,
        count=count,
        total_ms=seconds * 1e3,
        flops_per_s=count * product.flops / seconds,
        bytes_per_s=count * product.bytes / seconds,
        bound=bound,
        ceiling_share=None if bound is None else count * bounds[bound] / seconds,
    )
