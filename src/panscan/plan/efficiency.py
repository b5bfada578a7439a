"""From counts of work to seconds: a model of time with a few factors, fitted to committed records.

A pass takes the longer of two times: what the GPU computes, and what the host needs to launch its kernels. The GPU's
time is a sum:

- products of the decoder layers, from their FLOPs and from the weights that they read: the norm of both times, little
  more than the longer one; the output matrix likewise;
- attention: FLOPs in prefill, keys and values read in decode; elementwise kernels: activations read and written;
- the latency of each layer's chain of kernels, and the fixed work of a pass (embedding, sampling, inputs);
- between GPUs, a latency for each message, and the bytes sent.

Rates are a GPU's measured ceilings (a large product, a large copy), or its data sheet's times the share that an H200
reaches of its data sheet. ``efficiency.json`` holds the factors; ``benchmarks/plan_accuracy.py`` fits and tests them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files

import msgspec

from panscan.core.gpu_features import supports
from panscan.core.weight_formats import format_named
from panscan.engine.options import EngineOptions
from panscan.engine.scheduling.graph_sizes import Size, graph_sizes, most_chunk_rows
from panscan.plan.cost import Variant, Work, pass_work, vision_work
from panscan.plan.gpus import Gpu, all_gpus

_VECTOR_ROWS = 2  # int4: up to this many rows, a kernel without tensor cores; see panscan.model.linear.multiply
_FEW_ROWS = 64  # int4: more rows multiply dequantised weights; engines measure it at startup, an H200 finds this
_OVERLAP = 3.0  # exponent of the norm of compute and read times, as in products.json
_OVERLAPS: dict[str | None, float] = {"int8": 1.5}  # other exponents, by format
_CUDNN_VISION = 0.88  # rate of the tower with cuDNN's attention, to that with the kernel for Hopper (vision-tower.json)
_OPTIONS = EngineOptions()


@dataclass(frozen=True, slots=True)
class Interval:
    """A predicted figure, and the bounds that the records justify."""

    low: float
    value: float
    high: float


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors of the model of time. Rates are relative to the ceilings of a large bf16 product and a large copy.

    Args:
        read_bf16: bandwidth at which products read unquantised weights.
        read_fp8: the same for fp8 weights.
        read_int8: the same for int8 weights.
        read_int4: the same for int4 weights in products of up to 2 rows.
        read_int4_few: the same in products of 3 to 64 rows, which dequantise in registers.
        compute_bf16: rate of products of many rows.
        compute_fp8: the same for fp8, relative to the data sheet's ratio to bf16.
        compute_int8: the same for int8.
        vision: rate of the vision tower, attention included.
        attention: rate of attention in prefill.
        kv: bandwidth at which decode reads keys and values.
        activations: bandwidth of elementwise kernels.
        link: bandwidth between GPUs, relative to the data sheet's.
        layer_seconds: latency of one layer's kernels in a CUDA graph.
        tail_seconds: the same in passes launched kernel by kernel, whose products end in partly filled waves.
        int4_few_seconds: additional latency of one layer's int4 products of 3 to 64 rows.
        pass_seconds: fixed time of a pass.
        message_seconds: latency of one message between GPUs.
        launch_seconds: host time to launch one layer, of the tower or the decoder, kernel by kernel.
        launch_ranks_seconds: the same with tensor parallelism.
        replay_seconds: host time to prepare a pass and replay its CUDA graph.
        replay_ranks_seconds: the same with tensor parallelism.
        sequence_ranks_seconds: host time per request of a pass with tensor parallelism.
        prepare_seconds: host time to prepare one view.
        prepare_ranks_seconds: the same with tensor parallelism, where pixels are sent to ranks.
    """

    read_bf16: float
    read_fp8: float
    read_int8: float
    read_int4: float
    read_int4_few: float
    compute_bf16: float
    compute_fp8: float
    compute_int8: float
    vision: float
    attention: float
    kv: float
    activations: float
    link: float
    layer_seconds: float
    tail_seconds: float
    int4_few_seconds: float
    pass_seconds: float
    message_seconds: float
    launch_seconds: float
    launch_ranks_seconds: float
    replay_seconds: float
    replay_ranks_seconds: float
    sequence_ranks_seconds: float
    prepare_seconds: float
    prepare_ranks_seconds: float


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The factors and where they come from.

    Args:
        gpu: name of the GPU that the records are from.
        ceilings: its measured FLOP/s and bytes/s.
        spread: relative error that nine of ten measurements of one GPU stay within, held-out ones included.
        spread_ranks: the same with tensor parallelism.
        fitted: names of the records that the factors are fitted to, in part.
        held_out: names of the records with measurements that they are tested on.
        factors: the factors.
    """

    gpu: str
    ceilings: tuple[float, float]
    spread: float
    spread_ranks: float
    fitted: tuple[str, ...]
    held_out: tuple[str, ...]
    factors: Factors


@cache
def committed_efficiency() -> Efficiency:
    """Return the efficiency that was fitted to the committed records."""
    text = files(__package__).joinpath("efficiency.json").read_text(encoding="utf-8")
    return msgspec.json.decode(text, type=Efficiency)


class Clock:
    """Predicted times of one variant on one GPU (with tensor parallelism, of the whole group).

    ``widening``: by how much a time may be longer or shorter than predicted, as a factor. ``measured``: the factors are
    from records of this GPU. ``basis``: what the prediction rests on, one line.

    Args:
        gpu: the GPU.
        variant: what runs on it.
        ceilings: FLOP/s of a large 16-bit product and bytes/s of a large copy, measured on the GPU
            (:mod:`panscan.model.ceilings`); None: the same share of its data sheet as on the GPU of the records. Other
            operand types and the link, which are not measured, keep their data sheet's ratio to 16 bits.
        efficiency: factors; None: the committed ones.
        graphs: sizes of CUDA graphs; None: those that the engine records.
    """

    def __init__(
        self,
        gpu: Gpu,
        variant: Variant,
        *,
        ceilings: tuple[float, float] | None = None,
        efficiency: Efficiency | None = None,
        graphs: tuple[Size, ...] | None = None,
    ) -> None:
        efficiency = efficiency or committed_efficiency()
        self.gpu, self.variant = gpu, variant
        self._factors, self._graphs = efficiency.factors, graphs
        known = all_gpus()[efficiency.gpu]
        # The ceilings of the GPU of the records relative to its data sheet.
        reached = efficiency.ceilings[0] / known.flops_per_s["bf16"], efficiency.ceilings[1] / known.bytes_per_s
        flops, copied = ceilings or (reached[0] * gpu.half_rate, reached[1] * gpu.bytes_per_s)
        self._share, self._copied = flops / gpu.half_rate, copied
        self._split = variant.tensor_parallel_size > 1
        self.measured = gpu.name == efficiency.gpu
        spread = efficiency.spread_ranks if self._split else efficiency.spread
        self.widening = 1 + spread
        if not self.measured:
            # The spread, and what a data sheet leaves open: this GPU may reach all of it, or fall as far short of what
            # is expected; with measured ceilings, half as far. (Distances are logs of ratios.)
            self.widening *= 1 / min(reached) if ceilings is None else min(reached) ** -0.5
            if gpu.capability is None:  # without CUDA, other kernels run: twice as far
                self.widening **= 2
        if self.measured:
            self.basis = f"Predicted from records of {known.label}; nine of ten measurements are within {spread:.0%}"
        else:
            rates = "the data sheet" if ceilings is None else "measured ceilings"
            limits = f"the true values may differ by {self.widening:.1f} times"
            self.basis = f"Estimated from {rates} and the efficiency of {known.label}; {limits}"

    def interval(self, seconds: float, exact: float = 0.0) -> Interval:
        """Return a time, or another figure in proportion to times, with its bounds.

        Args:
            seconds: the predicted figure.
            exact: what the bounds have in addition, whatever the GPU.
        """
        return Interval(*(exact + figure for figure in (seconds / self.widening, seconds, seconds * self.widening)))

    def vision_seconds(self, views: int) -> float:
        """Return the time of encoding views together; 0 without any."""
        return max(self._vision_device(views), self._vision_host(views))

    def pass_seconds(
        self,
        decode_contexts: Sequence[int] = (),
        prefill: Sequence[tuple[int, int]] = (),
        views: int = 0,
        *,
        graph: bool | None = None,
    ) -> float:
        """Return the time of one pass of the engine, from the start of its vision batch or of the pass before.

        The decoder starts when the GPU has encoded the views and the host has launched them and prepared the graph; a
        pass without a graph ends no sooner than the host has launched its last layer.

        Args:
            decode_contexts: tokens of each decoding request, the new one included.
            prefill: chunks of prompts, as positions [start, end).
            views: views that the pass encodes first.
            graph: whether a CUDA graph is replayed; None: as the engine would.
        """
        singles, others = len(decode_contexts), sum(end - start for start, end in prefill)
        if not singles + others:
            return self.vision_seconds(views)
        ranks = self.variant.tensor_parallel_size
        rows = padded_rows(singles, others, self._graphs, ranks) if graph is not False else None
        computed = self._decoder(decode_contexts, prefill, rows)
        requests = singles + len(prefill)
        replay = self._host("replay") + requests * self._factors.sequence_ranks_seconds * self._split
        host = self._vision_host(views) + replay
        if rows is None:
            return max(self.vision_seconds(views) + computed, host + self.variant.text.layers * self._host("launch"))
        return max(self._vision_device(views), host) + computed if views else max(computed, host)

    def bound(self, work: Work, rows: int) -> str:
        """Return what takes the largest part of some work: ``compute``, ``bandwidth``, ``link`` or ``host``.

        Args:
            work: counts of a pass or a phase.
            rows: rows of the pass; one of more than a CUDA graph holds is launched kernel by kernel.
        """
        variant, factors, copied = self.variant, self._factors, self._copied
        replayed = rows <= most_chunk_rows(variant.tensor_parallel_size)
        latency = factors.layer_seconds if replayed else self._host("launch")
        times = {
            "compute": work.products / self._product_rate(variant.weights)
            + work.tower / self._product_rate(variant.quantize_vision)
            + work.dense / self._product_rate()
            + work.attention / (self._rate(variant.dtype) * factors.attention),
            "bandwidth": work.weight_bytes / self._read_rate()
            + work.kv_bytes / (copied * factors.kv)
            + work.activation_bytes / (copied * factors.activations),
            "link": self._between(work.link_bytes, work.reductions),
            "host": variant.text.layers * latency + factors.pass_seconds,
        }
        return max(times, key=lambda name: times[name])

    def prepare_seconds(self, views: int) -> float:
        """Return the host time to prepare a request: to decode its images and to cut and scale their views."""
        return views * self._host("prepare")

    def _host(self, name: str) -> float:
        """Return a factor of the host, which has more to do with tensor parallelism."""
        factor: float = getattr(self._factors, f"{name}_ranks_seconds" if self._split else f"{name}_seconds")
        return factor

    def _rate(self, kind: str) -> float:
        """Return the FLOP/s of an operand type; without units for it, of the 16-bit type that it is converted to."""
        return self._share * (self.gpu.flops_per_s.get(kind) or self.gpu.half_rate)

    def _decoder(self, decode_contexts: Sequence[int], prefill: Sequence[tuple[int, int]], rows: int | None) -> float:
        """Return the time of the decoder on the GPU. ``rows``: of its CUDA graph; None: launched kernel by kernel."""
        factors, layers = self._factors, self.variant.text.layers
        decode = pass_work(self.variant, decode_contexts=decode_contexts)
        chunks = pass_work(self.variant, prefill=prefill)
        sampled = len(decode_contexts) + len(prefill)
        computed = rows or len(decode_contexts) + sum(end - start for start, end in prefill)
        latency = factors.layer_seconds if rows else factors.tail_seconds
        activations = decode.activation_bytes + chunks.activation_bytes
        return (
            layers * (self._layer_products(computed) + latency)
            + self._output(sampled)
            + chunks.attention / (self._rate(self.variant.dtype) * factors.attention)
            + decode.kv_bytes / (self._copied * factors.kv)
            + activations / (self._copied * factors.activations)
            + self._between(decode.link_bytes + chunks.link_bytes, max(decode.reductions, chunks.reductions))
            + factors.pass_seconds
        )

    def _vision_host(self, views: int) -> float:
        vision = self.variant.shape.vision
        return vision.layers * self._host("launch") if vision is not None and views else 0.0

    def _vision_device(self, views: int) -> float:
        work = vision_work(self.variant, views)
        rate = self._rate(self.variant.dtype) * self._factors.vision
        if not supports("warpgroup_products", self.gpu.capability):
            rate *= _CUDNN_VISION
        flops = work.flops(tower_narrow=self._product_rate(self.variant.quantize_vision) / self._product_rate())
        return flops / rate + self._between(work.link_bytes, work.reductions)

    def _product_rate(self, weights: str | None = None) -> float:
        """Return the FLOP/s of products by weights: in their 8-bit type, or that of the activations."""
        kind = weights if format_named(weights).products == "narrow" else None
        factor: float = getattr(self._factors, f"compute_{kind or 'bf16'}")
        return self._rate(kind or self.variant.dtype) * factor

    def _read_rate(self) -> float:
        """Return the bytes/s at which products read the decoder's weights."""
        factor: float = getattr(self._factors, f"read_{self.variant.weights or 'bf16'}")
        return self._copied * factor

    def _layer_products(self, rows: int) -> float:
        """Return the time of one layer's products."""
        weights, matrices = self.variant.weights, sum(inputs * outputs for inputs, outputs in self.variant.matrices())
        compute = 2.0 * rows * matrices / self._product_rate(weights)
        if self.variant.weight_format.grouped:
            return self._int4_products(rows, matrices, compute)
        return _norm(compute, self.variant.layer_bytes / self._read_rate(), _OVERLAPS.get(weights, _OVERLAP))

    def _int4_products(self, rows: int, matrices: int, compute: float) -> float:
        """Return the time of one layer's products with int4 weights, by the method for this many rows."""
        factors, stored, copied = self._factors, self.variant.layer_bytes, self._copied
        if rows <= _VECTOR_ROWS:
            return stored / self._read_rate()
        if rows <= _FEW_ROWS:
            return compute + stored / (copied * factors.read_int4_few) + factors.int4_few_seconds
        dense = matrices * self.variant.width
        return _norm(compute, dense / (copied * factors.read_bf16), _OVERLAP) + (stored + dense) / copied

    def _output(self, sampled: int) -> float:
        """Return the time of the output matrix for the rows whose logits are computed."""
        weights = self.variant.vocabulary() * self.variant.text.hidden
        compute = 2.0 * sampled * weights / self._product_rate()
        read = weights * self.variant.width / (self._copied * self._factors.read_bf16)
        return _norm(compute, read, _OVERLAP)

    def _between(self, sent_bytes: float, messages: int) -> float:
        """Return the time of the messages between GPUs."""
        sent = sent_bytes / (self.gpu.link_bytes_per_s * self._factors.link)
        return sent + messages * self._factors.message_seconds


@lru_cache(maxsize=4096)
def padded_rows(singles: int, others: int, graphs: tuple[Size, ...] | None = None, ranks: int = 1) -> int | None:
    """Return the rows of the CUDA graph that a pass replays; None if it is launched kernel by kernel.

    Args:
        singles: decode rows.
        others: rows of prefill chunks.
        graphs: sizes of CUDA graphs; None: those that the engine records.
        ranks: GPUs that share the layers.
    """
    decode_rows = max(_OPTIONS.max_num_seqs, singles)
    fitting = [
        (rows, decode)
        for decode, rows in graphs or graph_sizes(decode_rows, _OPTIONS.prefill_chunk_size, ranks)
        if decode >= singles and rows >= others and bool(decode) == bool(singles) and bool(rows) == bool(others)
    ]
    return sum(min(fitting)) if fitting else None


def _norm(compute: float, read: float, exponent: float) -> float:
    """Return the norm of both times."""
    total: float = (compute**exponent + read**exponent) ** (1 / exponent)
    return total
