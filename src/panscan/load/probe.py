"""Check an endpoint before the load: whether it answers, which model it serves, whether it counts image tokens.

A server that drops images, or reads their base64 as text, answers a load test with fast, meaningless figures. The same
prompt with and without an image shows it in the prompt tokens.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from panscan.core import EndpointError, PanAndScan, SettingError, now
from panscan.core.foreign import is_count
from panscan.images.views import PUBLISHED_COST, plan_views
from panscan.load.chat import Endpoint, chat_body, fetch_json, served_models
from panscan.load.scenario import DocumentShare
from panscan.records.load_records import ProbeRecord

_MODELS_SECONDS = 30.0
_POLL_SECONDS = 0.5
_PROMPT = "What does this document say?"
_PAGE = DocumentShare("receipt", 600, 1800)  # three crops with the default pan and scan
_FEW = 8  # tokens: a placeholder such as "<image>" as text has fewer
_CHARACTERS_PER_TOKEN = 8  # at most, of base64 that is read as text
_TOLERANCE = 0.1  # of the expected tokens, for the words around images


@dataclass(frozen=True, slots=True)
class EndpointFacts:
    """What an endpoint answered before the load.

    Args:
        model: name of the model that is asked.
        server: what ``/v1/models`` names as the owner, such as ``vllm``; None if unknown.
        text_prompt_tokens: prompt tokens without an image; None if not reported.
        image_prompt_tokens: prompt tokens of the same prompt with an image; None if not reported.
        expected_image_tokens: image tokens of that image for Gemma 3; None for other models.
        warnings: reasons to doubt the figures.
        notes: further facts.
    """

    model: str
    server: str | None
    text_prompt_tokens: int | None
    image_prompt_tokens: int | None
    expected_image_tokens: int | None
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def record(self) -> ProbeRecord:
        """The ``probe`` record."""
        return ProbeRecord(
            model=self.model,
            text_prompt_tokens=self.text_prompt_tokens,
            image_prompt_tokens=self.image_prompt_tokens,
            expected_image_tokens=self.expected_image_tokens,
            warnings=list(self.warnings),
            notes=list(self.notes),
        )


def address(url: str) -> str:
    """Return a URL without its query, which may hold a key."""
    return urlunsplit(urlsplit(url)._replace(query="", fragment=""))


def find_model(endpoint: Endpoint) -> tuple[Endpoint, str | None, str | None]:
    """Return the endpoint with its model, the name of the server, and a warning.

    Args:
        endpoint: its model is empty if the server shall choose.

    Raises:
        EndpointError: the server does not answer.
        SettingError: the server does not name a model, or names several, and none was chosen.
    """
    try:
        models = served_models(endpoint, now() + min(_MODELS_SECONDS, endpoint.timeout))
    except EndpointError as error:
        if not endpoint.model or error.status not in (404, 405, 501):
            raise
        return endpoint, None, None
    names = list(models)
    server = next(filter(None, models.values()), None)
    if endpoint.model:
        unknown = names and endpoint.model not in models
        warning = f"--model {endpoint.model}: the server lists {_listed(names, 5)}" if unknown else None
        return endpoint, server, warning
    if len(names) != 1:
        listed = f"the server lists {_listed(names, 10)}" if names else "the server lists none"
        raise SettingError(f"--model is missing: {listed}; choose one")
    return replace(endpoint, model=names[0]), server, None


def _listed(names: list[str], most: int) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


_Found = TypeVar("_Found")


def _when_ready(ask: Callable[[], _Found], deadline: float, on_wait: Callable[[str], None]) -> _Found:
    """Return what ``ask`` returns, once the server accepts connections and has loaded its model.

    Raises:
        EndpointError: another failure, or the server is not ready at the deadline.
    """
    while True:
        try:
            return ask()
        except EndpointError as error:
            if (error.kind != "connect" and error.status != 503) or now() >= deadline:
                raise
            on_wait(str(error))
        time.sleep(_POLL_SECONDS)


def probe_endpoint(
    endpoint: Endpoint,
    kwargs: Mapping[str, Any] | None = None,
    *,
    ready_seconds: float = 0.0,
    on_wait: Callable[[str], None] = lambda _: None,
) -> EndpointFacts:
    """Ask for the model and compare the prompt tokens of a prompt with and without an image.

    Args:
        endpoint: its model is empty if the server shall choose.
        kwargs: pan-and-scan settings (``mm_processor_kwargs``) that the load sends.
        ready_seconds: how long to wait for a server that starts.
        on_wait: called with the reason while it waits.

    Raises:
        EndpointError: the server does not answer, or refuses the key or the path.
        SettingError: see :func:`find_model`.
    """
    deadline = now() + ready_seconds
    try:
        endpoint, server, warning = _when_ready(lambda: find_model(endpoint), deadline, on_wait)
        asking = _ProbeRequests(endpoint, [warning] if warning else [])
        if ready_seconds:
            asking.wait(deadline, on_wait)
        return _compare(asking, endpoint.model, server, kwargs)
    except EndpointError as error:
        hint = "; is the server running?" if error.kind == "connect" else ""
        message = f"{address(endpoint.url)}: {error}{hint}"
        raise EndpointError(message, kind=error.kind, status=error.status) from error


def _compare(asking: _ProbeRequests, model: str, server: str | None, kwargs: Mapping[str, Any] | None) -> EndpointFacts:
    """Return the probe of prompts with and without an image.

    Raises:
        EndpointError: see :func:`probe_endpoint`.
    """
    image = _image_url()
    text = asking.prompt_tokens("a prompt without an image", None, None)
    pictured = asking.prompt_tokens("a prompt with an image", image, kwargs)
    notes: list[str] = []
    if text is None or pictured is None:
        if not asking.refused:
            asking.warnings.append("the endpoint reports no prompt tokens: image tokens cannot be checked")
        return EndpointFacts(model, server, text, pictured, None, tuple(asking.warnings))
    counted = pictured - text
    expected = _expected(model, kwargs)
    asking.warnings += _token_warnings(counted, expected, len(image), exact=kwargs is not None)
    notes.append(f"image tokens counted: {counted} for a page of {_PAGE.width}x{_PAGE.height} pixels")
    notes.append(_pan_and_scan_note(asking, image, kwargs, pictured))
    return EndpointFacts(model, server, text, pictured, expected, tuple(asking.warnings), tuple(notes))


class _ProbeRequests:
    """Short requests to an endpoint, whose failures become warnings."""

    def __init__(self, endpoint: Endpoint, warnings: list[str]) -> None:
        self._endpoint = endpoint
        self.warnings = warnings
        self.refused = False

    def wait(self, deadline: float, on_wait: Callable[[str], None]) -> None:
        """Wait until the model is loaded, or the deadline has passed. Other failures show in the next request."""
        with suppress(EndpointError):
            _when_ready(lambda: self._ask(None, None), deadline, on_wait)

    def prompt_tokens(self, what: str, image: bytes | None, kwargs: Mapping[str, Any] | None) -> int | None:
        """Return the prompt tokens of a request for one token; None if it fails or they are not reported.

        Raises:
            EndpointError: the server does not answer, or refuses the key or the path.
        """
        try:
            return self._ask(image, kwargs)
        except EndpointError as error:
            if error.kind in ("connect", "timeout") or error.status in (401, 403, 404):
                raise
            self.refused = True
            self.warnings.append(f"the endpoint refused {what}: {error}")
            return None

    def varied(self, image: bytes, kwargs: Mapping[str, Any]) -> int | None:
        """Return the prompt tokens with other pan-and-scan settings; None if the endpoint does not accept them."""
        try:
            return self._ask(image, kwargs)
        except EndpointError:
            return None

    def _ask(self, image: bytes | None, kwargs: Mapping[str, Any] | None) -> int | None:
        parts: list[dict[str, Any]] = [{"type": "text", "text": _PROMPT}]
        if image is not None:
            parts.insert(0, {"type": "image_url", "image_url": {"url": image}})
        message = {"role": "user", "content": parts}
        body = chat_body(self._endpoint.model, [message], 1, stream=False, mm_processor_kwargs=kwargs)
        found = fetch_json(self._endpoint, "POST", "/v1/chat/completions", body)
        usage = found.get("usage") if isinstance(found, dict) else None
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        return count if is_count(count) else None


def _image_url() -> bytes:
    buffer = BytesIO()
    _PAGE.draw(0, 0, 40).image.save(buffer, "PNG")
    return b"data:image/png;base64," + base64.b64encode(buffer.getvalue())


def _expected(model: str, kwargs: Mapping[str, Any] | None) -> int | None:
    """Return the image tokens of the probe's page: with the given settings, or at least those of one view."""
    if re.search(r"gemma[-_ ]?3(?!n)", model, re.IGNORECASE) is None:
        return None
    settings = _settings(kwargs)
    return plan_views(_PAGE.width, _PAGE.height, settings, PUBLISHED_COST).image_tokens


def _settings(kwargs: Mapping[str, Any] | None) -> PanAndScan:
    if kwargs is None:
        return PanAndScan(enabled=False)
    fields = {name.removeprefix("pan_and_scan_"): value for name, value in kwargs.items()}
    enabled = fields.pop("do_pan_and_scan", False)
    return PanAndScan(enabled=enabled, **fields)


def _token_warnings(counted: int, expected: int | None, image_characters: int, *, exact: bool) -> list[str]:
    """Return warnings about the tokens that an image added to the prompt."""
    if counted > image_characters / _CHARACTERS_PER_TOKEN:
        return [f"the image added {counted:,} prompt tokens: the server reads the image's base64 as text"]
    least = _FEW if expected is None else (1 - _TOLERANCE) * PUBLISHED_COST.image_tokens
    if counted < least:
        wanted = "" if expected is None else f" (expected for Gemma 3: {expected:,})"
        return [
            f"the image added {counted:,} prompt tokens{wanted}: the server does not count image tokens, or treats the"
            " request as text"
        ]
    if exact and expected is not None and abs(counted - expected) > expected * _TOLERANCE + 2 * _FEW:
        return [
            f"the image added {counted:,} prompt tokens, expected {expected:,}: the server does not apply the"
            " pan-and-scan settings"
        ]
    return []


def _pan_and_scan_note(asking: _ProbeRequests, image: bytes, kwargs: Mapping[str, Any] | None, counted: int) -> str:
    """Ask again with pan and scan switched, and return what that changes."""
    other = not _settings(kwargs).enabled
    found = asking.varied(image, {**(kwargs or {}), "do_pan_and_scan": other})
    if found is None:
        return "the endpoint does not accept pan-and-scan settings (mm_processor_kwargs)"
    if found == counted and kwargs is None:  # it may be on already
        found = asking.varied(image, {"do_pan_and_scan": not other})
    if found is None or found == counted:
        return "pan-and-scan settings (mm_processor_kwargs) do not change the prompt tokens"
    return f"pan-and-scan settings change the prompt tokens from {counted:,} to {found:,}"
