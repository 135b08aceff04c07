"""The routes of a capture server: find the session, sample from the deployment, answer."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hearth.errors import AuthError, NotFoundError, TooLargeError
from hearth.sdk.background import start
from hearth.sdk.capture.answers import build_answer, build_events, read_turn
from hearth.sdk.capture.policy import SamplingPolicy
from hearth.sdk.capture.requests import build_body, read_request
from hearth.sdk.capture.session import CaptureSession
from hearth.sdk.sampling_requests import SamplingRequest, SamplingTarget
from hearth.wire.chat import ChatResponse
from hearth.wire.completions import ModelCard, ModelList
from hearth.wire.http import await_connected, catch_errors, json_response
from hearth.wire.messages import HttpResponse

logger = logging.getLogger(__name__)

CHAT_PATH = "/inference/v1/chat/completions"
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's client does not retry what has this header: the retries have happened here."""


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
                catch_errors(capture.complete_chat, _NO_RETRY),
                methods=["POST"],
            ),
            Route(
                f"{prefix}/models", catch_errors(capture.list_models, _NO_RETRY), methods=["GET"]
            ),
            Route("/{path:path}", catch_errors(_refuse_path, _NO_RETRY), methods=_METHODS),
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
        model = ModelCard(id=self._target.model, created=int(time.time()), owned_by="hearth")
        return json_response(ModelList(data=[model]))

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
        session.keep(read_turn(answer, fields.get("seed", seed)))
        content = build_answer(answer, wanted.form)
        if wanted.form.stream:
            return Response(build_events(content, wanted.form), media_type="text/event-stream")
        return json_response(content)

    async def _sample(
        self, request: Request, session: CaptureSession, body: bytes
    ) -> ChatResponse | HttpResponse:
        """The deployment's answer, or its refusal.

        Raises:
            ClosedError: the session ended meanwhile.
            ClientDisconnect: the client has left.
        """
        sampling = start(SamplingRequest(self._target, CHAT_PATH, ChatResponse).send(body))
        answer = asyncio.ensure_future(sampling)
        with session.track(sampling):
            try:
                return await await_connected(request, answer)
            except asyncio.CancelledError:
                if answer.cancelled():  # by the session's end, not with this request
                    raise session.closed_error() from None
                raise

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


async def _refuse_path(request: Request) -> Response:
    raise NotFoundError(
        f"path must be POST chat/completions or GET models below a session's base_url, got "
        f"{request.method} {request.url.path}"
    )


def _pass_on(refusal: HttpResponse) -> Response:
    """The deployment's own refusal."""
    media_type = refusal.headers.get("content-type", "application/json")
    return Response(refusal.content, refusal.status_code, headers=_NO_RETRY, media_type=media_type)
