from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from hearth.inference.vllm.plugin.access import TOKEN_VARIABLE, ServerAccess
from hearth.wire.asgi import TOKEN_HEADER

HEADER = TOKEN_HEADER.decode()


async def resume(_: object) -> PlainTextResponse:
    return PlainTextResponse("resumed")


@pytest.mark.parametrize(
    ("shown", "status"),
    [({HEADER: "right"}, 200), ({HEADER: "wrong"}, 401), ({HEADER: ""}, 401), ({}, 401)],
)
async def test_only_who_shows_the_token_is_answered(
    shown: dict[str, str], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "right")
    app = Starlette(routes=[Route("/resume", resume, methods=["POST"])])
    transport = httpx.ASGITransport(ServerAccess(app))

    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        answer = await client.post("/resume", headers=shown)

    assert answer.status_code == status
    assert (answer.text == "resumed") == (status == 200)
