"""An ASGI app that listens, on a port or at a Unix socket, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import uvicorn


class AppListener:
    """Serves from ``with`` on to its end; ``url`` says where, unless it is a Unix socket."""

    def __init__(self, app: Any, path: Path | None = None, port: int = 0) -> None:
        self._listener = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(str(path) if path else ("127.0.0.1", port))
        self._listener.listen()
        self.url = "" if path else f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        config = uvicorn.Config(
            app, log_config=None, access_log=False, timeout_graceful_shutdown=1, ws="none"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self.loop = runner.get_loop()
            runner.run(self._server.serve(sockets=[self._listener]))

    def __enter__(self) -> AppListener:
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.002)
            assert self._thread.is_alive()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End it as a process would: its socket is closed, its connections broken."""
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()
