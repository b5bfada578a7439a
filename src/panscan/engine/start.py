"""What an engine does once, before its first pass: choose kernels, fuse and compile, take memory, record graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from panscan.core import now
from panscan.engine.attention import AttentionRows, ChunkRows
from panscan.engine.backends import Choice, choose_backend
from panscan.engine.executor import Executor
from panscan.engine.graphs import Graphs
from panscan.engine.kv_memory import KVCache, choose_blocks
from panscan.engine.layout import Segment
from panscan.engine.options import EngineOptions
from panscan.engine.triton_attention import TritonBackend
from panscan.model.decoder import Decoder
from panscan.model.fused import fuse_projections
from panscan.model.load import Loaded
from panscan.model.machine import release_memory, synchronize
from panscan.model.tower import VisionTower

__all__ = ["Started"]

log = logging.getLogger("panscan.engine")


@dataclass
class Started:
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
        self.decoder = Decoder(self.loaded.model)
        if self.decoder.device.type == "cuda":
            torch.cuda.set_device(self.decoder.device)  # of this thread: graphs go to its present device
        self.fast = self._is_fast()
        if self.fast:
            with self._stage("fused projections"):
                self._undo.append(fuse_projections(self.loaded.model))
        self.encode = self._tower()
        if self.fast:
            release_memory()  # what a start needed, before the cache is sized by what is free
        self.blocks = choose_blocks(self.decoder, self.options)
        self._cache = KVCache(self.decoder, self.blocks, self.options.block_size)
        choice = choose_backend(self.options.attention_backend, self.decoder.layers)
        self.decisions.append(f"attention: {choice.name} ({choice.reason})")
        self._compile(choice)
        self.graphs = self._graphs(choice)
        self.executor = Executor(self.decoder, self._cache, choice.backend, self.options.block_size, self.graphs)

    def close(self) -> None:
        """Give the model back as it was."""
        while self._undo:
            self._undo.pop()()

    def _is_fast(self) -> bool:
        """Whether modules are fused and compiled, passes recorded and overlapped: where our kernels are asked for, on a
        model that is on one NVIDIA GPU, in its own precision and without hooks."""
        if self.decoder.device.type != "cuda" or self.options.attention_backend != "triton":
            return False
        model = self.loaded.model
        devices = {layer.device for layer in self.decoder.layers} | {self.decoder.device}
        hooked = any(hasattr(module, "_hf_hook") for module in model.modules())
        return len(devices) == 1 and not hooked and getattr(model, "hf_quantizer", None) is None

    def _tower(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """What encodes views: on an NVIDIA GPU another way through the same modules."""
        if not (self.fast and self.decoder.view_bytes):
            return self.decoder.encode
        tower = VisionTower(self.loaded.model, compiled=not self.options.fast_start)
        self.decisions.append(f"vision attention: {tower.attention} ({tower.reason})")
        size = self.loaded.model.config.vision_config.image_size
        with self._stage("vision tower" if self.options.fast_start else "vision tower compiled"):
            for power in range(self.options.vision_batch_size.bit_length()):  # the sizes that it cuts batches into
                tower(torch.zeros(1 << power, 3, size, size, device=self.decoder.device, dtype=self.decoder.dtype))

        def encode(pixels: torch.Tensor) -> torch.Tensor:
            return tower(pixels.to(self.decoder.device, self.decoder.dtype))

        return encode

    def _compile(self, choice: Choice) -> None:
        """Compile the layers, and all that a prefill pass needs."""
        if not self.fast:
            return
        if not self.options.fast_start:
            self.decoder.compile()
        with self._stage("prefill" if self.options.fast_start else "layers compiled for prefill"):
            self._try_out(choice)

    @torch.no_grad()
    def _try_out(self, choice: Choice) -> None:
        """One prefill pass of two rows, on the spare block."""
        spare, device = self._cache.spare, self.decoder.device
        chunk = ChunkRows(0, 2, (Segment(0, 2, image=False),), ([spare[0]] * 2, [spare[1]] * 2))
        rows = AttentionRows((chunk,), self.options.block_size, self.decoder.window)
        kinds = {layer.local for layer in self.decoder.layers}
        plans = {local: choice.backend.plan(rows, local=local, device=device) for local in kinds}

        def attend(local: bool, *others: Any) -> torch.Tensor:
            return plans[local].attend(*others)

        ids = torch.tensor([0, 0], device=device)
        hidden = self.decoder.run(
            self.decoder.embed(ids), torch.tensor([0, 1], device=device), self._cache.k, self._cache.v, attend
        )
        self.decoder.logits(hidden[0])

    def _graphs(self, choice: Choice) -> Graphs | None:
        if not (self.fast and isinstance(choice.backend, TritonBackend)):
            return None
        tokens = min(self.decoder.max_positions, self.options.block_size * max(self.blocks))
        graphs = Graphs(
            self.decoder, self._cache, choice.backend,
            decode_rows=self.options.max_num_seqs, short_rows=self.options.prefill_chunk_size,
            longest=tokens, block_size=self.options.block_size, capture=self.decoder.device.type == "cuda",
        )  # fmt: skip
        with self._stage("graphs of " + ", ".join(f"{kind} {sizes}" for kind, sizes in graphs.sizes.items())):
            for kind, size in graphs.prepare():
                log.debug("graph of a %s pass of %d rows", kind, size)
        return graphs

    @contextmanager
    def _stage(self, what: str) -> Iterator[None]:
        log.info("%s ...", what)
        started = now()
        yield
        synchronize(self.decoder.device)
        self.decisions.append(f"{what}: {now() - started:.1f} s")
        log.info("%s: %.1f s", what, now() - started)
