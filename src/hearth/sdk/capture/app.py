"""The routes of a capture server: whose request it is, how it is drawn, what the client is told."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from hearth.errors import AuthError, HearthError, NotFoundError, TooLargeError
from hearth.sdk.answer import Answer
from hearth.sdk.background import APIFuture, start
from hearth.sdk.capture.answers import answer_body, answer_events, turn_of
from hearth.sdk.capture.forwarding import Deployment, Forwarding
from hearth.sdk.capture.policy import SamplingPolicy
from hearth.sdk.capture.requests import forwarded, read_request
from hearth.sdk.capture.session import CaptureSession
from hearth.telemetry import new_request_id
from hearth.wire.chat import ChatResponse
from hearth.wire.completions import Model, ModelList
from hearth.wire.faults import fault_body, status_of

logger = logging.getLogger(__name__)

_CLIENT_GONE = 499
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]

Handler = Callable[[Request], Awaitable[Response]]


def create_app(
    deployment: Deployment,
    policy: SamplingPolicy,
    sessions: Mapping[str, CaptureSession],
    *,
    max_body_bytes: int,
) -> Starlette:
    """The app of a capture server, an ASGI application; ``sessions`` are the open ones by id."""
    capture = _Capture(deployment, policy, sessions, max_body_bytes)
    prefix = "/sessions/{session}/v1"
    return Starlette(
        routes=[
            Route(f"{prefix}/chat/completions", _answering(capture.chat), methods=["POST"]),
            Route(f"{prefix}/models", _answering(capture.models), methods=["GET"]),
            Route("/{path:path}", _answering(_nothing), methods=_METHODS),
        ]
    )


class _Capture:
    def __init__(
        self,
        deployment: Deployment,
        policy: SamplingPolicy,
        sessions: Mapping[str, CaptureSession],
        max_body_bytes: int,
    ) -> None:
        self._deployment = deployment
        self._policy = policy
        self._sessions = sessions
        self._max_body_bytes = max_body_bytes

    async def models(self, request: Request) -> Response:
        self._session_of(request)
        model = Model(id=self._deployment.model, created=int(time.time()), owned_by="hearth")
        return _json(ModelList(data=[model]).dump())

    async def chat(self, request: Request) -> Response:
        session = self._session_of(request)
        asked = read_request(await self._body_of(request))
        seed = session.next_seed()
        if (words := self._policy.overridden(asked.fields)) and session.warns_now():
            logger.warning("session %s is drawn with the recipe's sampling: %s", session.id, words)
        fields = self._policy.applied(asked.fields)
        body = forwarded(fields, asked.form, model=self._deployment.model, seed=seed)
        response = await self._drawn(request, session, body)
        if not response.is_success:
            return _passed_on(response)
        answer = ChatResponse.parse(response.content)
        session.keep(turn_of(answer))
        told = answer_body(answer, asked.form)
        if asked.form.stream:
            return Response(answer_events(told, asked.form), media_type="text/event-stream")
        return _json(orjson.dumps(told))

    async def _drawn(self, request: Request, session: CaptureSession, body: bytes) -> Answer:
        """The deployment's answer.

        Raises:
            ClosedError: the session ended meanwhile.
            ClientDisconnect: nobody waits for it any more.
        """
        drawing = start(Forwarding(self._deployment).run(body))
        with session.drawing(drawing):
            try:
                return await _unless_gone(request, drawing)
            except _CancelledDrawError:
                raise session.ended() from None

    def _session_of(self, request: Request) -> CaptureSession:
        """The open session of a request that has its key.

        Raises:
            NotFoundError: there is none, or none any more.
            AuthError: the key is another's.
        """
        name = request.path_params["session"]
        session = self._sessions.get(name)
        if session is None:
            raise NotFoundError(
                f"session must be open, got {name!r}: its trajectory has ended, or it never was"
            )
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        is_right = secrets.compare_digest(key.encode(), session.api_key.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise AuthError(f"api_key must be that of session {name}, got another")
        return session

    async def _body_of(self, request: Request) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size <= self._max_body_bytes:
                parts.append(part)
        # What is too long is read to its end: a client that is cut off amid its body hears nothing.
        if size > self._max_body_bytes:
            raise TooLargeError(f"body must be at most {self._max_body_bytes} bytes, got {size}")
        return b"".join(parts)


class _CancelledDrawError(Exception):
    """The answer was given up while it was drawn."""


async def _unless_gone(request: Request, drawing: APIFuture[Answer]) -> Answer:
    """What is drawn.

    Raises:
        ClientDisconnect: nobody waits for it any more, though it may be there.
    """
    # The body is read, so all that can still come is the client's leaving.
    leaving = asyncio.ensure_future(request.receive())
    answer = asyncio.ensure_future(drawing)
    try:
        done, _ = await asyncio.wait([answer, leaving], return_when=asyncio.FIRST_COMPLETED)
        if leaving in done:
            raise ClientDisconnect
        if answer.cancelled():
            raise _CancelledDrawError
        return answer.result()
    finally:
        answer.cancel()
        leaving.cancel()


async def _nothing(request: Request) -> Response:
    raise NotFoundError(
        f"path must be POST chat/completions or GET models below a session's base_url, got "
        f"{request.method} {request.url.path}"
    )


def _answering(handler: Handler) -> Handler:
    """The handler with its errors as answers in OpenAI's form."""

    async def answer(request: Request) -> Response:
        request_id = request.headers.get("x-request-id") or new_request_id()
        try:
            response = await handler(request)
        except ClientDisconnect:
            response = Response(status_code=_CLIENT_GONE)
        except HearthError as error:
            response = _fault(error, request_id)
        except Exception as error:
            logger.exception("request %s to %s failed", request_id, request.url.path)
            response = _fault(error, request_id)
        response.headers.setdefault("x-request-id", request_id)
        return response

    return answer


def _fault(error: Exception, request_id: str) -> Response:
    return _final(_json(orjson.dumps(fault_body(error, request_id)), status=status_of(error)))


def _passed_on(refusal: Answer) -> Response:
    """The deployment's own refusal."""
    media_type = refusal.headers.get("content-type", "application/json")
    return _final(Response(refusal.content, refusal.status_code, media_type=media_type))


def _final(response: Response) -> Response:
    """An answer that OpenAI's client takes for the last: all patience has been had here."""
    response.headers["x-should-retry"] = "false"
    return response


def _json(body: bytes, *, status: int = 200) -> Response:
    return Response(body, status_code=status, media_type="application/json")
