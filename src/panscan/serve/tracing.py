"""OpenTelemetry traces: one span per request with a child span per stage, from the timestamps of the result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from panscan.core import Result, UnsupportedError
from panscan.core.installation import install_command

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


def open_tracer(endpoint: str, model_name: str) -> Tracer:
    """Return a tracer that sends spans to an OTLP endpoint over HTTP, in the background.

    Raises:
        UnsupportedError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        needs = f"--otlp-traces-endpoint needs OpenTelemetry: {install_command('serve,tracing')}"
        raise UnsupportedError(needs) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "panscan", "panscan.model": model_name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return provider.get_tracer("panscan.serve")


def record(tracer: Tracer, result: Result, headers: dict[str, str]) -> None:
    """Record the spans of a finished request.

    Args:
        tracer: tracer from :func:`open_tracer`.
        result: finished request, whose timestamps become the times of the spans.
        headers: headers of the HTTP request; ``traceparent`` sets the parent span.
    """
    from opentelemetry.trace import SpanKind, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    stamps = result.stamps
    end = stamps.end or (stamps.tokens[-1] if stamps.tokens else stamps.accepted)
    attributes: dict[str, Any] = {
        "gen_ai.request.id": result.id,
        "gen_ai.usage.input_tokens": result.prompt_tokens,
        "gen_ai.usage.output_tokens": result.output_tokens,
        "gen_ai.response.finish_reasons": [result.finish_reason],
        "panscan.views": result.views,
        "panscan.image_tokens": result.image_tokens,
        "panscan.cached_tokens": result.cached_tokens,
    }
    span = tracer.start_span(
        "llm_request",
        TraceContextTextMapPropagator().extract(headers),
        SpanKind.SERVER,
        attributes=attributes,
        start_time=int(stamps.accepted * 1e9),
    )
    context = set_span_in_context(span)
    for name, start, until in _stages(result):
        stage = tracer.start_span(name, context, start_time=int(start * 1e9))
        stage.end(int(until * 1e9))
    span.end(int(end * 1e9))


def _stages(result: Result) -> list[tuple[str, float, float]]:
    """Return (name, start, end) of each stage with a timestamp, in order."""
    stamps = result.stamps
    first = stamps.tokens[0] if stamps.tokens else None
    boundaries = [
        ("queue", stamps.preparing),
        ("load", stamps.loaded),
        ("preprocess", stamps.preprocessed),
        ("schedule", stamps.scheduled),
        ("vision", stamps.vision),
        ("prefill", first),
        ("decode", stamps.tokens[-1] if len(stamps.tokens) > 1 else None),
    ]
    stages, start = [], stamps.accepted
    for name, until in boundaries:
        if until is not None:
            stages.append((name, start, max(start, until)))
            start = max(start, until)
    if not stamps.tokens and stamps.end is not None and result.finish_reason in ("cancelled", "error"):
        names = {"queue": "queue" if stamps.preparing is None else "schedule"}
        stages.append((names.get(stamps.last_stage, stamps.last_stage), start, max(start, stamps.end)))
    return stages
