"""Who may send requests to a platform, checked before anything else; and who changed what."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from hearth.errors import AuthError
from hearth.settings import is_loopback
from hearth.wire.asgi import Scope

logger = logging.getLogger(__name__)

ANYONE = "anyone"
"""Stands for the key of a request to a platform without keys."""
_HOST = re.compile(r"(\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(:\d+)?")
"""A host and perhaps a port; nothing before, between or after."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Which requests are accepted, and how long they may be."""

    api_keys: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Accepted keys, each with the name that stands for it in records; without any, every request
    to this machine is accepted."""
    is_local: bool = True
    """Without keys, refuse names that are not this machine's: a web page may send requests too."""
    max_body: int = 2**30
    """Longest body to a trainer, in bytes."""
    requests_per_key: int | None = None
    """Requests of one key that are answered at once; None: any number."""

    def check(self, scope: Scope) -> str:
        """Accept a request; the name of its key, or ``anyone`` without keys.

        Raises:
            AuthError: no key, a wrong one, or a host that is not this machine.
        """
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self.api_keys:
            return self._find_key(headers)
        if self.is_local:
            for name in (b"host", b"origin"):
                self._check_local(name.decode(), headers.get(name, b"localhost"))
        return ANYONE

    def name_client(self, scope: Scope) -> bytes:
        """Whose request it is, so that clients share fairly: a key used from one address."""
        host = (scope.get("client") or ("",))[0]
        key = _given_key(dict(scope["headers"]))
        return hashlib.sha256(host.encode() + b" " + key).hexdigest()[:16].encode()

    def _find_key(self, headers: dict[bytes, bytes]) -> str:
        given = _given_key(headers)
        digest = hashlib.sha256(given).digest()
        # Compare every key in constant time, so that the time reveals nothing.
        matches = [
            name
            for key, name in self.api_keys.items()
            if hmac.compare_digest(digest, hashlib.sha256(key.encode()).digest())
        ]
        if not matches:
            shown = "a wrong one" if given else "none"
            raise AuthError(
                f"x-api-key must be a key of this platform, got {shown}: export HEARTH_API_KEY"
            )
        return matches[0]

    def _check_local(self, name: str, value: bytes) -> None:
        host = value.decode("latin-1").lower()
        if name == "origin":
            host = host.partition("://")[2] or host
        known = _HOST.fullmatch(host)
        if known is None or not is_loopback(known["v6"] or known["name"]):
            raise AuthError(
                f"{name} must be this machine while the platform has no API key, got {host[:80]!r}"
            )


class AuditLog:
    """Who created, changed and deleted what: a file of JSON lines that only grows.

    Each line has the time, the name of the key, the client's address, the request's method, path
    and query, and the status of its answer. The file is opened for each line, so that it may be
    moved away. Any thread may call it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, key: str, scope: Scope, status: int) -> None:
        """Write down one request and how it was answered; an error says so where none can be."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "key": key,
            "address": (scope.get("client") or ("",))[0],
            "method": scope["method"],
            "path": scope["path"],
            "query": scope.get("query_string", b"").decode("latin-1"),
            "status": status,
        }
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o600)
            try:
                os.write(descriptor, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
            finally:
                os.close(descriptor)
        except OSError as error:
            logger.error("%s must take a line, got %s; it was %s", self._path, error, line)


def _given_key(headers: dict[bytes, bytes]) -> bytes:
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    return headers.get(b"x-api-key") or (bearer if scheme.lower() == b"bearer" else b"")
