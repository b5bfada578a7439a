"""GPU activities by name and matrix products by shape: time, achieved rates, and the GPU's limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from panscan.core import SettingError
from panscan.plan.gpus import Gpu, all_gpus, gpu_named
from panscan.trace.columns import OPERATOR, Columns, Floats, Ints
from panscan.trace.figures import KernelTime, ProductTime
from panscan.trace.gpu import KINDS
from panscan.trace.products import Product

__all__ = ["gpu_of", "kernel_times", "product_times"]


def gpu_of(metadata: Mapping[str, Any]) -> tuple[str | None, Gpu | None]:
    """Return the name of the first GPU in a trace's metadata and its data sheet, as far as known."""
    devices = metadata.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices else None
    name = first.get("name") if isinstance(first, dict) else None
    if not isinstance(name, str) or not isinstance(first, dict):
        return None, None
    memory = first.get("totalGlobalMem")
    words = [word for word in name.replace("-", " ").split() if word.upper() not in ("NVIDIA", "GEFORCE", "TESLA")]
    for count in range(len(words), 0, -1):
        try:
            gpu = gpu_named(" ".join(words[:count]))
        except SettingError:
            continue
        return name, _by_memory(gpu, words[0], memory)
    return name, None


def _by_memory(gpu: Gpu, model: str, memory: object) -> Gpu | None:
    """Return the variant of a GPU model with the memory that the trace reports; None: there is no such variant."""
    if not isinstance(memory, int) or memory <= 0:
        return gpu
    variants = [gpu, *(each for each in all_gpus().values() if each.name.split("-")[0] == model.lower())]
    return next((each for each in variants if abs(each.memory_bytes / memory - 1) < 0.1), None)


def kernel_times(columns: Columns, kinds: Ints, gpu: Gpu | None, most: int) -> tuple[tuple[KernelTime, ...], float]:
    """Return the activities with most time by name, and the milliseconds of all others.

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
    moved, work, known = _recorded_work(columns, gpu)
    first_kind = np.zeros(size, dtype=np.int64)
    first_kind[data.name] = kinds
    found = []
    order = np.argsort(-total, kind="stable")[:most]
    for name in order[count[order] > 0].tolist():
        seconds = float(total[name]) / 1e6
        whole = known[name] == count[name] and seconds > 0
        found.append(
            KernelTime(
                name=columns.names[name],
                kind=KINDS[first_kind[name]],
                count=int(count[name]),
                total_ms=seconds * 1e3,
                mean_us=float(total[name] / count[name]),
                share=float(total[name] / max(duration.sum(), 1e-9)),
                bytes_per_s=float(moved[name]) / seconds if whole and moved[name] else None,
                flops_per_s=float(work[0][name]) / seconds if whole and work[0][name] else None,
                ceiling_share=float(work[1][name]) / seconds if whole and work[1][name] else None,
            )
        )
    return tuple(found), float(total.sum()) / 1e3 - sum(each.total_ms for each in found)


def _recorded_work(columns: Columns, gpu: Gpu | None) -> tuple[Floats, tuple[Floats, Floats], Ints]:
    """Return bytes, (FLOPs, least seconds) and the number of activities with known work, by name.

    The work of an operator that launches several kernels belongs to none of them.
    """
    data, size = columns.gpu, len(columns.names)
    product = _products_of_activities(columns)
    _, inverse, copies = np.unique(data.external, return_inverse=True, return_counts=True)
    product = np.where(copies[inverse] == 1, product, -1)
    flops, read, least = (np.array([*values, 0.0]) for values in _limits(columns.products, gpu))
    moved = np.where(product >= 0, read[product], data.bytes)
    known = np.bincount(data.name, (product >= 0) | (data.bytes > 0), size).astype(np.int64)

    def summed(values: Floats) -> Floats:
        return np.bincount(data.name, values, size).astype(np.float64)

    return summed(moved), (summed(flops[product]), summed(least[product])), known


def _products_of_activities(columns: Columns) -> Ints:
    """Return the matrix product that launched each activity; -1: none, or its shapes are not recorded."""
    ids = np.array(sorted(columns.product_of_external), dtype=np.int64)
    if not len(ids):
        return np.full(len(columns.gpu.start), -1, dtype=np.int64)
    products = np.array([columns.product_of_external[each] for each in ids.tolist()], dtype=np.int64)
    at = np.minimum(np.searchsorted(ids, columns.gpu.external), len(ids) - 1)
    return np.where(ids[at] == columns.gpu.external, products[at], -1)


def _limits(products: tuple[Product, ...], gpu: Gpu | None) -> tuple[list[float], list[float], list[float]]:
    """Return FLOPs, bytes and least seconds on a GPU (0: unknown) of one call of each product."""
    least = [max(_bounds(each, gpu).values(), default=0.0) for each in products]
    return [each.flops for each in products], [each.bytes for each in products], least


def _bounds(product: Product, gpu: Gpu | None) -> dict[str, float]:
    """Return the seconds that a GPU needs at least for the FLOPs and for the bytes; empty if either is unknown."""
    if gpu is None or product.dtype not in gpu.flops_per_s:
        return {}
    return {"compute": product.flops / gpu.flops_per_s[product.dtype], "bandwidth": product.bytes / gpu.bytes_per_s}


def product_times(columns: Columns, gpu: Gpu | None, most: int) -> tuple[ProductTime, ...]:
    """Return the matrix products with most time; on a trace without GPU events, the time of the operators.

    Args:
        columns: events of the trace.
        gpu: limits to compare with; without GPU events they are not used.
        most: number of products.
    """
    if not columns.products:
        return ()
    size = len(columns.products)
    if len(columns.gpu.start):
        product = _products_of_activities(columns)
        rows = np.flatnonzero(product >= 0)
        total = np.bincount(product[rows], (columns.gpu.end - columns.gpu.start)[rows], size)
        calls = np.unique(np.stack((product[rows], columns.gpu.external[rows])), axis=1)[0]
        count = np.bincount(calls, minlength=size)
    else:
        gpu = None
        rows = np.flatnonzero((columns.cpu.product >= 0) & (columns.cpu.kind == OPERATOR))
        product = columns.cpu.product[rows]
        total = np.bincount(product, (columns.cpu.end - columns.cpu.start)[rows], size)
        count = np.bincount(product, minlength=size)
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
