"""Conversion of HTTP request bodies to the engine's requests, with their documents and estimated work."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec
from msgspec.structs import asdict

from panscan.core import PanAndScan, Request, Sampling, SettingError
from panscan.core.deadline import Deadline
from panscan.core.foreign import JsonObject
from panscan.core.option import shorten
from panscan.core.request import IMAGE_KEYS
from panscan.images.views import PromptCost, plan_views, view_settings
from panscan.serve.admission import Pool
from panscan.serve.body import MOST_PARTS, FieldError
from panscan.serve.client import PreparedRequest, RequestWork
from panscan.serve.media import MediaFile, read_media
from panscan.serve.options import ServeOptions
from panscan.serve.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    MmProcessorKwargs,
    TextPart,
    TokenizeRequest,
)
from panscan.serve.sampling_fields import SamplingFields

_CHARACTERS_PER_TOKEN = 4  # approximate; used to estimate a prompt's length
_MOST_LOGPROBS = 100_000  # log-probabilities of one HTTP request: about 10 MB of JSON
_MOST_PROMPT_LOGPROBS = 400_000  # the same for prompts, by their characters, which are four per token or less


class RequestBuilder:
    """A builder of the engine's requests for one HTTP request. It reads documents, so call it in a thread.

    Args:
        options: server options with the defaults and limits.
        cost: prompt tokens of an image.
        uploads: files of a multipart body, by field name.
        deadline: when the work ends.
    """

    def __init__(
        self, options: ServeOptions, cost: PromptCost, uploads: Mapping[str, bytes], deadline: Deadline
    ) -> None:
        self._options, self.cost, self._uploads = options, cost, uploads
        self._read_media = partial(read_media, options=options, uploads=uploads, deadline=deadline)

    def chat(self, body: ChatCompletionRequest) -> PreparedRequest:
        """Return the requests of a chat completion.

        Raises:
            FieldError: a value is out of its range.
            ImageError: an image cannot be read, or exceeds a limit.
            TimeoutError: the deadline has passed.
        """
        sampling = _with_logprobs(body, body.n, self._sampling(body), "top_logprobs")
        request, documents = self._conversation(body, sampling)
        text = sum(len(part.text) for turn in body.messages for part in turn.parts if isinstance(part, TextPart))
        text += len(json.dumps(request.tools)) if request.tools else 0
        work = self._work(documents, request.pan_and_scan, text, sampling.max_new_tokens, body.model)
        _check_prompt_logprobs(sampling, (work.prompt_tokens + text) * body.n)
        return PreparedRequest(_choices(request, body.n), work)

    def completion(self, body: CompletionRequest) -> PreparedRequest:
        """Return the requests of a plain completion: for each prompt, ``n`` choices.

        Raises:
            FieldError: a value is out of range, or the body has files, which a prompt cannot reference.
        """
        self.check_used(())
        sampling = self._sampling(body)
        prompts = body.prompts
        count = len(prompts) * body.n
        if count > self._options.max_choices:
            raise FieldError(f"prompt and n: at most {self._options.max_choices} choices per request", "prompt")
        sampling = _with_logprobs(body, count, sampling, "logprobs")
        requests = [
            Request(prompt=prompt, raw=True, sampling=sampling, add_special_tokens=body.add_special_tokens)
            if isinstance(prompt, str)
            else Request(prompt_ids=prompt, raw=True, sampling=sampling)
            for prompt in prompts
        ]
        _check_prompt_logprobs(sampling, sum(map(len, prompts)) * body.n)
        work = self._work([], PanAndScan(), max(map(len, prompts)), sampling.max_new_tokens, body.model)
        return PreparedRequest([choice for request in requests for choice in _choices(request, body.n)], work)

    def counted(self, body: TokenizeRequest) -> Request:
        """Return the request whose tokens to count.

        Raises:
            FieldError, ImageError, TimeoutError: see :meth:`chat`.
        """
        if body.messages is None:
            self.check_used(())
            return Request(prompt=body.prompt, raw=True, add_special_tokens=body.add_special_tokens)
        return self._conversation(body)[0]

    def document(self, url: str) -> MediaFile:
        """Return the document behind a URL (see :func:`panscan.serve.media.read_media`).

        Raises:
            FieldError: the body has a file that the URL does not reference.
        """
        self.check_used([url])
        return self._read_media(url, "image")

    def check_used(self, urls: Sequence[str]) -> None:
        """Refuse a multipart body with files that no URL references.

        Raises:
            FieldError: a file is not referenced.
        """
        used = {url.partition(":")[2] for url in urls if url[:11].lower() == "attachment:"}
        if unused := self._uploads.keys() - used:
            name = shorten(min(unused)).strip("'")
            raise FieldError(f"{name}: the request does not reference this file; use the URL attachment:{name}", name)

    def pan_and_scan(self, given: MmProcessorKwargs | None) -> PanAndScan:
        """Return the server's pan-and-scan settings, overridden by those of a request.

        Raises:
            FieldError: a value is out of its range.
        """
        defaults = self._options.settings.pan_and_scan
        if given is None:
            return defaults
        values = {
            **defaults.processor_kwargs(),
            **{name: value for name, value in asdict(given).items() if value is not None},
        }
        enabled = values.pop("do_pan_and_scan")
        try:
            return PanAndScan(enabled, **{name.removeprefix("pan_and_scan_"): value for name, value in values.items()})
        except SettingError as error:
            raise FieldError(str(error), "mm_processor_kwargs") from error

    def _conversation(
        self, body: ChatCompletionRequest | TokenizeRequest, sampling: Sampling | None = None
    ) -> tuple[Request, list[MediaFile]]:
        """Return the request of a conversation, with one image per page, and its documents in order.

        Raises:
            ImageError: a document cannot be read, or exceeds a limit.
            FieldError: too many parts or images, too many bytes in total, or an unreferenced file.
            TimeoutError: the deadline has passed.
        """
        messages = body.messages or []
        if sum(len(message.parts) for message in messages) > MOST_PARTS:
            raise FieldError(f"messages: at most {MOST_PARTS} parts per request", "messages")
        documents: list[MediaFile] = []
        turns = []
        for message in messages:
            parts: list[JsonObject] = []
            for part in message.parts:
                if isinstance(part, TextPart):
                    parts.append({**part.template_values, "type": "text", "text": part.text})
                    continue
                for name in part.template_values.keys() & {*IMAGE_KEYS}:  # the request would take it, too: a local file
                    raise FieldError(f"messages: remove {name!r}: the part has its image in another field", "messages")
                if len(documents) >= self._options.max_images:
                    raise FieldError(f"messages: at most {self._options.max_images} images per request", "messages")
                document = self._read_media(part.url, f"image {len(documents) + 1}", one_view=part.one_view)
                documents.append(document)
                if sum(document.size for document in documents) > self._options.max_body_mb * 1e6:
                    most = f"{self._options.max_body_mb:g} MB"
                    raise FieldError(f"messages: the images exceed {most} in total", "messages")
                parts += [{**part.template_values, "type": "image"} for _ in document.pages]
            turn: JsonObject = {"role": "system" if message.role == "developer" else message.role, "content": parts}
            if message.tool_calls:
                turn["tool_calls"] = msgspec.to_builtins(message.tool_calls)
            if message.tool_call_id is not None:
                turn["tool_call_id"] = message.tool_call_id
            turns.append(turn)
        self.check_used(message_urls(messages))
        tools = {
            "tools": msgspec.to_builtins(body.tools),
            "tool_choice": "auto" if body.tool_choice is None else msgspec.to_builtins(body.tool_choice),
            "parallel_tool_calls": body.parallel_tool_calls,
        }
        try:
            request = Request(
                messages=turns,
                images=[page for document in documents for page in document.pages],
                pan_and_scan=self.pan_and_scan(body.mm_processor_kwargs),
                max_pages=self._options.max_pages,
                template_kwargs=body.chat_template_kwargs,
                sampling=sampling or Sampling(),
                **tools,
            )
        except FieldError:
            raise
        except SettingError as error:
            name = re.split("[.: ]", str(error), maxsplit=1)[0]
            raise FieldError(str(error), name if name in tools else "tools") from error
        return request, documents

    def _sampling(self, body: SamplingFields) -> Sampling:
        options = self._options
        if body.n > options.max_choices:
            raise FieldError(f"n: at most {options.max_choices}, got {shorten(body.n)}", "n")
        return body.sampling(options.settings.sampling)

    def _work(
        self,
        documents: Sequence[MediaFile],
        pan_and_scan: PanAndScan,
        characters: int,
        max_new_tokens: int,
        model: str | None,
    ) -> RequestWork:
        """Return the estimated work of a request, from its documents' headers.

        Raises:
            FieldError: the pan-and-scan settings do not fit a document (see :func:`panscan.images.views.split`).
        """
        try:
            plans = [
                plan_views(*size, view_settings(page, pan_and_scan), self.cost)
                for document in documents
                for page, size in zip(document.pages, document.sizes, strict=True)
            ]
        except SettingError as error:
            raise FieldError(str(error), "mm_processor_kwargs") from error
        tokens = sum(plan.prompt_tokens for plan in plans) + characters // _CHARACTERS_PER_TOKEN
        views = sum(len(plan.views) for plan in plans)
        digests = tuple(document.digest for document in documents)
        return RequestWork(views, tokens, max_new_tokens, digests, model=model)


def _choices(request: Request, count: int) -> list[Request]:
    """Return ``count`` copies with unique ids; a seed increases by one per copy, modulo 2^64."""
    choices = []
    for index in range(count):
        sampling = request.sampling
        if index and sampling.seed is not None:
            seed = sampling.seed + index
            sampling = replace(sampling, seed=seed - 2**64 if seed >= 2**64 else seed)
        choices.append(replace(request, id=uuid.uuid4().hex, sampling=sampling))
    return choices


def _with_logprobs(body: SamplingFields, choices: int, sampling: Sampling, param: str) -> Sampling:
    """Return the sampling of a request, bounded so that its answer has at most 100,000 log-probabilities.

    Raises:
        FieldError: choices x max_tokens x (top_logprobs + 1) exceed them, with the request's own max_tokens.
    """
    if sampling.logprobs is None:
        return sampling
    tokens, width = sampling.max_new_tokens, sampling.logprobs + 1
    if choices * tokens * width <= _MOST_LOGPROBS:
        return sampling
    if body.output_tokens is None:
        return replace(sampling, max_new_tokens=_MOST_LOGPROBS // (choices * width))
    size = f"{choices} x {tokens} x {width} = {choices * tokens * width}"
    message = f"{size} (choices x max_tokens x log-probabilities per token) exceed {_MOST_LOGPROBS}"
    raise FieldError(f"{param}: {message}; lower n, max_tokens or {param}, or send fewer prompts", param)


def _check_prompt_logprobs(sampling: Sampling, tokens: int) -> None:
    """Bound the log-probabilities of prompts of so many tokens at most.

    Raises:
        FieldError: they are too many.
    """
    most = _MOST_PROMPT_LOGPROBS // ((sampling.prompt_logprobs or 0) + 1)
    if sampling.prompt_logprobs is not None and tokens > most:
        size = f"prompts of {tokens:,} characters and image tokens exceed {most:,}"
        message = f"{size} with {sampling.prompt_logprobs} log-probabilities per token; shorten or split them"
        raise FieldError(f"prompt_logprobs: {message}", "prompt_logprobs")


def message_urls(messages: Sequence[ChatMessage]) -> list[str]:
    """Return the URLs of a conversation's images and documents."""
    return [part.url for message in messages for part in message.parts if not isinstance(part, TextPart)]


def media_pool(urls: Sequence[str], uploads: Mapping[str, bytes]) -> Pool:
    """Return the threads that read these documents: slow ones must not delay plain images."""
    if any(url[:8].lower().startswith(("http:", "https:")) for url in urls):
        return "fetch"
    for url in urls:  # by their first bytes, or the same in base64
        header, _, payload = url[:256].partition(",")
        content = uploads.get(url.partition(":")[2], b"") if url.startswith("attachment:") else b""
        inline = header.lower().endswith(";base64") and payload.startswith(("iVBORw0KGg", "/9j/"))
        if not inline and not content.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")):
            return "document"
    return "read"
