"""Control planes over a launcher that does as told, a real platform in memory, and PostgreSQL.

A death at a given moment cannot be had from a real launcher; whatever can is shown on the real one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from hearth.control.access import Access
from hearth.control.app import create_gateway
from hearth.control.catalog import read_catalog
from hearth.control.context import Context
from hearth.control.plane import ControlPlane
from hearth.control.store import Store
from hearth.errors import EngineError
from hearth.launch.spec import Endpoint, ExitReport, ExportSpec, SnapshotRecord, Watcher, WorkerSpec
from training.quickstart import MODEL

TRAINER = "/training/v1/rlorTrainerJobs/me"
CONTEXT_LENGTH = 77
"""What a scripted trainer says of itself."""


class Told:
    """A worker whose life is told by the test; it answers with what it was asked."""

    def __init__(self, spec: Any, watcher: Watcher, number: int) -> None:
        self.spec = spec
        self.watcher = watcher
        self.number = number
        self.pid = None
        self.stops = 0
        self.asked: list[dict[str, Any]] = []

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(app=self.answer)

    def record(self) -> dict[str, Any]:
        return {"number": self.number}

    def stop(self, grace_s: float = 5.0) -> None:
        self.stops += 1

    def starts(self) -> None:
        self.watcher.ready(self)

    def dies(self, reason: str = "killed") -> None:
        self.watcher.failed(self, ExitReport(reason=reason))

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.asked.append({"path": scope["path"], "headers": headers, "body": body})
        model = {"model_name": "m", "max_context_length": CONTEXT_LENGTH}
        answer = orjson.dumps({"worker": self.spec.worker_id, "supported_models": [model]})
        json = (b"content-type", b"application/json")
        await send({"type": "http.response.start", "status": 200, "headers": [json]})
        await send({"type": "http.response.body", "body": answer})


class Script:
    """A launcher that starts nothing and says what the test tells it to."""

    placement = "inline"

    def __init__(self, kind: type[Told] = Told) -> None:
        self.kind = kind
        self.started: list[Told] = []
        self.adopts = False
        self.reason = "it was gone"
        self.buckets: dict[str, list[SnapshotRecord]] = {}
        self.exports: list[ExportSpec] = []
        self.may_export = threading.Event()
        self.may_export.set()
        self.export_error: Exception | None = None
        self.closed = False

    def start(self, spec: WorkerSpec, watcher: Watcher) -> Told:
        self.started.append(self.kind(spec, watcher, len(self.started)))
        return self.started[-1]

    def adopt(self, record: dict[str, Any], watcher: Watcher) -> Told | ExitReport:
        if not self.adopts:
            return ExitReport(reason=self.reason)
        spec = Anything(f"trainer-{record['number']}")
        found = Told(spec, watcher, record["number"])
        self.started.append(found)
        return found

    def last(self, id: str) -> Told:
        found = [one for one in self.started if one.spec.worker_id.endswith(f"-{id}")]
        assert found, f"{id} was never started"
        return found[-1]

    def saves(self, bucket: str, identity: str, kind: Any = "base") -> None:
        facts = SnapshotRecord(
            identity=identity, kind=kind, created_s=time.time(), base_model="m", num_bytes=1
        )
        self.buckets.setdefault(bucket, []).append(facts)

    def export(self, spec: ExportSpec) -> None:
        self.exports.append(spec)
        assert self.may_export.wait(10)
        if self.export_error is not None:
            raise self.export_error
        folder = Path(spec.folder)
        folder.mkdir(parents=True)
        (folder / "weights").write_text(spec.identity, encoding="utf-8")

    def snapshots(self, bucket: str) -> list[SnapshotRecord]:
        return list(self.buckets.get(bucket, []))

    def log_path(self, worker_id: str) -> Path | None:
        return None

    def close(self) -> None:
        self.closed = True
        self.may_export.set()
        self.export_error = EngineError("the launcher was closed")


class Anything:
    """A spec of which only the id is read."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id


class Asked:
    """A platform over HTTP, without a socket between."""

    def __init__(self, plane: ControlPlane, access: Access | None = None) -> None:
        self.app = create_gateway(plane, access or Access(is_local=False))
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://platform", timeout=30
        )

    async def __call__(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """The status and the parsed body; paths without a leading / are below the account."""
        if body is not None and not isinstance(body, bytes):
            body = orjson.dumps(body)
        path = path if path.startswith("/") else f"/v1/accounts/me/{path}"
        answer = await self.http.request(method, path, content=body, **options)
        return answer.status_code, answer.json()

    async def refused(self, status: int, method: str, path: str, body: Any = None) -> str:
        """The message of an error, whose status and form are as they must be."""
        found, content = await self(method, path, body)
        assert found == status, content
        assert content["error"]["code"] >= 3
        return content["error"]["message"]

    async def close(self) -> None:
        await self.http.aclose()
        await self.app.close()


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def make_plane(tmp_path: Path) -> Iterator[Callable[..., ControlPlane]]:
    """Control planes with one data folder and, unless told otherwise, one SQLite file."""
    made: list[ControlPlane] = []

    def make(launcher: Any, url: str | None = None, **context: Any) -> ControlPlane:
        store = Store(url or f"sqlite:///{tmp_path / 'control.db'}")
        given = {"launcher": launcher, "catalog": read_catalog(), "data_dir": tmp_path} | context
        made.append(ControlPlane(store, Context(**given)))
        return made[-1]

    yield make
    for plane in made:
        plane.close()


@pytest.fixture
def plane(make_plane: Callable[..., ControlPlane], script: Script) -> ControlPlane:
    return make_plane(script, "sqlite://")


@pytest.fixture
async def ask(plane: ControlPlane) -> AsyncIterator[Asked]:
    asked = Asked(plane)
    yield asked
    await asked.close()


@pytest.fixture
async def make_ask() -> AsyncIterator[Callable[..., Asked]]:
    made: list[Asked] = []

    def make(plane: ControlPlane, access: Access | None = None) -> Asked:
        made.append(Asked(plane, access))
        return made[-1]

    yield make
    for one in made:
        await one.close()


@pytest.fixture(scope="session")
def base() -> str:
    """The folder of the tiny model that Hearth ships."""
    return str(MODEL)


@pytest.fixture
def job(base: str) -> Callable[..., dict[str, Any]]:
    """A create body for a job; keyword arguments go into its training config."""

    def make(more: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
        return {"trainingConfig": {"baseModel": base} | config} | (more or {})

    return make


@pytest.fixture
def running(ask: Asked, script: Script, job: Callable[..., Any]) -> Callable[..., Any]:
    """Make a scripted job and have it answer."""

    async def make(id: str = "j", more: dict[str, Any] | None = None) -> Told:
        status, content = await ask("POST", f"rlorTrainerJobs?rlorTrainerJobId={id}", job(more))
        assert status == 200, content
        script.last(id).starts()
        return script.last(id)

    return make


@pytest.fixture
def deployed(ask: Asked, script: Script, base: str) -> Callable[..., Any]:
    """Make a scripted deployment and have it answer."""

    async def make(id: str = "d", **more: Any) -> Told:
        status, content = await ask(
            "POST", f"deployments?deploymentId={id}", {"baseModel": base} | more
        )
        assert status == 200, content
        script.last(id).starts()
        return script.last(id)

    return make


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a PostgreSQL server of our own, at a Unix socket in a folder of its own."""
    binaries = _postgres_binaries()
    if binaries is None:
        pytest.skip("needs PostgreSQL's initdb and postgres")
    # Not below pytest's folder: another user must get there.
    folder = Path(tempfile.mkdtemp(prefix="hearth-pg-"))
    user = _unprivileged(folder)
    run = {"cwd": folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **user}
    quick = ["--no-sync", "--auth=trust", "--username=hearth", "--encoding=UTF8", "--locale=C"]
    data = str(folder / "data")
    server = None
    try:
        subprocess.run([str(binaries / "initdb"), "-D", data, *quick], check=True, **run)
        options = {"listen_addresses": "", "unix_socket_directories": str(folder), "fsync": "off"}
        server = subprocess.Popen(
            [str(binaries / "postgres"), "-D", data]
            + [word for name, value in options.items() for word in ("-c", f"{name}={value}")],
            **run,
        )
        url = f"postgresql+psycopg://hearth@/postgres?host={folder}"
        _await_answer(url, server)
        yield url
    finally:
        if server is not None:
            server.terminate()
            server.wait(20)
        shutil.rmtree(folder)


@pytest.fixture
def postgres_url(postgres: str, request: pytest.FixtureRequest) -> str:
    """The URL of an empty schema of that server."""
    import sqlalchemy as sql

    schema = f"test_{time.monotonic_ns()}"
    engine = sql.create_engine(postgres, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sql.text(f"CREATE SCHEMA {schema}"))
    engine.dispose()
    return f"{postgres}&options=-csearch_path%3D{schema}"


def _postgres_binaries() -> Path | None:
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    config = shutil.which("pg_config")
    if config is not None:
        found = subprocess.run([config, "--bindir"], capture_output=True, text=True, check=False)
        folders.append(Path(found.stdout.strip() or "/"))
    return next((folder for folder in folders if (folder / "postgres").exists()), None)


def _unprivileged(folder: Path) -> dict[str, Any]:
    """As whom to run it: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        with contextlib.suppress(LookupError):
            shutil.chown(folder, user=name)
            return {"user": name, "extra_groups": []}
    pytest.skip("needs an unprivileged user to run PostgreSQL as")


def _await_answer(url: str, server: subprocess.Popen[Any]) -> None:
    import sqlalchemy as sql

    engine = sql.create_engine(url)
    end_s = time.monotonic() + 20
    while True:
        try:
            engine.connect().close()
            break
        except sql.exc.OperationalError:
            assert server.poll() is None, "PostgreSQL ended"
            assert time.monotonic() < end_s, "PostgreSQL does not answer"
            time.sleep(0.02)
    engine.dispose()
