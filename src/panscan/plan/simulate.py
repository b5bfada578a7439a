"""A discrete-event simulation of engines: the real scheduler, block tables and vision cache, with predicted pass times.

What :mod:`panscan.engine.loop` does in threads and on a device happens here on a simulated clock: a few requests are
prepared in advance, from their arrival on, one pass is launched while the previous one computes, and tokens arrive when
their pass ends.
"""

from __future__ import annotations

from collections import Counter, abc, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import count
from math import inf
from typing import Protocol

from panscan.core import Stamps
from panscan.engine.scheduling.batch import Chunk, Sequence, Step
from panscan.engine.scheduling.graph_sizes import MOST_CHUNKS
from panscan.engine.scheduling.kv_blocks import KVBlocks
from panscan.engine.scheduling.kv_sizes import KVShape
from panscan.engine.scheduling.pacing import Pacer, PassSize
from panscan.engine.scheduling.scheduler import Scheduler
from panscan.engine.vision import VisionCache
from panscan.plan.cost import OUTPUT_COST, VIEW_COST
from panscan.plan.mix import RequestSketch
from panscan.records.request_records import RequestTimes

_AHEAD = 32  # requests that are prepared while others compute; see panscan.engine.worker
_THREADS = 4  # that prepare requests; see panscan.engine.worker
_CONTENTION = 0.3
"""By which share a preparation is slower for each other one in progress: stages "load" and "preprocess" in w1-27b.json,
all at once (9.7 ms) over alone (5.1 ms), with four threads. They wait for the interpreter's lock, and only a request
alone has its page copied by several threads."""
_READ_TOGETHER = 8  # decoding requests that read a common prefix once; see panscan.engine.kernels


class PassTimes(Protocol):
    """Predicted times of one engine, in seconds."""

    def pass_seconds(
        self, decode_contexts: abc.Sequence[int], prefill: abc.Sequence[tuple[int, int]], views: int, *, graph: bool
    ) -> float:
        """Return the seconds of a pass.

        Args:
            decode_contexts: tokens that each decoding request reads, the new one included.
            prefill: chunks ``[start, end)`` of prompts.
            views: views that the vision tower encodes first.
            graph: whether the pass replays a CUDA graph.
        """
        ...

    def prepare_seconds(self, views: int, known: int) -> float:
        """Return the seconds that a thread needs to prepare a request.

        Args:
            views: of the request.
            known: how many of them the vision cache holds, so that their pixels are not computed.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """Sizes of an engine's passes and caches; see :class:`panscan.engine.options.EngineOptions`.

    Args:
        kv_shape: layers of each kind, and their keys and values.
        slabs: slabs of the KV cache.
        window: positions that a local layer attends to; None: the model has no local layer.
        block_size: tokens per block.
        max_num_seqs: requests that compute at once.
        prefill_chunk_size: prompt tokens of one pass.
        vision_slots: views that the vision cache holds.
        prefix_caching: requests that begin alike share what was computed.
        overlap: a pass is launched before the tokens of the previous one are known, as on a GPU.
        graphs: short passes replay CUDA graphs.
        shared_from: decoding requests of a pass from which shared pages are read together; None: they never are.
        tpot_target: seconds per output token that prefill is paced by; None: it is not.
        ahead: requests that are prepared ahead of need; None: any number.
    """

    kv_shape: KVShape
    slabs: int
    window: int | None
    block_size: int = 2
    max_num_seqs: int = 128
    prefill_chunk_size: int = 2048
    vision_slots: int = 128
    prefix_caching: bool = True
    overlap: bool = True
    graphs: bool = True
    shared_from: int | None = None
    tpot_target: float | None = None
    ahead: int | None = _AHEAD


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request with its time stamps, in seconds of the simulated clock.

    Args:
        sketch: its tokens, image spans and answer length.
        arrived: when the engine accepted it.
        tokens: when each output token reached the host.
        cached: prompt tokens taken from the prefix cache; None before its first pass.
        refused: the KV cache cannot hold it, even alone.
    """

    sketch: RequestSketch
    arrived: float
    tokens: list[float] = field(default_factory=list)
    cached: int | None = None
    refused: bool = False

    @property
    def done(self) -> bool:
        """Whether it has all its tokens, or was refused."""
        return self.refused or len(self.tokens) == self.sketch.output_tokens

    @property
    def times(self) -> RequestTimes:
        """Its times, as those of a measured request."""
        return RequestTimes(
            error="refused" if self.refused else None,
            stamps=Stamps(self.arrived, tokens=self.tokens),
            output_tokens=len(self.tokens),
            due=self.arrived,
            queued=0.0,
        )

    @property
    def cost(self) -> float:
        """Its work in prompt tokens, as the router of ``panscan serve --replicas`` predicts it."""
        return self.sketch.views * VIEW_COST + len(self.sketch.ids) + self.sketch.output_tokens * OUTPUT_COST


@dataclass(frozen=True, slots=True)
class SimulatedPass:
    """One pass: when it ended, its decode and prefill rows, and the views encoded for it."""

    ended: float
    decode_rows: int
    prefill_rows: int
    views: int


@dataclass(frozen=True, slots=True)
class _LaunchedPass:
    sampled: list[Sequence]
    size: PassSize
    vision: float
    ended: float


class SimulatedEngine:
    """One engine on a simulated clock.

    ``now``: seconds of the host's clock. ``passes``: all passes so far. ``outstanding``: predicted work of the requests
    that have not finished, in prompt tokens. ``stopped``: whether ``on_done`` stopped it.

    Args:
        sizes: sizes of passes and caches.
        times: predicted times.
        on_done: called with each request that has all its tokens or is refused; False stops the engine.
    """

    def __init__(
        self, sizes: EngineSizes, times: PassTimes, on_done: Callable[[SimulatedRequest], bool] | None = None
    ) -> None:
        self._sizes, self._times, self._on_done = sizes, times, on_done
        self.stopped = False
        self._blocks = KVBlocks(
            sizes.kv_shape,
            sizes.slabs,
            block_size=sizes.block_size,
            window=sizes.window,
            prefix_caching=sizes.prefix_caching,
        )
        self._scheduler = Scheduler[Sequence](
            self._blocks,
            max_num_seqs=sizes.max_num_seqs,
            prefill_chunk_size=sizes.prefill_chunk_size,
            max_views=max(1, sizes.vision_slots),
        )
        self._pacer = None if sizes.tpot_target is None else Pacer(sizes.tpot_target)
        self._vision = VisionCache(sizes.vision_slots)
        self.now = 0.0
        self.passes: list[SimulatedPass] = []
        self.outstanding = 0.0
        self._numbers = count()
        self._device_free = 0.0
        self._inflight: _LaunchedPass | None = None
        self._requests: dict[Sequence, SimulatedRequest] = {}
        self._arriving: deque[SimulatedRequest] = deque()
        self._accepted: deque[tuple[int, SimulatedRequest]] = deque()
        self._preparing: list[tuple[float, int, SimulatedRequest]] = []  # a heap by (end, number)
        self._threads = [0.0] * _THREADS  # a heap: when each becomes free

    @property
    def preemptions(self) -> int:
        """How often a request gave its blocks back to an older one."""
        return self._scheduler.preemptions

    def submit(self, request: SimulatedRequest) -> None:
        """Take a request that arrives no earlier than those before."""
        self._arriving.append(request)
        self.outstanding += request.cost

    def run(self, until: float = inf) -> None:
        """Compute until the host's clock reaches ``until``, or nothing is left to do."""
        while self.now < until and not self.stopped:
            self._receive()
            if self.step():
                continue
            message = min(
                self._arriving[0].arrived if self._arriving else inf,
                self._preparing[0][0] if self._preparing else inf,
            )
            if message >= until:
                return
            self.now = max(self.now, message)

    def step(self) -> bool:
        """Launch a pass, then deliver the tokens of the previous one; return False if there is nothing to do."""
        limit = None  # how long the prefill of the pass may take
        if self._pacer is not None:
            inflight = None if self._inflight is None else self._inflight.size
            requests = ((sequence, request.arrived, request.tokens) for sequence, request in self._requests.items())
            limit = self._pacer.limit(self.now, inflight, requests)
        step = self._scheduler.schedule(limit)
        if step is None:
            return self._land()
        flight = self._launch(step)
        self._land()
        self._scheduler.advance(step)
        self._inflight = flight
        if not self._sizes.overlap:
            self._land()
        return True

    def _receive(self) -> None:
        """Handle what has happened by now: start preparations, and queue the requests that are prepared.

        A request is prepared from its arrival on, or, if too many are ready, when the loop finds that they are fewer.
        """
        self._prepare_ahead(self.now)
        while self._arriving and self._arriving[0].arrived <= self.now:
            request = self._arriving.popleft()
            self._accepted.append((next(self._numbers), request))
            self._prepare_ahead(request.arrived)
        while self._preparing and self._preparing[0][0] <= self.now:
            _, number, request = heappop(self._preparing)
            self._add(number, request)

    def _prepare_ahead(self, earliest: float) -> None:
        most = inf if self._sizes.ahead is None else self._sizes.ahead
        while self._accepted and len(self._preparing) + len(self._scheduler.waiting) < most:
            number, request = self._accepted.popleft()
            start = max(earliest, self._threads[0])
            others = sum(free > start for free in self._threads[1:])
            known = sum(self._vision.holds(span.key) for span in request.sketch.layout.spans)
            ready = start + self._times.prepare_seconds(request.sketch.views, known) * (1 + _CONTENTION * others)
            heapreplace(self._threads, ready)
            heappush(self._preparing, (ready, number, request))

    def _add(self, number: int, request: SimulatedRequest) -> None:
        sketch = request.sketch
        limit = len(sketch.ids) + (sketch.max_new_tokens or sketch.output_tokens)
        sequence = Sequence(number, list(sketch.ids), len(sketch.ids), sketch.layout, limit)
        if not self._blocks.fits(limit, self._scheduler.longest_chunk(sequence)):
            request.refused = True
            self._end(request)
            return
        self._requests[sequence] = request
        self._scheduler.add(sequence)

    def _launch(self, step: Step[Sequence]) -> _LaunchedPass:
        """Return the pass, with the time when the device finishes it."""
        prefill, keys = [], []
        contexts = self._tokens_read([chunk for chunk in step if chunk.sequence.decodes])
        for chunk in step:
            if not chunk.sequence.decodes:
                prefill.append((chunk.start, chunk.end))
                keys += [span.key for span in chunk.sequence.layout.within(chunk.start, chunk.end)]
        missing = [key for key in dict.fromkeys(keys) if self._vision.use(key) is None]
        for key in missing:
            self._vision.add(key)
        views, rows = len(missing), sum(end - start for start, end in prefill)
        graph = self._sizes.graphs and len(prefill) < MOST_CHUNKS
        seconds = self._times.pass_seconds(contexts, prefill, views, graph=graph)
        self._device_free = max(self.now, self._device_free) + seconds
        self.passes.append(SimulatedPass(self._device_free, len(contexts), rows, views))
        sampled = [chunk.sequence for chunk in step if chunk.samples]
        vision = self._times.pass_seconds([], [], views, graph=False) if views and self._pacer is not None else 0.0
        return _LaunchedPass(sampled, PassSize.of(step, views, self.now), vision, self._device_free)

    def _tokens_read(self, decoding: abc.Sequence[Chunk[Sequence]]) -> list[int]:
        """Return how many tokens each decoding request reads. Up to eight that share pages read those together, as in
        :func:`panscan.engine.triton_attention.prefix_groups`."""
        least = self._sizes.shared_from
        sharing = self._sizes.prefix_caching and least is not None and len(decoding) >= least
        seen: Counter[tuple[bytes, ...]] = Counter()
        tokens = []
        for chunk in decoding:
            spans = chunk.sequence.layout.spans
            pages = tuple(span.key for span in spans)
            known = sharing and bool(pages) and seen[pages] % _READ_TOGETHER > 0
            seen[pages] += 1
            tokens.append(chunk.end - spans[-1].end if known else chunk.end)
        return tokens

    def _land(self) -> bool:
        """Wait for the pass in flight and deliver its tokens; return False if there is none."""
        flight, self._inflight = self._inflight, None
        if flight is None:
            return False
        self.now = max(self.now, flight.ended)
        if self._pacer is not None:
            self._pacer.pass_finished(flight.size, flight.ended, flight.vision)
        for sequence in flight.sampled:
            request = self._requests.get(sequence)
            if request is None:
                continue
            sequence.settle(0)
            request.tokens.append(flight.ended)
            request.cached = sequence.cached
            if request.done:
                del self._requests[sequence]
                self._scheduler.remove(sequence)
                self._end(request)
        return True

    def _end(self, request: SimulatedRequest) -> None:
        self.outstanding -= request.cost
        if self._on_done is not None and not self._on_done(request):
            self.stopped = True


def route_arrivals(
    engines: abc.Sequence[SimulatedEngine], sketches: abc.Sequence[RequestSketch], arrivals: abc.Sequence[float]
) -> list[SimulatedRequest]:
    """Return the requests after the engines have answered them. Each goes to the engine with the least work.

    If an engine is stopped, the rest of the requests is not answered.

    Args:
        engines: replicas without requests.
        sketches: the requests.
        arrivals: when each arrives, ascending, in seconds.
    """
    requests = [SimulatedRequest(sketch, arrival) for sketch, arrival in zip(sketches, arrivals, strict=True)]
    for request in requests:
        if len(engines) > 1:
            for engine in engines:
                engine.run(request.arrived)
            if any(engine.stopped for engine in engines):
                break
        min(engines, key=lambda engine: engine.outstanding).submit(request)
    for engine in engines:
        engine.run()
    return requests
