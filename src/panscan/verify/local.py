"""What the same weights answer on this machine, under the reference and under each hypothesis."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256

import numpy as np
import torch

from panscan.core import Request
from panscan.core.activity import activity
from panscan.core.foreign import JsonObject
from panscan.core.lru import LruCache
from panscan.model.checkpoint import Loaded
from panscan.model.inputs import read_images
from panscan.model.load import load_for
from panscan.model.machine import release_memory
from panscan.model.runtime import reference_computation
from panscan.runners.observe import observe
from panscan.settings import Settings
from panscan.verdict.evidence import Distributions, TokenIndex
from panscan.verdict.float32 import converted_model, head_logits, one_view_at_a_time
from panscan.verdict.reference import eager_settings
from panscan.verify.changes import (
    ChangedPrompt,
    changed_model,
    changed_pixels,
    changed_prompt,
    final_states,
    rope_factor,
)
from panscan.verify.hypotheses import CHANGES, HYPOTHESES, Changes, Hypothesis


@dataclass(slots=True)
class _KnownRequest:
    """A request, which must live as long as its id is a key; its decoded images; the hypotheses that change it."""

    request: Request
    read: Request
    hypotheses: list[Hypothesis] | None = None


class LocalModel:
    """A checkpoint loaded on this machine, which computes one request at a time (see :func:`open_local`).

    All hypotheses apply to all requests: changes that do not concern a request have no effect on it. Computations use
    float32 and eager attention. Weights are upcast part by part, so a model of any size needs room for one float32
    layer beside itself. Hypotheses that give a request the same computation share one cached result.

    Args:
        loaded: unquantised weights.
        settings: those that it was loaded with.

    Raises:
        UnsupportedError: the weights are quantised, offloaded or split over processes.
    """

    def __init__(self, loaded: Loaded, settings: Settings) -> None:
        self._loaded, self._settings = loaded, settings
        self.vocabulary = int(loaded.model.get_output_embeddings().weight.shape[0])
        self.tokens = TokenIndex(loaded.reader.tokenizer, self.vocabulary, loaded.eos_ids)
        self._requests: LruCache[int, _KnownRequest] = LruCache(32)
        self._features: LruCache[Hashable, torch.Tensor] = LruCache(96)  # of views
        self._states: LruCache[Hashable, torch.Tensor] = LruCache(512)
        with converted_model(loaded.model, torch.float32):
            pass  # raises where weights cannot be converted

    @property
    def view_size(self) -> int | None:
        """Pixels of a view's side; None: the checkpoint reads no images."""
        spec = self._loaded.reader.pixels
        return None if spec is None else spec.size

    @property
    def positions(self) -> int:
        """Positions of the checkpoint's context."""
        return int(self._loaded.model.config.get_text_config().max_position_embeddings)

    def hypotheses(self, request: Request) -> list[Hypothesis]:
        """Return the hypotheses that change this request, most frequent first, without the reference.

        In a combination, every change has an effect in addition to the others.
        """
        known = self._known(request)
        if known.hypotheses is None:
            known.hypotheses = [
                hypothesis
                for hypothesis in HYPOTHESES
                if all(self._has_effect(request, c, hypothesis.changes) for c in hypothesis.changes)
            ]
        return list(known.hypotheses)

    def log_probabilities(self, request: Request, tokens: Sequence[int], hypothesis: Hypothesis) -> Distributions:
        """Return natural log-probabilities ``[tokens, vocabulary]`` before each token of a given answer.

        Args:
            request: the question.
            tokens: the answer's token ids. The last one is compared, never read.
            hypothesis: the computation.

        Raises:
            ImageError: an image cannot be read.
            SettingError: the prompt is invalid, or longer than the context.
        """
        return self._distributions(request, tokens, hypothesis.changes, torch.float32)

    def noise(self, request: Request, tokens: Sequence[int]) -> Distributions:
        """Return the same for the reference computed in bfloat16: the rounding error of a correct server."""
        return self._distributions(request, tokens, (), torch.bfloat16)

    def greedy(self, request: Request, steps: int) -> list[int]:
        """Return the reference's own answer: at most ``steps`` tokens, with the end token if it was reached."""
        model = self._loaded.model
        with converted_model(model, torch.float32), one_view_at_a_time(model):
            settings = eager_settings(self._settings, "cpu", steps)
            [seen] = observe(self._loaded, settings, [self._known(request).read], steps=steps, dtype=torch.float32)
        return seen.tokens

    def prompt_tokens(self, request: Request, hypothesis: Hypothesis) -> int:
        """Return the length of the prompt under a hypothesis."""
        return len(self._prompt(request, hypothesis.changes).ids)

    def inputs(self, request: Request) -> JsonObject:
        """Return the page sizes, views and image tokens of a request, as JSON values."""
        plans = self._prompt(request, ()).plans
        views = sum(len(plan.views) for plan in plans)
        return {
            "pixels": [f"{plan.width}x{plan.height}" for plan in plans],
            "views": views,
            "image_tokens": views * self._loaded.reader.prompts.image_tokens,
        }

    @torch.no_grad()
    def _distributions(
        self, request: Request, tokens: Sequence[int], changes: Changes, dtype: torch.dtype
    ) -> Distributions:
        if not tokens:
            return np.empty((0, self.vocabulary), np.float32)
        prompt, model = self._prompt(request, changes), self._loaded.model
        spec = self._loaded.reader.pixels
        pixels = None if spec is None or not prompt.images else changed_pixels(prompt, changes, spec)
        digest = b"" if pixels is None else _pixels_digest(pixels)
        computed = frozenset(c for c in changes if self._computes(prompt, c))

        def compute() -> torch.Tensor:
            with changed_model(model, computed, dtype):
                features = None if pixels is None else self._view_features(pixels, dtype)
                ids = [*prompt.ids, *tokens[:-1]]
                soft_id = self._loaded.reader.prompts.soft_id
                return final_states(model, ids, features, soft_id, len(tokens), computed).float().cpu()

        key = (tuple(prompt.ids), tuple(tokens), digest, computed, dtype)
        hidden = self._states.computed(key, compute)
        scores: Distributions = head_logits(model, hidden).log_softmax(-1).cpu().numpy()
        return scores

    def _view_features(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Features ``[views, image tokens, hidden]``; no change of the model concerns the vision tower."""

        def encode(view: torch.Tensor) -> torch.Tensor:
            batch = view[None].to(self._loaded.device, dtype)
            features: torch.Tensor = self._loaded.model.model.get_image_features(batch, return_dict=True).pooler_output
            return features[0].cpu()

        return torch.stack(
            [self._features.computed((_pixels_digest(view), dtype), partial(encode, view)) for view in pixels]
        )

    def _computes(self, prompt: ChangedPrompt, change: str) -> bool:
        """Return whether a change affects the model's computation for a prompt."""
        text, images = self._loaded.model.config.get_text_config(), len(prompt.images)
        match CHANGES[change].aspect:
            case "mask":
                views = sum(len(plan.views) for plan in prompt.plans)
                return views > (1 if change == "joined-image-blocks" else 0)
            case "features":
                return images > 0
            case "window":
                return len(prompt.ids) > int(text.sliding_window)
            case "rope":
                return rope_factor(self._loaded.model) != 1
            case "scale":
                scale = self._loaded.model.get_input_embeddings().embed_scale
                return bool(float(scale) != float(torch.tensor(text.hidden_size**0.5)))
            case aspect:
                return aspect == "weights"

    def _has_effect(self, request: Request, change: str, others: Changes) -> bool:
        """Return whether a change affects a request, in addition to others."""
        others = [other for other in others if other != change]
        plain, changed = self._prompt(request, others), self._prompt(request, [*others, change])
        if plain.ids != changed.ids or plain.plans != changed.plans or len(plain.images) != len(changed.images):
            return True
        if CHANGES[change].aspect in ("channels", "normalisation"):
            return bool(plain.images)
        if CHANGES[change].aspect == "resize":
            square = self.view_size, self.view_size
            return any(view.size != square for plan in plain.plans for view in plan.views)
        return self._computes(plain, change)

    def _known(self, request: Request) -> _KnownRequest:
        return self._requests.computed(id(request), lambda: _KnownRequest(request, read_images(request)))

    def _prompt(self, request: Request, changes: Changes) -> ChangedPrompt:
        return changed_prompt(self._known(request).read, changes, self._loaded.reader)


@contextmanager
def open_local(settings: Settings, loaded: Loaded | None = None) -> Iterator[LocalModel]:
    """Make a checkpoint compute the reference while in the block.

    Args:
        settings: settings that name the checkpoint.
        loaded: its weights; None: load them.

    Raises:
        ModelError: the model cannot be loaded.
        UnsupportedError: its weights are quantised, offloaded or split, or the device is missing.
    """
    with activity(f"loading {settings.model_name}"):
        loaded = load_for(settings) if loaded is None else loaded
        local = LocalModel(loaded, settings)
    with reference_computation(loaded.model):
        yield local
    release_memory()


def _pixels_digest(pixels: torch.Tensor) -> bytes:
    return sha256(pixels.numpy().tobytes()).digest()
