"""From a request and the names of attention implementations to their measured masks. No weights are loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from panscan.attention_map.engine_probe import engine_mask
from panscan.attention_map.segments import Segment, image_positions, segments_of
from panscan.core import Request, SettingError
from panscan.core.ranges import shorten
from panscan.engine.options import EngineOptions
from panscan.images.files import image_size
from panscan.images.views import plan_views
from panscan.model.attention_masks import LayerKind, effective_mask, kernel_reason
from panscan.model.checkpoint import Reader, load_config, load_random_meta_model, load_reader
from panscan.model.inputs import count_prompt, images_of
from panscan.model.machine import resolve_device
from panscan.settings import ATTENTION, Settings, nearest

__all__ = ["ENGINE", "MOST_TOKENS", "REFERENCE", "Masks", "PromptAttention", "check_names", "measure", "plain_token"]

ENGINE = "engine"
REFERENCE = "eager"
"""The implementation that Gemma 3 is defined by, and that others are compared with."""
MOST_TOKENS = 8192
"""Tokens of the longest prompt: masks take 5 bytes or more for each pair of positions."""
_CAUSAL_KERNELS = tuple(name for name in ATTENTION if name.startswith("flash"))


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """What one or several attention implementations compute.

    Args:
        names: of implementations with equal masks.
        by_kind: bool ``[queries, keys]`` by layer kind.
        notes: facts about how single implementations were measured.
    """

    names: tuple[str, ...]
    by_kind: dict[LayerKind, NDArray[np.bool_]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PromptAttention:
    """Which positions of a prompt attend to which.

    Args:
        model: name of the model.
        prompt: the user's text.
        tokens: each token of the prompt, as the tokenizer spells it.
        images: number of images.
        segments: text and views, in order.
        layers: number of layers by kind.
        window: positions that a local layer attends to, the query's own included.
        groups: the masks; the first ones are those of :data:`REFERENCE`, all others differ from them.
    """

    model: str
    prompt: str
    tokens: tuple[str, ...]
    images: int
    segments: tuple[Segment, ...]
    layers: dict[LayerKind, int]
    window: int
    groups: tuple[Masks, ...] = field(repr=False)

    @property
    def reference(self) -> Masks:
        """Masks of the reference, and of implementations that agree with it."""
        return self.groups[0]


def check_names(names: Collection[str]) -> None:
    """Check names of attention implementations.

    Raises:
        SettingError: an unknown name.
    """
    known = (*ATTENTION, ENGINE)
    for name in names:
        if name not in known and "/" not in name:
            raise SettingError(
                f"--attention takes {', '.join(known)} or a kernels-hub name (owner/kernel); got {shorten(name)}"
                f"{nearest(name, known)}"
            )
        if name != ENGINE:
            Settings(attention=name)


def plain_token(token: str) -> str:
    """Return a token as text on one line: spaces as the tokenizer spells them become spaces, line breaks ``\\n``."""
    return token.replace("\u2581", " ").replace("\n", "\\n")


def measure(request: Request, settings: Settings, names: Sequence[str]) -> PromptAttention:
    """Measure which positions of a request's prompt attend to which.

    Args:
        request: its images are read as far as their sizes.
        settings: model, device, and the engine's options count.
        names: implementations besides the reference; ``engine`` is panscan's engine.

    Raises:
        SettingError: an unknown name, or a prompt of more than :data:`MOST_TOKENS`.
        ImageError: an image cannot be read.
        ModelError: the checkpoint is not available.
        UnsupportedError: an implementation cannot run here.
    """
    check_names(names)
    reader, config = _reader_and_config(settings)
    text = config.get_text_config()
    ids, _, views = count_prompt(request, reader)
    _check_length(len(ids), views)
    images = images_of(request)
    crops = [plan_views(*image_size(image), request.pan_and_scan).crops for image in images]
    image = image_positions(ids, reader.prompts.soft_id)
    kinds = list(text.layer_types)
    layers: dict[LayerKind, int] = {
        "global": kinds.count("full_attention"),
        "local": kinds.count("sliding_attention"),
    }
    found = _measured(ids, image, reader.prompts.soft_id, config, settings, [REFERENCE, *names])
    return PromptAttention(
        model=settings.model_name,
        prompt=request.prompt or "",
        tokens=tuple(reader.tokenizer.convert_ids_to_tokens(ids)),
        images=len(images),
        segments=segments_of(image, crops),
        layers={kind: count for kind, count in layers.items() if count},
        window=int(text.sliding_window),
        groups=_grouped(found),
    )


def _reader_and_config(settings: Settings) -> tuple[Reader, Any]:
    """Return what writes the prompt, and the configuration that decides the masks."""
    if settings.random_weights:
        assert settings.model_shape is not None  # Settings holds this
        meta_model = load_random_meta_model(
            settings.model_name, settings.model_shape, torch.float32, resolve_device(settings.device)
        )
        return meta_model.reader, meta_model.model.config
    reader = load_reader(settings.model, settings.revision)
    return reader, load_config(settings.model, settings.revision)


def _check_length(tokens: int, views: int) -> None:
    if tokens > MOST_TOKENS:
        fix = "give fewer images or a lower --max-num-crops" if views else "shorten -p"
        raise SettingError(
            f"the prompt has {tokens:,} tokens ({views} views); the picture takes at most {MOST_TOKENS:,}: {fix}"
        )


def _measured(
    ids: Sequence[int],
    image: NDArray[np.bool_],
    soft_id: int | None,
    config: Any,
    settings: Settings,
    names: Sequence[str],
) -> Iterator[Masks]:
    """Yield the masks of each implementation, each name once."""
    for name in dict.fromkeys(names):
        if name == ENGINE:
            window = int(config.get_text_config().sliding_window)
            device = resolve_device(settings.device)
            masks, backend = engine_mask(ids, soft_id, window, EngineOptions.of(settings), device)
            yield Masks((name,), masks, (f"{name}: attention backend {backend}",))
            continue
        reason = kernel_reason(name, settings.device) if name in _CAUSAL_KERNELS else None
        masks = effective_mask(image, name, config, device=settings.device, kernel=reason is None)
        note = f"{name}: as Transformers prepares it; the kernel itself cannot run here ({reason})"
        yield Masks((name,), masks, (note,) if reason else ())


def _grouped(found: Iterator[Masks]) -> tuple[Masks, ...]:
    """Return the masks with equal ones joined, in the order of their first names."""
    groups: list[Masks] = []
    for each in found:
        for at, group in enumerate(groups):
            kinds = group.by_kind.keys() & each.by_kind.keys()
            if all(np.array_equal(group.by_kind[kind], each.by_kind[kind]) for kind in kinds):
                groups[at] = Masks((*group.names, *each.names), group.by_kind, (*group.notes, *each.notes))
                break
        else:
            groups.append(each)
    return tuple(groups)
