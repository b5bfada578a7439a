"""A model runner owns everything on one device and computes passes: weights, KV cache, vision, attention, sampler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from panscan.core import Sampling, UnsupportedError, now
from panscan.engine import triton_attention
from panscan.engine.attention import KVCache, SegmentsBackend
from panscan.engine.graphs import Graphs
from panscan.engine.options import EngineOptions
from panscan.engine.passes import PassResult, RunnerFacts, WaitForPass
from panscan.engine.sampling import PendingTokens, Sampler, read_scores, score_tokens
from panscan.engine.scheduling.batch import Chunk, FlatBatch, SamplingRow, Sequence, flatten
from panscan.engine.scheduling.graph_sizes import graph_sizes
from panscan.engine.scheduling.kv_blocks import KVBlocks
from panscan.engine.scheduling.kv_sizes import (
    DeviceMemory,
    KVShape,
    MemoryBudget,
    MemoryFacts,
    choose_slabs,
    gpu_working_bytes,
    pass_rows,
)
from panscan.engine.triton_attention import TritonBackend
from panscan.engine.views import PixelStore, ViewFeatures
from panscan.images.pixels import PixelSpec
from panscan.images.resize import Resize, by_pillow, choose_resize
from panscan.images.transfer import upload
from panscan.model.checkpoint import Loaded
from panscan.model.layers import LayerFacts, OutputRows, text_layers, vision_layers
from panscan.model.linear.tuning import choose_methods
from panscan.model.linear.vocabulary import VocabularyMatrix
from panscan.model.machine import (
    GraphRecorder,
    Readback,
    is_out_of_memory,
    keep_freed_memory,
    limit_process_memory,
    measure_memory,
    record_event,
    release_memory,
    synchronize,
)
from panscan.model.phases import phase
from panscan.model.quantization import layer_matrices, weights_name
from panscan.model.runtime import forbid_tf32
from panscan.model.sharding import SINGLE_RANK, Ranks
from panscan.model.support import kv_cache_reason

log = logging.getLogger("panscan.engine")

_KV_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_USUAL_TOKENS = 1024, 4096
_USUAL_VIEWS = 8  # views in a pass of 2,048 prompt tokens, at most


class ModelRunner:
    """The model, caches and kernels of one device, or of one rank, which compute passes.

    ``facts``: properties that the loop needs. ``cache``: keys and values. ``graphs``: recorded passes, or None.
    ``pixels``: pixels that wait for the vision tower.

    Args:
        loaded: the model; with several ranks, this rank's shard. Between passes it serves ``generate()``.
        options: sizes, attention backend and preprocessing.
        ranks: the processes that share the model.

    Raises:
        SettingError: a cache size that is too small.
        UnsupportedError: a backend that cannot run here, layers on several devices, or too little memory.
    """

    def __init__(self, loaded: Loaded, options: EngineOptions, ranks: Ranks = SINGLE_RANK) -> None:
        self._loaded, self._options, self._ranks = loaded, options, ranks
        self._decisions: list[str] = []
        self._closing = ExitStack()
        self.graphs: Graphs | None = None
        self._pixel_bytes: int | None = None  # limit for waiting pixels on the device
        self._previous: torch.Tensor | None = None  # tokens that the last pass sampled, on the device
        self._logits: torch.Tensor | None = None  # of the last pass, until they are sampled
        self._sampled: list[PendingTokens] = []  # of the last pass, once they are
        try:
            self._start()
        except BaseException as error:  # includes KeyboardInterrupt: memory limits must be lifted
            self.stop()
            if is_out_of_memory(error):
                raise UnsupportedError(
                    "out of memory at engine startup: lower --kv-cache-gb, --max-num-seqs or --vision-batch-size"
                ) from error
            raise

    def stop(self) -> None:
        """Lift the memory limit. Memory is freed with the last reference to the runner."""
        self._closing.close()

    @torch.no_grad()
    def execute(self, batch: FlatBatch) -> WaitForPass:
        """Launch a pass without waiting for the GPU; on other devices, compute it.

        Passes run in the order of their launches. Pending tokens are those of the previously launched pass.
        """
        vision = self._encode(batch)
        # Pending ids come from the previous pass, on the device.
        ids = upload(batch.ids, self._device)
        if len(batch.pending_rows):
            assert self._previous is not None  # its pass was launched
            ids[upload(batch.pending_rows, self._device)] = self._rows(self._previous, batch.pending_sources)
        embedded = self._text.embed(ids)
        self._features.fill(embedded, batch.images)
        sampled, final = self._layers(batch, embedded)
        sampled_logits = self._text.logits(sampled)
        observed = answers = None
        if len(batch.observed_rows):
            observed = self._text.logits(self._rows(final, batch.observed_rows))
        if len(batch.observed_samples):
            answers = self._rows(sampled_logits, batch.observed_samples)
        scores = Readback.of()
        if len(batch.scored_rows):
            rows, ids = self._rows(final, batch.scored_rows), upload(batch.scored_ids, self._device)
            scores = score_tokens(rows, ids, batch.scored_top, self._text.logits, self._options.max_num_seqs)
        self._logits, self._sampled = sampled_logits, []
        if batch.sampling is not None:
            self.sample(batch.sampling)
        pending = self._sampled

        def wait() -> PassResult:
            [sampled] = pending
            tokens, logprobs = sampled.wait()
            finished_at, done = now(), sampled.readback.done
            encoded = vision
            if vision is not None and done is not None:
                # Events have no time of their own, only that between two of them.
                start, end = (finished_at - float(event.elapsed_time(done)) / 1e3 for event in vision)
                encoded = start, end
            logits, sampled_from = (None if tensor is None else tensor.float().cpu() for tensor in (observed, answers))
            return PassResult(tokens, logprobs, finished_at, encoded, logits, sampled_from, read_scores(scores))

        return wait

    def sample(self, rows: tuple[SamplingRow, ...]) -> None:
        """Sample the tokens of the last launched pass, one per row; on a GPU, without waiting for it."""
        assert self._logits is not None  # its pass was launched
        tokens = self._sampler.launch(self._logits, rows)
        self._logits, self._previous = None, tokens.tokens
        self._sampled.append(tokens)

    def _start(self) -> None:
        forbid_tf32()
        options, model = self._options, self._loaded.model
        if reason := kv_cache_reason(options.kv_cache_dtype, torch.device(self._loaded.device)):
            raise UnsupportedError(reason)
        kv_dtype = _KV_DTYPES.get(options.kv_cache_dtype)
        self._text = text_layers(model, self._ranks, vocab_size=self._loaded.vocab_size, kv_dtype=kv_dtype)
        self._device = self._text.device
        self._on_gpu = self._device.type == "cuda"
        self._shape = KVShape.of(self._text.layers)
        self._graph_sizes = graph_sizes(options.max_num_seqs, options.prefill_chunk_size, self._ranks.size)
        self._backend, attention = choose_backend(options.attention_backend, self._text.layers[0])
        recorded_rows = options.max_num_seqs
        if self._on_gpu:
            torch.cuda.set_device(self._device)  # graphs go to this thread's current device
            budget = MemoryBudget.of(self._options, torch.cuda.mem_get_info(self._device)[1])
            held = torch.cuda.memory_allocated(self._device)
            budget.check_weights(held, str(self._device))
            self._closing.callback(limit_process_memory(self._device, budget.bytes))
            self._pixel_bytes = budget.pixel_bytes
            recorded_rows = budget.recorded_rows(held, options.max_num_seqs)
        elif self._device.type == "cpu":
            keep_freed_memory()
        self._choose_matmul_methods()
        self._log_decision(f"attention: {self._backend.name} ({attention})")
        if isinstance(self._backend, TritonBackend):
            self._text.use_kernels()
        slow = self._slow_reason()
        if slow is not None:
            self._log_decision(f"layers: launched one by one ({slow})")
        self._sampler = Sampler(model.generation_config.suppress_tokens or [], self._device)
        self._recorder = GraphRecorder(self._device, capture=self._on_gpu)
        if slow is None and recorded_rows:
            with self._stage(f"CUDA graphs of the sampler, up to {recorded_rows} rows"):
                self._sampler.record(self._recorder, self._text.vocab_size, recorded_rows)
        self._start_vision()
        self._start_cache()
        if slow is None:
            self._record_graphs()
        local = any(layer.local for layer in self._text.layers)
        self.facts = RunnerFacts(
            device=self._device.type,
            overlaps=(slow is None),
            window=self._text.window if local else None,
            max_positions=self._text.max_positions,
            kv_shape=self._shape,
            slabs=self._slabs,
            view_bytes=self._view_bytes,
            pixel_bytes=None if self._pixel_bytes is None else self._pixel_bytes * self._ranks.size,
            decisions=tuple(self._decisions),
        )

    def _choose_matmul_methods(self) -> None:
        """Choose kernels or libraries for quantised matrix products, before graphs are recorded."""
        name = weights_name(self._loaded.model)
        if name is None:
            return
        methods = choose_methods(layer_matrices(self._loaded.model), self._text.dtype, self._ranks.all_reduce_min)
        self._log_decision(f"weights: {name} ({'; '.join(methods)})" if methods else f"weights: {name}")
        head = self._loaded.model.get_output_embeddings()
        if self._on_gpu and isinstance(head, VocabularyMatrix):
            with self._stage("output matrix warm-up"):
                for rows in head.compiled_rows(self._options.max_num_seqs):
                    self._text.logits(torch.zeros(rows, head.in_features, dtype=self._text.dtype, device=self._device))

    def _start_vision(self) -> None:
        loaded, options = self._loaded, self._options
        self._vision = vision_layers(loaded.model, self._ranks) if loaded.reader.reads_images else None
        self._image_tokens = 0 if self._vision is None else self._vision.image_tokens
        self._view_bytes = self._image_tokens * self._text.hidden_size * self._text.dtype.itemsize
        spec = loaded.reader.pixels or PixelSpec()
        resize: Resize = by_pillow
        if self._vision is not None:
            resize, name = choose_resize(options.preprocess, spec, self._device)
            self._log_decision(f"view resizing: {name}")
        self.pixels = PixelStore(self._device, loaded.dtype, spec, self._pixel_bytes, resize)
        encode = self._vision or torch.nn.Identity()  # without vision layers, no pass has views
        self._features = ViewFeatures(encode, self.pixels, options.vision_batch_size, self._ranks)
        if self._vision is None or not self._on_gpu:
            return
        self._log_decision(f"vision attention: {self._vision.attention} ({self._vision.reason})")
        with self._stage("vision warm-up"):
            most = options.vision_batch_size
            counts = (*range(1, min(most, _USUAL_VIEWS) + 1), *(1 << power for power in range(most.bit_length())))
            for size in sorted({size for count in counts for size in self._vision.batch_sizes(count)}):
                self._try_vision(size)

    def _start_cache(self) -> None:
        options, text = self._options, self._text
        working, on_gpu = self._working_bytes(), self._on_gpu
        release_memory()  # the cache is sized by free memory
        facts = MemoryFacts(
            shape=self._shape,
            device=str(self._device),
            on_gpu=on_gpu,
            working_bytes=working,
            view_bytes=self._view_bytes,
            max_positions=text.max_positions,
            sharers=options.memory_sharers * (1 if on_gpu else self._ranks.size),
            holders=options.memory_holders,
        )
        memory = DeviceMemory(*measure_memory(self._device))
        [self._slabs] = self._ranks.all_reduce_min([choose_slabs(facts, options, memory)])
        self.cache = KVCache(text.layers, self._slabs, options.block_size)
        size = self._slabs * facts.shape.slab_bytes(options.block_size)
        blocks = KVBlocks(facts.shape, self._slabs, block_size=options.block_size, window=text.window)
        room = " or ".join(
            f"{blocks.concurrent(tokens, options.prefill_chunk_size):,} of {tokens:,}" for tokens in _USUAL_TOKENS
        )
        self._log_decision(f"KV cache: {size / 1e9:.3g} GB, requests at once by tokens: {room}")

    def _working_bytes(self) -> int:
        """Return the bytes that passes need in addition to weights and caches: measured on a GPU, else estimated."""
        options, text = self._options, self._text
        tokens = pass_rows(options, self._image_tokens)
        if not self._on_gpu:
            vision = 0 if self._vision is None else self._vision.working_bytes(options.vision_batch_size)
            return text.working_bytes(tokens=tokens, rows=options.max_num_seqs) + vision
        with self._stage("working memory of the largest pass"):
            views = partial(self._try_vision, options.vision_batch_size)
            largest = max(self._peak_of(partial(self._try_text, tokens)), self._peak_of(views))
        graphs = text.working_bytes(tokens=max(map(sum, self._graph_sizes)), rows=0)
        return gpu_working_bytes(largest_pass=largest, graphs=graphs, pixels=self._pixel_bytes or 0)

    def _peak_of(self, run: Callable[[], None]) -> int:
        """Return the peak GPU bytes that ``run`` allocates, without those allocated before."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        run()
        peak: int = torch.cuda.max_memory_allocated(self._device)
        return peak - before

    @torch.no_grad()
    def _try_text(self, rows: int) -> None:
        """Run the largest prefill pass on a cache of one block, and sample ``max_num_seqs`` tokens."""
        options, text = self._options, self._text
        cache = KVCache(text.layers, 0, options.block_size)
        blocks = [cache.spare] * -(-rows // options.block_size)
        sequence = Sequence(0, [0] * rows, tables=(blocks, blocks))
        batch = flatten([Chunk(sequence, 0, rows)], block_size=options.block_size, window=text.window)
        final = self._eager(batch, text.embed(upload(batch.ids, self._device)), cache)
        logits = text.logits(final[:1].expand(options.max_num_seqs, -1))
        mask = np.full(-(-logits.shape[-1] // 8), 0xFF, np.uint8)
        for top_k in (None, 128, logits.shape[-1]):  # a search in the vocabulary, few candidates, all ids
            row = SamplingRow(Sampling(temperature=1.0, top_k=top_k, top_p=0.9), 0, 0, allowed=mask)
            self._sampler.launch(logits, [row] * options.max_num_seqs).wait()

    def _try_vision(self, count: int) -> None:
        """Encode a batch of blank views."""
        if self._vision is not None:
            size = (self._loaded.reader.pixels or PixelSpec()).size
            self._vision(torch.zeros(count, 3, size, size, device=self._device, dtype=self._loaded.dtype))

    def _record_graphs(self) -> None:
        options, text = self._options, self._text
        assert isinstance(self._backend, TritonBackend)  # else the layers are slow
        self.graphs = Graphs(
            text,
            self.cache,
            self._backend,
            sizes=self._graph_sizes,
            longest=min(text.max_positions, options.block_size * max(self._shape.slab_blocks) * self._slabs),
            block_size=options.block_size,
            recorder=self._recorder,
        )
        decode, chunks = (max(rows) for rows in zip(*self.graphs.sizes, strict=True))
        with self._stage(f"{len(self.graphs.sizes)} CUDA graphs: up to {decode} decode + {chunks} prefill rows"):
            self.graphs.prepare()

    def _slow_reason(self) -> str | None:
        """Return why passes are neither recorded nor overlapped; None if they are."""
        model = self._loaded.model
        reasons = {
            "not on an NVIDIA GPU": not self._on_gpu,
            "attention is PyTorch's": not isinstance(self._backend, TritonBackend),
            "hooks on its modules": any(hasattr(module, "_hf_hook") for module in model.modules()),
            "quantised": getattr(model, "hf_quantizer", None) is not None,
            "norms or activation are not Gemma 3's own": not self._text.kernels,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _encode(self, batch: FlatBatch) -> tuple[Any, Any] | None:
        """Encode the views of a pass; return the start and the end, as CUDA events or else as times on the host."""
        if not batch.encode:
            return None
        start = record_event(self._device) if self._on_gpu else now()
        like = torch.empty(0, self._image_tokens, self._text.hidden_size, dtype=self._text.dtype, device=self._device)
        with phase("vision"):
            self._features.encode(batch.encode, like)
        if self._on_gpu:
            return start, record_event(self._device)
        synchronize(self._device)
        return start, now()

    def _layers(self, batch: FlatBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return final hidden states of the sampled rows, and of all rows, from a graph if one is large enough.

        Without observed and scored rows, a pass that is not recorded computes only the sampled rows of the last layer.
        """
        final = None if self.graphs is None else self.graphs.run(batch, hidden)
        needed = len(batch.observed_rows) or len(batch.scored_rows)
        if final is None and not needed and len(batch.sampled) < batch.rows:
            local = self._text.layers[-1].local
            plan = self._backend.plan(batch.sampled_rows(), local=local, device=self._device)
            sampled = self._eager(batch, hidden, self.cache, OutputRows(upload(batch.sampled, self._device), plan))
            return sampled, sampled[:0]
        if final is None:
            final = self._eager(batch, hidden, self.cache)
        return self._rows(final, batch.sampled), final

    def _eager(
        self, batch: FlatBatch, hidden: torch.Tensor, cache: KVCache, output: OutputRows | None = None
    ) -> torch.Tensor:
        kinds = {layer.local for layer in self._text.layers}
        plans = {local: self._backend.plan(batch, local=local, device=self._device) for local in kinds}
        return self._text.run(hidden, upload(batch.positions, self._device), cache.layers, plans, output)

    def _rows(self, tensor: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
        return tensor.index_select(0, upload(rows, tensor.device))

    @contextmanager
    def _stage(self, what: str) -> Iterator[None]:
        log.info("%s ...", what)
        started = now()
        yield
        synchronize(self._device)
        self._log_decision(f"{what}: {now() - started:.1f} s")

    def _log_decision(self, decision: str) -> None:
        """Record a startup decision and log it: at level INFO on a GPU, where startup takes longer, else DEBUG."""
        self._decisions.append(decision)
        log.log(logging.INFO if self._on_gpu else logging.DEBUG, "%s", decision)


def choose_backend(name: str, layer: LayerFacts) -> tuple[SegmentsBackend | TritonBackend, str]:
    """Return the attention backend for a model's layers, and why it was chosen.

    Args:
        name: ``triton`` (ours), ``sdpa`` (PyTorch's, sequence by sequence), or ``auto``: ours on NVIDIA GPUs that take
            them, PyTorch's elsewhere.
        layer: any layer; all have the same head size, dtype and device.

    Raises:
        UnsupportedError: the requested kernels cannot run here.
    """
    if name == "sdpa":
        reason: str | None = "requested"
    elif name == "auto" and layer.device.type != "cuda":
        reason = "not on an NVIDIA GPU"
    else:
        reason = triton_attention.unsupported_reason(layer.head_size, layer.dtype, layer.device)
    if reason is not None:
        if name == "triton":
            raise UnsupportedError(f"--attention-backend triton: {reason}; use auto")
        return SegmentsBackend(), reason
    from panscan.engine.kernels import decode_units

    why = "requested" if name == "triton" else "on an NVIDIA GPU"
    return TritonBackend(layer.head_size, layer.dtype, decode_units(layer.kv_heads, layer.device)), why
