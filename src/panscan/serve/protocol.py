"""Request bodies: the supported fields of OpenAI's API, with vLLM's extensions. All other fields are refused."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from panscan.core import Sampling, SettingError
from panscan.core.option import shorten
from panscan.core.sampling import FILTERS
from panscan.core.tools import MAX_TOOLS
from panscan.settings import nearest

_MOST_VALUES = 50_000  # JSON values of a body
_BASE64 = b";base64,"
_LARGE_PAYLOAD = 64 * 1024  # bytes
_SIGNATURE = 16  # characters of a payload that tell a plain image
_DECODER = msgspec.json.Decoder(bytes)
_LONGEST_SHOWN = 100  # characters of a client's name in a message
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)  # matches at every quote: linear work

PARAMS = {
    "max_new_tokens": "max_tokens",
    "json_schema": "response_format",
    "template_kwargs": "chat_template_kwargs",
    **{name: name for name in ("messages", "tools", "tool_choice", "logit_bias")},
    **dict.fromkeys(("regex", "choice", "grammar"), "structured_outputs"),
}
"""Fields of a body by the name that begins an error of the engine."""
_FOR_TEMPLATE = "template_values"

MOST_PARTS = 4096
"""Maximum number of parts over all messages."""


class FieldError(SettingError):
    """An error in a field of a request body. ``param``: path of the field, as in OpenAI's errors."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An object of a request body. It refuses unknown fields and treats ``null`` as absent.

    ``NEUTRAL``: fields of OpenAI's API that are accepted only with these values, which have no effect.
    """

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


class MmProcessorKwargs(Body):
    """The pan-and-scan settings of a request, named as in Transformers' processor. Defaults: the server's settings."""

    do_pan_and_scan: bool | None = None
    pan_and_scan_min_crop_size: int | None = None
    pan_and_scan_max_num_crops: int | None = None
    pan_and_scan_min_ratio_to_activate: float | None = None


Reference = Annotated[str, Meta(max_length=2**31)]  # a data URL; the size of the body is limited


_Unused = Annotated[str | None, Meta(description="Accepted for compatibility; not used or stored.")]


class _Part(Body, kw_only=True):
    """A part of a message. Further keys are for the chat template, which must read them."""

    template_values: dict[str, Any] = {}


class TextPart(_Part, kw_only=True, tag_field="type", tag="text"):
    """Text of a message."""

    text: str


class _ImageUrl(Body):
    url: Reference
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(_Part, kw_only=True, tag_field="type", tag="image_url"):
    """An image or document of a message, by ``data:``, ``https:``, ``file:`` or ``attachment:`` URL."""

    image_url: _ImageUrl
    uuid: _Unused = None

    @property
    def url(self) -> str:
        """The URL of the image."""
        return self.image_url.url

    @property
    def one_view(self) -> bool:
        """Whether the image is read without crops."""
        return self.image_url.detail == "low"


class _File(Body):
    file_data: Reference
    filename: Annotated[str, Meta(max_length=1024)] | None = None


class FilePart(_Part, kw_only=True, tag_field="type", tag="file"):
    """A document of a message: ``file_data`` is a ``data:`` or ``attachment:`` URL."""

    file: _File
    one_view: ClassVar = False

    @property
    def url(self) -> str:
        """The URL of the document."""
        return self.file.file_data


_CallId = Annotated[str, Meta(min_length=1, max_length=256)]


class _CalledFunction(Body):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str


class _MessageCall(Body):
    NEUTRAL: ClassVar = {"index": tuple(range(MAX_TOOLS))}

    id: _CallId
    function: _CalledFunction
    type: Literal["function"] = "function"


class _Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(Body):
    function: _Function
    type: Literal["function"] = "function"


class _NamedFunction(Body):
    name: str


class _NamedTool(Body):
    function: _NamedFunction
    type: Literal["function"] = "function"


class ChatMessage(Body):
    """One turn of a conversation."""

    NEUTRAL: ClassVar = {
        "refusal": (),
        "audio": (),
        "function_call": (),
        "annotations": ([],),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        str | Annotated[list[TextPart | ImagePart | FilePart], Meta(min_length=1, max_length=MOST_PARTS)] | None
    ) = None
    name: _Unused = None
    tool_calls: Annotated[list[_MessageCall], Meta(max_length=MAX_TOOLS)] = []
    tool_call_id: _CallId | None = None

    def __post_init__(self) -> None:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are of the role 'assistant'")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise ValueError("tool_call_id and the role 'tool' require each other")
        if self.content is None and not self.tool_calls:
            raise ValueError("Object missing required field `content`")

    @property
    def parts(self) -> list[TextPart | ImagePart | FilePart]:
        """The content as parts."""
        return [TextPart(text=self.content)] if isinstance(self.content, str) else self.content or []


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]


_Text = Annotated[str, Meta(min_length=1)]
_Schema = dict[str, Any] | bool | _Text
_Choice = Annotated[list[_Text], Meta(min_length=1, max_length=4096)]


class _JsonSchema(Body):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema: dict[str, Any] | bool
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Body):
    """The format of the answer: any text, any JSON object, or JSON that matches a schema.

    ``schema`` is llama.cpp's spelling; ``value`` that of Hugging Face's inference server, as are two types.
    """

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: _JsonSchema | None = None
    schema: dict[str, Any] | bool | None = None
    value: dict[str, Any] | bool | str | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.json_schema, self.schema, self.value) if value is not None]
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema and type 'json_schema' require each other")
        if len(given) > 1 or (self.type == "text" and given):
            raise ValueError("give one of json_schema, schema and value, and none for text")
        if isinstance(self.value, str) != (self.type == "regex") or (self.type == "json" and not given):
            raise ValueError("value must be a text for type 'regex', and a JSON schema for other types")

    @property
    def structure(self) -> dict[str, Any]:
        """The format as fields of :class:`panscan.core.Sampling`."""
        if self.type in ("text", "regex"):
            return _structure(None, self.value if isinstance(self.value, str) else None)
        given = (self.schema, self.value, None if self.json_schema is None else self.json_schema.schema)
        return _structure(next((schema for schema in given if schema is not None), {"type": "object"}))


class StructuredOutputs(Body):
    """vLLM's constraints on the answer."""

    NEUTRAL: ClassVar = {
        "disable_any_whitespace": (True, False),
        "disable_additional_properties": (True, False),
        "disable_fallback": (True, False),
        "whitespace_pattern": (),
        "structural_tag": (),
    }

    json: _Schema | None = None
    regex: _Text | None = None
    choice: _Choice | None = None
    grammar: _Text | None = None
    json_object: bool = False

    @property
    def structure(self) -> dict[str, Any]:
        """The constraints as fields of :class:`panscan.core.Sampling`."""
        schema = {"type": "object"} if self.json_object and self.json is None else self.json
        return _structure(schema, self.regex, self.choice, self.grammar)


def _structure(
    schema: dict[str, Any] | bool | str | None,
    regex: str | None = None,
    choice: list[str] | None = None,
    grammar: str | None = None,
) -> dict[str, Any]:
    """Return the constraints that are given as fields of :class:`panscan.core.Sampling`."""
    text = schema if schema is None or isinstance(schema, str) else json.dumps(schema)
    values = {"json_schema": text, "regex": regex, "choice": choice and tuple(choice), "grammar": grammar}
    return {name: value for name, value in values.items() if value is not None}


class _StreamOptions(Body):
    NEUTRAL: ClassVar = {"include_obfuscation": (False,)}

    include_usage: bool = False
    continuous_usage_stats: bool = False

    def __post_init__(self) -> None:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats requires include_usage: true")


Stop = Annotated[str, Meta(min_length=1, max_length=1024)]


class SamplingFields(Body):
    """The fields that chat and text completions share. Those of :class:`panscan.core.Sampling` have its names."""

    NEUTRAL: ClassVar = {
        "best_of": (1,),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "echo": (False,),
        "suffix": (),
        "guided_decoding_backend": (),
        "guided_whitespace_pattern": (),
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
        "min_tokens": (0,),
        "bad_words": ([],),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "include_stop_str_in_output": (False,),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "priority": (0,),
    }

    model: Annotated[str, Meta(max_length=1024)] | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=1024)] | None = None
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=16)] | None = None
    n: Annotated[int, Meta(ge=1)] = 1
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _Schema | None = None
    guided_regex: _Text | None = None
    guided_choice: _Choice | None = None
    guided_grammar: _Text | None = None
    user: _Unused = None
    safety_identifier: _Unused = None
    prompt_cache_key: _Unused = None
    request_id: _Unused = None
    metadata: Annotated[
        Annotated[dict[str, str], Meta(max_length=128)] | None,  # OpenAI's API allows 16 names
        Meta(description="Accepted for compatibility; not used or stored."),
    ] = None

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options requires stream: true")

    @property
    def output_tokens(self) -> int | None:
        """Maximum number of output tokens; None: as many as the server allows."""
        return self.max_tokens

    @property
    def structure(self) -> dict[str, Any]:
        """The constraint on the answer as a field of :class:`panscan.core.Sampling`; empty if there is none.

        Raises:
            FieldError: there are several.
        """
        given = [
            ("response_format", {} if self.response_format is None else self.response_format.structure),
            ("structured_outputs", {} if self.structured_outputs is None else self.structured_outputs.structure),
            ("guided_json", _structure(self.guided_json)),
            ("guided_regex", _structure(None, self.guided_regex)),
            ("guided_choice", _structure(None, None, self.guided_choice)),
            ("guided_grammar", _structure(None, None, None, self.guided_grammar)),
        ]
        fields = [(param, item) for param, structure in given for item in structure.items()]
        if len(fields) > 1:
            (first, (one, _)), (second, (other, _)), *_ = fields
            names = f"{first}.{one} and {other}" if first == second else f"{first} and {second}"
            raise FieldError(f"{names} exclude each other: give one of them", second)
        return dict(item for _, item in fields)

    @property
    def logprobs_per_token(self) -> int | None:
        """Number of log-probabilities per token besides its own; None: no log-probabilities."""
        raise NotImplementedError

    def sampling(self, defaults: Sampling) -> Sampling:
        """Return the sampling parameters.

        With temperature 0 the filters cannot change the token, so they are checked and dropped.

        Args:
            defaults: parameters that the request lacks, and the maximum number of output tokens.

        Raises:
            FieldError: a value is out of its range.
        """
        most = defaults.max_new_tokens
        tokens = most if self.output_tokens is None else self.output_tokens
        if tokens > most:
            raise FieldError(f"max_tokens: at most {most}, got {shorten(tokens)}", "max_tokens")
        values = {item.name: getattr(self, item.name, None) for item in fields(Sampling)}
        chosen = {name: value for name, value in values.items() if value is not None}
        chosen |= {name: None for name, off in FILTERS.items() if chosen.get(name) in off}
        chosen |= {
            "max_new_tokens": tokens,
            "logprobs": self.logprobs_per_token,
            "logit_bias": _biases(self.logit_bias),
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            **self.structure,
        }
        try:
            if chosen.get("temperature", defaults.temperature) == 0:
                replace(defaults, temperature=1.0, **{name: chosen[name] for name in FILTERS if name in chosen})
                chosen |= dict.fromkeys(FILTERS)
            return replace(defaults, **chosen)
        except SettingError as error:  # with the name of the request's field
            name = str(error).split(" ", 1)[0].rstrip(":")
            param = PARAMS.get(name, name)
            message = param + str(error).removeprefix(name) if param == "max_tokens" else str(error)
            raise FieldError(message, param if param in SamplingFields.__struct_fields__ else None) from error


def _biases(given: Mapping[str, float] | None) -> dict[int, float] | None:
    """Return the biases by token id.

    Raises:
        FieldError: a key is not a token id.
    """
    for key in given or ():
        if not re.fullmatch("[0-9]{1,10}", key, re.ASCII):
            raise FieldError(f"logit_bias: expected token ids as keys, got {shorten(key)}", "logit_bias")
    return {int(key): value for key, value in given.items()} if given else None


class ChatCompletionRequest(SamplingFields, kw_only=True):
    """Body of ``/v1/chat/completions``."""

    NEUTRAL: ClassVar = {
        **SamplingFields.NEUTRAL,
        "functions": ([],),
        "function_call": ("none",),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "web_search_options": (),
        "verbosity": ("medium",),
        "chat_template_kwargs": ({}, {"enable_thinking": False}),
        "documents": ([],),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
    }

    messages: Messages
    tools: Annotated[list[_Tool], Meta(max_length=MAX_TOOLS)] = []
    tool_choice: Literal["auto", "none", "required"] | _NamedTool | None = None
    parallel_tool_calls: bool = True
    mm_processor_kwargs: MmProcessorKwargs | None = None
    chat_template_kwargs: dict[str, Any] = {}
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")

    @property
    def tool_fields(self) -> dict[str, Any]:
        """The fields of :class:`panscan.core.Request` about tools."""
        choice = "auto" if self.tool_choice is None else msgspec.to_builtins(self.tool_choice)
        tools = msgspec.to_builtins(self.tools)
        return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": self.parallel_tool_calls}

    @property
    def output_tokens(self) -> int | None:
        """See :class:`SamplingFields`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def logprobs_per_token(self) -> int | None:
        """See :class:`SamplingFields`."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(SamplingFields, kw_only=True):
    """Body of ``/v1/completions``: raw text, without the chat template."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    add_special_tokens: bool = True
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts: texts, or token ids.

        Raises:
            FieldError: a list of token ids has a text or a list in it.
        """
        given = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        ids = [item for item in given if isinstance(item, int)]
        if len(ids) not in (0, len(given)):
            raise FieldError("prompt: expected texts, token ids or lists of token ids, not a mixture", "prompt")
        return [ids] if ids else [item for item in given if not isinstance(item, int)]

    @property
    def logprobs_per_token(self) -> int | None:
        """See :class:`SamplingFields`."""
        return self.logprobs


class TokenizeRequest(Body):
    """Body of ``/tokenize``: a conversation or a raw prompt."""

    NEUTRAL: ClassVar = {"add_generation_prompt": (True,)}

    model: Annotated[str, Meta(max_length=1024)] | None = None
    messages: Messages | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    mm_processor_kwargs: MmProcessorKwargs | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("prompt: give either messages or prompt")
        for name in ("mm_processor_kwargs", "chat_template_kwargs"):
            if self.prompt is not None and getattr(self, name):
                raise ValueError(f"{name} requires messages")


class DetokenizeRequest(Body):
    """Body of ``/detokenize``."""

    tokens: list[Annotated[int, Meta(ge=0, le=2**31 - 1)]]
    model: Annotated[str, Meta(max_length=1024)] | None = None


class ViewsRequest(Body):
    """Body of ``/v1/views``: an image, or only its size."""

    image: Reference | None = None
    width: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    height: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    mm_processor_kwargs: MmProcessorKwargs | None = None
    preview: bool = False

    def __post_init__(self) -> None:
        if (self.image is None) == (self.width is None) or (self.width is None) != (self.height is None):
            raise ValueError("image: give either image, or width and height")


Parsed = TypeVar("Parsed", bound=Body)


class DataUrl(str):
    """The start of a large ``data:`` URL, and the decoded ``content`` of all of it."""

    content: bytes


def parse(kind: type[Parsed], body: bytes) -> Parsed:
    """Return the parsed body. The work is linear in its size.

    Large base64 payloads are decoded straight from the body, and their URLs become :class:`DataUrl`: JSON parsers and
    checks would pass over them five times. Other bodies are parsed without this step.

    Raises:
        FieldError: the body is not valid JSON, has too many values, or a field is unknown, invalid or repeated.
    """
    rest, files = _cut_payloads(body)
    if files:
        with suppress(FieldError):  # its message may quote what was cut
            parsed = _parse_json(kind, rest)
            if _attach(parsed, files):
                return parsed
    return _parse_json(kind, body)


def _cut_payloads(body: bytes) -> tuple[bytes, dict[str, DataUrl]]:
    """Return the body with a mark instead of each large payload, and the URLs by their text with the mark."""
    files: dict[str, DataUrl] = {}
    pieces: list[bytes] = []
    mark, kept, position = uuid.uuid4().hex, 0, 0
    while (start := body.find(_BASE64, position) + len(_BASE64)) >= len(_BASE64):
        position = body.find(b'"', start)  # also past other occurrences in this string: the work stays linear
        if position < 0:
            break
        head = body[body.rfind(b'"', kept, start) + 1 : start].decode(errors="replace")
        if position - start < _LARGE_PAYLOAD or body.find(b"\\", start, position) >= 0 or head.count(",") > 1:
            continue
        try:  # twice as fast as binascii, and stricter
            content = _DECODER.decode(b"".join((b'"', memoryview(body)[start:position], b'"')))
        except msgspec.MsgspecError:
            continue
        name = f"{mark}{len(files)}"
        url = files[head + name] = DataUrl(head + body[start : start + _SIGNATURE].decode())
        url.content = content
        pieces += body[kept:start], name.encode()
        kept = position
    return b"".join([*pieces, body[kept:]]), files


def _attach(body: Body, files: dict[str, DataUrl]) -> bool:
    """Replace the URLs of a parsed body that were cut; return whether these are all of ``files``."""
    parts = [part for message in getattr(body, "messages", None) or () for part in message.parts]
    references: list[tuple[Body, str]] = [(body, "image")] if isinstance(body, ViewsRequest) else []
    references += [(part.image_url, "url") for part in parts if isinstance(part, ImagePart)]
    references += [(part.file, "file_data") for part in parts if isinstance(part, FilePart)]
    for owner, name in references:
        if (url := files.pop(getattr(owner, name), None)) is not None:
            setattr(owner, name, url)
    return not files


def _parse_json(kind: type[Parsed], body: bytes) -> Parsed:
    if count_values(body) > _MOST_VALUES and count_values(_STRING.sub(b"", body)) > _MOST_VALUES:
        raise FieldError(f"the body has more than {_MOST_VALUES} JSON values")
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FieldError(f"the body is not valid JSON: {error}") from None
    try:
        parsed = msgspec.convert(_supported_fields(content, kind), kind)
    except msgspec.ValidationError as error:  # with the path as OpenAI writes it, such as messages.0.role
        problem, _, location = str(error).partition(" - at `$")
        path = re.sub(r"\[(\d+)\]", r".\1", location.rstrip("`")).replace("[...]", "").removeprefix(".")
        if missing := re.fullmatch(r"Object missing required field `(\w+)`", problem):
            path, problem = f"{path}.{missing[1]}".removeprefix("."), "this field is required"
        elif not path and (name := re.split("[ :]", problem)[0]) in kind.__struct_fields__:
            raise FieldError(problem, name) from None
        problem = problem[:1].lower() + problem[1:]
        raise FieldError(f"{path}: {problem}" if path else problem, path or None) from None
    try:
        json.loads(body, object_pairs_hook=_unique)  # last, because it takes longest
    except RecursionError:
        raise FieldError("the body is nested too deeply") from None
    return parsed


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
                shown = name[:_LONGEST_SHOWN] if name.isprintable() else shorten(name)
                raise FieldError(f"{shown}: the JSON body repeats this field", shown)
            seen.add(name)
    return unique


def _supported_fields(value: Any, kind: type[Body] | Mapping[str, type[Body]], path: str = "") -> Any:
    """Return a JSON object without nulls and neutral fields; any other value unchanged.

    Args:
        value: JSON value.
        kind: type of the object, or its types by the field ``type``.
        path: path of the object with a final dot; empty for the body.

    Raises:
        FieldError: a field of the object, or of one in it, is not supported, or has none of a list of values.
    """
    if not isinstance(value, dict):
        return value
    if isinstance(kind, Mapping):
        _check_choice(f"{path}type", value.get("type"), tuple(kind))
        kind = kind[value["type"]]
    supported: dict[str, Any] = {}
    known = _field_choices(kind)
    for name, inner in value.items():
        neutral = kind.NEUTRAL.get(name)
        if inner is None or any(type(inner) is type(item) and inner == item for item in neutral or ()):
            continue
        if neutral is not None and name not in known:
            raise _unsupported(path, name, f"; it may be {' or '.join(map(repr, neutral))}" if neutral else "")
        if _FOR_TEMPLATE in known and (name not in known or name == _FOR_TEMPLATE):
            supported.setdefault(_FOR_TEMPLATE, {})[name] = inner
            continue
        if name not in known:
            raise _unsupported(path, name, nearest(name[:_LONGEST_SHOWN], kind.__struct_fields__))
        if choices := known[name]:
            _check_choice(f"{path}{name}", inner, choices)
        nested = _nested_kinds(kind).get(name)
        if nested is None:
            supported[name] = inner
        elif isinstance(inner, list):
            items = enumerate(inner[: MOST_PARTS + 1])  # a longer list is refused
            supported[name] = [_supported_fields(item, nested, f"{path}{name}.{index}.") for index, item in items]
        else:
            supported[name] = _supported_fields(inner, nested, f"{path}{name}.")
    return supported


def _unsupported(path: str, name: str, hint: str) -> FieldError:
    name = name[:_LONGEST_SHOWN]
    shown = name if name.isprintable() and name else repr(name)
    return FieldError(f"{path[:-1]}{': ' if path else ''}{shown} is not supported{hint}", f"{path}{name}")


@cache
def _field_choices(kind: type[Body]) -> dict[str, tuple[str, ...]]:
    """Return the fields of a type; for each that takes one of a few values, these values."""
    names = [*kind.__struct_fields__]
    if (tag := kind.__struct_config__.tag_field) is not None:
        names.append(tag)
    hints = get_type_hints(kind)
    return {name: get_args(hints[name]) if get_origin(hints.get(name)) is Literal else () for name in names}


@cache
def _nested_kinds(kind: type[Body]) -> dict[str, type[Body] | dict[str, type[Body]]]:
    """Return the fields of a type that hold objects, or lists of them: the type, or types by the field ``type``."""
    kinds = {name: _bodies(hint) for name, hint in get_type_hints(kind).items()}
    tagged = {name: {str(body.__struct_config__.tag): body for body in bodies} for name, bodies in kinds.items()}
    return {name: bodies[0] if len(bodies) == 1 else tagged[name] for name, bodies in kinds.items() if bodies}


def _bodies(hint: Any) -> list[type[Body]]:
    if isinstance(hint, type) and issubclass(hint, Body):
        return [hint]
    return [body for argument in get_args(hint) for body in _bodies(argument)]


def _check_choice(path: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise a FieldError unless a value is one of a few."""
    if value not in choices:
        expected = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
        raise FieldError(f"{path}: expected {expected}, got {shorten(value)}", path)
