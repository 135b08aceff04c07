import os

import httpx
import pytest
from tests.unit.viewer.conftest import ADDRESS, KEY, open_viewer

from hearth.viewer.app import ROUTES, create_app
from hearth.viewer.library import Library

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


@pytest.mark.parametrize("key", ["", "another key", KEY[:-1], KEY + "x", "\u00fc"])
async def test_without_the_key_nothing_is_answered(runs, key):
    async with open_viewer(runs, key="") as client:
        for path in ("/", "/assets/app.js", "/api/runs", "/api/live", f"/?key={key}"):
            headers = {"authorization": f"Bearer {key}".encode()} if key else {}
            answer = await client.get(path, headers=headers)

            assert answer.status_code == 401, path
            assert KEY not in answer.text


async def test_the_address_with_the_key_sets_a_cookie_and_hides_the_key(runs):
    async with open_viewer(runs, key="") as client:
        answer = await client.get("/", params={"key": KEY, "view": "curves"})

        assert answer.status_code == 303
        assert answer.headers["location"] == "/?view=curves"
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith("hearth-view-7000=")
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert (await client.get("/api/runs")).status_code == 200  # with the cookie


async def test_the_key_is_compared_in_constant_time(runs, monkeypatch):
    compared = []
    compare = __import__("secrets").compare_digest
    monkeypatch.setattr(
        "secrets.compare_digest", lambda *pair: compared.append(pair) or compare(*pair)
    )
    async with open_viewer(runs, key="wrong") as client:
        assert (await client.get("/api/runs")).status_code == 401

    assert compared == [(b"wrong", KEY.encode())]


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1:7000", "", "localhost@evil"]
)
async def test_a_name_of_another_machine_is_refused_even_with_the_key(viewer, host):
    answer = await viewer.get("/api/runs", headers={"host": host})

    assert answer.status_code == 403


@pytest.mark.parametrize("host", ["localhost:9", "127.0.0.1", "[::1]:80"])
async def test_names_of_this_machine_are_answered_at_any_port(viewer, host):
    assert (await viewer.get("/api/runs", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:3000", "http://localhost:7000"]
)
async def test_a_page_of_elsewhere_is_refused_even_with_the_key(viewer, origin):
    answer = await viewer.get("/api/runs", headers={"origin": origin})

    assert answer.status_code == 403
    own = await viewer.get("/api/runs", headers={"origin": ADDRESS})
    assert own.status_code == 200


async def test_every_answer_forbids_what_a_page_may_not_do(viewer):
    for path in ("/", "/assets/app.js", "/api/runs", "/api/nothing", "/run/first/curves"):
        headers = (await viewer.get(path)).headers

        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-frame-options"] == "DENY"


async def test_only_reading_is_answered_but_for_asking_again(viewer):
    for route in ROUTES:
        method, path = route.split()
        for other in {"GET", "POST", "PUT", "PATCH", "DELETE"} - {method}:
            answer = await viewer.request(other, path, json={})
            assert 400 <= answer.status_code < 500, (other, path)


async def test_asking_again_needs_json_of_bounded_length(viewer):
    path = "/api/runs/first/again"
    text = await viewer.post(path, content="{}", headers={"content-type": "text/plain"})
    long = await viewer.post(path, json={"sample": "x" * 70_000})

    assert (text.status_code, long.status_code) == (400, 400)
    assert "content-type must be application/json" in text.text
    assert "content-length must be at most 65536" in long.text


@pytest.mark.parametrize(
    "path",
    [
        "/assets/..%2fapp.py",
        "/assets/%2e%2e/app.py",
        "/assets/.hidden",
        "/api/runs/%2e%2e",
        "/api/runs/..%2f..%2fetc",
        "/api/runs/~etc",
        "/api/runs/first/samples/..%2f..%2fsecret",
        "/api/runs/first/groups/%2e%2e",
        "/api/runs/first/samples?rescored=../../secret",
    ],
)
async def test_no_path_leads_out_of_the_runs(viewer, path):
    url = httpx.URL(ADDRESS).copy_with(raw_path=path.encode())

    answer = await viewer.get(url)

    assert answer.status_code == 404


async def test_links_out_of_a_run_are_not_followed(tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "metrics.jsonl").write_text('{"type":"train","step":7,"secret":1.0}\n')
    (secret / "config.json").write_text('{"password": "secret"}')
    named = tmp_path / "named"
    run = named / "run"
    run.mkdir(parents=True)
    (run / "timeline.jsonl").write_text("")
    for name in ("metrics.jsonl", "config.json"):
        (run / name).symlink_to(secret / name)
    (named / "linked").symlink_to(secret)

    async with open_viewer(named) as client:
        table = (await client.get("/api/runs")).json()["runs"]
        shown = (await client.get("/api/runs/run")).json()

    assert [row["name"] for row in table] == ["run"]
    assert (shown["config"], shown["metrics"], shown["step"]) == ({}, [], None)


async def test_samples_that_link_out_of_a_run_are_not_read(tmp_path, runs):
    run = tmp_path / "run"
    (run / "samples").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("")
    name = "train-000001.parquet"
    (run / "samples" / name).symlink_to(runs / "first" / "samples" / name)

    async with open_viewer(run) as client:
        page = (await client.get("/api/runs/run/samples")).json()
        sample = await client.get("/api/runs/run/samples/train.1.0.0.0")

    assert page["total"] == 0
    assert sample.status_code == 404


def test_the_database_reads_nothing_but_the_named_folders(tmp_path, runs):
    import duckdb

    from hearth.viewer.database import Database

    other = tmp_path / "other.csv"
    other.write_text("a\n1\n")
    database = Database([runs.resolve()])

    for sql in (f"FROM read_csv('{other}')", f"COPY (SELECT 1) TO '{tmp_path}/out.csv'"):
        with pytest.raises(duckdb.PermissionException):
            database.query(sql)
    with pytest.raises(duckdb.Error):
        database.query("SET enable_external_access = true")
    with pytest.raises(duckdb.InvalidInputException, match="locked"):
        database.query("SET memory_limit = '9GB'")
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize(
    "value", ["'; DROP TABLE rows_1; --", '" OR 1=1 --', "') UNION SELECT 1 --", "\\", "%", "?"]
)
@pytest.mark.parametrize(
    "name", ["search", "kind", "finish_reason", "sort", "column", "step_min", "rescored", "in"]
)
@pytest.mark.slow
async def test_no_value_of_a_request_becomes_sql(viewer, name, value):
    for path in ("samples", "histogram", "prompts"):
        answer = await viewer.get(f"/api/runs/first/{path}", params={name: value})
        assert answer.status_code in (200, 400, 404)
        if answer.status_code == 200 and name == "kind" and path == "samples":
            assert answer.json()["total"] == 0

    whole = (await viewer.get("/api/runs/first/samples")).json()
    assert whole["total"] > 90


def test_nothing_is_written_into_a_run(runs):
    paths = sorted(path for path in runs.rglob("*") if path.is_file())

    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}
    import asyncio

    async def look():
        async with open_viewer(runs) as client:
            for path in ("", "/samples?search=a", "/report", "/export", "/events", "/timeline"):
                assert (await client.get(f"/api/runs/first{path}")).status_code == 200

    asyncio.run(look())

    assert sorted(path for path in runs.rglob("*") if path.is_file()) == paths
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in paths} == before
    assert os.access(runs, os.W_OK)


def test_the_app_hides_its_key(runs):
    assert KEY not in repr(create_app(Library([runs]), KEY, "cookie"))
