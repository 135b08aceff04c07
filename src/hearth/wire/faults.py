"""Errors as response bodies, in the two dialects that clients read."""

from __future__ import annotations

from typing import Any, Literal

from hearth.errors import HearthError
from hearth.wire.base import Record

_GRPC_CODE = {400: 3, 401: 16, 404: 5, 409: 6, 410: 9, 413: 3, 425: 14, 429: 8, 500: 13, 503: 14}
_GRPC_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS",
    410: "FAILED_PRECONDITION",
    413: "INVALID_ARGUMENT",
    425: "UNAVAILABLE",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
}


class Fault(Record):
    """The body's ``error`` object."""

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


def status_of(error: Exception) -> int:
    """The HTTP status of an error; 500 for one that is not ours."""
    return error.status if isinstance(error, HearthError) else 500


def fault_body(error: Exception, request_id: str | None = None) -> dict[str, Any]:
    """``{"error": {...}}`` as the control plane, the deployments and OpenAI's clients read it."""
    status = status_of(error)
    fault = Fault(
        code=_GRPC_CODE.get(status, 13),
        message=str(error) or type(error).__name__,
        status=_GRPC_STATUS.get(status, "INTERNAL"),
        type=error.code if isinstance(error, HearthError) else "internal",
        request_id=request_id,
    )
    return {"error": fault.as_dict()}


def failed_future(error: Exception) -> FailedFuture:
    """The result of an operation that raised ``error``."""
    known = isinstance(error, HearthError)
    message = str(error) if known else f"{type(error).__name__}: {error}"
    return FailedFuture(
        error=message,
        category="user" if known and error.category == "user" else "server",
        error_class=type(error).__name__,
    )
