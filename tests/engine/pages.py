"""Sequences fed to a model runner in blocks of random order; everything that no row may read is NaN."""

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tests.small_models import SIDE, SOFT

from panscan.core import Sampling, View
from panscan.engine.model_runner import ModelRunner
from panscan.engine.options import EngineOptions
from panscan.engine.passes import PassResult
from panscan.engine.scheduling.batch import Chunk, FlatBatch, PromptLayout, SamplingRow, Sequence, ViewToEncode, flatten
from panscan.model.checkpoint import Loaded


@dataclass
class ForcedSequence:
    """A sequence, the tokens of its answer, and levels ``[48, 48, 3]`` of its views by key."""

    sequence: Sequence
    forced: list[int]
    views: dict[bytes, NDArray[np.uint8]] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether prompt and answer are computed."""
        return self.sequence.computed == self.sequence.prompt_tokens + len(self.forced)

    def next_chunk(self, draw: random.Random, most: int) -> Chunk:
        """Return some of the rest: prompt, cut outside of image spans, or the newest token."""
        sequence = self.sequence
        if sequence.computed == len(sequence.ids):
            sequence.ids.append(self.forced[len(sequence.outputs)])
        end = min(len(sequence.ids), sequence.computed + draw.randint(1, most))
        return Chunk(sequence, sequence.computed, sequence.layout.cut(sequence.computed, end))


def ask(loaded: Loaded, draw: random.Random, *, number: int = 0, longest: int = 25, outputs: int = 3) -> ForcedSequence:
    """Return a random prompt (text, and image spans with text between them) and its answer."""
    ids = _text(draw, longest)
    views: dict[bytes, NDArray[np.uint8]] = {}
    for view in range(draw.randint(0, 3) if loaded.reader.reads_images else 0):
        levels = np.random.default_rng(draw.randrange(1 << 30)).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
        views[f"{number} {view}".encode()] = levels
        ids += [SOFT] * loaded.model.config.mm_tokens_per_image + _text(draw, longest)
    sequence = Sequence(number, ids, len(ids), PromptLayout.of(ids, SOFT, list(views)), len(ids) + outputs)
    return ForcedSequence(sequence, [draw.randrange(20, 1000) for _ in range(outputs)], views)


def _text(draw: random.Random, longest: int) -> list[int]:
    return [draw.randrange(20, 1000) for _ in range(draw.randint(1, longest))]


@torch.no_grad()
def teacher(loaded: Loaded, asked: ForcedSequence) -> torch.Tensor:
    """Return logits ``[positions, vocabulary]`` of one eager forward pass over prompt and answer."""
    model, sequence = loaded.model, asked.sequence
    ids = torch.tensor([sequence.ids[: sequence.prompt_tokens] + asked.forced])
    inputs: dict[str, Any] = {"token_type_ids": (ids == SOFT).long()} if loaded.reader.reads_images else {}
    if asked.views:
        levels = torch.from_numpy(np.stack(list(asked.views.values())))
        inputs["pixel_values"] = levels.permute(0, 3, 1, 2).float() / 127.5 - 1
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        logits: torch.Tensor = model(ids, **inputs).logits[0]
    finally:
        model.set_attn_implementation(before)
    return logits


class Pages:
    """A model runner, its KV cache full of NaN, and tables that give sequences blocks of random order.

    A local block goes back, as NaN, as soon as no later row attends to it. Views get random slots.

    Args:
        loaded: the model.
        block_size: tokens per KV cache block.
        draw: source of randomness.
        options: of the runner, beside sizes.
    """

    def __init__(self, loaded: Loaded, block_size: int, draw: random.Random, **options: Any) -> None:
        sizes = {"kv_cache_gb": 0.02, "max_num_seqs": 4, "prefill_chunk_size": 64, "vision_batch_size": 2}
        self.runner = ModelRunner(loaded, EngineOptions(block_size=block_size, **{**sizes, **options}))
        for layer in self.runner.cache.layers:
            for part in layer[:2]:
                part.fill_(float("nan"))
        self.block_size = block_size
        self._window = self.runner.facts.window
        self._local = [kind == "sliding_attention" for kind in loaded.model.config.get_text_config().layer_types]
        count = self.runner.facts.slabs
        slabs = draw.sample(range(count), count)
        self._free = [slabs[: count // 2], slabs[count // 2 :]]
        self._slots: dict[bytes, int] = {}
        self._handles = itertools.count()
        self._free_slots = draw.sample(range(100), 100)

    def run(self, chunks: list[Chunk], asked: Iterable[ForcedSequence], observed: list[int]) -> PassResult:
        """Run one pass and return its result, with logits of the sampled rows, and what is known of the observed ones.

        Args:
            chunks: in the order of their rows.
            asked: what the chunks belong to, with the levels of their views.
            observed: rows to return.
        """
        for chunk in chunks:
            for kind in {*self._local}:
                table = chunk.sequence.tables[kind]
                while len(table) * self.block_size < chunk.end:
                    table.append(self._free[kind].pop())
        batch = self._flatten(chunks, {key: levels for page in asked for key, levels in page.views.items()})
        result = self.runner.execute(replace(batch, observed_rows=np.array(observed, np.int64)))()
        for chunk in chunks:
            chunk.sequence.computed = chunk.end
            self._drop_local_blocks(chunk.sequence)
        return result

    def _flatten(self, chunks: list[Chunk], views: dict[bytes, NDArray[np.uint8]]) -> FlatBatch:
        spans = [span for chunk in chunks for span in chunk.sequence.layout.within(chunk.start, chunk.end)]
        new = list(dict.fromkeys(span.key for span in spans if span.key not in self._slots))
        self._slots |= {key: self._free_slots.pop() for key in new}
        pixels = [next(self._handles) for _ in new]
        for key, handle in zip(new, pixels, strict=True):
            self.runner.pixels.put(views[key], {handle: View("whole", (0, 0, SIDE, SIDE))})
        batch = flatten(chunks, block_size=self.block_size, window=self._window or 1, slots=self._slots)
        samples = [number for number, chunk in enumerate(chunks) if chunk.samples]
        return replace(
            batch,
            encode=tuple(ViewToEncode(self._slots[key], handle) for key, handle in zip(new, pixels, strict=True)),
            sampled=batch.offsets[1:][samples].astype(np.int64) - 1,
            sampling=tuple(SamplingRow(Sampling(), 0, 0) for _ in samples),
            observed_samples=np.arange(len(samples)),
        )

    def _drop_local_blocks(self, sequence: Sequence) -> None:
        if self._window is None:
            return
        table = sequence.tables[1]
        gone = max(0, sequence.computed - self._window + 1) // self.block_size
        for index in range(min(gone, len(table))):
            if table[index] >= 0:
                rows = slice(table[index] * self.block_size, (table[index] + 1) * self.block_size)
                for layer in np.flatnonzero(self._local):
                    cache = self.runner.cache.layers[layer]
                    cache.keys[rows] = cache.values[rows] = float("nan")
                self._free[1].insert(0, table[index])
                table[index] = -1
