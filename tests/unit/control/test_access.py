"""Who is let in, and that keys stay at the access."""

import logging

import pytest

from hearth.control.access import Access

KEYS = ("first-key", "second-key")
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
        "x-api-key must be a key of this platform, got none: export FIREWORKS_API_KEY"
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
    http = access(api_keys=("a", "b", "c"))

    for number, key in enumerate(("a", "c", "no key of these"), start=1):
        await http.get("/v1/accounts", headers={"x-api-key": key})
        assert len(compared) == 3 * number
    assert {len(entry) for pair in compared for entry in pair} == {32}, "only digests are compared"


async def test_no_key_is_ever_logged(access, caplog):
    http = access(api_keys=KEYS)
    with caplog.at_level(logging.DEBUG):
        for key in (*KEYS, "wrong-key"):
            await http.get("/v1/accounts", headers={"x-api-key": key})
            await http.post("/v1/completions", headers={"authorization": f"Bearer {key}"})

    assert "-key" not in caplog.text
