"""Who is let in, and that keys stay at the access."""

import asyncio
import logging
import stat

import orjson
import pytest

from hearth.control.access import Access, AuditLog

KEYS = {"first-key": "alice", "second-key": "bob"}
OPEN = [
    "localhost",
    "localhost:8000",
    "LOCALHOST",
    "127.0.0.1:8000",
    "127.8.9.1",
    "[::1]",
    "[::1]:80",
]
CLOSED = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "10.0.0.1",
    "[::2]:80",
    "0.0.0.0",
    "",
    "x//localhost",
    "user@localhost",
    "[::1].evil.example",
    "localhost:80@evil.example",
    "[::1",
]


@pytest.fixture
def access(make_ask, plane):
    def make(**options):
        return make_ask(plane, Access(**options)).http

    return make


async def status(http, path="/v1/accounts", **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await http.get(path, headers={"host": "localhost"} | named)
    return answer.status_code


async def test_without_keys_whoever_calls_this_machine_by_its_name_is_let_in(access):
    http = access()

    for host in OPEN:
        assert await status(http, host=host) == 200, host
        assert await status(http, host=host, origin=f"http://{host}") == 200, host
    assert await status(http, x_api_key="anything") == 200


async def test_without_keys_a_name_of_another_machine_is_refused(access):
    http = access()

    for host in CLOSED:
        assert await status(http, host=host) == 401, host
        assert await status(http, origin=f"https://{host}") == 401, host


@pytest.mark.parametrize("origin", ["null", "file://", "http://evil.example", "evil.example"])
async def test_without_keys_a_page_of_elsewhere_is_refused(access, origin):
    answer = await access().get("/v1/accounts", headers={"host": "localhost", "origin": origin})

    assert answer.status_code == 401
    message = answer.json()["error"]["message"]
    assert message.startswith("origin must be this machine while the platform has no API key, got")


async def test_an_embedded_platform_looks_at_no_names(access):
    http = access(is_local=False)

    assert await status(http, host="embedded-1.hearth.internal") == 200


@pytest.mark.parametrize("key", KEYS)
async def test_a_right_key_is_let_in_wherever_it_stands_and_whatever_the_host(access, key):
    http = access(api_keys=KEYS)

    assert await status(http, x_api_key=key) == 200
    assert await status(http, authorization=f"Bearer {key}") == 200
    assert await status(http, authorization=f"bearer {key}") == 200
    assert await status(http, x_api_key=key, host="evil.example", origin="http://x") == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"x_api_key": "wrong"},
        {"x_api_key": "first-key "},
        {"x_api_key": "first-ke"},
        {"x_api_key": "first-key,second-key"},
        {"authorization": "Bearer wrong"},
        {"authorization": "first-key"},
        {"authorization": "Basic first-key"},
        {"authorization": "Bearer"},
        {"x_api_key": "wrong", "authorization": "Bearer first-key"},
        {"x_api_key": "ü".encode()},
    ],
)
async def test_a_wrong_key_is_401_in_every_place(access, headers):
    http = access(api_keys=KEYS)

    trainer = "/training/v1/rlorTrainerJobs/me/j/api/v1/healthz"
    for path in ("/v1/accounts", "/healthz", "/nothing", "/v1/completions", trainer):
        assert await status(http, path, **headers) == 401


async def test_no_key_and_a_wrong_one_are_told_apart_and_what_to_do_is_said(access):
    http = access(api_keys=KEYS)

    none = (await http.get("/v1/accounts")).json()["error"]
    wrong = (await http.get("/v1/accounts", headers={"x-api-key": "wrong"})).json()["error"]

    assert none["message"] == (
        "x-api-key must be a key of this platform, got none: export HEARTH_API_KEY"
    )
    assert "got a wrong one" in wrong["message"]
    assert none["status"] == wrong["status"] == "UNAUTHENTICATED"


async def test_every_key_is_compared_in_constant_time(access, monkeypatch):
    compared = []
    import hmac

    compare = hmac.compare_digest
    # Not ours: the one function whose time tells nothing.
    monkeypatch.setattr(
        hmac, "compare_digest", lambda *pair: compared.append(pair) or compare(*pair)
    )
    http = access(api_keys={"a": "1", "b": "2", "c": "3"})

    for number, key in enumerate(("a", "c", "no key of these"), start=1):
        await http.get("/v1/accounts", headers={"x-api-key": key})
        assert len(compared) == 3 * number
    assert {len(digest) for pair in compared for digest in pair} == {32}, (
        "only digests are compared"
    )


async def test_no_key_is_ever_logged(access, caplog):
    http = access(api_keys=KEYS)
    with caplog.at_level(logging.DEBUG):
        for key in (*KEYS, "wrong-key"):
            await http.get("/v1/accounts", headers={"x-api-key": key})
            await http.post("/v1/completions", headers={"authorization": f"Bearer {key}"})

    assert "-key" not in caplog.text


DEPLOYMENTS = "/v1/accounts/me/deployments"
JOBS = "/v1/accounts/me/rlorTrainerJobs"
ALICE, BOB = ({"x-api-key": key} for key in KEYS)


@pytest.fixture
def audit(tmp_path):
    return AuditLog(tmp_path / "audit.jsonl")


def read_audit(folder):
    return [orjson.loads(line) for line in (folder / "audit.jsonl").read_bytes().splitlines()]


async def test_who_changes_what_is_written_down_with_how_it_was_answered(
    make_ask, plane, audit, script, base, tmp_path
):
    http = make_ask(plane, Access(api_keys=KEYS), audit).http
    made = {"baseModel": base}
    await http.post(f"{DEPLOYMENTS}?deploymentId=d", json=made, headers=ALICE)
    script.last("d").starts()
    await http.get(f"{DEPLOYMENTS}/d", headers=ALICE)
    await http.patch(f"{DEPLOYMENTS}/d", json={"maxReplicaCount": 99}, headers=BOB)
    named = BOB | {"fireworks-deployment": "d"}
    await http.post("/hot_load/v1/models/hot_load", json={"identity": "s"}, headers=named)
    await http.post("/v1/completions", json={"model": "d"}, headers=BOB)
    await http.delete(f"{DEPLOYMENTS}/d", headers=ALICE)
    await http.delete(f"{DEPLOYMENTS}/d", headers={"x-api-key": "wrong"})
    saved = "/api/v1/training_runs/r/checkpoints/weights/w"
    for path in ("/api/v1/create_session", "/api/v1/create_model", "/api/v1/forward", saved):
        await http.post(path, json={}, headers=BOB)
    await http.delete(saved, headers=BOB)

    lines = read_audit(tmp_path)
    found = [(line["key"], line["method"], line["path"], line["status"]) for line in lines]
    assert found == [
        ("alice", "POST", DEPLOYMENTS, 200),
        ("bob", "PATCH", f"{DEPLOYMENTS}/d", 400),
        ("bob", "POST", "/hot_load/v1/models/hot_load", 200),
        ("alice", "DELETE", f"{DEPLOYMENTS}/d", 200),
        # Tinker's API, which this platform has none of.
        ("bob", "POST", "/api/v1/create_session", 404),
        ("bob", "POST", "/api/v1/create_model", 404),
        ("bob", "DELETE", saved, 404),
    ]
    assert lines[0]["query"] == "deploymentId=d"
    assert lines[0]["address"] == "127.0.0.1"
    assert stat.S_IMODE((tmp_path / "audit.jsonl").stat().st_mode) == 0o600
    assert not any(key in (tmp_path / "audit.jsonl").read_text() for key in KEYS)


async def test_a_log_that_cannot_be_written_refuses_nobody_and_is_said(
    make_ask, plane, audit, base, tmp_path, caplog
):
    (tmp_path / "audit.jsonl").mkdir()
    http = make_ask(plane, Access(is_local=False), audit).http

    answer = await http.post(f"{DEPLOYMENTS}?deploymentId=d", json={"baseModel": base})

    assert answer.status_code == 200
    assert "audit.jsonl must take a line, got" in caplog.text


async def test_whoever_created_a_resource_is_said_of_it_and_nobody_can_say_otherwise(
    make_ask, plane, base, job
):
    http = make_ask(plane, Access(api_keys=KEYS)).http
    body = {"baseModel": base, "createdBy": "bob"}
    await http.post(f"{DEPLOYMENTS}?deploymentId=d", json=body, headers=ALICE)
    await http.post(f"{JOBS}?rlorTrainerJobId=j", json=job(), headers=BOB)
    again = await http.post(f"{DEPLOYMENTS}?deploymentId=d", json=body, headers=BOB)

    assert (again.status_code, again.json()["createdBy"]) == (200, "alice")
    await http.patch(f"{DEPLOYMENTS}/d", json={"maxReplicaCount": 0}, headers=BOB)
    found = await http.get(f"{DEPLOYMENTS}/d", headers=BOB)
    assert found.json()["createdBy"] == "alice"
    assert (await http.get(f"{JOBS}/j", headers=BOB)).json()["createdBy"] == "bob"


async def test_a_key_has_no_more_workers_of_a_kind_than_it_may(make_plane, make_ask, script, base):
    plane = make_plane(script, "sqlite://", workers_per_key=1)
    http = make_ask(plane, Access(api_keys=KEYS)).http

    async def create(id, key, **more):
        body = {"baseModel": base} | more
        return await http.post(f"{DEPLOYMENTS}?deploymentId={id}", json=body, headers=key)

    assert (await create("a", ALICE)).status_code == 200
    refused = await create("b", ALICE)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["message"] == (
        "deployments of key 'alice' must be at most 1 at once, got one more than ['a']: end one of "
        "them, or raise workers_per_key"
    )
    assert (await create("b", BOB)).status_code == 200
    none = {"minReplicaCount": 0, "maxReplicaCount": 0}
    assert (await create("c", ALICE, **none)).status_code == 200
    up = {"maxReplicaCount": 1}
    grown = await http.patch(f"{DEPLOYMENTS}/c", json=up, headers=BOB)
    assert grown.status_code == 429, "whose it is counts, not who asks"
    await http.delete(f"{DEPLOYMENTS}/a", headers=ALICE)
    assert (await http.patch(f"{DEPLOYMENTS}/c", json=up, headers=ALICE)).status_code == 200


async def test_a_trainer_that_is_resumed_counts_again(make_plane, make_ask, script, job):
    plane = make_plane(script, "sqlite://", workers_per_key=1)
    http = make_ask(plane, Access(api_keys=KEYS)).http

    async def post(path, body=None):
        return (await http.post(f"{JOBS}{path}", json=body, headers=ALICE)).status_code

    assert await post("?rlorTrainerJobId=a", job()) == 200
    assert await post("/a:cancel") == 200
    assert await post("?rlorTrainerJobId=b", job()) == 200
    assert await post("/a:resume") == 429
    assert await post("/b:cancel") == 200
    assert await post("/a:resume") == 200


async def test_a_key_has_no_more_requests_at_once_than_it_may(make_ask, plane, running):
    worker = await running()
    may_end, arrived = asyncio.Event(), asyncio.Semaphore(0)
    answer = worker.answer

    async def hold(scope, receive, send):
        arrived.release()
        await may_end.wait()
        await answer(scope, receive, send)

    worker.answer = hold
    http = make_ask(plane, Access(api_keys=KEYS, requests_per_key=2)).http
    path = "/training/v1/rlorTrainerJobs/me/j/api/v1/healthz"
    held = [asyncio.create_task(http.get(path, headers=ALICE)) for _ in range(2)]
    for _ in held:
        await arrived.acquire()
    assert await status(http, x_api_key="first-key") == 429

    assert await status(http, x_api_key="second-key") == 200
    may_end.set()
    assert [answer.status_code for answer in await asyncio.gather(*held)] == [200, 200]
    assert await status(http, x_api_key="first-key") == 200
