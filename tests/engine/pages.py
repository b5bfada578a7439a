"""Small models, and sequences fed to an executor in blocks handed out at random; what nobody owns is NaN."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from panscan.engine.attention import SegmentsBackend
from panscan.engine.executor import Executor, Pass
from panscan.engine.kv_memory import KVCache
from panscan.engine.scheduling.sequence import Chunk, PromptLayout, Sequence, Step
from panscan.model.decoder import Decoder
from panscan.model.random_weights import random_model
from panscan.model.shapes import SHAPES, Shape, VisionShape

BLOCKS = 400
SOFT = 9  # the id of image tokens

_TEXT = replace(SHAPES["tiny"].text, hidden=64, intermediate=96, layers=4, heads=2, kv_heads=1, pattern=2, window=7)
_EYES = VisionShape(hidden=16, intermediate=24, layers=1, heads=2, image_size=48, patch_size=4)
MODELS: dict[str, Shape] = {
    "window inside image blocks": Shape("t", _TEXT, _EYES, 16),
    "four query heads to a kv head": Shape("t", replace(_TEXT, heads=4, head_size=48, window=12), _EYES, 9),
    "a head of its own": Shape("t", replace(_TEXT, kv_heads=2, head_size=16, window=30, pattern=3), _EYES, 4),
    "global layers only": Shape("t", replace(_TEXT, pattern=1), _EYES, 9),
    "local layers only": Shape("t", replace(_TEXT, pattern=6), _EYES, 16),
    "text only": Shape("t", _TEXT, None, 0),
}


@cache
def model_of(name: str) -> Any:
    """A random model in float32. The text-only one caps its logits, as its class does and the other does not."""
    model, _ = random_model(MODELS[name], dtype=torch.float32, device="cpu")
    model.config.get_text_config().final_logit_softcapping = 0.5
    return model


@cache
def decoder_of(name: str) -> Decoder:
    return Decoder(model_of(name))


@dataclass
class Asked:
    """A sequence, the tokens that will be forced, and pixels of its views by key."""

    sequence: Sequence
    forced: list[int]
    pixels: dict[bytes, torch.Tensor]


def ask(name: str, draw: random.Random, *, number: int = 0, longest: int = 25, outputs: int = 3) -> Asked:
    """A random prompt: text, image blocks with text between or next to each other's marks, text; and its answer."""
    shape = MODELS[name]
    ids: list[int] = [draw.randrange(20, 1000) for _ in range(draw.randint(1, longest))]
    pixels: dict[bytes, torch.Tensor] = {}
    for view in range(draw.randint(0, 3) if shape.vision is not None else 0):
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        pixels[f"{number} {view}".encode()] = torch.rand(3, 48, 48, generator=generator) * 2 - 1
        ids += [SOFT] * shape.image_tokens + [draw.randrange(20, 1000) for _ in range(draw.randint(1, longest))]
    sequence = Sequence(number, ids, len(ids), PromptLayout.of(ids, SOFT, list(pixels)), len(ids) + outputs)
    return Asked(sequence, [draw.randrange(20, 1000) for _ in range(outputs)], pixels)


@torch.no_grad()
def teacher(name: str, asked: Asked) -> torch.Tensor:
    """Logits ``[positions, vocabulary]`` of one eager forward pass over prompt and answer."""
    model = model_of(name)
    ids = torch.tensor([asked.sequence.ids[: asked.sequence.prompt_tokens] + asked.forced])
    inputs: dict[str, Any] = {"input_ids": ids}
    if MODELS[name].vision is not None:
        inputs["token_type_ids"] = (ids == SOFT).long()
    if asked.pixels:
        inputs["pixel_values"] = torch.stack(list(asked.pixels.values()))
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        logits: torch.Tensor = model(**inputs).logits[0]
    finally:
        model.set_attn_implementation(before)
    return logits


class Pages:
    """An executor whose cache holds NaN wherever no sequence has a right to read."""

    def __init__(self, name: str, block_size: int, draw: random.Random) -> None:
        self.decoder, self.block_size = decoder_of(name), block_size
        self.cache = KVCache(self.decoder, (BLOCKS, BLOCKS), block_size)
        for tensor in (*self.cache.k, *self.cache.v):
            tensor.fill_(float("nan"))
        self.free = [draw.sample(range(BLOCKS), BLOCKS) for _ in range(2)]
        self.executor = Executor(self.decoder, self.cache, SegmentsBackend(), block_size)

    def run(self, chunks: Iterable[Chunk], features: dict[bytes, torch.Tensor]) -> Pass:
        """One pass; hidden states of all its positions."""
        step = Step(list(chunks))
        for chunk in step.chunks:
            for free, table in zip(self.free, chunk.sequence.tables, strict=True):
                while len(table) * self.block_size < chunk.end:
                    table.append(free.pop())
        places = {chunk.sequence: range(chunk.start, chunk.end) for chunk in step.chunks}
        done = self.executor.run(step, features.__getitem__, places)
        for chunk in step.chunks:
            chunk.sequence.computed = chunk.end
            self._leave(chunk.sequence)
        return done

    def _leave(self, sequence: Sequence) -> None:
        """Take back local blocks that no later row sees."""
        table = sequence.tables[1]
        gone = max(0, sequence.computed - self.decoder.window + 1) // self.block_size
        for index in range(min(gone, len(table))):
            if table[index] >= 0:
                rows = slice(table[index] * self.block_size, (table[index] + 1) * self.block_size)
                for layer, facts in enumerate(self.decoder.layers):
                    if facts.local:
                        self.cache.k[layer][rows] = self.cache.v[layer][rows] = float("nan")
                self.free[1].insert(0, table[index])
                table[index] = -1
