"""What is asked: views, sampling, requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from panscan.core.errors import SettingError


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

    ``temperature`` 0 is greedy; ``ignore_eos`` gives exactly ``max_new_tokens`` tokens (for speed measurements), unless
    something of ``stop`` or ``stop_token_ids`` comes up. An answer ends before the first text of ``stop`` (which may
    begin and end inside tokens) and at the first id of ``stop_token_ids``. ``logprobs``: natural logarithms of the
    probabilities of each chosen token and of this many likeliest ones, before temperature and filters. With a
    ``seed`` a token depends on it, its place in the answer and its probabilities alone.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        checks = {
            "max_new_tokens": self.max_new_tokens >= 1,
            "temperature": 0 <= self.temperature < float("inf"),
            "top_k": self.top_k is None or self.top_k >= 1,
            "top_p": self.top_p is None or 0 < self.top_p <= 1,
            "min_p": self.min_p is None or 0 <= self.min_p <= 1,
            "repetition_penalty": self.repetition_penalty is None or 0 < self.repetition_penalty < float("inf"),
            "stop": isinstance(self.stop, tuple) and all(isinstance(text, str) and text for text in self.stop),
            "stop_token_ids": isinstance(self.stop_token_ids, tuple)
            and all(token >= 0 for token in self.stop_token_ids),
            "logprobs": self.logprobs is None or 0 <= self.logprobs <= 20,
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
        images: paths, http(s) URLs, PIL images, bytes of files, arrays or tensors (uint8 ``[height, width, 3]``), read
            in this order, before the text. One path may be a PDF or TIFF page (``file.pdf#page=2``); a file of many
            pages without ``#page=`` stands for all of them.
        system: a system message.
        messages: a whole conversation instead of ``prompt`` and ``system``; image parts take ``images`` in order.
        raw: ``prompt`` goes to the tokenizer as it is, for base checkpoints: no turn template,
            and every ``<start_of_image>`` in it takes the next image.
        pan_and_scan: settings of the views. Disabled: each image is one view.
        sampling: how output tokens are chosen.
        id: kept in the result and in records.
    """

    prompt: str | None = None
    images: Sequence[Any] = ()
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
