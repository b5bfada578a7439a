"""Request bodies: the supported fields of OpenAI's API, with vLLM's extensions. All other fields are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field
from typing_extensions import override

from panscan.core.foreign import JsonObject
from panscan.core.tools import MAX_TOOLS
from panscan.serve.body import MOST_PARTS, Body, FieldError, References
from panscan.serve.sampling_fields import Name, Prompt, SamplingFields, TopLogprobs, Unused


class MmProcessorKwargs(Body):
    """The pan-and-scan settings of a request, named as in Transformers' processor. Defaults: the server's settings."""

    do_pan_and_scan: bool | None = None
    pan_and_scan_min_crop_size: int | None = None
    pan_and_scan_max_num_crops: int | None = None
    pan_and_scan_min_ratio_to_activate: float | None = None


Reference = Annotated[str, Meta(max_length=2**31)]  # a data URL; the size of the body is limited


class _Part(Body, kw_only=True):
    """A part of a message. Further keys are for the chat template, which must read them."""

    template_values: JsonObject = field(default_factory=dict)


class TextPart(_Part, kw_only=True, tag_field="type", tag="text"):
    """Text of a message."""

    text: str


class _ImageUrl(Body):
    url: Reference
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(_Part, kw_only=True, tag_field="type", tag="image_url"):
    """An image or document of a message, by ``data:``, ``https:``, ``file:`` or ``attachment:`` URL."""

    image_url: _ImageUrl | Reference
    uuid: Unused = None

    @property
    def image(self) -> _ImageUrl:
        """The URL, which may stand for the object, as in vLLM."""
        if isinstance(self.image_url, str):
            self.image_url = _ImageUrl(url=self.image_url)
        return self.image_url

    @property
    def url(self) -> str:
        """The URL of the image."""
        return self.image.url

    @property
    def one_view(self) -> bool:
        """Whether the image is read without crops."""
        return self.image.detail == "low"


class _File(Body):
    file_data: Reference
    filename: Name | None = None


class FilePart(_Part, kw_only=True, tag_field="type", tag="file"):
    """A document of a message: ``file_data`` is a ``data:`` or ``attachment:`` URL."""

    file: _File
    one_view: ClassVar = False

    @property
    def url(self) -> str:
        """The URL of the document."""
        return self.file.file_data


_ShortName = Annotated[str, Meta(min_length=1, max_length=256)]


class _CalledFunction(Body):
    name: _ShortName
    arguments: str


class _MessageCall(Body):
    NEUTRAL: ClassVar = {"index": tuple(range(MAX_TOOLS))}

    id: _ShortName
    function: _CalledFunction
    type: Literal["function"] = "function"


class _Function(Body):
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class _Tool(Body):
    function: _Function
    type: Literal["function"] = "function"


class _NamedFunction(Body):
    name: str


class _NamedTool(Body):
    function: _NamedFunction
    type: Literal["function"] = "function"


_Tools = Annotated[list[_Tool], Meta(max_length=MAX_TOOLS)]
_ToolChoice = Literal["auto", "none", "required"] | _NamedTool | None


class ChatMessage(Body):
    """One turn of a conversation."""

    NEUTRAL: ClassVar = {"refusal": (), "audio": (), "annotations": ([],)}
    REPLACED: ClassVar = {"function_call": "tool_calls"}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        str | Annotated[list[TextPart | ImagePart | FilePart], Meta(min_length=1, max_length=MOST_PARTS)] | None
    ) = None
    name: Unused = None
    tool_calls: Annotated[list[_MessageCall], Meta(max_length=MAX_TOOLS)] = field(default_factory=list)
    tool_call_id: _ShortName | None = None

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


def _document_references(messages: Sequence[ChatMessage]) -> References:
    parts = [part for message in messages for part in message.parts]
    images = [(part.image, "url") for part in parts if isinstance(part, ImagePart)]
    return [*images, *((part.file, "file_data") for part in parts if isinstance(part, FilePart))]


class ChatCompletionRequest(SamplingFields, kw_only=True):
    """Body of ``/v1/chat/completions``."""

    NEUTRAL: ClassVar = {
        **SamplingFields.NEUTRAL,
        "echo": (False,),
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
    REPLACED: ClassVar = {"functions": "tools", "function_call": "tool_choice"}

    is_chat: ClassVar = True

    messages: Messages
    tools: _Tools = field(default_factory=list)
    tool_choice: _ToolChoice = None
    parallel_tool_calls: bool = True
    mm_processor_kwargs: MmProcessorKwargs | None = None
    chat_template_kwargs: JsonObject = field(default_factory=dict)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")

    @override
    def references(self) -> References:
        return _document_references(self.messages)

    @property
    @override
    def output_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    @override
    def logprobs_per_token(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(SamplingFields, kw_only=True):
    """Body of ``/v1/completions``: raw text, without the chat template."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    add_special_tokens: bool = True
    logprobs: TopLogprobs | None = None
    echo: bool = False

    def __post_init__(self) -> None:
        if self.echo and self.stream and self.logprobs is not None:
            raise ValueError("echo with logprobs requires stream: false")
        super().__post_init__()

    @property
    def prompts(self) -> list[Prompt]:
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
    @override
    def echoed(self) -> list[Prompt] | None:
        return self.prompts if self.echo else None

    @property
    @override
    def only_echo(self) -> bool:
        return self.echo and self.max_tokens == 0

    @property
    @override
    def output_tokens(self) -> int | None:
        return 1 if self.only_echo else self.max_tokens

    @property
    @override
    def logprobs_per_token(self) -> int | None:
        return self.logprobs

    @property
    @override
    def logprobs_per_prompt_token(self) -> int | None:
        counts = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in counts if count is not None), default=None)


class TokenizeRequest(Body):
    """Body of ``/tokenize``: a conversation or a raw prompt."""

    NEUTRAL: ClassVar = {"add_generation_prompt": (True,)}

    model: Name | None = None
    messages: Messages | None = None
    tools: _Tools = field(default_factory=list)
    tool_choice: _ToolChoice = None
    parallel_tool_calls: bool = True
    prompt: str | None = None
    add_special_tokens: bool = True
    mm_processor_kwargs: MmProcessorKwargs | None = None
    chat_template_kwargs: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("prompt: give either messages or prompt")
        for name in ("mm_processor_kwargs", "chat_template_kwargs", "tools", "tool_choice"):
            if self.prompt is not None and getattr(self, name):
                raise ValueError(f"{name} requires messages")

    @override
    def references(self) -> References:
        return _document_references(self.messages or ())


class DetokenizeRequest(Body):
    """Body of ``/detokenize``."""

    tokens: list[Annotated[int, Meta(ge=0, le=2**31 - 1)]]
    model: Name | None = None


_Side = Annotated[int, Meta(ge=1, le=2**20)]


class ViewsRequest(Body):
    """Body of ``/v1/views``: an image, or only its size."""

    image: Reference | None = None
    width: _Side | None = None
    height: _Side | None = None
    mm_processor_kwargs: MmProcessorKwargs | None = None
    preview: bool = False

    def __post_init__(self) -> None:
        if (self.image is None) == (self.width is None) or (self.width is None) != (self.height is None):
            raise ValueError("image: give either image, or width and height")

    @override
    def references(self) -> References:
        return [(self, "image")]
