"""One ASGI app in front of several: sends each request to the trainer or deployment it names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

from hearth.errors import NotFoundError
from hearth.wire.faults import fault_body, status_of

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

TRAINER_PREFIX = "/training/v1/rlorTrainerJobs"


class Gateway:
    """Routes by path to trainers, and by deployment name to deployments.

    A deployment is named by the ``fireworks-deployment`` header or by ``model`` in the body.
    """

    def __init__(self) -> None:
        self.trainers: dict[str, App] = {}
        self.deployments: dict[str, App] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        try:
            app, scope, receive = await self._route(scope, receive)
        except NotFoundError as error:
            await _answer(send, error)
            return
        await app(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive) -> tuple[App, Scope, Receive]:
        path: str = scope["path"]
        for prefix, app in self.trainers.items():
            if path.startswith(prefix + "/"):
                return app, {**scope, "path": path[len(prefix) :]}, receive
        if path.startswith(TRAINER_PREFIX):
            raise NotFoundError(
                f"trainer job must exist, got {path!r}: known jobs are {sorted(self.trainers)}"
            )
        name, receive = await self._deployment_name(scope, receive)
        if name not in self.deployments:
            raise NotFoundError(
                f"deployment must exist, got {name!r}: known deployments are "
                f"{sorted(self.deployments)}"
            )
        return self.deployments[name], scope, receive

    async def _deployment_name(self, scope: Scope, receive: Receive) -> tuple[str, Receive]:
        for key, value in scope["headers"]:
            if key == b"fireworks-deployment":
                return value.decode("latin-1"), receive
        body = await _body(receive)
        try:
            name = orjson.loads(body).get("model", "")
        except (orjson.JSONDecodeError, AttributeError):
            name = ""
        if not name and len(self.deployments) == 1:
            name = next(iter(self.deployments))
        return name, _replay(body, receive)


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _replay(body: bytes, rest: Receive) -> Receive:
    """A channel with the body once more; what follows (the client's leaving) is the real one."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await rest()

    return receive


async def _answer(send: Send, error: Exception) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status_of(error), "headers": headers})
    await send({"type": "http.response.body", "body": orjson.dumps(fault_body(error))})
