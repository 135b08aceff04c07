"""A server of S3's interface on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from moto.server import ThreadedMotoServer


@contextlib.contextmanager
def serve_objects() -> Generator[dict[str, str], None, None]:
    """An empty store, and the environment variables with which clients use it."""
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield {
            "AWS_ACCESS_KEY_ID": "one",
            "AWS_SECRET_ACCESS_KEY": "two",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_REGION": "us-east-1",
        }
    finally:
        server.stop()
