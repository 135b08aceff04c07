import asyncio
import itertools
from dataclasses import replace

import httpx
import pytest
from tests.listening import AppListener
from tests.waiting import wait_until

from hearth.errors import ClosedError, ConfigError, NotFoundError, RequestError, TransportError
from hearth.sdk import FixedConcurrencyController, transport
from hearth.sdk.background import start
from hearth.sdk.resources import ControlPlaneClient
from hearth.sdk.transport import Http, RetryPolicy, make_transport, mount, parse_origin, unmount
from hearth.wire.base import Record
from hearth.wire.connections import KeptConnections
from hearth.wire.messages import HttpRequest

FAST = RetryPolicy(attempts=4, base_s=0.001, longest_s=0.002)
_ports = itertools.count(1)


class Scripted:
    """A peer that answers with the given statuses in turn, the last one for ever."""

    def __init__(self, *statuses: int, body: bytes = b'{"ok": true}') -> None:
        self.url = f"http://peer-{next(_ports)}.test"
        self.statuses = list(statuses)
        self.body = body
        self.seen: list[dict[bytes, bytes]] = []
        mount(self.url, self)

    async def __call__(self, scope, receive, send) -> None:
        self.seen.append(dict(scope["headers"]))
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": self.body})


def test_transient_statuses_are_tried_again_until_one_succeeds():
    peer = Scripted(503, 429, 200)
    http = Http(peer.url, "key", retries=FAST)

    assert start(http.post("/x", b"{}")).result() == b'{"ok": true}'
    assert len(peer.seen) == 3
    assert peer.seen[0][b"x-api-key"] == b"key"


def test_retries_end_and_the_last_answer_is_the_error():
    peer = Scripted(503, body=b'{"error": {"message": "booting"}}')

    with pytest.raises(TransportError, match=r"booting .*HTTP 503"):
        start(Http(peer.url, "key", retries=FAST).post("/x", b"{}")).result()
    assert len(peer.seen) == 4


def test_a_request_that_is_refused_for_now_says_why_it_waits(caplog):
    peer = Scripted(429, 200, body=b'{"error": {"message": "workers_per_key are in use"}}')
    patient = RetryPolicy(attempts=2, base_s=2.0, longest_s=2.0)

    start(Http(peer.url, "key", retries=patient).post("/x", b"{}")).result()

    (warning,) = caplog.messages
    assert f"POST {peer.url}/x is tried again in" in warning
    assert "workers_per_key are in use" in warning


@pytest.mark.parametrize(("status", "kind"), [(400, RequestError), (404, NotFoundError)])
def test_a_final_status_is_its_own_error_at_once(status, kind):
    peer = Scripted(status, body=b'{"error": {"message": "prompt must not be empty"}}')

    with pytest.raises(kind, match="prompt must not be empty"):
        start(Http(peer.url, "key", retries=FAST).post("/x", b"{}")).result()
    assert len(peer.seen) == 1


@pytest.mark.slow
def test_an_unreachable_platform_is_named_after_the_last_try():
    http = Http("http://127.0.0.1:9", "key", retries=FAST)

    with pytest.raises(TransportError, match=r"127\.0\.0\.1:9/x failed 4 times"):
        start(http.post("/x", b"{}")).result()


async def say_ok(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.slow
def test_a_platform_that_never_answered_is_said_at_once_to_be_waited_for(caplog):
    patient = RetryPolicy(attempts=8, base_s=0.5)
    assert patient.longest_wait_s == 0.5 * (2**6 - 1) + 30.0
    http = Http("http://127.0.0.1:9", "key", retries=patient)
    asked = start(http.post("/x", b"{}"))
    try:
        wait_until(lambda: caplog.records, 20)
    finally:
        asked.cancel()

    assert [record.getMessage().partition(". ")[0] for record in caplog.records] == [
        "http://127.0.0.1:9 cannot be reached: waiting up to 62 s for it"
    ]

    quick = Http("http://127.0.0.1:9", "key", retries=FAST)
    with pytest.raises(TransportError):
        start(quick.post("/x", b"{}")).result()
    assert len(caplog.records) == 1, "who hardly waits says nothing"


def test_a_platform_that_is_away_is_waited_for_and_that_is_said(monkeypatch, caplog):
    # A person is told after seconds; here at once.
    monkeypatch.setattr(transport, "_FIRST_WARNING_S", 0.0)
    with AppListener(say_ok) as first:
        http = Http(first.url, "key", retries=FAST)
        assert start(http.post("/x", b"{}")).result() == b"ok"

    asking = start(http.post("/x", b"{}"))
    wait_until(lambda: http.waited_s > 0.2, what="a refused connection")
    refused = start(http.request(HttpRequest("GET", "/x")))
    with pytest.raises(TransportError, match="failed 4 times"):
        refused.result()
    assert not asking.done()
    with AppListener(say_ok, port=parse_port(first.url)):
        assert asking.result(60) == b"ok"

    assert f"the platform at {first.url} cannot be reached since 0 s" in caplog.text
    assert f"the platform at {first.url} is back after" in caplog.text
    waited_s = http.waited_s
    assert waited_s > 0.2
    assert http.waited_s == waited_s, "it does not grow while the platform answers"
    start(http.close()).result()


async def say_empty(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


@pytest.mark.slow
def test_who_provisions_waits_for_a_platform_that_is_away_and_who_cleans_up_does_not():
    with AppListener(say_empty) as first:
        control = ControlPlaneClient("key", first.url, "me", FAST, None)
        start(control.get("accounts/me/jobs/j", Record)).result()

    asking = [
        start(control.get("accounts/me/jobs/j", Record)),
        start(control.send("POST", "accounts/me/jobs/j:resume")),
    ]
    wait_until(lambda: control.http.waited_s > 0.2, what="a refused connection")
    for method, name in (("POST", "jobs/j:cancel"), ("PATCH", "jobs/j"), ("DELETE", "jobs/j")):
        with pytest.raises(TransportError, match="failed 4 times"):
            start(control.send(method, f"accounts/me/{name}")).result()
    assert not any(future.done() for future in asking)
    with AppListener(say_empty, port=parse_port(first.url)):
        assert [future.result(60) for future in asking] == [Record(), b"{}"]
    start(control.http.close()).result()


@pytest.mark.slow
def test_a_platform_that_stays_away_ends_the_wait():
    with AppListener(say_ok) as listener:
        http = Http(listener.url, "key", retries=replace(FAST, attempts=2, away_s=0.3))
        start(http.post("/x", b"{}")).result()

    with pytest.raises(TransportError, match="failed 2 times"):
        start(http.post("/x", b"{}")).result(60)
    start(http.close()).result()


@pytest.mark.slow
def test_a_platform_that_does_not_answer_is_said_at_each_attempt(caplog):
    async def say_nothing(scope, receive, send):
        assert scope["type"] == "http", "uvicorn takes this for an app without a lifespan"
        while (await receive())["type"] != "http.disconnect":
            pass

    with AppListener(say_nothing) as listener:
        http = Http(listener.url, "key", retries=replace(FAST, attempts=2))
        with pytest.raises(TransportError, match="failed 2 times, last with ReadTimeout"):
            start(http.post("/x", b"{}", timeout_s=0.1)).result(60)
        start(http.close()).result()

    assert "/x was not answered within 0 s (attempt 1 of 2)" in caplog.text


def parse_port(url):
    return int(url.rpartition(":")[2])


def test_a_client_used_after_its_platform_is_gone_says_so():
    peer = Scripted(200)
    http = Http(peer.url, "key")
    start(http.post("/x", b"{}")).result()

    unmount(peer.url)

    with pytest.raises(ClosedError, match="inside the `with` block"):
        start(http.post("/x", b"{}")).result()


@pytest.mark.parametrize("url", ["", "embedded", "ftp://host", "http://"])
def test_a_base_url_needs_scheme_and_host(url):
    with pytest.raises(ConfigError, match="base_url"):
        parse_origin(url)


def test_an_empty_key_is_refused():
    with pytest.raises(ConfigError, match="api_key"):
        Http("http://peer.test", "")


def test_futures_work_from_threads_and_from_fresh_event_loops():
    async def seven() -> int:
        await asyncio.sleep(0)
        return 7

    async def awaited() -> int:
        return await start(seven())

    assert start(seven()).result() == 7
    assert [asyncio.run(awaited()) for _ in range(3)] == [7, 7, 7]


def test_the_limit_counts_requests():
    controller = FixedConcurrencyController(3)

    async def request() -> None:
        await controller.acquire()
        await asyncio.sleep(0.001)
        controller.release()

    async def many() -> None:
        await asyncio.gather(*(request() for _ in range(20)))

    start(many()).result()
    assert controller.high_water == 3
    assert controller.in_flight == 0


class Failing(Scripted):
    """A peer that raises the first time: before it answers, amid its answer or after it."""

    def __init__(self, moment: str) -> None:
        super().__init__(200)
        self.moment = moment

    async def __call__(self, scope, receive, send) -> None:
        moment, self.moment = self.moment, ""
        if moment == "before":
            raise RuntimeError("boom")
        if moment == "amid":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b'{"o', "more_body": True})
            raise RuntimeError("boom")
        await super().__call__(scope, receive, send)
        if moment == "after":
            raise RuntimeError("boom")


def test_an_app_that_raises_before_its_answer_has_answered_500():
    with pytest.raises(TransportError, match="HTTP 500"):
        start(Http(Failing("before").url, "key", retries=FAST).post("/x", b"{}")).result()


@pytest.mark.parametrize("moment", ["amid", "after"])
def test_an_answer_that_breaks_off_is_asked_for_again_and_a_whole_one_counts(moment):
    peer = Failing(moment)

    found = start(Http(peer.url, "key", retries=FAST).post("/x", b"{}")).result()

    assert found == b'{"ok": true}'
    assert len(peer.seen) == 1


def test_a_proxy_of_the_environment_is_asked_where_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    assert isinstance(make_transport("http://platform:8000"), httpx.AsyncHTTPTransport)
    assert isinstance(make_transport("http://127.0.0.1:8000"), KeptConnections)
    assert isinstance(make_transport("https://platform"), KeptConnections)
