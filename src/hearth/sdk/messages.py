"""Requests and responses, the same whether they go over the network or through memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True)
class HttpRequest:
    """What is sent to a platform. ``path`` begins after its base URL."""

    method: str
    path: str
    body: bytes | None = None
    _: KW_ONLY
    params: Mapping[str, str] | None = None
    headers: Mapping[str, str] | None = None
    """Beside those of the platform's client."""
    timeout_s: float = 60.0


@dataclass(frozen=True)
class HttpResponse:
    """A whole response, whatever its status. It is small because every completion makes one."""

    status_code: int
    headers: Mapping[str, str]
    """Names in lower case."""
    content: bytes
    method: str
    """That of the request."""
    url: str
    """That of the request."""

    @property
    def is_success(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status_code < 300
