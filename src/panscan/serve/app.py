"""The HTTP API: OpenAI's endpoints, health checks, metrics and the playground, over any backend."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from panscan import __version__
from panscan.core import PanscanError
from panscan.core import Request as ModelRequest
from panscan.core.ranges import shorten
from panscan.model.bundled import is_demonstration
from panscan.serve.admission import AdmissionControl, AdmissionSlot, RefusedError, read_body
from panscan.serve.backend import ServeBackend
from panscan.serve.generation import Generation, refusal
from panscan.serve.guards import BodyTooLargeError, Guard
from panscan.serve.metrics import ServerMetrics
from panscan.serve.options import ServeOptions
from panscan.serve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeRequest,
    ViewsRequest,
    count_values,
    parse,
)
from panscan.serve.replies import TIMED_OUT, Reply, TokenNames, encoded, error_body, error_of, error_status
from panscan.serve.requests import RequestBuilder, check_used, media_pool, message_urls
from panscan.serve.tracing import open_tracer
from panscan.serve.views import page_views, size_views

__all__ = ["create_app"]

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


def create_app(options: ServeOptions, backend: ServeBackend) -> FastAPI:
    """Return the application. The caller starts and closes the backend.

    ``app.state.admission`` is the :class:`panscan.serve.generation.AdmissionControl`, which drains the server.

    Raises:
        UnsupportedError: tracing is enabled, but OpenTelemetry is not installed.
    """
    tracer = None
    if options.otlp_traces_endpoint is not None:
        tracer = open_tracer(options.otlp_traces_endpoint, options.model_name)
    app = FastAPI(title="panscan", version=__version__, docs_url=None, redoc_url=None)
    metrics = ServerMetrics(options.model_name)
    app.state.admission = admission = AdmissionControl(options, backend, metrics)
    api = _Api(options, backend, admission, Generation(admission, tracer))
    _add_routes(app, api)
    _add_error_handlers(app, metrics)
    app.add_middleware(Guard, options=options)
    app.openapi = partial(_openapi, app)  # type: ignore[method-assign]  # FastAPI documents this override
    return app


class _Api:
    """The handlers of all endpoints."""

    def __init__(
        self, options: ServeOptions, backend: ServeBackend, admission: AdmissionControl, generation: Generation
    ) -> None:
        self._options, self._backend, self._admission, self._generation = options, backend, admission, generation
        self._names = TokenNames(backend)
        self._created = int(time.time())
        self._pages = _playground()

    @property
    def _builder(self) -> RequestBuilder:
        info = self._backend.info
        return RequestBuilder(self._options, None if info is None else info.cost)

    @property
    def _max_model_len(self) -> int | None:
        info = self._backend.info
        return None if info is None else info.max_model_len

    async def health(self, _request: Request) -> Response:
        """Return 200 while the process is alive."""
        return JSONResponse({})

    async def ready(self, _request: Request) -> Response:
        """Return 200 if the server can start a request now, otherwise 503."""
        if self._admission.draining:
            raise RefusedError(503, "the server is shutting down", 5)
        if not self._backend.ready:
            raise RefusedError(503, "the model is loading", 5)
        return JSONResponse({})

    async def metrics(self, _request: Request) -> Response:
        """Return all metrics in Prometheus' text format."""
        self._admission.metrics.retried.labels(self._options.model_name).set(self._backend.retried)
        stats = await self._backend.stats()
        body = self._admission.metrics.expose(stats, self._backend.inflight + self._admission.waiting)
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, _request: Request) -> Response:
        """List the served model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """Return the model with this name."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def chat(self, request: Request) -> Response:
        """Create a chat completion."""
        return await self._generate(request, ChatCompletionRequest)

    async def completions(self, request: Request) -> Response:
        """Create a text completion."""
        return await self._generate(request, CompletionRequest)

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a prompt, and its number of views."""
        slot = self._admission.admit(request)
        try:
            body, uploads = await self._body(request, slot, TokenizeRequest)
            self._check_model(body.model)
            work = partial(self._prompt, body, uploads, slot)
            prompt = await self._read(request, slot, work, message_urls(body.messages or ()), uploads)
            del body, uploads, work
            counts = await self._admission.until_disconnect(request, slot, self._backend.count(prompt))
            found = {
                "count": len(counts.ids),
                "max_model_len": self._max_model_len,
                "tokens": counts.ids,
                "views": counts.views,
                "image_tokens": counts.image_tokens,
            }
            return JSONResponse(found)
        finally:
            slot.release()

    async def views(self, request: Request) -> Response:
        """Return the views of an image under the given pan-and-scan settings."""
        slot = self._admission.admit(request)
        try:
            body, uploads = await self._body(request, slot, ViewsRequest)
            settings = self._builder.pan_and_scan(body.mm_processor_kwargs)
            cost = self._backend.info.cost if self._backend.info is not None else None
            if body.image is None:
                assert body.width is not None and body.height is not None  # the body was checked
                check_used(uploads, ())
                page = size_views(body.width, body.height, settings, cost)
                return JSONResponse({"pages": [page], "page_count": 1})
            work = partial(self._builder.document, body.image, uploads, slot.deadline)
            document = await self._read(request, slot, work, [body.image], uploads)
            draw = partial(page_views, document, settings, cost, slot.deadline, preview=body.preview)
            pages = await self._admission.in_thread(request, slot, draw, "decode")
            answer = {"pages": pages, "page_count": len(document.pages)}
            if not body.preview:
                return JSONResponse(answer)
            content = await self._admission.in_thread(request, slot, partial(encoded, answer))
            return Response(content, media_type="application/json")
        finally:
            slot.release()

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

    async def _generate(
        self, request: Request, kind: type[ChatCompletionRequest] | type[CompletionRequest]
    ) -> Response:
        """Create a chat or text completion."""
        slot = self._admission.admit(request)
        streams = False
        try:
            body, uploads = await self._body(request, slot, kind, generates=True)
            self._check_model(body.model)
            if isinstance(body, ChatCompletionRequest):
                work = partial(self._builder.chat, body, uploads, slot.deadline)
                prepared = await self._read(request, slot, work, message_urls(body.messages), uploads)
            else:
                work = partial(self._builder.completion, body, uploads)
                prepared = await self._read(request, slot, work, (), uploads)
            usage, per_prompt, stream = body.stream_options, body.n, body.stream
            reply = Reply(
                "chat" if isinstance(body, ChatCompletionRequest) else "text",
                self._options.model_name,
                self._names,
                logprobs=body.logprobs is not None and body.logprobs is not False,
                continuous_usage=usage is not None and usage.continuous_usage_stats,
            )
            del body, uploads, work  # documents as text, which the answer does not need
            response = await self._generation.answer(
                request,
                slot,
                prepared,
                reply,
                stream=stream,
                include_usage=usage is not None and usage.include_usage,
                per_prompt=per_prompt,
            )
            streams = stream
            return response
        finally:
            if not streams:
                slot.release()

    async def _body(
        self, request: Request, slot: AdmissionSlot, kind: type[Any], *, generates: bool = False
    ) -> tuple[Any, dict[str, bytes]]:
        """Return the parsed body, and the files of a multipart body."""
        content, uploads = await read_body(request, slot, self._admission, generates=generates)
        if len(content) < _INLINE and count_values(content) < _INLINE_VALUES:
            return parse(kind, content), uploads
        return await self._admission.in_thread(request, slot, partial(parse, kind, content), "parse"), uploads

    async def _read(
        self,
        request: Request,
        slot: AdmissionSlot,
        work: Callable[[], _Read],
        urls: Sequence[str],
        uploads: Mapping[str, bytes],
    ) -> _Read:
        """Read the documents of a request in a thread. Small requests without documents need none."""
        if not urls and slot.size < _INLINE:
            return work()
        return await self._admission.in_thread(request, slot, work, media_pool(urls, uploads))

    def _prompt(self, body: TokenizeRequest, uploads: Mapping[str, bytes], slot: AdmissionSlot) -> ModelRequest:
        if body.messages is None:
            check_used(uploads, ())
            return ModelRequest(prompt=body.prompt, raw=True)
        messages, documents = self._builder.conversation(body.messages, uploads, slot.deadline)
        return ModelRequest(
            messages=messages,
            images=[page for document in documents for page in document.pages],
            pan_and_scan=self._builder.pan_and_scan(body.mm_processor_kwargs),
            max_pages=self._options.max_pages,
        )

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._options.model_name):
            message = f"the model {shorten(name)} does not exist; this server serves {self._options.model_name!r}"
            raise RefusedError(404, message, code="model_not_found")

    def _model(self) -> dict[str, Any]:
        options, info = self._options, self._backend.info
        limits = ("max_images", "max_pages", "max_pixels", "max_body_mb", "max_output_tokens", "max_choices")
        own: dict[str, Any] = {
            "pan_and_scan": options.settings.pan_and_scan.processor_kwargs(),
            "limits": {name: getattr(options, name) for name in limits},
            "demonstration": is_demonstration(options.settings),
        }
        if info is not None:
            reads = info.cost is not None
            own |= {"runner": "engine", "dtype": info.dtype, "reads_images": reads}
            own |= {"image_tokens": info.cost.image_tokens if info.cost is not None else 0}
        return {
            "id": options.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "panscan",
            "root": options.settings.model_name,
            "max_model_len": self._max_model_len,
            "panscan": own,
        }


def _add_routes(app: FastAPI, api: _Api) -> None:
    """Register all endpoints; FastAPI documents them."""
    get: list[tuple[str, Callable[[Request], Awaitable[Response]]]] = [
        ("/health", api.health),
        ("/ready", api.ready),
        ("/metrics", api.metrics),
        ("/v1/models", api.models),
        ("/v1/models/{name:path}", api.model),
    ]
    post: list[tuple[str, Callable[[Request], Awaitable[Response]], type[BaseModel]]] = [
        ("/v1/chat/completions", api.chat, ChatCompletionRequest),
        ("/v1/completions", api.completions, CompletionRequest),
        ("/tokenize", api.tokenize, TokenizeRequest),
        ("/v1/views", api.views, ViewsRequest),
    ]
    for path, handler in get:
        app.add_api_route(path, handler, methods=["GET"], response_class=Response)
    for path, handler, body in post:
        app.add_api_route(
            path, handler, methods=["POST"], response_class=Response, openapi_extra={"requestBody": _body_of(body)}
        )
    app.add_api_route("/", api.page, methods=["GET"], include_in_schema=False)
    app.add_api_route("/playground/{name}", api.page, methods=["GET"], include_in_schema=False)


def _add_error_handlers(app: FastAPI, metrics: ServerMetrics) -> None:
    """Register handlers that return every error in OpenAI's format."""

    def reply(status: int, body: Mapping[str, Any], headers: dict[str, str] | None = None) -> Response:
        metrics.refuse(status)
        return JSONResponse(body, status, headers)

    def panscan_error(_request: Request, error: Exception) -> Response:
        assert isinstance(error, PanscanError)  # registered for this type only
        status = error_status(error)
        return reply(status, error_of(error), {"retry-after": str(metrics.retry_after)} if status >= 429 else None)

    def refused(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RefusedError)  # registered for this type only
        metrics.refuse(error.status)
        return refusal(error)

    def http(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # registered for this type only
        return reply(error.status_code, error_body(str(error.detail), error.status_code), dict(error.headers or {}))

    def too_large(_request: Request, error: Exception) -> Response:
        return reply(413, error_body(str(error), 413), {"connection": "close"})

    def late(_request: Request, _error: Exception) -> Response:
        return reply(
            504,
            error_body(TIMED_OUT, 504),
            {"connection": "close"},
        )

    def gone(_request: Request, _error: Exception) -> Response:
        metrics.refuse(_CLOSED)
        return Response(status_code=_CLOSED)

    def full(request: Request, _error: Exception) -> Response:
        log.error("%s %s: out of memory", request.method, request.url.path)
        return reply(503, error_body(_NO_MEMORY, 503), {"retry-after": "5", "connection": "close"})

    def bug(request: Request, error: Exception) -> Response:
        log.error("%s %s: %r", request.method, request.url.path, error, exc_info=error)
        return reply(500, error_body(f"internal error: {type(error).__name__}", 500))

    handlers = {
        PanscanError: panscan_error,
        RefusedError: refused,
        HTTPException: http,
        BodyTooLargeError: too_large,
        TimeoutError: late,
        ClientDisconnect: gone,
        MemoryError: full,
        Exception: bug,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return an endpoint's request body for the OpenAPI document."""
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    form = {
        "type": "object",
        "properties": {"request": {"type": "string", "contentMediaType": "application/json"}},
        "required": ["request"],
    }
    return {
        "required": True,
        "content": {"application/json": {"schema": reference}, "multipart/form-data": {"schema": form}},
    }


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, including the schemas of request bodies."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for model in (ChatCompletionRequest, CompletionRequest, TokenizeRequest, ViewsRequest):
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= schema.pop("$defs", {})
            schemas[model.__name__] = schema
        app.openapi_schema = document
    return app.openapi_schema


def _playground() -> dict[str, bytes]:
    """Return the playground's files by name."""
    folder = files("panscan.serve").joinpath("playground")
    return {
        each.name: each.read_bytes()
        for each in (folder.iterdir() if folder.is_dir() else ())
        if each.name.rpartition(".")[2] in _TYPES
    }
