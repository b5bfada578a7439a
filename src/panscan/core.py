"""The shared nouns and the exception tree. Imports nothing else of panscan, and no tensor library.

PanscanError                    exit code 1
├── SettingError                2   an option, key or value is wrong
├── InputError                  3   something the user gave could not be used
│   ├── ImageError                  a document or picture
│   ├── DatasetError                questions, prompts
│   ├── ModelError                  a checkpoint: unknown, gated, incomplete
│   └── RecordsError                a run directory
└── UnsupportedError            4   fine in itself, but not on this machine
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import platformdirs

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "DatasetError",
    "ImageError",
    "InputError",
    "Message",
    "ModelError",
    "PanAndScan",
    "PanscanError",
    "PanscanWarning",
    "RecordsError",
    "Request",
    "Result",
    "Sampling",
    "SettingError",
    "Stamps",
    "UnsupportedError",
    "View",
    "cache_directory",
    "from_perf_counter",
    "now",
]


class PanscanError(Exception):
    """Root of everything panscan raises on purpose. The message is one line that names the knob."""

    exit_code = 1


class SettingError(PanscanError):
    """An option, key or value that panscan does not accept."""

    exit_code = 2


class InputError(PanscanError):
    """Something that the user gave could not be used."""

    exit_code = 3


class ImageError(InputError):
    """A document or picture could not be read."""


class DatasetError(InputError):
    """A file of questions or prompts could not be read."""


class ModelError(InputError):
    """A checkpoint could not be loaded."""


class RecordsError(InputError):
    """A run directory or its records could not be read or written."""


class UnsupportedError(PanscanError):
    """A setting that is fine in itself but that this machine cannot do. In a sweep: a skipped cell."""

    exit_code = 4


class PanscanWarning(UserWarning):
    """Something works, but not as the user may believe."""


_EPOCH = time.time() - time.perf_counter()


def now() -> float:
    """Seconds since the Unix epoch, monotonic within the process, with the resolution of ``perf_counter``.

    Anchored to the wall clock once, so that stamps of several processes of one host can be merged.
    """
    return from_perf_counter(time.perf_counter())


def from_perf_counter(seconds: float) -> float:
    """A reading of ``time.perf_counter()`` of this process on the time line of :func:`now`."""
    return _EPOCH + seconds


def cache_directory() -> Path:
    """Where panscan keeps what it can make again: ``PANSCAN_CACHE``, or the user's cache directory. Not created."""
    return Path(os.environ.get("PANSCAN_CACHE") or platformdirs.user_cache_path("panscan"))


@dataclass(frozen=True, slots=True)
class PanAndScan:
    """Pan-and-scan settings, with the names and defaults of Transformers' Gemma 3 processor (without its prefix).

    Args:
        enabled: ``do_pan_and_scan``.
        min_crop_size: ``pan_and_scan_min_crop_size``, pixels; a crop's shorter side is never smaller.
        max_num_crops: ``pan_and_scan_max_num_crops``; the whole image comes on top of them.
        min_ratio_to_activate: ``pan_and_scan_min_ratio_to_activate``, longer side over shorter side.

    Raises:
        SettingError: on values for which Transformers divides by zero, crashes or crops without end.
    """

    enabled: bool = True
    min_crop_size: int = 256
    max_num_crops: int = 4
    min_ratio_to_activate: float = 1.2

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise SettingError(f"do_pan_and_scan must be true or false, got {self.enabled!r}")
        for name, least in (("min_crop_size", 1), ("max_num_crops", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise SettingError(
                    f"pan_and_scan_{name} must be a whole number of at least {least}, got {value!r}"
                    " (Transformers divides by it)"
                )
        ratio = self.min_ratio_to_activate
        if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not 0 <= ratio < float("inf"):
            raise SettingError(f"pan_and_scan_min_ratio_to_activate must be a number of at least 0, got {ratio!r}")

    def processor_kwargs(self) -> dict[str, Any]:
        """The four keyword arguments of Transformers' processor, all of them (it falls back to its own otherwise)."""
        return {
            "do_pan_and_scan": self.enabled,
            "pan_and_scan_min_crop_size": self.min_crop_size,
            "pan_and_scan_max_num_crops": self.max_num_crops,
            "pan_and_scan_min_ratio_to_activate": self.min_ratio_to_activate,
        }


@dataclass(frozen=True, slots=True)
class View:
    """One picture that the model reads at its fixed size: the whole image, or a crop of it.

    ``box`` is (left, top, right, bottom) in pixels of the upright image, half open.
    """

    kind: Literal["whole", "crop"]
    box: tuple[int, int, int, int]

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        left, top, right, bottom = self.box
        return right - left, bottom - top


@dataclass(frozen=True, slots=True)
class Sampling:
    """How output tokens are chosen. The default is greedy.

    ``temperature`` 0 is greedy; ``ignore_eos`` gives exactly ``max_new_tokens`` tokens (for speed measurements).
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = {
            "max_new_tokens": self.max_new_tokens >= 1,
            "temperature": 0 <= self.temperature < float("inf"),
            "top_k": self.top_k is None or self.top_k >= 1,
            "top_p": self.top_p is None or 0 < self.top_p <= 1,
            "min_p": self.min_p is None or 0 <= self.min_p <= 1,
            "repetition_penalty": self.repetition_penalty is None or 0 < self.repetition_penalty < float("inf"),
        }
        for name, fine in checks.items():
            if not fine:
                raise SettingError(f"{name} is out of range: {getattr(self, name)!r}")
        if self.greedy and any(v is not None for v in (self.top_k, self.top_p, self.min_p)):
            raise SettingError("top_k, top_p and min_p need a temperature above 0 (temperature 0 is greedy)")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


Message = Mapping[str, Any]
"""One chat turn, as in the OpenAI and Transformers formats: ``{"role": ..., "content": str | [parts]}``."""


@dataclass(frozen=True, slots=True)
class Request:
    """One question about zero or more images.

    Args:
        prompt: the user's text. Special tokens inside it are plain text, unless ``raw``.
        images: paths, http(s) URLs or PIL images, read in this order, before the text. One path may be a PDF or TIFF
            page (``file.pdf#page=2``); a file of many pages without ``#page=`` stands for all of them.
        system: a system message.
        messages: a whole conversation instead of ``prompt`` and ``system``; image parts take ``images`` in order.
        raw: ``prompt`` goes to the tokenizer as it is, for base checkpoints: no turn template,
            and every ``<start_of_image>`` in it takes the next image.
        pan_and_scan: settings of the views. Disabled: each image is one view.
        sampling: how output tokens are chosen.
        id: kept in the result and in records.
    """

    prompt: str | None = None
    images: Sequence[str | Path | Image] = ()
    system: str | None = None
    messages: Sequence[Message] | None = None
    raw: bool = False
    pan_and_scan: PanAndScan = field(default_factory=PanAndScan)
    sampling: Sampling = field(default_factory=Sampling)
    id: str = ""

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise SettingError("a request takes either prompt or messages")
        if self.messages is not None and (self.system is not None or self.raw):
            raise SettingError("messages hold the whole conversation: system and raw do not go with them")
        if self.raw and self.system is not None:
            raise SettingError("a raw prompt has no turns: system does not go with it")


@dataclass(slots=True)
class Stamps:
    """Boundaries of a request's life, in seconds of :func:`now`. Metrics are derived from them, never measured twice.

    ``accepted`` -> ``loaded`` (pixels decoded) -> ``preprocessed`` (views and ids on the device) -> ``vision``
    (image embeddings ready; None without images or where the runner cannot see it) -> ``tokens[0]`` (first token)
    -> ... -> ``tokens[-1]`` -> ``end``.
    Stages of a batch are shared by its requests. ``vision_start`` is when the vision tower was entered.
    """

    accepted: float
    loaded: float | None = None
    preprocessed: float | None = None
    vision_start: float | None = None
    vision: float | None = None
    tokens: list[float] = field(default_factory=list)
    end: float | None = None

    @property
    def ttft(self) -> float | None:
        """Accepted to first token, seconds."""
        return self.tokens[0] - self.accepted if self.tokens else None

    @property
    def e2e(self) -> float | None:
        """Accepted to last token, seconds."""
        return self.tokens[-1] - self.accepted if self.tokens else None

    def stages(self) -> dict[str, float | None]:
        """Seconds of load, preprocess, vision, prefill and decode; together they are :attr:`e2e`.

        ``vision`` is the time in the vision tower and its projector, ``prefill`` the rest of the way to the first
        token. A stage whose boundary was not stamped is None, and its time is in the next one.
        """
        at = self.accepted
        found: dict[str, float | None] = dict.fromkeys(("load", "preprocess", "vision", "prefill", "decode"))
        for name, boundary in (("load", self.loaded), ("preprocess", self.preprocessed)):
            if boundary is not None:
                found[name], at = boundary - at, boundary
        if self.vision is not None:
            found["vision"] = self.vision - (at if self.vision_start is None else self.vision_start)
        if self.tokens:
            found["prefill"] = self.tokens[0] - at - (found["vision"] or 0.0)
            found["decode"] = self.tokens[-1] - self.tokens[0]
        return found


@dataclass(slots=True)
class Result:
    """What became of a request. Token counts are counts of real ids."""

    id: str
    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    views: int
    crops: int
    image_tokens: int
    prompt_tokens: int
    stamps: Stamps

    @property
    def output_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def stages_ms(self) -> dict[str, float]:
        """Milliseconds of each stage that was seen (see :meth:`Stamps.stages`)."""
        return {name: 1e3 * seconds for name, seconds in self.stamps.stages().items() if seconds is not None}
