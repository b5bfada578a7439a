"""Request bodies: the supported fields of OpenAI's API, with vLLM's extensions. All other fields are refused."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from panscan.core import SettingError
from panscan.core.ranges import shorten
from panscan.settings import nearest

__all__ = [
    "ChatCompletionRequest",
    "ChatMessage",
    "CompletionRequest",
    "FieldError",
    "FilePart",
    "ImagePart",
    "MmProcessorKwargs",
    "ResponseFormat",
    "SamplingFields",
    "TextPart",
    "TokenizeRequest",
    "ViewsRequest",
    "count_values",
    "parse",
]

_MOST_VALUES = 50_000  # JSON values of a body
_LONGEST_SHOWN = 100  # characters of a client's name in a message
_LONGEST_PROBLEM = 300  # characters of a validation error
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)  # matches at every quote: linear work

_MOST_STOPS = 16
_LONGEST_STOP = 1024  # characters
_MOST_MESSAGES = 4096
_MOST_PARTS = 4096  # maximum over all messages
_MOST_METADATA = 128  # names; OpenAI's API allows 16
_LONGEST_REFERENCE = 2**31  # characters of a data URL; the size of the body is limited


class FieldError(SettingError):
    """An error in a field of a request body. ``param``: path of the field, as in OpenAI's errors."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class _Body(BaseModel):
    """A request body that refuses unknown fields and treats ``null`` as absent.

    ``NEUTRAL``: fields of OpenAI's API that are accepted only with these values, which have no effect.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        for name, accepted in cls.NEUTRAL.items():
            if name in given and not any(type(given[name]) is type(each) and given[name] == each for each in accepted):
                values = " or ".join(repr(each) for each in accepted)
                hint = f"; it may be {values}" if accepted else ""
                raise PydanticCustomError("unsupported", "{name} is not supported{hint}", {"name": name, "hint": hint})
            given.pop(name, None)
        unknown = next((name for name in given if name not in cls.model_fields), None)
        if unknown is not None:
            hint = nearest(unknown[:_LONGEST_SHOWN], cls.model_fields)
            raise _unknown(unknown, hint)
        _check_parts(given.get("messages"))
        return given


def _unknown(name: str, hint: str) -> PydanticCustomError:
    name = name[:_LONGEST_SHOWN]
    shown = name if name.isprintable() and name else repr(name)
    return PydanticCustomError(
        "unknown", "{shown} is not supported{hint}", {"name": name, "shown": shown, "hint": hint}
    )


def _check_parts(messages: Any) -> None:
    """Refuse a conversation with too many parts, before validating each part.

    Raises:
        PydanticCustomError: too many parts.
    """
    if not isinstance(messages, list):
        return
    contents = (each.get("content") for each in messages if isinstance(each, dict))
    if sum(len(content) for content in contents if isinstance(content, list)) > _MOST_PARTS:
        raise PydanticCustomError("messages", "at most {most} parts per request", {"most": _MOST_PARTS})


class MmProcessorKwargs(_Body):
    """The pan-and-scan settings of a request, named as in Transformers' processor. Defaults: the server's settings."""

    do_pan_and_scan: bool | None = None
    pan_and_scan_min_crop_size: int | None = None
    pan_and_scan_max_num_crops: int | None = None
    pan_and_scan_min_ratio_to_activate: float | None = None


class TextPart(_Body):
    """Text of a message."""

    type: Literal["text"]
    text: str


class _ImageUrl(_Body):
    url: str = Field(max_length=_LONGEST_REFERENCE)
    detail: Literal["auto", "high"] = "auto"


class ImagePart(_Body):
    """An image or document of a message, by ``data:``, ``https:``, ``file:`` or ``attachment:`` URL."""

    type: Literal["image_url"]
    image_url: _ImageUrl


class _File(_Body):
    file_data: str = Field(max_length=_LONGEST_REFERENCE)
    filename: str | None = Field(default=None, max_length=1024)


class FilePart(_Body):
    """A document of a message: ``file_data`` is a ``data:`` or ``attachment:`` URL."""

    type: Literal["file"]
    file: _File


Part = Annotated[TextPart | ImagePart | FilePart, Field(discriminator="type")]


def _content_kind(value: Any) -> str:
    return "text" if isinstance(value, str) else "parts"


Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Part], Tag("parts"), Field(min_length=1, max_length=_MOST_MESSAGES)],
    Discriminator(_content_kind),
]


class ChatMessage(_Body):
    """One turn of a conversation."""

    NEUTRAL: ClassVar = {
        "tool_calls": ([],),
        "refusal": (),
        "audio": (),
        "function_call": (),
        "annotations": ([],),
        "name": (),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class _JsonSchema(_Body):
    """A named JSON schema. ``schema`` is an alias, because it would shadow a method of pydantic."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=False)

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    json_schema: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None
    description: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        known = ("name", "schema", "strict", "description")
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None:
            hint = nearest(unknown[:_LONGEST_SHOWN], known)
            raise _unknown(unknown, hint)
        return given


class ResponseFormat(_Body):
    """The format of the answer: any text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("schema", "json_schema and type 'json_schema' require each other")
        return self


class _StreamOptions(_Body):
    NEUTRAL: ClassVar = {"include_obfuscation": (False,)}

    include_usage: bool = False
    continuous_usage_stats: bool = False

    @model_validator(mode="after")
    def _check(self) -> _StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise PydanticCustomError("usage", "continuous_usage_stats requires include_usage: true")
        return self


Stop = Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]


def _stop_kind(value: Any) -> str:
    return "text" if isinstance(value, str) else "list"


class SamplingFields(_Body):
    """The fields that chat and text completions share."""

    NEUTRAL: ClassVar = {
        "frequency_penalty": (0, 0.0),
        "presence_penalty": (0, 0.0),
        "logit_bias": ({},),
        "best_of": (1,),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "echo": (False,),
        "suffix": (),
    }

    model: str | None = Field(default=None, max_length=1024)
    stream: bool = False
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: (
        Annotated[
            Annotated[Stop, Tag("text")] | Annotated[list[Stop], Tag("list"), Field(max_length=_MOST_STOPS)],
            Discriminator(_stop_kind),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[int], Field(max_length=_MOST_STOPS)] | None = None
    n: int = Field(default=1, ge=1)
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    user: str | None = Field(default=None, description="Accepted for compatibility; not used or stored.")
    metadata: dict[str, str] | None = Field(default=None, description="Accepted for compatibility; not used or stored.")

    @field_validator("metadata", mode="before")
    @classmethod
    def _check_metadata(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > _MOST_METADATA:  # before each value is validated
            raise PydanticCustomError("metadata", "at most {most} names", {"most": _MOST_METADATA})
        return value

    @model_validator(mode="after")
    def _check_stream_options(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options requires stream: true")
        return self


class ChatCompletionRequest(SamplingFields):
    """Body of ``/v1/chat/completions``."""

    NEUTRAL: ClassVar = {
        **SamplingFields.NEUTRAL,
        "tools": ([],),
        "tool_choice": ("none",),
        "functions": ([],),
        "function_call": ("none",),
        "parallel_tool_calls": (True, False),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "web_search_options": (),
        "verbosity": (),
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=_MOST_MESSAGES)]
    mm_processor_kwargs: MmProcessorKwargs | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @model_validator(mode="after")
    def _check_fields(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs requires logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise PydanticCustomError("max_tokens", "max_tokens and max_completion_tokens differ; give one of them")
        return self


class CompletionRequest(SamplingFields):
    """Body of ``/v1/completions``: raw text, without the chat template."""

    prompt: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[str], Tag("list"), Field(min_length=1, max_length=128)],
        Discriminator(_stop_kind),
    ]
    logprobs: int | None = Field(default=None, ge=0, le=20)


class TokenizeRequest(_Body):
    """Body of ``/tokenize``: a conversation or a raw prompt."""

    NEUTRAL: ClassVar = {"add_generation_prompt": (True,), "add_special_tokens": (True, False)}

    model: str | None = Field(default=None, max_length=1024)
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=_MOST_MESSAGES)] | None = None
    prompt: str | None = None
    mm_processor_kwargs: MmProcessorKwargs | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.messages is None) == (self.prompt is None):
            raise PydanticCustomError("prompt", "give either messages or prompt")
        if self.prompt is not None and self.mm_processor_kwargs is not None:
            raise PydanticCustomError("mm_processor_kwargs", "mm_processor_kwargs requires messages")
        return self


class ViewsRequest(_Body):
    """Body of ``/v1/views``: an image, or only its size."""

    image: str | None = Field(default=None, max_length=_LONGEST_REFERENCE)
    width: int | None = Field(default=None, ge=1, le=2**20)
    height: int | None = Field(default=None, ge=1, le=2**20)
    mm_processor_kwargs: MmProcessorKwargs | None = None
    preview: bool = False

    @model_validator(mode="after")
    def _check(self) -> ViewsRequest:
        if (self.image is None) == (self.width is None) or (self.width is None) != (self.height is None):
            raise PydanticCustomError("image", "give either image, or width and height")
        return self


Parsed = TypeVar("Parsed", bound=BaseModel)


def parse(kind: type[Parsed], body: bytes) -> Parsed:
    """Return the parsed body. The work is linear in its size.

    Raises:
        FieldError: the body is not valid JSON, has too many values, or a field is unknown, invalid or repeated.
    """
    if count_values(body) > _MOST_VALUES and count_values(_STRING.sub(b"", body)) > _MOST_VALUES:
        raise FieldError(f"the body has more than {_MOST_VALUES} JSON values")
    try:
        parsed = kind.model_validate_json(body)
        json.loads(body, object_pairs_hook=_unique)
        return parsed
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    param = _path(first["loc"]) or (first["type"] if first["type"] in kind.model_fields else None)
    problem = first["msg"] if len(first["msg"]) <= _LONGEST_PROBLEM else f"{first['msg'][:_LONGEST_PROBLEM]}..."
    if first["type"] == "json_invalid":
        raise FieldError(f"the body is not valid JSON: {problem.removeprefix('Invalid JSON: ')}")
    if first["type"] in ("unknown", "unsupported"):
        name = first["ctx"]["name"]
        raise FieldError(problem if param is None else f"{param}: {problem}", f"{param}.{name}" if param else name)
    raise FieldError(f"{param}: {problem}" if param else problem, param)


def count_values(body: bytes) -> int:
    """Return an upper bound on the number of JSON values: each follows a comma or opens a container, but for one."""
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. If a name is repeated, a proxy may use the first value, and Python the last.

    Raises:
        FieldError: a name is repeated.
    """
    unique = dict(pairs)
    if len(unique) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                shown = _shown(name)
                raise FieldError(f"{shown}: the JSON body repeats this field", shown)
            seen.add(name)
    return unique


def _shown(name: str) -> str:
    """Return a client's name for a message: one line, and not long."""
    return name[:_LONGEST_SHOWN] if name.isprintable() else shorten(name)


def _path(location: tuple[int | str, ...]) -> str:
    """Return the path of a field as the client wrote it, without the union tags that pydantic adds."""
    tagged = ("content", "stop", "prompt")
    steps = zip(location, (None, *location), strict=False)
    names = [
        part if isinstance(part, int) else _shown(part)
        for part, before in steps
        if isinstance(part, int) or not _is_tag(part, before, tagged)
    ]
    return ".".join(map(str, names[:8]))


def _is_tag(part: str, before: int | str | None, tagged: tuple[str, ...]) -> bool:
    return part in ("text", "image_url", "file", "parts", "list") and (isinstance(before, int) or before in tagged)
