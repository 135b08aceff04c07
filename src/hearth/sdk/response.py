"""A response of the platform, the same whether it came over the network or through memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
