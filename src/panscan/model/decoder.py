"""The parts of a loaded Gemma 3 that an engine calls one by one: embedding, layers, output matrix, vision tower."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import Gemma3ForCausalLM

from panscan.model.paged_attention import NAME, Attend, attending

__all__ = [
    "Decoder",
    "LayerFacts",
]

Result = TypeVar("Result")

_LIMIT = 256
"""Compilations of one function, for all models of the process together; PyTorch's 8 is less than a few models need."""


def compiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """A function without graph breaks, compiled at its first call for all sizes but 1, which PyTorch takes for a
    constant. To be called by the thread that calls this: PyTorch 2.13 keeps the limit per thread."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _LIMIT)
    compiled_function: Callable[..., Result] = torch.compile(function, fullgraph=True, dynamic=True)
    return compiled_function


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What one layer's keys and values are: kind (``local``: sliding window), heads, type and place."""

    local: bool
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device


class Decoder:
    """A loaded ``Gemma3ForConditionalGeneration`` or ``Gemma3ForCausalLM``, its modules untouched.

    ``layers``: facts of each layer, in order. ``window``: positions that a local layer sees, its own included.
    ``device`` and ``dtype``: of embeddings and encoded views. ``hidden_size``, ``vocab_size``, ``max_positions``: of
    the text model. ``image_tokens``: of one encoded view, 0 for a model that reads text only.

    Args:
        loaded_model: in evaluation mode. Its layers may be spread over devices, as accelerate's hooks do it. One
            token runs through it at once: that tells where each layer computes, on what type and how many heads.
    """

    def __init__(self, loaded_model: Any) -> None:
        self._model = loaded_model
        self._text = getattr(loaded_model.model, "language_model", loaded_model.model)
        config = self._text.config
        self._kinds: tuple[str, ...] = tuple(config.layer_types)
        # Transformers' conditional class leaves the capping out.
        capped = isinstance(loaded_model, Gemma3ForCausalLM)
        self._softcap: float | None = config.final_logit_softcapping if capped else None
        self.window: int = config.sliding_window
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.max_positions: int = config.max_position_embeddings
        self.image_tokens: int = getattr(loaded_model.config, "mm_tokens_per_image", 0)
        self._compiled: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
        self.layers, self.device, self.dtype = self._probe()

    @property
    def view_bytes(self) -> int:
        """Of one encoded view; 0 for a model that reads text only."""
        return self.image_tokens * self.hidden_size * self.dtype.itemsize

    def working_bytes(self, *, tokens: int, rows: int, views: int) -> int:
        """Bytes that passes need beside weights and caches, generously: ``tokens`` through the layers, ``rows`` of
        logits, ``views`` through the vision tower at once.

        Per token four hidden states and three of the MLP's width, per patch the same of the tower's, in the model's
        precision; per row the logits as computed and three float32 copies; and half as much again for what the
        allocator cannot use.
        """
        text, size = self._text.config, self.dtype.itemsize
        needed: int = tokens * (4 * text.hidden_size + 3 * text.intermediate_size) * size
        needed += rows * self.vocab_size * (size + 3 * 4)
        tower = getattr(self._model.config, "vision_config", None)
        if tower is not None:
            patches = (tower.image_size // tower.patch_size) ** 2
            needed += views * patches * (4 * tower.hidden_size + 3 * tower.intermediate_size) * size
        return needed + needed // 2

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings ``[1, T, hidden]``, scaled as Gemma scales them, of int64 ids ``[T]``."""
        hidden: torch.Tensor = self._text.embed_tokens(ids[None])
        return hidden

    @torch.no_grad()
    def run(
        self, hidden: torch.Tensor, positions: torch.Tensor,
        k_caches: Sequence[torch.Tensor], v_caches: Sequence[torch.Tensor], attend: Attend,
    ) -> torch.Tensor:  # fmt: skip
        """Final hidden states ``[1, T, hidden]``, normed, of embeddings ``[1, T, hidden]``.

        Args:
            hidden: rows of any sequences, one after the other; they meet in attention only.
            positions: int64 ``[T]``, each row's place in its sequence.
            k_caches: of each layer, what ``attend`` writes keys to and reads them from; so are ``v_caches``.
            v_caches: values.
            attend: attention of all layers.
        """
        rotary = {kind: self._text.rotary_emb(hidden, positions[None], kind) for kind in set(self._kinds)}
        with self._paged(), attending(attend):
            places = [(rotary[kind], *caches) for kind, *caches in zip(self._kinds, k_caches, v_caches, strict=True)]
            if self._compiled is not None:
                return self._run_compiled(self._compiled, hidden, places)
            for layer, (rotated, k_cache, v_cache) in zip(self._text.layers, places, strict=True):
                hidden = layer(hidden, position_embeddings=rotated, k_cache=k_cache, v_cache=v_cache)
        normed: torch.Tensor = self._text.norm(hidden)
        return normed

    def _run_compiled(
        self, step: Callable[..., tuple[torch.Tensor, torch.Tensor]], hidden: torch.Tensor, places: Sequence[Any]
    ) -> torch.Tensor:
        layers = self._text.layers
        norms = [*(layer.input_layernorm for layer in layers), self._text.norm]
        normed: torch.Tensor = norms[0](hidden)
        for layer, following, place in zip(layers, norms[1:], places, strict=True):
            hidden, normed = step(layer, following, hidden, normed, *place)
        return normed

    def compile(self) -> None:
        """Compile what a layer does, once for all layers and numbers of rows; the first passes after it are slow.

        One graph for local layers and one for global ones, and again for a single row, whose size PyTorch takes for a
        constant. For a model without hooks: layers are not called as a whole, but cut behind the norm that the next
        one begins with, which then reads memory together with the sum before it.
        """
        self._compiled = compiled(_layer_and_norm)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits, float32 ``[n, vocab_size]``, of final hidden states ``[n, hidden]``, as ``generate()``
        has them: computed in the model's precision, capped where its class caps them, then upcast."""
        logits: torch.Tensor = self._model.lm_head(hidden)
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits.float()

    @torch.no_grad()
    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encoded views ``[views, image_tokens, hidden]`` of pixels ``[views, 3, size, size]``, in the embedding's type
        and on its device."""
        placed = pixels.to(self.device, self.dtype)
        features: torch.Tensor = self._model.get_image_features(placed, return_dict=True).pooler_output
        return features.to(self.device, self.dtype)

    def _probe(self) -> tuple[tuple[LayerFacts, ...], torch.device, torch.dtype]:
        """Facts of the layers, and place and type of an embedding: seen, as they depend on hooks and quantisation."""
        seen: list[LayerFacts] = []

        def attend(local: bool, query: torch.Tensor, key: torch.Tensor, *_: Any) -> torch.Tensor:
            seen.append(LayerFacts(local, key.shape[1], key.shape[3], key.dtype, key.device))
            return torch.zeros_like(query).transpose(1, 2)

        place = self._text.embed_tokens.weight.device
        ids = torch.zeros(1, dtype=torch.long, device="cpu" if place.type == "meta" else place)  # hooks take it along
        hidden = self.embed(ids)
        nothing = [hidden] * len(self._kinds)
        self.run(hidden, torch.zeros(1, dtype=torch.long, device=hidden.device), nothing, nothing, attend)
        return tuple(seen), hidden.device, hidden.dtype

    @contextmanager
    def _paged(self) -> Iterator[None]:
        """Attention by name while the layers run; the same model serves ``generate()`` between passes."""
        config = self._text.config
        before = config._attn_implementation
        config._attn_implementation = NAME
        try:
            yield
        finally:
            config._attn_implementation = before


def _layer_and_norm(
    layer: Any, following: Any, hidden: torch.Tensor, normed: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor], k_cache: torch.Tensor, v_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """A layer without its first norm, and the norm that follows it: the sum, and the sum normed."""
    attended, _ = layer.self_attn(
        hidden_states=normed, position_embeddings=rotary, attention_mask=None, k_cache=k_cache, v_cache=v_cache
    )
    hidden = hidden + layer.post_attention_layernorm(attended)
    activated = layer.mlp(layer.pre_feedforward_layernorm(hidden))
    hidden = hidden + layer.post_feedforward_layernorm(activated)
    return hidden, following(hidden)
