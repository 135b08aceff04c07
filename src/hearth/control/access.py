"""Who may send requests to a platform; checked before anything else."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection
from dataclasses import dataclass

from hearth.errors import AuthError
from hearth.settings import is_loopback
from hearth.wire.asgi import Scope


@dataclass(frozen=True, kw_only=True)
class Access:
    """Which requests are accepted, and how long they may be."""

    api_keys: Collection[str] = ()
    """Accepted keys; without any, every request to this machine is."""
    is_local: bool = True
    """Without keys, refuse names that are not this machine's: a web page may send requests too."""
    max_body: int = 2**30
    """Longest body to a trainer, in bytes."""

    def check(self, scope: Scope) -> None:
        """Accept a request.

        Raises:
            AuthError: no key, a wrong one, or a host that is not this machine.
        """
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self.api_keys:
            self._check_key(headers)
        elif self.is_local:
            for name in (b"host", b"origin"):
                self._check_local(name.decode(), headers.get(name, b"localhost"))

    def _check_key(self, headers: dict[bytes, bytes]) -> None:
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = headers.get(b"x-api-key") or (bearer if scheme.lower() == b"bearer" else b"")
        digest = hashlib.sha256(given).digest()
        # Compare every key in constant time, so that the time reveals nothing.
        matches = [
            hmac.compare_digest(digest, hashlib.sha256(key.encode()).digest())
            for key in self.api_keys
        ]
        if not any(matches):
            shown = "a wrong one" if given else "none"
            raise AuthError(
                f"x-api-key must be a key of this platform, got {shown}: export FIREWORKS_API_KEY"
            )

    def _check_local(self, name: str, value: bytes) -> None:
        host = value.decode("latin-1").lower()
        if name == "origin":
            host = host.partition("://")[2] or host
        host = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.split(":")[0]
        if not is_loopback(host):
            raise AuthError(
                f"{name} must be this machine while the platform has no API key, got {host!r}"
            )
