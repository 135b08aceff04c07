"""Resource names: which ids and accounts are valid, and the id in a name."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime

from hearth.errors import RequestError

ACCOUNT = "me"
_ID = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_NAME = re.compile(rf"accounts/(?:{ACCOUNT})?/[a-zA-Z]+/([^/]*)")
_MODEL_NAME = re.compile(rf"accounts/{ACCOUNT}/models/([a-z0-9-]{{1,63}})")


def check_id(value: str, field: str) -> str:
    """``value``, when it can be an id: it becomes part of paths and of file names.

    Raises:
        RequestError: it has other characters than ``a-z 0-9 -``, begins or ends with ``-``, is
            empty or longer than 63.
    """
    if not _ID.fullmatch(value):
        raise RequestError(
            f"{field} must be 1 to 63 of a-z, 0-9 and '-', not at an end, got {value[:80]!r}"
        )
    return value


def full_name(collection: str, id: str) -> str:
    """The full name of a resource."""
    return f"accounts/{ACCOUNT}/{collection}/{id}"


def parse_id(name: str) -> str:
    """The id of a name ``accounts/me/KIND/ID``; another name is returned as it is.

    No account, as in ``accounts//KIND/ID``, is the key's own: scripts of document 003 write that
    where ``FIREWORKS_ACCOUNT_ID`` is not set.
    """
    match = _NAME.fullmatch(name)
    return match.group(1) if match is not None else name


def parse_model_id(name: str) -> str:
    """The id of a model that is to be promoted.

    Raises:
        RequestError: the name is not ``accounts/me/models/ID`` with an id of at most 63.
    """
    match = _MODEL_NAME.fullmatch(name)
    if match is None:
        raise RequestError(
            f"output_model must be accounts/{ACCOUNT}/models/ID with 1 to 63 of a-z, 0-9 and '-', "
            f"got {name[:120]!r}"
        )
    return match.group(1)


def format_timestamp(seconds: float | None = None) -> str:
    """UTC as clients compare it: microseconds, then ``Z``."""
    moment = datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
