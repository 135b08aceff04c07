"""A span for each request, where traces are asked for."""

from __future__ import annotations

import sys
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from hearth.errors import ConfigError
from hearth.local.tracing import trace_requests

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def fail(scope: Any, receive: Any, send: Any) -> None:
    await Response(b"", 503)(scope, receive, send)


async def test_a_request_is_a_span_below_its_callers_with_its_status() -> None:
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="lacks OpenTelemetry"
    )
    spans = memory.InMemorySpanExporter()
    app, send_rest = trace_requests(fail, spans)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as http:
        await http.get("/v1/accounts", headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
        await http.post("/v1/completions")
    send_rest()

    first, second = spans.get_finished_spans()
    assert (first.name, second.name) == ("GET control", "POST deployment")
    assert f"{first.context.trace_id:032x}" == TRACE
    assert f"{first.parent.span_id:016x}" == PARENT
    assert dict(first.attributes) == {
        "http.request.method": "GET",
        "url.path": "/v1/accounts",
        "http.response.status_code": 503,
    }
    assert not first.status.is_ok
    assert second.parent is None


def test_traces_without_opentelemetry_are_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)

    with pytest.raises(ConfigError, match=r"traces must be false .* install 'hearth-rl\[otel\]'"):
        trace_requests(fail)
