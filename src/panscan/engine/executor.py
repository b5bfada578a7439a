"""One pass through the decoder: a step's chunks become logits, their keys and values fill the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import torch

from panscan.engine.attention import AttentionRows, Backend
from panscan.engine.kv_memory import KVCache
from panscan.engine.sequence import Sequence, Step
from panscan.model.decoder import Decoder

__all__ = ["Executor", "Pass"]


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass gave.

    Args:
        logits: float32 ``[n, vocabulary]`` of the step's chunks that sample, in their order.
        hidden: final hidden states ``[places, hidden]`` of each sequence at those of its places that were computed.
    """

    logits: torch.Tensor
    hidden: dict[Sequence, torch.Tensor]


class Executor:
    """Runs steps on a decoder, a cache and a backend of attention.

    Args:
        decoder: the model.
        cache: of its keys and values.
        backend: of attention.
        block_size: tokens of a block of the cache.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, backend: Backend, block_size: int) -> None:
        self._decoder, self._cache, self._backend, self._block_size = decoder, cache, backend, block_size

    @torch.no_grad()
    def run(
        self, step: Step, features: Callable[[bytes], torch.Tensor], places: Mapping[Sequence, Rows[int]] | None = None
    ) -> Pass:
        """Compute a step.

        Args:
            step: its chunks; blocks of their positions are in the sequences' tables.
            features: encoded view ``[image tokens, hidden]`` by its key.
            places: positions whose final hidden states are wanted; those outside of a sequence's chunk are left out.
        """
        hidden = self._decoder.run(self._embed(step, features), self._positions(step), self._layer_arguments(step))[0]
        sampled, watched, at = [], {}, 0
        for chunk in step.chunks:
            shift = at - chunk.start
            at = chunk.end + shift
            if chunk.samples:
                sampled.append(at - 1)
            wanted = (places or {}).get(chunk.sequence, ())
            if rows := [place + shift for place in wanted if chunk.start <= place < chunk.end]:
                watched[chunk.sequence] = hidden[torch.tensor(rows, device=hidden.device)]
        last = torch.tensor(sampled, dtype=torch.long, device=hidden.device)
        return Pass(self._decoder.logits(hidden[last]), watched)

    def _embed(self, step: Step, features: Callable[[bytes], torch.Tensor]) -> torch.Tensor:
        """``[1, T, hidden]``: embeddings of ids, and encoded views in the places of their blocks."""
        ids = [token for chunk in step.chunks for token in chunk.sequence.ids[chunk.start : chunk.end]]
        hidden = self._decoder.embed(torch.tensor(ids, device=self._decoder.device))
        at = 0
        for chunk in step.chunks:
            shift = at - chunk.start
            for span in chunk.sequence.layout.within(chunk.start, chunk.end):
                hidden[0, span.start + shift : span.end + shift] = features(span.key)
            at = chunk.end + shift
        return hidden

    def _positions(self, step: Step) -> torch.Tensor:
        positions = [position for chunk in step.chunks for position in range(chunk.start, chunk.end)]
        return torch.tensor(positions, device=self._decoder.device)

    def _layer_arguments(self, step: Step) -> Callable[[int], dict[str, Any]]:
        """What each layer is called with: attention planned once for all layers of a kind on a device."""
        rows = AttentionRows.of(step, self._block_size, self._decoder.window)
        kinds = {(layer.local, layer.device) for layer in self._decoder.layers}
        plans = {kind: self._backend.plan(rows, local=kind[0], device=kind[1]) for kind in kinds}

        def arguments(index: int) -> dict[str, Any]:
            layer = self._decoder.layers[index]
            plan = plans[layer.local, layer.device]

            def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
                return plan.attend(query, key, value, self._cache.k[index], self._cache.v[index], scaling)

            return {"attend": attend}

        return arguments
