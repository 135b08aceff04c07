"""Responses and errors of all our HTTP apps: JSON bodies, errors in both dialects that clients
read, and requests whose client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from hearth.errors import HearthError
from hearth.telemetry import new_request_id
from hearth.wire.asgi import NO_DISCONNECT
from hearth.wire.base import Record

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]
_T = TypeVar("_T")

SHORT_WAIT_S = 4.0
"""How long a look at what starts or loads is held. The official client looks every 5 to 15 s, so
what is ready soon shall be seen by its first look."""
_CLIENT_GONE = 499
_ASK_AGAIN = frozenset({425, 429, 503})
_GRPC_STATUS = {
    400: (3, "INVALID_ARGUMENT"),
    401: (16, "UNAUTHENTICATED"),
    403: (7, "PERMISSION_DENIED"),
    404: (5, "NOT_FOUND"),
    409: (6, "ALREADY_EXISTS"),
    410: (9, "FAILED_PRECONDITION"),
    413: (3, "INVALID_ARGUMENT"),
    425: (14, "UNAVAILABLE"),
    429: (8, "RESOURCE_EXHAUSTED"),
    500: (13, "INTERNAL"),
    503: (14, "UNAVAILABLE"),
}


class ErrorDetail(Record):
    """The ``error`` object of a body."""

    code: int
    message: str
    status: str
    type: str
    request_id: str | None = None


class FailedFuture(Record):
    """What ``retrieve_future`` answers for an operation that failed."""

    error: str
    category: Literal["user", "server", "unknown"]
    error_class: str | None = None


def json_response(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A response of a record, of JSON bytes, or of what orjson can write."""
    if isinstance(content, Record):
        body = content.dump()
    else:
        body = content if isinstance(content, bytes) else orjson.dumps(content)
    return Response(body, status_code=status, headers=headers, media_type="application/json")


def error_status(error: Exception) -> int:
    """The HTTP status of an error; 500 for one that is not a ``HearthError``."""
    return error.status if isinstance(error, HearthError) else 500


def error_body(error: Exception, request_id: str | None = None) -> bytes:
    """``{"error": {...}}`` as the control plane, the deployments and OpenAI's clients read it."""
    code, status = _GRPC_STATUS.get(error_status(error), (13, "INTERNAL"))
    detail = ErrorDetail(
        code=code,
        message=str(error) or type(error).__name__,
        status=status,
        type=error.code if isinstance(error, HearthError) else "internal",
        request_id=request_id,
    )
    return orjson.dumps({"error": detail.as_dict()})


def error_response(
    error: Exception, request_id: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """The response to a request that raised ``error``; it says when to ask again, if that helps."""
    status = error_status(error)
    retry = {"retry-after": "1"} if status in _ASK_AGAIN else {}
    return json_response(error_body(error, request_id), status, retry | dict(headers or {}))


def describe_failure(error: Exception) -> FailedFuture:
    """The result of an operation that raised ``error``."""
    is_ours = isinstance(error, HearthError)
    return FailedFuture(
        error=str(error) if is_ours else f"{type(error).__name__}: {error}",
        category="user" if is_ours and error.category == "user" else "server",
        error_class=type(error).__name__,
    )


async def handle_error(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for ``HearthError``."""
    return error_response(error, request.headers.get("x-request-id"))


def catch_errors(handler: Handler, error_headers: Mapping[str, str] | None = None) -> Handler:
    """``handler`` with every error as a response, and a request id on every response.

    The id is the client's ``x-request-id`` or a new one; the handler finds it in
    ``request.state.request_id``. ``error_headers`` are added to responses of errors.
    """

    async def run(request: Request) -> Response:
        request_id = request.headers.get("x-request-id") or new_request_id()
        request.state.request_id = request_id
        try:
            response = await handler(request)
        except ClientDisconnect:
            response = Response(status_code=_CLIENT_GONE)
        except Exception as error:
            if not isinstance(error, HearthError):
                logger.exception("request %s to %s failed", request_id, request.url.path)
            response = error_response(error, request_id, error_headers)
        response.headers["x-request-id"] = request_id
        return response

    return run


async def await_connected(request: Request, future: asyncio.Future[_T]) -> _T:
    """The result of ``future``, which is cancelled when the client disconnects before it.

    The request's body must have been read.

    Raises:
        ClientDisconnect: the client has disconnected.
    """
    if NO_DISCONNECT in request.scope.get("extensions", {}):
        return await future
    # After the body only the message of a disconnect can come.
    disconnect = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait([future, disconnect], return_when=asyncio.FIRST_COMPLETED)
        if disconnect.done():
            raise ClientDisconnect
        return future.result()
    finally:
        future.cancel()
        future.add_done_callback(_retrieve_exception)
        disconnect.cancel()


def _retrieve_exception(future: asyncio.Future[_T]) -> None:
    """Read the exception, or asyncio logs that nobody did."""
    if not future.cancelled():  # a cancelled gather() ends with an exception
        future.exception()
