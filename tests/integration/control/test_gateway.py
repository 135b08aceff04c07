"""The gateway between real sockets: a worker at a Unix socket, clients at a port."""

import asyncio
import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import orjson
import pytest
from tests.listening import AppListener
from tests.unit.control.conftest import ScriptedLauncher, ScriptedWorker
from tests.waiting import wait_until

from hearth.control.access import Access
from hearth.control.app import create_gateway
from hearth.control.catalog import read_catalog
from hearth.control.context import Context
from hearth.control.plane import ControlPlane
from hearth.control.store import Store
from hearth.launch.spec import Endpoint
from hearth.wire.fireworks import Deployment, TrainerJob

TRAINER = "/training/v1/rlorTrainerJobs/me/j"
COMPLETIONS = "/inference/v1/completions"
NAMED = {"fireworks-deployment": "accounts/me/deployments/d"}


class Peer:
    """A worker's app: echoes, streams what it is told to, and notes who leaves."""

    def __init__(self):
        self.forget()

    def forget(self):
        self.asked = []
        self.may_end = threading.Event()
        self.left = threading.Event()
        self.streaming = threading.Event()
        self.has_begun = threading.Event()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            return
        body = b""
        while True:
            message = await receive()
            self.has_begun.set()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.asked.append(
            {
                "path": scope["path"],
                "raw_path": scope["raw_path"],
                "query": scope["query_string"],
                "method": scope["method"],
                "body": body,
                "headers": [(name.decode(), value.decode()) for name, value in scope["headers"]],
            }
        )
        if scope["path"].endswith("/stream"):
            await self._stream(receive, send)
        elif scope["path"].endswith("/hold"):
            self.streaming.set()
            await receive()
            self.left.set()
        elif "/break" in scope["path"]:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            half = b"" if scope["path"].endswith("at-once") else b"half"
            await send({"type": "http.response.body", "body": half, "more_body": True})
            raise ConnectionError("the worker dies")
        else:
            status = int(dict(self.asked[-1]["headers"]).get("x-status", 200))
            headers = [(b"x-of-worker", b"yes"), (b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": b"" if status == 204 else body})

    async def _stream(self, receive, send):
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        self.streaming.set()
        leaving = asyncio.ensure_future(receive())
        while not self.may_end.is_set():
            await asyncio.wait([leaving], timeout=0.01)
            if leaving.done():
                self.left.set()
                return
        leaving.cancel()
        await send({"type": "http.response.body", "body": b"data: 2\n\n"})


@pytest.fixture(scope="module")
def served(tmp_path_factory, base):
    """A worker at a Unix socket, and a client of a gateway with two trainers and a deployment.

    At the second trainer's socket nobody answers unless a test does.
    """
    folder = tmp_path_factory.mktemp("gateway")
    sockets = {"trainer-j": "w", "deployment-d": "w", "trainer-brief": "brief"}

    class AtSocket(ScriptedWorker):
        @property
        def endpoint(self):
            return Endpoint(socket=str(folder / sockets[self.spec.worker_id]))

    context = Context(launcher=ScriptedLauncher(AtSocket), catalog=read_catalog(), data_dir=folder)
    plane = ControlPlane(Store(), context)
    config = {"baseModel": base, "maxContextLength": 9}
    for id in ("j", "brief"):
        plane.jobs.create(id, TrainerJob.from_dict({"trainingConfig": config}), None)
    plane.deployments.create("d", Deployment(base_model=base))
    for worker in context.launcher.started:
        worker.starts()
    peer = Peer()
    with (
        AppListener(peer, folder / "w"),
        AppListener(create_gateway(plane, Access(max_body=16000))) as gateway,
        httpx.Client(base_url=gateway.url) as http,
    ):
        yield http, peer, folder, plane
    plane.close()


@pytest.fixture
def here(served):
    return served[0]


@pytest.fixture
def peer(served):
    served[1].forget()
    return served[1]


@pytest.fixture
def folder(served):
    return served[2]


def test_method_path_query_body_and_status_are_kept(here, peer):
    answer = here.put(
        f"{TRAINER}/api/v1/a?b=1&c=%2F&d=", content=b"body", headers={"x-status": "418"}
    )

    assert (answer.status_code, answer.content) == (418, b"body")
    assert answer.headers["x-of-worker"] == "yes"
    asked = peer.asked[-1]
    assert (asked["method"], asked["path"], asked["body"]) == ("PUT", "/api/v1/a", b"body")
    assert asked["query"] == b"b=1&c=%2F&d="


@pytest.mark.parametrize(
    ("sent", "path", "query"),
    [
        ("/api/v1/a%3Fb=1", "/api/v1/a?b=1", b""),
        ("/api/v1/a%20b%00c", "/api/v1/a b\0c", b""),
        ("/api/v1/%C3%BC?x=%C3%BC", "/api/v1/ü", b"x=%C3%BC"),
        ("//other.host/x", "//other.host/x", b""),
    ],
)
def test_an_encoded_path_is_no_other_path_at_the_worker(here, peer, sent, path, query):
    assert here.get(f"{TRAINER}{sent}").status_code == 200

    assert (peer.asked[-1]["path"], peer.asked[-1]["query"]) == (path, query)


@pytest.mark.parametrize("status", [200, 204, 400, 404, 425, 429, 500, 503])
def test_status_codes_are_the_workers(here, status):
    assert here.get(f"{TRAINER}/x", headers={"x-status": str(status)}).status_code == status


def test_headers_that_are_the_connections_own_come_once(here):
    answer = here.post(f"{TRAINER}/x", content=b"body")

    for name in ("date", "server", "content-length"):
        assert len(answer.headers.get_list(name)) <= 1


def test_a_streamed_answer_is_passed_on_as_it_comes(here, peer):
    with here.stream("POST", f"{TRAINER}/stream", timeout=10) as answer:
        chunks = answer.iter_raw()
        assert next(chunks) == b"data: 1\n\n"
        assert not peer.may_end.is_set(), "the second is not even made"
        peer.may_end.set()
        assert b"".join(chunks) == b"data: 2\n\n"
    assert answer.headers["content-type"] == "text/event-stream"


def test_a_client_that_leaves_closes_the_workers_request(here, peer):
    with here.stream("POST", f"{TRAINER}/stream", timeout=10) as answer:
        assert next(answer.iter_raw()) == b"data: 1\n\n"
        assert peer.streaming.wait(5)
    left_s = time.monotonic()

    assert peer.left.wait(5)
    assert time.monotonic() - left_s < 1


def test_an_answer_that_breaks_off_breaks_off_at_the_client(here, caplog):
    with pytest.raises(httpx.RemoteProtocolError):
        here.get(f"{TRAINER}/break")

    wait_until(lambda: "answer to GET" in caplog.text)
    of_the_gateway = [record for record in caplog.records if record.name.endswith("gateway")]
    assert [record.exc_info for record in of_the_gateway] == [None]


def test_an_answer_that_breaks_off_before_its_first_byte_is_503(here):
    answer = here.get(f"{TRAINER}/break-at-once")

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_a_dead_worker_is_503_with_when_to_ask_again(here, peer, folder):
    path = "/training/v1/rlorTrainerJobs/me/brief/x"
    with AppListener(peer, folder / "brief"):
        assert here.get(path).status_code == 200

    for _ in range(2):
        answer = here.get(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        message = answer.json()["error"]["message"]
        assert message.startswith("worker must answer, got ")
        assert "the answer will say how" in message


def test_a_request_whose_worker_dies_says_how_it_ended(served):
    here, _, folder, plane = served
    (folder / "brief").unlink(missing_ok=True)
    with ThreadPoolExecutor(1) as pool, socket.socket(socket.AF_UNIX) as worker:
        worker.bind(str(folder / "brief"))
        worker.listen()
        asking = pool.submit(here.get, "/training/v1/rlorTrainerJobs/me/brief/x")
        connection, _ = worker.accept()
        plane.jobs.live.get("brief").worker.dies("out of memory")
        connection.close()
        answer = asking.result(10)

    assert answer.status_code == 410
    assert "(out of memory): resume it" in answer.json()["error"]["message"]
    plane.jobs.resume("brief")
    plane.jobs.live.get("brief").worker.starts()


def test_a_clients_own_bucket_header_is_not_passed_on(here, peer):
    forged = NAMED | {"x-hearth-snapshot-bucket": "trainer-of-another"}

    here.post("/hot_load/v1/models/hot_load", content=b"{}", headers=forged)
    here.post(COMPLETIONS, content=b"{}", headers=forged)
    here.post(f"{TRAINER}/x", content=b"{}", headers=forged)

    buckets = [
        [value for name, value in request["headers"] if name == "x-hearth-snapshot-bucket"]
        for request in peer.asked
    ]
    assert buckets == [["deployment-d"], [], []]


def test_keys_never_reach_a_worker(here, peer):
    keys = {"x-api-key": "secret", "authorization": "Bearer secret", "cookie": "secret"}

    here.post(f"{TRAINER}/x", content=b"{}", headers=keys)
    here.post(COMPLETIONS, content=b"{}", headers=keys | NAMED | {"x-other": "kept"})

    assert "secret" not in str(peer.asked)
    assert ("x-other", "kept") in peer.asked[-1]["headers"]


def test_a_worker_is_told_whose_request_it_is_but_no_key(here, peer):
    keys = [{"x-api-key": "k"}, {"authorization": "Bearer k"}, {"x-api-key": "other"}, {}]
    for key in keys:
        here.post(COMPLETIONS, content=b"{}", headers=NAMED | {"x-hearth-client": "me"} | key)

    clients = [
        [value for name, value in request["headers"] if name == "x-hearth-client"]
        for request in peer.asked
    ]
    assert [len(names) for names in clients] == [1, 1, 1, 1]
    first, second, third, fourth = (names[0] for names in clients)
    assert first == second
    assert len({first, third, fourth, "me"}) == 4


def test_a_request_id_is_passed_on(here, peer):
    here.post(COMPLETIONS, content=b"{}", headers=NAMED | {"x-request-id": "r-1"})

    assert ("x-request-id", "r-1") in peer.asked[-1]["headers"]


def test_the_body_that_names_the_deployment_reaches_it_whole(here, peer):
    body = orjson.dumps({"model": "accounts/me/deployments/d", "prompt": "ü" * 100})

    assert here.post(COMPLETIONS, content=body).status_code == 200
    assert peer.asked[-1]["body"] == body


def refused(answer, status):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


def test_a_body_without_json_or_without_a_model_is_400(here, peer):
    assert "body must be JSON, got b'{\"mod'" in refused(
        here.post(COMPLETIONS, content=b'{"mod'), 400
    )
    for body in (b"", b"[]", b"{}", b'{"model": 3}', b"null"):
        message = refused(here.post(COMPLETIONS, content=body), 400)
        assert message.startswith("model must name a deployment, got ")
        assert "fireworks-deployment" in message
    assert peer.asked == []


def chunks(size, count):
    for _ in range(count):
        yield b"x" * size


@pytest.mark.parametrize(
    ("method", "path", "limit"),
    [
        ("POST", f"{TRAINER}/x", 16000),
        ("POST", COMPLETIONS, 1000),
        ("POST", "/v1/accounts/me/rlorTrainerJobs?rlorTrainerJobId=k", 1000),
        ("POST", "/v1/accounts/me/deployments?deploymentId=k", 1000),
        ("PATCH", "/v1/accounts/me/deployments/d", 1000),
        ("POST", "/v1/accounts/me/checkpoints/s:promote", 1000),
    ],
)
def test_a_body_that_is_too_long_is_413(here, peer, method, path, limit):
    expected = f"body must be at most {limit} bytes: send fewer datums per request"

    assert refused(here.request(method, path, content=b"x" * (limit + 1)), 413) == expected
    answer = here.request(method, path, content=chunks(100, limit // 100 + 1))
    assert refused(answer, 413) == expected
    assert peer.asked == []


def test_a_body_that_says_it_is_too_long_is_413_before_it_is_sent(here):
    host, port = here.base_url.host, here.base_url.port
    with socket.create_connection((host, port), timeout=5) as connection:
        head = (
            f"POST {TRAINER}/x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\n"
        )
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_body_whose_length_is_said_twice_is_refused(here, peer):
    url = here.base_url
    request = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nhost: {url.host}\r\nconnection: close\r\n"
        "content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    )
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(request.encode())
        answer = b"".join(iter(lambda: connection.recv(4096), b""))

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"content-length must be absent with transfer-encoding" in answer
    assert peer.asked == []


def begin_body(url, length, sent):
    # A connection that announces a body and has sent some of it.
    connection = socket.create_connection((url.host, url.port), timeout=10)
    head = f"POST {TRAINER}/x HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n"
    connection.sendall(head.encode() + sent)
    return connection


def test_bodies_in_flight_are_bounded_before_they_are_read_and_room_comes_back(here):
    def post(**headers):
        return here.post(f"{TRAINER}/x", content=b"x" * 16000, headers=headers)

    def post_beside_one_more():
        begun.enter_context(begin_body(here.base_url, 16000, b"x"))
        return post()

    # Two of three bodies of the longest length; another client still has room for the third. A body
    # that meets a post on its way is refused itself, so bodies are begun until two are held.
    with contextlib.ExitStack() as begun:
        begun.enter_context(begin_body(here.base_url, 16000, b""))
        wait_until(lambda: post_beside_one_more().status_code == 429)
        refusal, other = post(), post(**{"x-api-key": "other"})
    wait_until(lambda: post().status_code == 200)

    assert refusal.headers["retry-after"] == "1"
    rule = "bytes of bodies in flight of one client must be at most 16000 now, got 48000"
    assert rule in refused(refusal, 429)
    assert other.status_code == 200


def test_a_long_body_is_passed_on_while_it_arrives(served, peer):
    body = bytes(range(256)) * 2**13
    with AppListener(create_gateway(served[3])) as listening:
        url = httpx.URL(listening.url)
        with begin_body(url, len(body), body[: len(body) * 3 // 4]) as connection:
            assert peer.has_begun.wait(5)
            assert peer.asked == [], "the rest has not been sent"
            connection.sendall(body[len(body) * 3 // 4 :])
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        parts = (body[start : start + 2**18] for start in range(0, len(body), 2**18))
        answer = httpx.post(f"{listening.url}{TRAINER}/x", content=parts, timeout=10)

    assert answer.content == body
    assert [request["body"] == body for request in peer.asked] == [True, True]


def test_a_body_of_the_longest_length_is_taken(here, peer):
    assert here.post(f"{TRAINER}/x", content=b"x" * 16000).status_code == 200
    assert here.post(f"{TRAINER}/x", content=chunks(100, 160)).status_code == 200
    assert [len(request["body"]) for request in peer.asked] == [16000, 16000]


def test_a_client_that_leaves_within_its_body_reaches_no_worker(here, peer):
    with socket.create_connection((here.base_url.host, here.base_url.port)) as connection:
        head = f"POST {TRAINER}/x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n"
        connection.sendall(head.encode() + b'{"a":')
    assert here.get(f"{TRAINER}/after").status_code == 200

    assert [request["path"] for request in peer.asked] == ["/after"]


@pytest.mark.parametrize("path", ["", "/", "/me", "/me/", "/me/j"])
def test_a_trainers_path_without_an_operation_says_what_it_must_be(here, path):
    message = refused(here.get(f"/training/v1/rlorTrainerJobs{path}"), 404)

    assert message.startswith("path must be ")


def test_a_platform_that_ends_answers_what_its_workers_hold(served, peer):
    gateway = create_gateway(served[3])
    answers = []
    with AppListener(gateway) as listening:
        asking = threading.Thread(
            target=lambda: answers.append(httpx.get(f"{listening.url}{TRAINER}/hold", timeout=10))
        )
        asking.start()
        assert peer.streaming.wait(5)
        listening.loop.call_soon_threadsafe(gateway.end)
        asking.join()

    assert (answers[0].status_code, answers[0].headers["retry-after"]) == (503, "1")
    message = answers[0].json()["error"]["message"]
    assert message == "platform must be open, got a request while it ends: ask again"
    assert peer.left.wait(5)
