"""The trainer and the deployment of each base model: started when first used, asked, restarted."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import orjson

from hearth.control.deployments import Deployments
from hearth.control.gateway import Gateway
from hearth.control.jobs import RESUMABLE, Jobs
from hearth.control.plane import ControlPlane
from hearth.errors import (
    BusyError,
    ClosedError,
    ConfigError,
    EngineError,
    HearthError,
    NotFoundError,
    RequestError,
    TooLargeError,
)
from hearth.launch.records import read_json
from hearth.launch.spec import ExportSpec
from hearth.wire.asgi import CLIENT_HEADER
from hearth.wire.fireworks import Deployment, TrainerJob, TrainingConfig
from hearth.wire.messages import HttpRequest, call_app

logger = logging.getLogger(__name__)

MOST_RUNS = 64
"""Runs of one base model that are trained at the same time."""
MOST_ADAPTERS = 64
"""Adapters of one base model in a deployment's memory; others are read again when they are used."""
_PREFIX = "tinker-"
_FAILED = 400
_LOST_STATUSES = frozenset({408, 410, 425, 500, 502, 503, 504})
"""Of a worker that died, is starting, or whose answer broke off."""
_DEPLOYMENT_TRIES = 8
_FIRST_PAUSE_S = 0.25


_ERRORS: dict[int, type[HearthError]] = {
    400: RequestError,
    404: NotFoundError,
    413: TooLargeError,
    422: RequestError,
    429: BusyError,
}


class BaseLostError(HearthError):
    """A worker did not answer: it may have died, or be starting."""


class Base:
    """One base model's trainer and deployment.

    They are ordinary resources of the platform, so that it watches, restarts and lists them.
    """

    def __init__(self, name: str, plane: ControlPlane, gateway: Gateway) -> None:
        self.name = name
        self.id = _PREFIX + hashlib.sha256(name.encode()).hexdigest()[:12]
        self._plane = plane
        self._trainer = gateway.worker_app(plane.jobs, self.id)
        self._deployment = gateway.worker_app(plane.deployments, self.id)
        self._lock = asyncio.Lock()
        self._is_trained = False
        self._is_served = False
        self._length: int | None = None

    async def start_deployment(self) -> None:
        """Have a deployment that answers.

        Raises:
            ConfigError: the model is unknown, or the platform keeps no snapshots on disk.
            BaseLostError: it does not start; the message says why.
        """
        if self._plane.deployments.live.endpoint(self.id) is not None:
            return
        async with self._lock:
            if not self._is_served:
                _refuse_inline(self._plane)
                body = Deployment(
                    base_model=self.name, max_adapters=MOST_ADAPTERS, description="Tinker's API"
                )
                await asyncio.to_thread(self._plane.deployments.create, self.id, body)
                self._is_served = True
        await self._await_ready(self._plane.deployments)

    async def start_trainer(self) -> None:
        """Have a trainer that answers, after a death too; raises as ``start_deployment``."""
        jobs = self._plane.jobs
        if jobs.live.endpoint(self.id) is not None:
            return
        async with self._lock:
            if not self._is_trained:
                _refuse_inline(self._plane)
                job = TrainerJob(
                    training_config=TrainingConfig(base_model=self.name),
                    hot_load_deployment_id=self.id,
                    display_name="Tinker's API",
                    extra_values={"max_policies": MOST_RUNS, "keep_snapshots": 2**31},
                )
                await asyncio.to_thread(jobs.create, self.id, job, None)
                self._is_trained = True
            job = await asyncio.to_thread(jobs.get, self.id)
            if job.state in RESUMABLE:
                logger.warning("the trainer of %s is restarted: %s", self.name, job.state)
                await asyncio.to_thread(jobs.resume, self.id)
        await self._await_ready(jobs)

    async def _await_ready(self, resources: Jobs | Deployments) -> None:
        while True:
            # Before the read, so that no change is missed between the two.
            change = asyncio.wrap_future(resources.records.changes.next_change(self.id))
            try:
                resource = await asyncio.to_thread(resources.get, self.id)
                if resource.state == resources.failed_state:
                    raise BaseLostError(
                        f"{resources.kind} of {self.name!r} must start, got {resource.state}: "
                        f"{resource.status_message}"
                    )
                if resources.live.endpoint(self.id) is not None:
                    return
                if resources.records.changes.is_closed:
                    raise ClosedError("platform must be open, got a request while it ends")
                await asyncio.wait([change], timeout=1.0)
            finally:
                change.cancel()

    async def ask_trainer(self, path: str, content: bytes) -> dict[str, Any]:
        """What the trainer answers to a POST.

        Raises:
            BaseLostError: it did not answer; ``start_trainer`` makes one that does.
            NotFoundError: it has no such model or future.
            RequestError: it refuses the request.
        """
        return await ask(self._trainer, f"/api/v1/{path}", content)

    async def complete(self, content: bytes, client: str) -> dict[str, Any]:
        """What the deployment answers to a completion request.

        One that dies is waited for, and one that is full for as long as it takes.

        Raises:
            BaseLostError: it did not answer in all tries.
            RequestError: it refuses the request.
        """
        pause_s, tries = _FIRST_PAUSE_S, 0
        while True:
            try:
                return await ask(self._deployment, "/inference/v1/completions", content, client)
            except BusyError:
                pass
            except BaseLostError as error:
                tries += 1
                if tries == _DEPLOYMENT_TRIES:
                    raise
                logger.info("a request to the deployment of %s is repeated: %s", self.name, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 8.0)
            await self.start_deployment()

    async def max_seq_len(self) -> int:
        """Most tokens of a sequence, as the deployment says."""
        if self._length is None:
            content = await ask(self._deployment, "/v1/models", b"", method="GET")
            self._length = int(content["data"][0]["max_model_len"])
        return self._length

    async def find_arch(self) -> str:
        """The model's type, as transformers names it."""
        entry = await asyncio.to_thread(self._plane.jobs.find_model, self.name)
        config = read_json(Path(entry.source).expanduser() / "config.json") or {}
        return str(config.get("model_type", "unknown"))

    def remove_checkpoint(self, identity: str) -> None:
        """Drop one of its trainer's checkpoints, if it is there."""
        folder = self._plane.context.checkpoint_dir(self.id) / identity
        shutil.rmtree(folder, ignore_errors=True)

    def remove_snapshot(self, identity: str) -> None:
        """Drop one of its trainer's snapshots, if it is there."""
        bucket = self._plane.context.data_dir / "buckets" / f"{Deployments.prefix}{self.id}"
        shutil.rmtree(bucket / identity, ignore_errors=True)

    def export_folder(self, identity: str) -> Path:
        """Where ``export`` writes a snapshot."""
        return self._plane.context.data_dir / "tinker" / "exports" / identity

    def export(self, identity: str) -> int:
        """Write an adapter's snapshot as PEFT reads it, and drop the snapshot; returns its bytes.

        Raises:
            EngineError: it cannot be read or written.
        """
        entry = self._plane.jobs.find_model(self.name)
        folder = self.export_folder(identity)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            self._plane.context.launcher.export(
                ExportSpec(
                    bucket=f"{Deployments.prefix}{self.id}",
                    identity=identity,
                    base_model=entry.name,
                    source=entry.source,
                    folder=str(folder),
                    trust_remote_code=entry.trust_remote_code,
                )
            )
        self.remove_snapshot(identity)
        return sum(path.stat().st_size for path in folder.iterdir())

    def measure_checkpoint(self, identity: str) -> int:
        """Bytes of one of its trainer's checkpoints."""
        folder = self._plane.context.checkpoint_dir(self.id) / identity
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Bases:
    """The base models that were used, by name."""

    def __init__(self, plane: ControlPlane, gateway: Gateway) -> None:
        self._make = partial(Base, plane=plane, gateway=gateway)
        self._plane = plane
        self._bases: dict[str, Base] = {}

    def find(self, name: str) -> Base:
        """The base model of a name.

        Raises:
            ConfigError: there is no such model.
        """
        if name not in self._bases:
            self._plane.jobs.find_model(name)
            self._bases[name] = self._make(name)
        return self._bases[name]

    def get(self, name: str) -> Base | None:
        """The base model of a name that was used before."""
        return self._bases.get(name)

    def make_unknown(self, name: str) -> Base:
        """A base of a name that stands for nothing, for a run that says so."""
        return self._make(name)

    def names(self) -> list[str]:
        """Registered models, then others that were used."""
        registered = sorted(self._plane.context.catalog.models)
        return [*registered, *sorted(self._bases.keys() - set(registered))]


async def ask(
    app: Any, path: str, content: bytes, client: str = "", method: str = "POST"
) -> dict[str, Any]:
    """The JSON that an app answers with.

    Raises:
        BaseLostError: it did not answer, or its worker is gone.
        HearthError: it refuses the request.
    """
    request = HttpRequest(method, path, content)
    headers = {"content-type": "application/json", CLIENT_HEADER.decode(): client}
    try:
        response = await call_app(app, request, f"http://worker{path}", headers)
    except httpx.HTTPError as error:  # it broke off
        raise BaseLostError(f"{type(error).__name__}: {error}") from error
    if response.status_code in _LOST_STATUSES:
        raise BaseLostError(_message(response.content))
    if response.status_code >= _FAILED:
        kind = _ERRORS.get(response.status_code, EngineError)
        raise kind(_message(response.content))
    return orjson.loads(response.content)


def _message(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return body[:200].decode(errors="replace")


def _refuse_inline(plane: ControlPlane) -> None:
    if plane.context.launcher.placement == "inline":
        raise ConfigError(
            "placement must be 'process' or 'ray' for Tinker's API, got 'inline': saved weights "
            "are kept in folders, and an inline platform keeps a few snapshots in memory"
        )
