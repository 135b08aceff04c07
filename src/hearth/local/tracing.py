"""Traces of a platform's requests by OpenTelemetry, where ``hearth serve --traces`` asks for them.

Where they go is said by OpenTelemetry's own variables (``OTEL_EXPORTER_OTLP_ENDPOINT`` and others).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hearth.control.gateway import name_part
from hearth.errors import ConfigError
from hearth.wire.asgi import App, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter


def trace_requests(app: App, exporter: SpanExporter | None = None) -> tuple[App, Callable[[], Any]]:
    """An app that records a span for each request, and what sends those that are left.

    A request's ``traceparent`` is its span's parent. ``exporter`` takes OTLP's place.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.propagate import extract
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, StatusCode
    except ImportError as error:
        raise ConfigError(
            f"traces must be false without OpenTelemetry, got true ({error}): run "
            "pip install 'hearth-rl[otel]'"
        ) from None
    os.environ.setdefault("OTEL_SERVICE_NAME", "hearth")
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter()))
    tracer = provider.get_tracer("hearth")

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        facts = {"http.request.method": scope["method"], "url.path": scope["path"]}
        with tracer.start_as_current_span(
            f"{scope['method']} {name_part(scope['path'])}",
            context=extract(headers),
            kind=SpanKind.SERVER,
            attributes=facts,
        ) as span:

            async def send_and_note(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(StatusCode.ERROR)
                await send(message)

            await app(scope, receive, send_and_note)

    return answer, provider.shutdown
