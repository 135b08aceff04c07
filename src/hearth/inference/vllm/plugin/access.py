"""Access to a vLLM server: only its worker may call it, since its endpoints change weights."""

from __future__ import annotations

import os

from hearth.wire.asgi import App, TokenCheck

TOKEN_VARIABLE = "HEARTH_VLLM_TOKEN"  # noqa: S105 - its name


class ServerAccess(TokenCheck):
    """ASGI middleware, as ``--middleware`` takes it; the token is ``HEARTH_VLLM_TOKEN``'s value."""

    def __init__(self, app: App) -> None:
        super().__init__(app, os.environ[TOKEN_VARIABLE])
