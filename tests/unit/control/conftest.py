"""Control planes over a scripted launcher.

A death at a given moment cannot be had from a real launcher; whatever can is shown on the real one.
"""

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest

from hearth.control import app
from hearth.control.access import Access, AuditLog
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


class ScriptedWorker:
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

    def is_killed(self) -> None:
        self.watcher.failed(self, ExitReport(signal="SIGKILL"))

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


class ScriptedLauncher:
    """A launcher that starts nothing and says what the test tells it to."""

    placement = "inline"

    def __init__(self, kind: type[ScriptedWorker] = ScriptedWorker) -> None:
        self.kind = kind
        self.started: list[ScriptedWorker] = []
        self.adopts = False
        self.reason = "it was gone"
        self.buckets: dict[str, list[SnapshotRecord]] = {}
        self.logs: dict[str, Path] = {}
        self.exports: list[ExportSpec] = []
        self.may_export = threading.Event()
        self.may_export.set()
        self.export_error: Exception | None = None
        self.closed = False

    def start(self, spec: WorkerSpec, watcher: Watcher) -> ScriptedWorker:
        self.started.append(self.kind(spec, watcher, len(self.started)))
        return self.started[-1]

    def adopt(self, record: dict[str, Any], watcher: Watcher) -> ScriptedWorker | ExitReport:
        if not self.adopts:
            return ExitReport(reason=self.reason)
        spec = SimpleNamespace(worker_id=f"trainer-{record['number']}")
        self.started.append(ScriptedWorker(spec, watcher, record["number"]))
        return self.started[-1]

    def last(self, id: str) -> ScriptedWorker:
        workers = [worker for worker in self.started if worker.spec.worker_id.endswith(f"-{id}")]
        assert workers, f"{id} was never started"
        return workers[-1]

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

    def forget_served(self, deployment_id: str) -> None:
        pass

    def snapshots(self, bucket: str) -> list[SnapshotRecord]:
        return list(self.buckets.get(bucket, []))

    def log_path(self, worker_id: str) -> Path | None:
        return self.logs.get(worker_id)

    def close(self) -> None:
        self.closed = True
        self.may_export.set()
        self.export_error = EngineError("the launcher was closed")


class PlatformClient:
    """A platform over HTTP, without a socket between."""

    def __init__(
        self, plane: ControlPlane, access: Access | None = None, audit: AuditLog | None = None
    ) -> None:
        self.app = create_gateway(plane, access or Access(is_local=False), audit)
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


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set how long a plain look at what starts is held: not at all, so that tests see what is."""

    def hold(seconds: float) -> None:
        monkeypatch.setattr(app, "SHORT_WAIT_S", seconds)
        monkeypatch.setattr(app, "_PROMOTION_WAIT_S", seconds)

    hold(0.0)
    return hold


@pytest.fixture
def script() -> ScriptedLauncher:
    return ScriptedLauncher()


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
def plane(make_plane: Callable[..., ControlPlane], script: ScriptedLauncher) -> ControlPlane:
    return make_plane(script, "sqlite://")


@pytest.fixture
async def ask(plane: ControlPlane) -> AsyncIterator[PlatformClient]:
    asked = PlatformClient(plane)
    yield asked
    await asked.close()


@pytest.fixture
async def make_ask() -> AsyncIterator[Callable[..., PlatformClient]]:
    made: list[PlatformClient] = []

    def make(
        plane: ControlPlane, access: Access | None = None, audit: AuditLog | None = None
    ) -> PlatformClient:
        made.append(PlatformClient(plane, access, audit))
        return made[-1]

    yield make
    for client in made:
        await client.close()


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
async def created(ask: PlatformClient, job: Callable[..., Any]) -> dict[str, Any]:
    """A scripted job that is asked for and does not answer yet."""
    status, content = await ask("POST", "rlorTrainerJobs?rlorTrainerJobId=j", job())
    assert status == 200, content
    return content


@pytest.fixture
def running(
    ask: PlatformClient, script: ScriptedLauncher, job: Callable[..., Any]
) -> Callable[..., Any]:
    """Make a scripted job and have it answer."""

    async def make(id: str = "j", more: dict[str, Any] | None = None) -> ScriptedWorker:
        status, content = await ask("POST", f"rlorTrainerJobs?rlorTrainerJobId={id}", job(more))
        assert status == 200, content
        script.last(id).starts()
        return script.last(id)

    return make


@pytest.fixture
def deployed(ask: PlatformClient, script: ScriptedLauncher, base: str) -> Callable[..., Any]:
    """Make a scripted deployment and have it answer."""

    async def make(id: str = "d", **more: Any) -> ScriptedWorker:
        status, content = await ask(
            "POST", f"deployments?deploymentId={id}", {"baseModel": base} | more
        )
        assert status == 200, content
        script.last(id).starts()
        return script.last(id)

    return make
