"""From a request and the names of attention implementations to their measured masks. No weights are loaded.

The engine's masks are measured on the passes into which its scheduler cuts the prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from panscan.core import Request, SettingError
from panscan.core.option import shorten
from panscan.core.text import listed
from panscan.engine.model_runner import choose_backend
from panscan.engine.options import EngineOptions
from panscan.engine.scheduling.batch import FlatBatch, PromptLayout, flatten
from panscan.engine.scheduling.batch import Sequence as EngineSequence
from panscan.engine.scheduling.kv_blocks import KVBlocks
from panscan.engine.scheduling.kv_sizes import KVShape
from panscan.engine.scheduling.scheduler import Scheduler
from panscan.images.files import image_size
from panscan.model.attention_masks import KINDS, PROBE_COLUMNS, LayerKind, effective_mask, kernel_reason, measured_mask
from panscan.model.checkpoint import load_config, load_random, load_reader
from panscan.model.inputs import images_of, plan_sizes
from panscan.model.layers import LayerCache, LayerFacts
from panscan.model.machine import resolve_device
from panscan.settings import ATTENTION, Settings, nearest

ENGINE = "engine"
REFERENCE = "eager"
"""The implementation that Gemma 3 is defined by, and that others are compared with."""
MOST_TOKENS = 8192
"""Tokens of the longest prompt: masks take 5 bytes or more for each pair of positions."""
_CAUSAL_KERNELS = tuple(name for name in ATTENTION if name.startswith("flash"))

Mask = NDArray[np.bool_]
"""Bool ``[queries, keys]``."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of text or the image tokens of a view: positions ``[start, end)`` of a prompt.

    Args:
        start: first position.
        end: position behind the last one.
        image: number of the image, starting at 1; None for text.
        crop: number of the crop, starting at 1; 0 for the whole image; None for text.
    """

    start: int
    end: int
    image: int | None = None
    crop: int | None = None

    @property
    def tokens(self) -> int:
        """Number of positions."""
        return self.end - self.start

    def label(self, *, images: int) -> str:
        """Return its name in a prompt of ``images`` images, e.g. ``text``, ``crop 2`` or ``image 3, crop 2``."""
        if self.image is None:
            return "text"
        view = f"crop {self.crop}" if self.crop else "whole"
        return view if images == 1 else f"image {self.image}, {view}"


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """What one or several attention implementations compute.

    Args:
        names: of implementations with equal masks.
        by_kind: bool ``[queries, keys]`` by layer kind.
        notes: facts about how single implementations were measured.
    """

    names: tuple[str, ...]
    by_kind: dict[LayerKind, Mask]
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
    if settings.random_weights:
        assert settings.model_shape is not None  # Settings holds this
        loaded = load_random(settings.model_name, settings.model_shape, torch.float32, torch.device("meta"))
        reader, config = loaded.reader, loaded.model.config
    else:
        reader = load_reader(settings.model, settings.revision)
        config = load_config(settings.model, settings.revision)
    text, soft_id = config.get_text_config(), reader.prompts.soft_id
    images = images_of(request)
    plans, prompt = plan_sizes(replace(request, images=images), list(map(image_size, images)), reader)
    ids, views = prompt.ids, sum(len(plan.views) for plan in plans)
    if len(ids) > MOST_TOKENS:
        fix = "give fewer images or a lower --max-num-crops" if views else "shorten -p"
        raise SettingError(
            f"the prompt has {len(ids):,} tokens ({views} views); the picture takes at most {MOST_TOKENS:,}: {fix}"
        )
    return PromptAttention(
        model=settings.model_name,
        prompt=request.prompt or "",
        tokens=tuple(reader.tokenizer.convert_ids_to_tokens(ids)),
        images=len(images),
        segments=segments_of(image_positions(ids, soft_id), [plan.crops for plan in plans]),
        layers={kind: text.layer_types.count(name) for kind, name in KINDS.items() if name in text.layer_types},
        window=int(text.sliding_window),
        groups=_grouped(_measured_masks(names, ids, soft_id, config, settings)),
    )


def _measured_masks(
    names: Sequence[str], ids: Sequence[int], soft_id: int | None, config: Any, settings: Settings
) -> Iterator[Masks]:
    """Yield the masks of the reference and of each implementation, each name once."""
    image = image_positions(ids, soft_id)
    for name in dict.fromkeys([REFERENCE, *names]):
        if name == ENGINE:
            window, device = config.get_text_config().sliding_window, resolve_device(settings.device)
            masks, backend = engine_mask(ids, soft_id, window, EngineOptions.of(settings), device)
            yield Masks((name,), masks, (f"{name}: attention backend {backend}",))
            continue
        reason = kernel_reason(name, settings.device) if name in _CAUSAL_KERNELS else None
        masks = effective_mask(image, name, config, device=settings.device, kernel=reason is None)
        note = f"{name}: as Transformers prepares it; the kernel itself cannot run here ({reason})"
        yield Masks((name,), masks, (note,) if reason else ())


def engine_mask(
    ids: Sequence[int], soft_id: int | None, window: int, options: EngineOptions, device: torch.device
) -> tuple[dict[LayerKind, NDArray[np.bool_]], str]:
    """Return which positions of a prompt attend to which, by layer kind: bool ``[queries, keys]``; and the backend.

    Args:
        ids: token ids of the prompt.
        soft_id: id of image tokens; None for a text-only checkpoint.
        window: positions that a local layer attends to, the query's own included.
        options: of the engine; those of passes, blocks and the attention backend count.
        device: that computes attention.

    Raises:
        UnsupportedError: the attention backend cannot run here.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    facts = LayerFacts(False, 1, PROBE_COLUMNS, dtype, dtype, device)
    backend, _ = choose_backend(options.attention_backend, facts)
    batches = list(_passes(ids, soft_id, window, options))

    def means(values: torch.Tensor, *, local: bool) -> torch.Tensor:
        parts = []
        for batch in batches:
            plan = backend.plan(batch, local=local, device=device)
            cached = _cache(batch, values, local=local).to(device, dtype)[:, None]
            query = torch.zeros(batch.rows, 1, PROBE_COLUMNS, dtype=dtype, device=device)
            cache = LayerCache(torch.zeros_like(cached), cached)
            parts.append(plan.attend(query, cache, 1.0)[:, 0].float().cpu())
        return torch.cat(parts)

    def attend(values: torch.Tensor) -> dict[LayerKind, torch.Tensor]:
        return {"global": means(values, local=False), "local": means(values, local=True)}

    with torch.inference_mode():
        return measured_mask(attend, image_positions(ids, soft_id), window), backend.name


def image_positions(ids: Sequence[int], soft_id: int | None) -> NDArray[np.bool_]:
    """Return which positions of a prompt are image tokens: bool ``[tokens]``.

    Args:
        ids: token ids of the prompt.
        soft_id: id of image tokens; None for a text-only checkpoint.
    """
    return np.array([token == soft_id for token in ids], np.bool_)


def _passes(ids: Sequence[int], soft_id: int | None, window: int, options: EngineOptions) -> Iterator[FlatBatch]:
    """Yield the passes that compute a prompt's keys and values, as the scheduler of an idle engine cuts them."""
    spans = int(np.count_nonzero(np.diff(image_positions(ids, soft_id), prepend=False, append=False))) // 2
    layout = PromptLayout.of(ids, soft_id, [str(number).encode() for number in range(spans)])
    sequence = EngineSequence(0, list(ids), len(ids), layout, limit=len(ids) + 1)
    count = -(-sequence.limit // options.block_size)
    blocks = KVBlocks(KVShape(1, 1, 1), 2 * count, block_size=options.block_size, window=window)
    scheduler = Scheduler[EngineSequence](blocks, max_num_seqs=1, prefill_chunk_size=options.prefill_chunk_size)
    scheduler.add(sequence)
    slots = {span.key: slot for slot, span in enumerate(layout.spans)}
    while sequence.computed < len(ids):
        step = scheduler.schedule()
        assert step is not None  # the blocks hold the whole prompt
        yield flatten(step, block_size=options.block_size, window=window, slots=slots)
        scheduler.advance(step)


def _cache(batch: FlatBatch, values: torch.Tensor, *, local: bool) -> torch.Tensor:
    """Return the values of a prompt's positions by KV cache slot, as a pass of one chunk finds them."""
    table = batch.tables[local][0]
    positions = np.arange(min(len(values), len(table) * batch.block_size))
    held = table[positions // batch.block_size]
    positions, held = positions[held >= 0], held[held >= 0].astype(np.int64)
    slots = held * batch.block_size + positions % batch.block_size
    cache = torch.zeros(int(slots.max()) + batch.block_size, values.shape[1])
    cache[torch.from_numpy(slots)] = values[torch.from_numpy(positions)]
    return cache


def segments_of(image: Mask, crops: Sequence[int]) -> tuple[Segment, ...]:
    """Return the segments of a prompt, in order, covering each position once.

    Args:
        image: bool ``[tokens]``: which positions are image tokens. Text stands between the views.
        crops: number of crops of each image.

    Raises:
        ValueError: the prompt has another number of views.
    """
    views = [(number, crop) for number, count in enumerate(crops, 1) for crop in range(count + 1)]
    runs = list(pairwise([0, *(np.flatnonzero(np.diff(image)) + 1).tolist(), len(image)]))
    shown = sum(bool(image[start]) for start, _ in runs)
    if shown != len(views):
        raise ValueError(f"{shown} views in the prompt, {len(views)} expected")
    in_order = iter(views)
    return tuple(Segment(start, end, *(next(in_order) if image[start] else ())) for start, end in runs)


def _grouped(measured: Iterator[Masks]) -> tuple[Masks, ...]:
    """Return the masks with equal ones joined, in the order of their first names."""
    groups: list[Masks] = []
    for masks in measured:
        for index, group in enumerate(groups):
            if all(np.array_equal(mask, masks.by_kind.get(kind, mask)) for kind, mask in group.by_kind.items()):
                groups[index] = Masks((*group.names, *masks.names), group.by_kind, (*group.notes, *masks.notes))
                break
        else:
            groups.append(masks)
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class MaskDifference:
    """Cells, that is, pairs of a query and a key, in the layers of one kind.

    Args:
        kind: of layers.
        reference: cells in which the reference attends.
        missing: those of them in which the other implementation does not.
        extra: cells in which only the other one does.
        cause: what explains the difference; None without one.
    """

    kind: LayerKind
    reference: int
    missing: int
    extra: int
    cause: str | None


def differences(shown: PromptAttention, other: Masks) -> list[MaskDifference]:
    """Return how an implementation's masks differ from the reference's, by layer kind."""
    by_layer_kind = []
    for kind in shown.layers:
        reference, mask = shown.reference.by_kind[kind], other.by_kind[kind]
        attended, missing, extra = map(np.count_nonzero, (reference, reference & ~mask, mask & ~reference))
        why = cause(shown.segments, reference, mask) if missing or extra else None
        by_layer_kind.append(MaskDifference(kind, int(attended), int(missing), int(extra), why))
    return by_layer_kind


def statements(shown: PromptAttention, other: Masks) -> list[str]:
    """Return a line for each layer kind in which an implementation differs from the reference."""
    name, reference = listed(other.names, "and"), shown.reference.names[0]
    lines = []
    for difference in differences(shown, other):
        lacks = f"lacks {difference.missing:,} of the {difference.reference:,} token pairs in which {reference} attends"
        adds = f"adds {difference.extra:,} token pairs"
        parts = [lacks] * bool(difference.missing) + [adds] * bool(difference.extra)
        statement = (
            f"{' and '.join(parts)}: {difference.cause}" if parts else f"and {reference} agree on all token pairs"
        )
        lines.append(f"{difference.kind} layers: {name} {statement}")
    return lines


def cause(segments: Sequence[Segment], reference: Mask, other: Mask) -> str:
    """Return what explains the difference of two masks; the first differing cell if nothing known does."""
    later = np.zeros_like(reference)  # keys of a view behind the query
    for segment in segments:
        if segment.image is not None:
            block = slice(segment.start, segment.end)
            later[block, block] = np.triu(np.ones((segment.tokens, segment.tokens), np.bool_), 1)
    if np.array_equal(other, reference & ~later):
        return "image tokens attend only to earlier positions"
    if not (other & ~reference).any() and not (reference & ~other & ~later).any():
        return "some image tokens do not attend to all of their view"
    query, key = np.argwhere(reference != other)[0]
    return f"first at query {query}, key {key}"
