"""What is asked: views and requests."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from panscan.core.errors import SettingError
from panscan.core.foreign import data_url_content
from panscan.core.option import Range, integers, shorten
from panscan.core.sampling import STRUCTURED, Sampling
from panscan.core.tools import ToolUse, tool_use

MAX_PAGES = 1000
"""Pages taken of one document unless the request or ``--max-pages`` says otherwise; one with more is refused."""

PAN_AND_SCAN_RANGES = {
    "min_crop_size": integers(1, 2**20, "Transformers divides by it"),
    "max_num_crops": integers(1, 1024, "Transformers divides by it"),
    "min_ratio_to_activate": Range(ge=0, le=2**20),
}
"""Of the numbers in :class:`PanAndScan`."""

_PAGES = integers(1, 1_000_000)


@dataclass(frozen=True, slots=True)
class PanAndScan:
    """Pan-and-scan settings, with the names and defaults of Transformers' Gemma 3 processor (without its prefix).

    Args:
        enabled: ``do_pan_and_scan``.
        min_crop_size: ``pan_and_scan_min_crop_size``, pixels; a crop's shorter side is never smaller.
        max_num_crops: ``pan_and_scan_max_num_crops``; the whole image comes on top of them.
        min_ratio_to_activate: ``pan_and_scan_min_ratio_to_activate``, longer side over shorter side.

    Raises:
        SettingError: for values with which Transformers divides by zero, crashes or crops without end.
    """

    enabled: bool = True
    min_crop_size: int = 256
    max_num_crops: int = 4
    min_ratio_to_activate: float = 1.2

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise SettingError(f"do_pan_and_scan must be true or false, got {shorten(self.enabled)}")
        for name, allowed in PAN_AND_SCAN_RANGES.items():
            allowed.check(f"pan_and_scan_{name}", getattr(self, name))

    def processor_kwargs(self) -> dict[str, Any]:
        """Return all four keyword arguments of Transformers' processor, which has other defaults."""
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


Message = Mapping[str, Any]
"""One chat turn, as in the OpenAI and Transformers formats: ``{"role": ..., "content": str | [parts]}``."""


@dataclass(frozen=True, slots=True)
class Request:
    """One question about zero or more images.

    Args:
        prompt: the user's text. Special tokens inside it are plain text, unless ``raw``.
        images: a list of paths, http(s) URLs, PIL images, bytes of files, arrays or tensors (uint8
            ``[height, width, 3]``), read in this order, before the text; or a single one of these. One path may be a
            PDF or TIFF page (``file.pdf#page=2``); a multi-page file without ``#page=`` means all of its pages.
            URLs must lead to public addresses, unless the environment has ``PANSCAN_ALLOW_PRIVATE_URLS=1``.
        system: a system message.
        messages: a whole conversation instead of ``prompt`` and ``system``. Its parts of the types ``image`` and
            ``image_url`` hold their images, as in Transformers and OpenAI's API, or take ``images`` in order.
        raw: ``prompt`` goes to the tokenizer unchanged, for base checkpoints: no chat template,
            and every ``<start_of_image>`` in it takes the next image.
        pan_and_scan: settings of the views. Disabled: each image is one view.
        sampling: sampling of output tokens.
        prompt_ids: token ids instead of ``prompt``, without images; needs ``raw``.
        add_special_tokens: whether a raw prompt begins with the token that begins texts.
        id: kept in the result and in records.
        max_pages: pages of one image file at most; a file with more fails the request.
        template_kwargs: further variables of the chat template, as in Transformers' ``apply_chat_template``. With a
            ``prompt``, the parts of the user's turn have these keys, too, as TranslateGemma expects its languages.
        tools: functions that the answer may call, in OpenAI's format. The prompt describes them. With a
            ``json_schema``, an answer that calls nothing matches the schema.
        tool_choice: ``auto``: the answer is text or calls; ``required``: calls; ``none``: text;
            ``{"type": "function", "function": {"name": ...}}``: one call of this function.
        parallel_tool_calls: whether the answer may have several calls.

    Raises:
        SettingError: a field of another type, or fields that exclude each other.
        ImageError: a ``data:`` URL in a message is not base64.
    """

    prompt: str | None = None
    images: Sequence[Any] = ()
    system: str | None = None
    messages: Sequence[Message] | None = None
    raw: bool = False
    pan_and_scan: PanAndScan = field(default_factory=PanAndScan)
    sampling: Sampling = field(default_factory=Sampling)
    id: str = ""
    max_pages: int = MAX_PAGES
    template_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    prompt_ids: Sequence[int] | None = None
    add_special_tokens: bool = True
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True

    def __post_init__(self) -> None:
        for name, kind, optional in _FIELDS:
            value = getattr(self, name)
            if not isinstance(value, kind) and not (optional and value is None):
                raise SettingError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
        _PAGES.check("max_pages", self.max_pages)
        messages, images = _separate_images(self.messages, _as_images(self.images))
        object.__setattr__(self, "messages", messages)
        object.__setattr__(self, "images", images)
        if [self.prompt, self.messages, self.prompt_ids].count(None) != 2:
            raise SettingError("a request takes either prompt or messages, or prompt_ids with raw")
        if self.prompt_ids is not None and (not self.raw or len(self.images)):
            raise SettingError("prompt_ids need raw, and no images")
        if self.messages is not None and (self.system is not None or self.raw):
            raise SettingError("messages hold the whole conversation: system and raw do not go with them")
        if self.raw and self.system is not None:
            raise SettingError("system is not supported with a raw prompt, which has no turns")
        if self.raw and self.template_kwargs:
            raise SettingError("template_kwargs are not supported with a raw prompt, which has no template")
        use = self.tool_use
        if use is not None and self.raw:
            raise SettingError("tools are not supported with a raw prompt, which has no turns")
        for name in () if use is None else STRUCTURED:
            if name != "json_schema" and getattr(self.sampling, name) is not None:
                raise SettingError(f"{name} and tools exclude each other: set tool_choice to 'none', or remove one")
        if use is not None and self.sampling.ignore_eos:
            raise SettingError("ignore_eos and tools exclude each other: a call ends where it is complete")

    @property
    def tool_use(self) -> ToolUse | None:
        """What the answer may call; None for nothing."""
        if not self.tools and self.tool_choice == "auto":
            return None
        use = tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        return None if use is None else replace(use, schema=self.sampling.json_schema)


def _separate_images(
    messages: Sequence[Message] | None, images: Sequence[Any]
) -> tuple[Sequence[Message] | None, Sequence[Any]]:
    """Return a conversation without the images that its parts hold, and these images in order.

    Parts are those of Transformers, ``{"type": "image", ...}`` with :data:`IMAGE_KEYS`, and OpenAI's ``image_url``.

    Args:
        messages: the conversation, which may be malformed.
        images: images that were given beside it.

    Raises:
        SettingError: images in both places, or an image of low detail.
        ImageError: a ``data:`` URL is not base64.
    """
    held: list[Any] = []

    def plain(part: Any) -> Any:
        is_image = isinstance(part, Mapping) and part.get("type") in ("image", "image_url")
        keys = [key for key in IMAGE_KEYS if is_image and key in part]
        held.extend(_held_image(key, part[key]) for key in keys)
        return {key: value for key, value in part.items() if key not in keys} if keys else part

    separated: list[Message] = []
    for message in messages if isinstance(messages, list | tuple) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = {"content": [plain(part) for part in content]} if isinstance(content, list | tuple) else {}
        separated.append({**message, **parts} if parts else message)
    if held and len(images):
        raise SettingError("images: the messages hold images, too: give all of them in one place")
    return (separated, held) if held else (messages, images)


def checked_request(request: object) -> Request:
    """Return a request unchanged after checking its type.

    Raises:
        SettingError: the value is not a request.
    """
    if not isinstance(request, Request):
        raise SettingError(f"a request must be a panscan.Request, got {shorten(request)}")
    return request


def request_list(requests: object) -> list[Request]:
    """Return the requests of an iterable as a list.

    Raises:
        SettingError: the value is not iterable, or contains something else.
    """
    if not isinstance(requests, Iterable):
        raise SettingError(f"requests must be a list of panscan.Request, got {shorten(requests)}")
    return [checked_request(request) for request in requests]


def _held_image(key: str, value: Any) -> Any:
    """Return an image of a part as :attr:`Request.images` take it.

    Raises:
        SettingError: the image is to be read without crops, which a request decides for all of its images.
        ImageError: a ``data:`` URL is not base64.
    """
    if key == "image_url" and isinstance(value, Mapping):
        if value.get("detail") == "low":
            raise SettingError("image_url: detail 'low' is not supported here: use PanAndScan(enabled=False)")
        value = value.get("url")
    if isinstance(value, str) and (key == "base64" or value.startswith("data:")):
        return data_url_content(value if value.startswith("data:") else f"data:;base64,{value}")
    return value


IMAGE_KEYS = ("image", "image_url", "url", "path", "base64")
"""Keys under which parts of messages hold an image."""
_FIELDS = (
    ("prompt", str, True),
    ("system", str, True),
    ("raw", bool, False),
    ("prompt_ids", Sequence, True),
    ("add_special_tokens", bool, False),
    ("pan_and_scan", PanAndScan, False),
    ("sampling", Sampling, False),
    ("id", str, False),
    ("template_kwargs", Mapping, False),
)
"""Fields of a request: name, type, whether None means that it is omitted."""


def _as_images(images: Any) -> Sequence[Any]:
    """Return a request's images as a sequence. Arrays, tensors and PIL images are recognised by their protocol.

    The protocol is not called: a PIL image would be decoded, and raise whatever the decoder raises.

    Raises:
        SettingError: neither images nor one image.
    """
    file = isinstance(images, str | bytes | bytearray | memoryview | os.PathLike)
    if file or any(hasattr(type(images), name) for name in ("__array__", "__array_interface__")):
        return (images,)
    if not isinstance(images, Sequence):
        raise SettingError(f"images must be a list of images, or a single image, got {type(images).__name__}")
    return images
