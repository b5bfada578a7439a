"""What an engine does once, before its first pass: choose kernels, fuse, compile, allocate memory, record graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from panscan.core import SettingError, UnsupportedError, now
from panscan.engine import triton_attention
from panscan.engine.attention import Backend, SegmentsBackend
from panscan.engine.executor import Executor
from panscan.engine.graphs import Graphs
from panscan.engine.kv_memory import KVCache, choose_blocks
from panscan.engine.options import EngineOptions
from panscan.engine.triton_attention import TritonBackend
from panscan.model.checkpoint import Loaded
from panscan.model.decoder import Decoder, LayerFacts
from panscan.model.fused import fuse_projections
from panscan.model.machine import is_out_of_memory, release_memory, synchronize
from panscan.model.tower import VisionTower
from panscan.settings import ATTENTION_BACKENDS, nearest

__all__ = ["BackendChoice", "Startup", "choose_backend"]


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend, its name, and why it is that one."""

    name: str
    reason: str
    backend: Backend


def choose_backend(name: str, layers: Sequence[LayerFacts]) -> BackendChoice:
    """The backend of paged attention for a model's layers.

    Args:
        name: ``triton`` (ours), ``sdpa`` (PyTorch's, sequence by sequence), or ``auto``: ours on NVIDIA GPUs that take
            them, PyTorch's elsewhere.
        layers: what is attended on.

    Raises:
        SettingError: an unknown name.
        UnsupportedError: the kernels that are asked for cannot run here.
    """
    if name not in ATTENTION_BACKENDS:
        known = ", ".join(ATTENTION_BACKENDS)
        raise SettingError(f"--attention-backend takes {known}; got {name!r}{nearest(name, ATTENTION_BACKENDS)}")
    if name == "sdpa":
        return BackendChoice("sdpa", "asked for", SegmentsBackend())
    reason = _no_triton(layers)
    if name == "auto":
        if any(layer.device.type != "cuda" for layer in layers):
            reason = "layers are not on NVIDIA GPUs"
        if reason is not None:
            return BackendChoice("sdpa", reason, SegmentsBackend())
    if reason is not None:
        raise UnsupportedError(f"--attention-backend triton: {reason}; auto takes what runs")
    [heads] = {(layer.head_size, layer.dtype) for layer in layers}
    why = "asked for" if name == "triton" else "layers are on NVIDIA GPUs"
    return BackendChoice("triton", why, triton_attention.TritonBackend(*heads))


def _no_triton(layers: Sequence[LayerFacts]) -> str | None:
    kinds = {(layer.head_size, layer.dtype, layer.device) for layer in layers}
    if len({kind[:2] for kind in kinds}) > 1:
        return "layers differ in head size or precision"
    reasons = (triton_attention.unsupported_reason(*kind) for kind in kinds)
    return next((reason for reason in reasons if reason is not None), None)


log = logging.getLogger("panscan.engine")

_TRIED_ROWS = 211  # of the pass that compiles: a size that the compiler takes for no other one of the model's


@dataclass
class Startup:
    """The parts of an engine that touch the device, ready to run.

    ``decoder``: the model. ``fast``: whether all is done that makes passes fast on a GPU. ``executor``: runs passes on
    the model. ``encode``: views' pixels to features. ``blocks``: of the KV cache, of global and of local layers.
    ``graphs``: of passes of few rows. ``decisions``: what was chosen and why, and how long it took, a line each.

    Args:
        loaded: the model. Between passes it goes on serving ``generate()``.
        options: sizes, and what to choose.

    Raises:
        SettingError: an unknown backend, or a cache size that holds nothing.
        UnsupportedError: a backend that cannot run here, or too little memory.
    """

    loaded: Loaded
    options: EngineOptions
    decisions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self.graphs: Graphs | None = None
        try:
            self._start()
        except BaseException as error:  # also an interruption: the model is given back in any case
            self.close()
            if is_out_of_memory(error):
                mend = "lower --kv-cache-gb, --max-num-seqs or --vision-batch-size"
                raise UnsupportedError(f"out of memory at the engine's start: {mend}") from error
            raise

    def _start(self) -> None:
        options = self.options
        self.decoder = Decoder(self.loaded.model)
        choice = choose_backend(options.attention_backend, self.decoder.layers)
        slow = self._slow_reason(choice.backend)
        self.fast = slow is None
        self._say(f"attention: {choice.name} ({choice.reason})")
        if not self.fast:
            self._say(f"layers: eager, launched one by one ({slow})")
        if self.fast:
            if self.decoder.device.type == "cuda":
                torch.cuda.set_device(self.decoder.device)  # of this thread: graphs go to its present device
            with self._stage("fused projections"):
                self._undo.append(fuse_projections(self.loaded.model))
        self.encode = self._tower()
        if self.fast:
            release_memory()  # what a start needed, before the cache is sized by what is free
        self.blocks = choose_blocks(self.decoder, options)
        cache = KVCache(self.decoder, self.blocks, options.block_size)
        self.executor = Executor(self.decoder, cache, choice.backend, options.block_size)
        if self.fast:
            self._compile()
        if self.fast and isinstance(choice.backend, TritonBackend):
            self.graphs = self.executor.graphs = self._graphs(cache, choice.backend)

    def close(self) -> None:
        """Give the model back as it was."""
        while self._undo:
            self._undo.pop()()

    def _slow_reason(self, backend: Backend) -> str | None:
        """Why modules are not fused and compiled, passes not recorded and overlapped; None if they are: where our
        kernels attend, on a model that is on one NVIDIA GPU, in its own precision and without hooks."""
        model, layers = self.loaded.model, self.decoder.layers
        reasons = {
            "not on an NVIDIA GPU": self.decoder.device.type != "cuda",
            "attention is PyTorch's": not isinstance(backend, TritonBackend),
            "spread over devices": len({layer.device for layer in layers} | {self.decoder.device}) > 1,
            "hooks on its modules": any(hasattr(module, "_hf_hook") for module in model.modules()),
            "quantised": getattr(model, "hf_quantizer", None) is not None,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _tower(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """What encodes views: on an NVIDIA GPU another way through the same modules."""
        if not (self.fast and self.decoder.view_bytes):
            return self.decoder.encode
        tower = VisionTower(self.loaded.model)
        self._say(f"vision attention: {tower.attention} ({tower.reason})")
        size = self.loaded.model.config.vision_config.image_size
        with self._stage("vision tower"):
            for power in range(self.options.vision_batch_size.bit_length()):  # the sizes that it cuts batches into
                tower(torch.zeros(1 << power, 3, size, size, device=self.decoder.device, dtype=self.decoder.dtype))

        def encode(pixels: torch.Tensor) -> torch.Tensor:
            return tower(pixels.to(self.decoder.device, self.decoder.dtype))

        return encode

    def _compile(self) -> None:
        """Compile the layers, and all that a prefill pass needs."""
        if not self.options.fast_start:
            self.decoder.compile()
        with self._stage("prefill" if self.options.fast_start else "layers compiled for prefill"):
            self.executor.try_out(_TRIED_ROWS)

    def _graphs(self, cache: KVCache, backend: TritonBackend) -> Graphs:
        options = self.options
        graphs = Graphs(
            self.decoder, cache, backend, decode_rows=options.max_num_seqs, chunk_rows=options.prefill_chunk_size,
            longest=min(self.decoder.max_positions, options.block_size * max(self.blocks)),
            block_size=options.block_size, capture=self.decoder.device.type == "cuda",
        )  # fmt: skip
        decode, short = (max(rows) for rows in zip(*graphs.sizes, strict=True))
        with self._stage(f"{len(graphs.sizes)} graphs of passes of up to {decode} decoding and {short} other rows"):
            for size in graphs.prepare():
                log.debug("graph of a pass of %d decoding and %d other rows", *size)
        return graphs

    @contextmanager
    def _stage(self, what: str) -> Iterator[None]:
        log.info("%s ...", what)
        started = now()
        yield
        synchronize(self.decoder.device)
        self._say(f"{what}: {now() - started:.1f} s")

    def _say(self, decision: str) -> None:
        """Keep it, and tell it on a GPU: a start takes long enough to be watched there, or is slow for a reason."""
        self.decisions.append(decision)
        log.log(logging.INFO if self.decoder.device.type == "cuda" else logging.DEBUG, "%s", decision)
