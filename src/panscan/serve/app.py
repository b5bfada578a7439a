"""The HTTP API: OpenAI's endpoints, health checks, metrics and the playground, over any backend."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from panscan import __version__
from panscan.core import PanscanError
from panscan.core.foreign import JsonObject
from panscan.core.option import shorten
from panscan.core.sampling import REST_OF_CONTEXT
from panscan.images.views import PUBLISHED_COST
from panscan.model.bundled import is_demonstration
from panscan.serve.admission import AdmissionControl, AdmissionSlot, RefusedError, read_body
from panscan.serve.body import Body, FieldError, Parsed, count_values, parse
from panscan.serve.client import EngineClient
from panscan.serve.generation import Generation
from panscan.serve.guards import Guard, with_request_ids
from panscan.serve.metrics import ServerMetrics
from panscan.serve.options import ServeOptions
from panscan.serve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    ViewsRequest,
)
from panscan.serve.replies import TIMED_OUT, Reply, TokenNames, error_body, error_of, error_status, json_response
from panscan.serve.request_builder import RequestBuilder, media_pool, message_urls
from panscan.serve.tracing import open_tracer
from panscan.serve.views import page_views, size_views

log = logging.getLogger("panscan.serve")

_Read = TypeVar("_Read")

_INLINE = 64 * 1024  # bytes; smaller bodies are parsed on the event loop, larger ones in a thread
_INLINE_VALUES = 1000  # the same for the number of JSON values
_CLOSED = 499  # nginx's status for a client that disconnected; it appears in the metrics only
_NO_MEMORY = "the server has too little memory for this request now; send less, or retry later"
_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; style-src 'self'; script-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "png": "image/png", "svg": "image/svg+xml"}


def create_app(options: ServeOptions, backend: EngineClient) -> Starlette:
    """Return the application. The caller starts and closes the backend.

    ``app.state.admission`` is the :class:`panscan.serve.generation.AdmissionControl`, which drains the server.

    Raises:
        UnsupportedError: tracing is enabled, but OpenTelemetry is not installed.
    """
    tracer = None
    if options.otlp_traces_endpoint is not None:
        tracer = open_tracer(options.otlp_traces_endpoint, options.model_name)
    metrics = ServerMetrics(options.model_name)
    admission = AdmissionControl(options, backend, metrics)
    middleware = [Middleware(Guard, options=options)]
    if options.allowed_origins:  # answers browsers whose page comes from one of them
        cross_origin = Middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
        middleware.insert(0, cross_origin)
    app = Starlette(
        routes=_routes(_Api(options, backend, admission, Generation(admission, tracer))),
        middleware=middleware,
        exception_handlers=dict.fromkeys(_ERRORS, partial(_error_response, metrics)),
    )
    app.middleware_stack = with_request_ids(app.build_middleware_stack())
    app.state.admission = admission
    return app


class _Api:
    """The handlers of all endpoints. Those of POST requests get the slot and the parsed body."""

    def __init__(
        self, options: ServeOptions, backend: EngineClient, admission: AdmissionControl, generation: Generation
    ) -> None:
        self._options, self._backend, self._admission, self._generation = options, backend, admission, generation
        self._names = TokenNames(backend)
        self._created = int(time.time())
        folder = files("panscan.serve").joinpath("playground")
        self._pages = {
            file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in _TYPES
        }

    def _builder(self, slot: AdmissionSlot) -> RequestBuilder:
        cost = None if self._backend.info is None else self._backend.info.cost
        return RequestBuilder(self._options, cost or PUBLISHED_COST, slot.uploads, slot.deadline)

    @property
    def _max_model_len(self) -> int | None:
        info = self._backend.info
        return None if info is None else info.max_model_len

    async def health(self, _request: Request) -> Response:
        """Return 200 while the process is alive."""
        return json_response({})

    async def ready(self, _request: Request) -> Response:
        """Return 200 if the server can start a request now, otherwise 503."""
        if self._admission.draining:
            raise RefusedError(503, "the server is shutting down", 5)
        if not self._backend.ready:
            raise RefusedError(503, "the model is loading", 5)
        return json_response({})

    async def metrics(self, _request: Request) -> Response:
        """Return all metrics in Prometheus' text format."""
        name, metrics = self._options.model_name, self._admission.metrics
        metrics.retried.labels(name).set(self._backend.retried)
        metrics.active.labels(name).set(self._admission.active)
        stats = await self._backend.stats()
        body = metrics.expose(stats, self._backend.inflight + self._admission.waiting)
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, _request: Request) -> Response:
        """List the served models."""
        return json_response({"object": "list", "data": [*map(self._model, self._options.models)]})

    async def model(self, request: Request) -> Response:
        """Return the model with this name; without one, all of them."""
        name = request.path_params["name"]
        return json_response(self._model(self._served_model(name))) if name else await self.models(request)

    async def chat(self, slot: AdmissionSlot, body: ChatCompletionRequest) -> ASGIApp:
        """Create a chat completion."""
        model = self._served_model(body.model)
        prepared = await self._read(slot, partial(self._builder(slot).chat, body), message_urls(body.messages))
        reply, stream = Reply(body, model, self._names), body.stream
        del body  # documents as text, which the answer does not need
        return await self._generation.answer(slot, prepared, reply, stream=stream)

    async def completions(self, slot: AdmissionSlot, body: CompletionRequest) -> ASGIApp:
        """Create a text completion."""
        model = self._served_model(body.model)
        prepared = await self._read(slot, partial(self._builder(slot).completion, body), ())
        reply = Reply(body, model, self._names)
        return await self._generation.answer(slot, prepared, reply, stream=body.stream)

    async def tokenize(self, slot: AdmissionSlot, body: TokenizeRequest) -> Response:
        """Return the token ids of a prompt, and its number of views."""
        self._served_model(body.model)
        prompt = await self._read(slot, partial(self._builder(slot).counted, body), message_urls(body.messages or ()))
        del body
        counts = await slot.until_disconnect(self._backend.count(prompt))
        return json_response(
            {
                "count": len(counts.ids),
                "max_model_len": self._max_model_len,
                "tokens": counts.ids,
                "views": counts.views,
                "image_tokens": counts.image_tokens,
            }
        )

    async def detokenize(self, slot: AdmissionSlot, body: DetokenizeRequest) -> Response:
        """Return the text of token ids, without special tokens."""
        self._served_model(body.model)
        self._builder(slot).check_used(())
        known = 0 if self._backend.info is None else self._backend.info.vocabulary
        for index, token in enumerate(body.tokens):
            if token >= known:
                raise FieldError(f"tokens.{index}: {token} is not the id of a token (0 to {known - 1})", "tokens")
        texts = await slot.until_disconnect(self._backend.token_texts(body.tokens))
        return json_response({"prompt": b"".join(texts).decode(errors="replace")})

    async def views(self, slot: AdmissionSlot, body: ViewsRequest) -> Response:
        """Return the views of an image under the given pan-and-scan settings."""
        builder = self._builder(slot)
        settings = builder.pan_and_scan(body.mm_processor_kwargs)
        if body.image is None:
            assert body.width is not None and body.height is not None  # the body was checked
            builder.check_used(())
            return json_response(
                {"pages": [size_views(body.width, body.height, settings, builder.cost)], "page_count": 1}
            )
        document = await self._read(slot, partial(builder.document, body.image), [body.image])
        draw = partial(page_views, document, settings, builder.cost, slot.deadline, preview=body.preview)
        return json_response({"pages": await slot.in_thread(draw, "decode"), "page_count": len(document.pages)})

    async def page(self, request: Request) -> Response:
        """Return one of the playground's files."""
        name = request.path_params.get("name", "index.html")
        if name not in self._pages:
            raise HTTPException(404)
        headers = {
            "content-security-policy": _POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }
        return Response(self._pages[name], headers=headers, media_type=_TYPES[name.rpartition(".")[2]])

    def on_body(
        self, kind: type[Parsed], handler: Callable[[AdmissionSlot, Parsed], Awaitable[ASGIApp]]
    ) -> Callable[[Request], Awaitable[ASGIApp]]:
        """Return an endpoint that admits a request, reads its body and calls the handler."""
        generates = kind in (ChatCompletionRequest, CompletionRequest)

        async def endpoint(request: Request) -> ASGIApp:
            with self._admission.admit(request) as slot:
                return await handler(slot, await self._body(slot, kind, generates=generates))

        return endpoint

    async def _body(self, slot: AdmissionSlot, kind: type[Parsed], *, generates: bool) -> Parsed:
        """Return the parsed body. Only the handler may hold it."""
        content = await read_body(slot, self._admission, generates=generates)
        if len(content) < _INLINE and count_values(content) < _INLINE_VALUES:
            return parse(kind, content)
        return await slot.in_thread(partial(parse, kind, content), "parse")

    async def _read(self, slot: AdmissionSlot, work: Callable[[], _Read], urls: Sequence[str]) -> _Read:
        """Read the documents of a request in a thread, and drop its files. Small requests without documents need none.

        Only ``work`` holds the body while the documents are read.
        """
        if not urls and slot.size < _INLINE:
            return work()
        uploads, slot.uploads = slot.uploads, {}
        return await slot.in_thread(work, media_pool(urls, uploads))

    def _served_model(self, name: str | None) -> str:
        """Return the name of the served model that a request names.

        Raises:
            RefusedError: there is none.
        """
        models = self._options.models
        if name is not None and name not in models:
            served = ", ".join(map(repr, models))
            message = f"the model {shorten(name)} does not exist; this server serves {served}"
            raise RefusedError(404, message, code="model_not_found")
        return self._options.model_name if name is None else name

    def _model(self, name: str) -> JsonObject:
        options, info = self._options, self._backend.info
        limits = ("max_images", "max_pages", "max_pixels", "max_body_mb", "max_choices")
        most_tokens = min(options.settings.max_new_tokens, self._max_model_len or REST_OF_CONTEXT)
        properties: JsonObject = {
            "pan_and_scan": options.settings.pan_and_scan.processor_kwargs(),
            "limits": {name: getattr(options, name) for name in limits} | {"max_output_tokens": most_tokens},
            "demonstration": is_demonstration(options.settings),
        }
        if info is not None:
            reads = info.cost is not None
            properties |= {"runner": "engine", "dtype": info.dtype, "reads_images": reads}
            properties |= {"image_tokens": info.cost.image_tokens if info.cost is not None else 0}
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "panscan",
            "root": options.models[name],
            "parent": options.model_name if name in options.adapters else None,
            "max_model_len": self._max_model_len,
            "panscan": properties,
        }


def _routes(api: _Api) -> list[Route]:
    """Return the routes of all endpoints, of their OpenAPI document and of the playground."""
    endpoints: dict[str, tuple[type[Body] | None, Callable[..., Awaitable[ASGIApp]]]] = {
        "/health": (None, api.health),
        "/ready": (None, api.ready),
        "/metrics": (None, api.metrics),
        "/v1/models": (None, api.models),
        "/v1/models/{name:path}": (None, api.model),
        "/v1/chat/completions": (ChatCompletionRequest, api.chat),
        "/v1/completions": (CompletionRequest, api.completions),
        "/tokenize": (TokenizeRequest, api.tokenize),
        "/detokenize": (DetokenizeRequest, api.detokenize),
        "/v1/views": (ViewsRequest, api.views),
    }
    paths = {}
    routes = [Route("/", api.page), Route("/playground/{name}", api.page)]
    for path, (kind, handler) in endpoints.items():
        method = "get" if kind is None else "post"
        endpoint = handler if kind is None else api.on_body(kind, handler)
        routes.append(Route(path, endpoint, methods=[method.upper()]))
        shown = path.replace(":path", "")
        paths[shown] = {method: _operation(shown, method, kind, handler)}
    kinds = [kind for kind, _ in endpoints.values() if kind is not None]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    info = {"title": "panscan", "version": __version__}
    document = {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}

    async def openapi(_request: Request) -> Response:
        return json_response(document)

    return [*routes, Route("/openapi.json", openapi)]


def _operation(path: str, method: str, kind: type[Body] | None, handler: Callable[..., Any]) -> JsonObject:
    """Return the description of an endpoint in the OpenAPI document."""
    operation: JsonObject = {
        "summary": handler.__name__.title(),
        "description": handler.__doc__,
        "operationId": re.sub(r"\W", "_", f"{handler.__name__}{path}_{method}"),
        "responses": {"200": {"description": "Successful Response"}},
    }
    text = {"type": "string"}
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": text}]
    if kind is not None:
        body = {"$ref": f"#/components/schemas/{kind.__name__}"}
        fields = {"request": text | {"contentMediaType": "application/json"}}
        form = {"type": "object", "properties": fields, "required": ["request"]}
        content = {"application/json": {"schema": body}, "multipart/form-data": {"schema": form}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


_ERRORS: tuple[type[Exception], ...] = (
    PanscanError,
    HTTPException,
    TimeoutError,
    ClientDisconnect,
    MemoryError,
    Exception,
)


def _error_response(metrics: ServerMetrics, request: Request, error: Exception) -> Response:
    """Return an error in OpenAI's format, and count it."""
    headers: Mapping[str, str] = {}
    name = f"{request.method} {request.url.path} (request {request.state.request_id})"
    match error:
        case PanscanError():
            status, body = error_status(error), error_of(error)
            headers = {"retry-after": str(metrics.retry_after)} if status >= 429 else {}
        case HTTPException():  # RefusedError among them
            status, headers = error.status_code, error.headers or {}
            detail = error.detail if isinstance(error, RefusedError) else _unknown_route(request, error)
            body = error_body(detail, status, code=getattr(error, "code", None))
        case TimeoutError():
            status, body, headers = 504, error_body(TIMED_OUT, 504), {"connection": "close"}
        case ClientDisconnect():
            status, body = _CLOSED, {}
        case MemoryError():
            log.error("%s: out of memory", name)
            status, body, headers = 503, error_body(_NO_MEMORY, 503), {"retry-after": "5", "connection": "close"}
        case _:
            log.error("%s: %r", name, error, exc_info=error)
            status, body = 500, error_body(f"internal error: {type(error).__name__}", 500)
    metrics.refuse(status)
    return json_response(body, status, headers)


def _unknown_route(request: Request, error: HTTPException) -> str:
    """Return the message for a path that does not exist, or that takes another method."""
    path = request.url.path
    if error.status_code == 405:
        return f"{shorten(path)} takes {(error.headers or {}).get('Allow')}, not {request.method}"
    posts = [route.path for route in request.app.routes if isinstance(route, Route) and "POST" in (route.methods or ())]
    return f"this server has no {shorten(path)}; it has POST {', '.join(posts)}, and GET /v1/models"
