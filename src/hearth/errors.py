"""The exception tree: each failure's class, HTTP status and code on the wire.

    HearthError
    |-- ConfigError (ValueError)             a setting, row or argument breaks its rule
    |-- RequestError (ValueError)            one request's content breaks its rule
    |   |-- NumericsError                    NaN, infinity or a positive logprob on a trained token
    |   |-- ForwardOnlyError                 training requested of a frozen model
    |   |-- ConflictError                    the name is taken, or the state forbids it
    |   `-- TooLargeError                    the body is longer than the platform takes
    |-- NotFoundError (LookupError)          no such model, job, deployment, snapshot or future
    |-- AuthError (PermissionError)          missing or wrong API key
    |   `-- ForbiddenError                   the request comes from elsewhere
    |-- ClosedError (RuntimeError)           a client, job or platform used after its end
    |-- NotReadyError (RuntimeError)         it starts, or loads new weights; retry soon
    |-- BusyError (RuntimeError)             too much in flight at once; retry soon
    |-- EngineError (RuntimeError)           the platform itself failed
    |   `-- StorageError (OSError)           a disk is full, read-only or broken
    |-- RequestFailedError (RuntimeError)    what a client sees when its future failed
    `-- TransportError (ConnectionError)     no answer, or one that the protocol does not know
        `-- UnreachableError                 no answer at all

Messages have one form: ``<field> must be <rule>, got <value>: <why, or what to do>``.
"""

from __future__ import annotations

from typing import ClassVar


class HearthError(Exception):
    """Root of every error Hearth raises on purpose."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"
    category: ClassVar[str] = "server"
    """``user`` if the caller can fix it, ``server`` if the platform must."""


class ConfigError(HearthError, ValueError):
    """A setting, a dataset row or an argument breaks its rule; nothing is provisioned yet."""

    status = 400
    code = "invalid_argument"
    category = "user"


class RequestError(HearthError, ValueError):
    """The content of one request breaks its rule."""

    status = 400
    code = "invalid_argument"
    category = "user"


class NumericsError(RequestError):
    """A NaN, an infinity or a positive logprob on a token that is trained."""


class ForwardOnlyError(RequestError):
    """Training was requested of a frozen model."""

    code = "failed_precondition"


class ConflictError(RequestError):
    """The name is taken by something else, or the resource's state forbids the request."""

    status = 409
    code = "already_exists"


class TooLargeError(RequestError):
    """The body is longer than the platform takes."""

    status = 413
    code = "too_large"


class NotFoundError(HearthError, LookupError):
    """No such model, job, deployment, snapshot or future."""

    status = 404
    code = "not_found"
    category = "user"


class AuthError(HearthError, PermissionError):
    """The API key is missing or wrong."""

    status = 401
    code = "unauthenticated"
    category = "user"


class ForbiddenError(AuthError):
    """The request comes from where none may come from, whatever key it shows."""

    status = 403
    code = "permission_denied"


class ClosedError(HearthError, RuntimeError):
    """A client, a job or a platform was used after its end."""

    status = 410
    code = "closed"
    category = "user"


class NotReadyError(HearthError, RuntimeError):
    """A trainer or deployment is starting; the same request may work soon."""

    status = 425
    code = "unavailable"


class BusyError(HearthError, RuntimeError):
    """As much is in flight as the platform holds; the same request may work soon."""

    status = 429
    code = "resource_exhausted"


class EngineError(HearthError, RuntimeError):
    """The platform itself failed."""


class StorageError(EngineError, OSError):
    """A file cannot be written: its disk is full, read-only or broken. What was there stays."""


class RequestFailedError(HearthError, RuntimeError):
    """A future failed on the platform; ``category`` says who can fix it."""

    def __init__(self, message: str, *, category: str = "server") -> None:
        """Keep the platform's own text and its category."""
        super().__init__(message)
        self.failed_category = category


class TransportError(HearthError, ConnectionError):
    """The platform cannot be reached, or its answer does not follow the protocol."""

    status = 503
    code = "unavailable"


class UnreachableError(TransportError):
    """No answer came: no platform runs there, or it is not reached from here."""
