"""Check an endpoint before the load: whether it answers, which model it serves, whether it counts image tokens.

A server that drops images, or reads their base64 as text, answers a load test with fast, meaningless figures. The same
prompt with and without an image shows it in the prompt tokens.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from panscan.core import EndpointError, SettingError, now
from panscan.core.activity import Activity, activity
from panscan.core.foreign import is_count
from panscan.images.encode import encoded_image
from panscan.images.views import PUBLISHED_COST, plan_views
from panscan.load.chat import Endpoint, chat_body, data_url, fetch_json, served_models
from panscan.load.scenario import DocumentShare
from panscan.records.load_records import ProbeRecord
from panscan.settings import Settings
from panscan.workload.request_sets import chat_parts

ProcessorKwargs = Mapping[str, Any] | None
"""Pan-and-scan settings of requests; None: the server's."""

_MODELS_SECONDS = 30.0
_POLL_SECONDS = 0.5
_PROMPT = "What does this document say?"
_PAGE = DocumentShare("receipt", 600, 1800)  # three crops with the default pan and scan
_FEW = 8  # tokens: a placeholder such as "<image>" as text has fewer
_CHARACTERS_PER_TOKEN = 8  # at most, of base64 that is read as text
_TOLERANCE = 0.1  # of the expected tokens, for the words around images


def address(url: str) -> str:
    """Return a URL without its query, which may hold a key."""
    return urlunsplit(urlsplit(url)._replace(query="", fragment=""))


def find_model(endpoint: Endpoint, option: str = "--model") -> tuple[Endpoint, str | None, list[str]]:
    """Return the endpoint with its model, the name of the server, and warnings.

    Args:
        endpoint: its model is empty if the server shall choose.
        option: option that names the model.

    Raises:
        EndpointError: the server does not answer, or refuses the key.
        SettingError: the server does not name a model, or names several, and none was chosen.
    """
    try:
        models = served_models(endpoint, now() + min(_MODELS_SECONDS, endpoint.timeout))
    except EndpointError as error:
        lists_none = error.status is not None and (400 <= error.status < 500 or error.status == 501)
        if not endpoint.model or not lists_none or error.status == 401:
            raise
        return endpoint, None, []
    server = next(filter(None, models.values()), None)
    listed = f"the server lists {', '.join([*models][:8]) or 'none'}"
    if len(models) > 8:
        listed += f" and {len(models) - 8:,} more"
    if not endpoint.model:
        if len(models) != 1:
            raise SettingError(f"{option} is missing: {listed}; choose one")
        return replace(endpoint, model=next(iter(models))), server, []
    unknown = models and endpoint.model not in models
    return endpoint, server, [f"{option} {endpoint.model}: {listed}"] if unknown else []


_Found = TypeVar("_Found")


def _when_ready(ask: Callable[[], _Found], deadline: float, step: Activity) -> _Found:
    """Return what ``ask`` returns, once the server accepts connections and has loaded its model.

    Raises:
        EndpointError: another failure, or the server is not ready at the deadline.
    """
    limit = deadline - now()
    while True:
        try:
            return ask()
        except EndpointError as error:
            if (error.kind != "connect" and error.status != 503) or now() >= deadline:
                raise
            step.rename(f"waiting up to {limit:.0f} s for the endpoint: {error}")
        time.sleep(_POLL_SECONDS)


def probe_endpoint(
    endpoint: Endpoint,
    kwargs: ProcessorKwargs = None,
    *,
    ready_seconds: float = 0.0,
) -> tuple[ProbeRecord, str | None]:
    """Ask for the model and compare the prompt tokens of a prompt with and without an image.

    Args:
        endpoint: its model is empty if the server shall choose.
        kwargs: pan-and-scan settings (``mm_processor_kwargs``) that the load sends.
        ready_seconds: how long to wait for a server that starts.

    Returns:
        What the endpoint answered, and what it names as the owner of its models, such as ``vllm``; None if unknown.

    Raises:
        EndpointError: the server does not answer, or refuses the key or the path.
        SettingError: see :func:`find_model`.
    """
    deadline = now() + ready_seconds
    try:
        with activity("probing the endpoint") as step:
            endpoint, server, warnings = _when_ready(lambda: find_model(endpoint), deadline, step)
            if ready_seconds:
                with suppress(EndpointError):  # it shows in the next request
                    _when_ready(lambda: _prompt_tokens(endpoint, None, None), deadline, step)
            return _compare(endpoint, warnings, kwargs), server
    except EndpointError as error:
        hint = "; is the server running?" if error.kind == "connect" else ""
        message = f"{address(endpoint.url)}: {error}{hint}"
        raise EndpointError(message, kind=error.kind, status=error.status) from error


def _prompt_tokens(endpoint: Endpoint, image: bytes | None, kwargs: ProcessorKwargs) -> int | None:
    """Return the prompt tokens of a request for one token; None if they are not reported.

    Raises:
        EndpointError: the request failed.
    """
    message = {"role": "user", "content": chat_parts([] if image is None else [image], _PROMPT)}
    body = chat_body(endpoint.model, [message], 1, stream=False, mm_processor_kwargs=kwargs, adapt=endpoint.adapt)
    match fetch_json(endpoint, "POST", "/v1/chat/completions", body):
        case {"usage": {"prompt_tokens": count}} if is_count(count):
            return int(count)
    return None


def _compare(endpoint: Endpoint, warnings: list[str], kwargs: ProcessorKwargs) -> ProbeRecord:
    """Return the results of prompts with and without an image.

    Raises:
        EndpointError: see :func:`probe_endpoint`.
    """
    page = data_url("image/png", encoded_image(_PAGE.draw(0, 0, 40).image))
    counts: list[int | None] = []
    refused = False
    for article, image, settings in (("without", None, None), ("with", page, kwargs)):
        try:
            counts.append(_prompt_tokens(endpoint, image, settings))
        except EndpointError as error:
            if error.kind in ("connect", "timeout") or error.status in (401, 403, 404):
                raise
            refused = True
            counts.append(None)
            warnings.append(f"the endpoint refused a prompt {article} an image: {error}")
    text, pictured = counts
    expected, notes = None, []
    if text is not None and pictured is not None:
        if re.search(r"gemma[-_ ]?3(?!n)", endpoint.model, re.IGNORECASE) is not None:
            asked = Settings(**{"do_pan_and_scan": False, **(kwargs or {})})  # without any, at least one view is taken
            expected = plan_views(_PAGE.width, _PAGE.height, asked.pan_and_scan).image_tokens
        warnings += _token_warnings(pictured - text, expected, len(page), exact=kwargs is not None)
        notes = [f"image tokens counted: {pictured - text} for a page of {_PAGE.width}x{_PAGE.height} pixels"]
    elif not refused:
        warnings.append("the endpoint reports no prompt tokens: image tokens cannot be checked")
    return ProbeRecord(
        model=endpoint.model,
        text_prompt_tokens=text,
        image_prompt_tokens=pictured,
        expected_image_tokens=expected,
        warnings=warnings,
        notes=notes,
    )


def _token_warnings(counted: int, expected: int | None, image_characters: int, *, exact: bool) -> list[str]:
    """Return warnings about the tokens that an image added to the prompt."""
    added = f"the image added {counted:,} prompt tokens"
    if counted > image_characters / _CHARACTERS_PER_TOKEN:
        return [f"{added}: the server reads the image's base64 as text"]
    least = _FEW if expected is None else (1 - _TOLERANCE) * PUBLISHED_COST.image_tokens
    if counted < least:
        wanted = "" if expected is None else f" (expected for Gemma 3: {expected:,})"
        return [f"{added}{wanted}: the server does not count image tokens, or treats the request as text"]
    if exact and expected is not None and abs(counted - expected) > expected * _TOLERANCE + 2 * _FEW:
        return [f"{added}, expected {expected:,}: the server does not apply the pan-and-scan settings"]
    return []
