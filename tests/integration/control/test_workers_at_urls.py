"""Workers on the network: the gateway shows them their token, and they answer nobody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.listening import AppListener
from tests.unit.control.conftest import ScriptedLauncher, ScriptedWorker

from hearth.control.access import Access
from hearth.control.app import create_gateway
from hearth.control.catalog import read_catalog
from hearth.control.context import Context
from hearth.control.plane import ControlPlane
from hearth.control.store import Store
from hearth.control.workers import fetch_json
from hearth.launch.app_server import AppServer, listener_at
from hearth.launch.spec import Endpoint
from hearth.wire.asgi import TOKEN_HEADER
from hearth.wire.fireworks import TrainerJob

PATH = "/training/v1/rlorTrainerJobs/me/j/api/v1/x?b=1"
HEADER = TOKEN_HEADER.decode()


class Echo:
    """Answers with JSON, and keeps the headers that it was asked with."""

    def __init__(self) -> None:
        self.headers: list[dict[str, str]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        json = (b"content-type", b"application/json")
        await send({"type": "http.response.start", "status": 200, "headers": [json]})
        await send({"type": "http.response.body", "body": b'{"is": "well"}'})


class OnNetwork:
    """A worker's app at a port of this machine, with a token."""

    def __init__(self) -> None:
        self.app = Echo()
        listener = listener_at("127.0.0.1")
        self.endpoint = Endpoint(
            url=f"http://127.0.0.1:{listener.getsockname()[1]}", token="the-token"
        )
        is_ready = threading.Event()
        self._server = AppServer(
            self.app, listener, health_path="/healthz", token="the-token", on_ready=is_ready.set
        )
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        assert is_ready.wait(20)

    def end(self) -> None:
        self._server.end()
        self._thread.join()


@pytest.fixture
def worker() -> Iterator[OnNetwork]:
    worker = OnNetwork()
    yield worker
    worker.end()


@pytest.fixture
def here(worker: OnNetwork, tmp_path: Any, base: str) -> Iterator[httpx.Client]:
    class There(ScriptedWorker):
        @property
        def endpoint(self) -> Endpoint:
            return worker.endpoint

    context = Context(launcher=ScriptedLauncher(There), catalog=read_catalog(), data_dir=tmp_path)
    plane = ControlPlane(Store(), context)
    config = {"baseModel": base, "maxContextLength": 9}
    plane.jobs.create("j", TrainerJob.from_dict({"trainingConfig": config}), None)
    context.launcher.last("j").starts()
    gateway = create_gateway(plane, Access())
    with AppListener(gateway) as listening, httpx.Client(base_url=listening.url) as http:
        yield http
    plane.close()


@pytest.mark.parametrize("shown", [None, "another", "the-token2"])
def test_without_its_token_a_worker_answers_nobody(worker: OnNetwork, shown: str | None) -> None:
    before = len(worker.app.headers)

    headers = {} if shown is None else {HEADER: shown}
    assert httpx.get(f"{worker.endpoint.url}/healthz", headers=headers).status_code == 401
    assert len(worker.app.headers) == before


def test_the_gateway_shows_the_token_and_the_app_does_not_see_it(
    worker: OnNetwork, here: httpx.Client
) -> None:
    for number in range(3):
        answer = here.post(PATH, content=b"body", headers={"x-n": str(number), HEADER: "forged"})
        assert (answer.status_code, answer.json()) == (200, {"is": "well"})

    asked = worker.app.headers[-1]
    assert asked["x-n"] == "2"
    assert HEADER not in asked


def test_the_control_plane_asks_with_the_token(worker: OnNetwork) -> None:
    assert fetch_json(worker.endpoint, "/any") == {"is": "well"}
    assert fetch_json(Endpoint(url=worker.endpoint.url, token="another"), "/any") is None


def test_a_worker_that_is_gone_is_503(worker: OnNetwork, here: httpx.Client) -> None:
    assert here.get(PATH).status_code == 200
    worker.end()

    answer = here.get(PATH)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
