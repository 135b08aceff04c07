import gc
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hearth.sdk.background import start
from hearth.sdk.transport import Http
from hearth.wire.messages import HttpRequest


class Peer(BaseHTTPRequestHandler):
    """Answers, keeps the connection, and tells of its end."""

    protocol_version = "HTTP/1.1"
    has_ended = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def finish(self) -> None:
        super().finish()
        self.has_ended.set()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Peer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    Peer.has_ended.clear()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
def test_a_client_that_nobody_closes_ends_its_connections_when_nobody_can_use_it(url):
    http = Http(url, "a-key")
    assert start(http.request(HttpRequest("GET", "/"))).result(10).status_code == 200
    assert not Peer.has_ended.wait(0.1)

    del http
    gc.collect()

    assert Peer.has_ended.wait(10)
