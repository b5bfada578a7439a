"""An endpoint under verification: what it supports, and its greedy answers with log-probabilities.

A field that an endpoint refuses is omitted from then on. All requests count against the limit, refused ones included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from sys import float_info
from typing import Any

from msgspec import Struct

from panscan.core import EndpointError, Request
from panscan.core.foreign import JsonObject, is_count
from panscan.load.chat import Endpoint, chat_body, data_url, fetch_json, most_characters
from panscan.load.probe import find_model
from panscan.settings import Settings, VerifyTable, check_options, default_of
from panscan.verdict.evidence import ReportedStep, ReportedToken
from panscan.workload.request_sets import chat_parts

_REFUSED = (400, 415, 422, 500, 501)
"""HTTP statuses of a request that may succeed with fewer fields."""
_SERVER_ERROR = 500  # the first HTTP status of failures that may pass
_ABOUT_IMAGES = re.compile(r"\bimages?\b|multimodal|multi-modal|vision", re.I)
_LADDER = (20, 10, 5, 1)  # numbers of top log-probabilities to try
_MOST_NATS = float_info.max
_MOST_STEPS = 4096
_MOST_TOP = 64  # more than any server reports
_LONGEST_TOKEN = 4096  # characters or bytes


@dataclass(frozen=True)
class VerifyOptions(VerifyTable):
    """Options of a verification; the numbers are in the table of options.

    Args:
        url: URL of the endpoint.
        settings: checkpoint and pan-and-scan settings; the reference.
        served_model: the endpoint's name of the model; None: the only one that it lists.
        api_key: bearer token.
        timeout: seconds per request.
    """

    url: str
    settings: Settings
    served_model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout: float = default_of("timeout", "verify")

    def __post_init__(self) -> None:
        check_options(self, "verify")


@dataclass(frozen=True, slots=True)
class EndpointAnswer:
    """An endpoint's answer to one request.

    Args:
        text: the answer.
        steps: reported tokens; empty without log-probabilities.
        finish_reason: reported reason.
        prompt_tokens: reported count; None if missing.
        output_tokens: reported count; None if missing.
    """

    text: str
    steps: tuple[ReportedStep, ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None


class Capabilities(Struct):
    """What an endpoint accepted and reported so far.

    Args:
        top_logprobs: number of log-probabilities per position that it accepts; 0: of the chosen token only; None: it
            reports none.
        mm_processor_kwargs: whether it accepts pan-and-scan settings in a request.
        images: whether it accepts images.
        several_images: whether it accepts several images in a request.
        prompt_tokens: whether it reports token counts.
        refusals: the endpoint's reasons by the field that it refused.
    """

    top_logprobs: int | None
    mm_processor_kwargs: bool = True
    images: bool = True
    several_images: bool = True
    prompt_tokens: bool = False
    refusals: dict[str, str] = {}


class EndpointClient:
    """Requests to one endpoint, within a limit.

    Args:
        endpoint: address and credentials; its model name may be empty until :meth:`identify`.
        max_requests: HTTP requests at most.
        max_tokens: output tokens per request.
        top_logprobs: log-probabilities per position to ask for.
    """

    def __init__(self, endpoint: Endpoint, *, max_requests: int, max_tokens: int, top_logprobs: int) -> None:
        self.endpoint, self.max_requests, self.max_tokens = endpoint, max_requests, max_tokens
        self.capabilities = Capabilities(top_logprobs)
        self.requests = 0
        self._other_errors: set[str] = set()  # errors that omitting fields did not avoid
        self.server: str | None = None

    @property
    def left(self) -> int:
        """Number of requests that may still be sent."""
        return self.max_requests - self.requests

    def identify(self) -> None:
        """Find the name of the served model, unless it was given.

        Raises:
            EndpointError: the endpoint cannot be reached, or refuses the key.
            SettingError: the endpoint does not name one model, and none was given.
        """
        self._count_request()
        self.endpoint, self.server, _ = find_model(self.endpoint, "--served-model")

    def answer(self, request: Request) -> EndpointAnswer:
        """Ask one question greedily, without the fields that the endpoint refuses.

        Args:
            request: images are bytes of PNG files.

        Raises:
            EndpointError: no answer, or one that cannot be used; ``kind`` is ``client`` if no request is left.
        """
        capabilities = deepcopy(self.capabilities)
        first, repeated = "", False
        while True:
            try:
                reply = self.post(request)
            except EndpointError as error:
                first = first or str(error)
                named = next((name for name in self._optional_fields(request) if name in str(error)), None)
                passing = error.kind == "http" and (error.status or 0) >= _SERVER_ERROR and named is None
                if passing and not repeated and self.left > 0:
                    repeated = True
                    continue
                if not self._narrow(request, error, named):
                    if error.kind == "http" and named is None:
                        self._other_errors.add(first)
                    self.capabilities = capabilities
                    raise
                if named is not None:
                    capabilities = deepcopy(self.capabilities)
            else:
                answer = _endpoint_answer(reply, self.max_tokens)
                self.capabilities.prompt_tokens |= answer.prompt_tokens is not None
                if answer.text and not answer.steps and self.capabilities.top_logprobs is not None:
                    self.capabilities.top_logprobs = None
                    self.capabilities.refusals["logprobs"] = "accepted, but the response has none"
                return answer

    def variant(self, request: Request, **fields: Any) -> EndpointAnswer:
        """Ask a question with other fields; see :meth:`post`."""
        return _endpoint_answer(self.post(request, **fields), self.max_tokens)

    def post(self, request: Request, **fields: Any) -> Any:
        """Return the JSON response to a question with other fields, which the endpoint may refuse.

        Args:
            request: images are bytes of PNG files.
            fields: see :meth:`_body`.

        Raises:
            EndpointError: no response, or no request is left.
        """
        self._count_request()
        return fetch_json(self.endpoint, "POST", "/v1/chat/completions", self._body(request, **fields))

    def _count_request(self) -> None:
        if self.left <= 0:
            raise EndpointError(f"the limit of {self.max_requests} requests is reached", kind="client")
        self.requests += 1

    def _body(
        self,
        request: Request,
        *,
        answer: str | None = None,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        **fields: Any,
    ) -> tuple[bytes, ...]:
        """Return the body of a request.

        Args:
            request: images are bytes of PNG files.
            answer: an answer that precedes the reply.
            max_tokens: output tokens; None: the session's.
            temperature: sampling temperature.
            fields: further fields.
        """
        can, settings = self.capabilities, request.pan_and_scan
        images = [data_url("image/png", data) for data in request.images]
        content = chat_parts(images, request.prompt or "") if images else request.prompt
        system = [] if request.system is None else [{"role": "system", "content": request.system}]
        answered = [] if answer is None else [{"role": "assistant", "content": answer}]
        crops: JsonObject | None = None
        if images and can.mm_processor_kwargs:
            crops = settings.processor_kwargs() if settings.enabled else {"do_pan_and_scan": False}
        return chat_body(
            self.endpoint.model,
            [*system, {"role": "user", "content": content}, *answered],
            max_tokens or self.max_tokens,
            stream=False,
            temperature=temperature,
            mm_processor_kwargs=crops,
            logprobs=None if can.top_logprobs is None else True,
            top_logprobs=can.top_logprobs or None,
            **fields,
        )

    def _optional_fields(self, request: Request) -> list[str]:
        """Return the fields of a request's body that the endpoint may refuse."""
        can = self.capabilities
        crops = bool(request.images) and can.mm_processor_kwargs
        return ["mm_processor_kwargs"] * crops + ["logprobs"] * (can.top_logprobs is not None)

    def _narrow(self, request: Request, error: EndpointError, named: str | None) -> bool:
        """Omit a field that the endpoint may have refused; return whether a request without it may succeed.

        Endpoints name the field that they refuse. Where the message names none, fields are omitted one by one.
        """
        can, message = self.capabilities, str(error)
        refused = named or next(iter(self._optional_fields(request)), None)
        if refused is None or error.kind != "http" or error.status not in _REFUSED:
            return False
        if named is None and (_ABOUT_IMAGES.search(message) or message in self._other_errors):
            return False
        can.refusals[refused] = message.partition(": ")[2] or message  # without the request that it names
        if refused == "mm_processor_kwargs":
            can.mm_processor_kwargs = False
        else:
            count = can.top_logprobs or 0
            can.top_logprobs = next((step for step in (*_LADDER, 0) if step < count), None)
        return True


def _endpoint_answer(reply: Any, max_tokens: int) -> EndpointAnswer:
    """Return the answer of a response.

    Raises:
        EndpointError: the response is no chat completion, or its text is far longer than ``max_tokens`` tokens.
    """
    match reply:
        case {"choices": [{"message": {**message}} as choice, *_]}:
            text, finish = message.get("content"), choice.get("finish_reason")
        case _:
            raise EndpointError("the response is not a chat completion: check the URL")
    text = text if isinstance(text, str) else ""
    characters = most_characters(max_tokens)
    if len(text) > characters:  # the tokenizer would take long
        raise EndpointError(
            f"the answer has {len(text):,} characters for max_tokens {max_tokens}: at most {characters:,}"
        )
    usage = reply.get("usage")
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")] if isinstance(usage, Mapping) else []
    return EndpointAnswer(
        text,
        reported_steps(choice.get("logprobs")),
        finish if isinstance(finish, str) else None,
        *(count if is_count(count) else None for count in counts),
    )


def reported_steps(logprobs: Any) -> tuple[ReportedStep, ...]:
    """Return the positions of ``logprobs`` of a chat completion."""
    rows = _rows(logprobs.get("content"), _MOST_STEPS) if isinstance(logprobs, Mapping) else []
    return tuple(
        ReportedStep(_token(row), tuple(map(_token, _rows(row.get("top_logprobs"), _MOST_TOP)))) for row in rows
    )


def _rows(listed: Any, most: int) -> list[Mapping[str, Any]]:
    return [row for row in listed[:most] if isinstance(row, Mapping)] if isinstance(listed, list) else []


def _token(row: Mapping[str, Any]) -> ReportedToken:
    raw, data = row.get("bytes"), None
    if isinstance(raw, list) and len(raw) <= _LONGEST_TOKEN:
        data = bytes(raw) if all(isinstance(byte, int) and 0 <= byte < 256 for byte in raw) else None
    return ReportedToken(_reported_text(row.get("token")), data, log_probability(row.get("logprob")))


def _reported_text(value: Any) -> str:
    """Return a token's text; one that no token has, such as one of megabytes, as the replacement character."""
    if not isinstance(value, str):
        return ""
    return value if len(value) <= _LONGEST_TOKEN else "\ufffd"


def log_probability(value: Any) -> float | None:
    """Return a finite number, at most 0; None for anything else. Rounding may report a little more than 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not -_MOST_NATS <= value <= _MOST_NATS:
        return None
    return min(float(value), 0.0)
