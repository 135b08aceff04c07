"""The routes of a capture server: find the session, sample from the deployment, answer."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from hearth.errors import AuthError, HearthError, NotFoundError, TooLargeError
from hearth.sdk.background import APIFuture, start
from hearth.sdk.capture.answers import answer_body, answer_events, read_turn
from hearth.sdk.capture.policy import SamplingPolicy
from hearth.sdk.capture.requests import build_body, read_request
from hearth.sdk.capture.session import CaptureSession
from hearth.sdk.response import HttpResponse
from hearth.sdk.sampling_requests import SamplingRequest, SamplingTarget
from hearth.telemetry import new_request_id
from hearth.wire.chat import ChatResponse
from hearth.wire.completions import Model, ModelList
from hearth.wire.faults import fault_body, status_of

logger = logging.getLogger(__name__)

_CHAT_PATH = "/inference/v1/chat/completions"
_CLIENT_GONE = 499
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]

Handler = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


def create_app(
    target: SamplingTarget,
    policy: SamplingPolicy,
    sessions: Mapping[str, CaptureSession],
    *,
    max_body_bytes: int,
) -> Starlette:
    """The app of a capture server, an ASGI application; ``sessions`` are the open ones by id."""
    capture = _Capture(target, policy, sessions, max_body_bytes)
    prefix = "/sessions/{session}/v1"
    return Starlette(
        routes=[
            Route(
                f"{prefix}/chat/completions",
                _answer_errors(capture.complete_chat),
                methods=["POST"],
            ),
            Route(f"{prefix}/models", _answer_errors(capture.list_models), methods=["GET"]),
            Route("/{path:path}", _answer_errors(_refuse_path), methods=_METHODS),
        ]
    )


class _Capture:
    def __init__(
        self,
        target: SamplingTarget,
        policy: SamplingPolicy,
        sessions: Mapping[str, CaptureSession],
        max_body_bytes: int,
    ) -> None:
        self._target = target
        self._policy = policy
        self._sessions = sessions
        self._max_body_bytes = max_body_bytes

    async def list_models(self, request: Request) -> Response:
        self._find_session(request)
        model = Model(id=self._target.model, created=int(time.time()), owned_by="hearth")
        return _json(ModelList(data=[model]).dump())

    async def complete_chat(self, request: Request) -> Response:
        session = self._find_session(request)
        wanted = read_request(await self._read_body(request))
        seed = session.next_seed()
        overrides = self._policy.describe_overrides(wanted.fields)
        if overrides and session.claim_warning():
            logger.warning("session %s keeps the recipe's sampling: %s", session.id, overrides)
        fields = self._policy.apply(wanted.fields)
        body = build_body(fields, wanted.form, model=self._target.model, seed=seed)
        answer = await self._sample(request, session, body)
        if isinstance(answer, HttpResponse):
            return _pass_on(answer)
        session.keep(read_turn(answer))
        content = answer_body(answer, wanted.form)
        if wanted.form.stream:
            return Response(answer_events(content, wanted.form), media_type="text/event-stream")
        return _json(orjson.dumps(content))

    async def _sample(
        self, request: Request, session: CaptureSession, body: bytes
    ) -> ChatResponse | HttpResponse:
        """The deployment's answer, or its refusal.

        Raises:
            ClosedError: the session ended meanwhile.
            ClientDisconnect: the client has left.
        """
        sampling = start(SamplingRequest(self._target, _CHAT_PATH, ChatResponse).send(body))
        with session.track(sampling):
            try:
                return await _wait_while_connected(request, sampling)
            except _SessionClosedError:
                raise session.closed_error() from None

    def _find_session(self, request: Request) -> CaptureSession:
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

    async def _read_body(self, request: Request) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size <= self._max_body_bytes:
                parts.append(part)
        # Read a body that is too long to its end: a client that is cut off sees no answer.
        if size > self._max_body_bytes:
            raise TooLargeError(f"body must be at most {self._max_body_bytes} bytes, got {size}")
        return b"".join(parts)


class _SessionClosedError(Exception):
    """The session was closed while the deployment answered."""


async def _wait_while_connected(request: Request, sampling: APIFuture[T]) -> T:
    """The future's result.

    Raises:
        ClientDisconnect: the client has left, though the result may be there.
    """
    # The body is read, so the only message that can still come is a disconnect.
    leaving = asyncio.ensure_future(request.receive())
    answer = asyncio.ensure_future(sampling)
    try:
        done, _ = await asyncio.wait([answer, leaving], return_when=asyncio.FIRST_COMPLETED)
        if leaving in done:
            raise ClientDisconnect
        if answer.cancelled():
            raise _SessionClosedError
        return answer.result()
    finally:
        answer.cancel()
        leaving.cancel()


async def _refuse_path(request: Request) -> Response:
    raise NotFoundError(
        f"path must be POST chat/completions or GET models below a session's base_url, got "
        f"{request.method} {request.url.path}"
    )


def _answer_errors(handler: Handler) -> Handler:
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
    return _forbid_retry(
        _json(orjson.dumps(fault_body(error, request_id)), status=status_of(error))
    )


def _pass_on(refusal: HttpResponse) -> Response:
    """The deployment's own refusal."""
    media_type = refusal.headers.get("content-type", "application/json")
    return _forbid_retry(Response(refusal.content, refusal.status_code, media_type=media_type))


def _forbid_retry(response: Response) -> Response:
    """A response that OpenAI's client does not retry: the retries have happened here."""
    response.headers["x-should-retry"] = "false"
    return response


def _json(body: bytes, *, status: int = 200) -> Response:
    return Response(body, status_code=status, media_type="application/json")
