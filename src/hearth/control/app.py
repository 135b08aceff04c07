"""The control plane's HTTP face: parses, calls the library, answers. Nothing is decided here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import orjson
from fastapi import APIRouter, FastAPI, Query, Request, Response

import hearth
from hearth.control.gateway import Door, Gateway
from hearth.control.names import ACCOUNT, check_account
from hearth.control.plane import ControlPlane
from hearth.control.store import Changes
from hearth.errors import HearthError, NotFoundError, RequestError
from hearth.wire.base import Record
from hearth.wire.faults import fault_body, status_of
from hearth.wire.fireworks import (
    Account,
    Accounts,
    CheckpointRows,
    Deployment,
    DeploymentPatch,
    Deployments,
    Models,
    Promote,
    TrainerJob,
    TrainerJobs,
    TrainingShapeVersions,
)

ResourceT = TypeVar("ResourceT", TrainerJob, Deployment)

LONGEST_WAIT_S = 25.0
"""How long a question for a state is held; clients' read timeout is 30 s."""

States = Annotated[str, Query(alias="waitForState")]
Timeout = Annotated[float, Query(alias="timeoutS")]
JobId = Annotated[str, Query(alias="rlorTrainerJobId")]
ShapeName = Annotated[str, Query(alias="trainingShape")]
DeploymentId = Annotated[str, Query(alias="deploymentId")]
PageSize = Annotated[int, Query(alias="pageSize")]
PageToken = Annotated[str, Query(alias="pageToken")]


def create_gateway(plane: ControlPlane, door: Door | None = None) -> Gateway:
    """The ASGI app of a whole platform: the control plane, its trainers and its deployments."""
    app = FastAPI(title="Hearth", openapi_url=None)
    for router in (_facts(plane), _shapes(plane), _jobs(plane), _deployments(plane)):
        app.include_router(router, prefix="/v1")
    app.include_router(_checkpoints(plane), prefix="/v1")
    app.include_router(_workers(plane), prefix="/v1")

    @app.get("/healthz")
    def healthz() -> Response:
        return _json({"status": "ok", "version": hearth.__version__})

    @app.exception_handler(HearthError)
    async def answer_error(request: Request, error: HearthError) -> Response:
        return _json(fault_body(error, request.headers.get("x-request-id")), status_of(error))

    return Gateway(plane.jobs, plane.deployments, app, door or Door())


def _facts(plane: ControlPlane) -> APIRouter:
    router = APIRouter()

    @router.get("/accounts")
    def accounts() -> Response:
        return _answer(Accounts(accounts=[Account(name=f"accounts/{ACCOUNT}")]))

    @router.get("/accounts/{account}/models")
    def models(account: str) -> Response:
        owned = [one for one in plane.models() if account in ("-", one.name.split("/")[1])]
        return _answer(Models(models=owned))

    @router.get("/accounts/{account}/models/{model}")
    def model(account: str, model: str) -> Response:
        return _answer(plane.model(f"accounts/{account}/models/{model}"))

    @router.get("/models")
    def served_models() -> Response:
        data = [_served(one) for one in plane.deployments.all() if one.state == "READY"]
        return _json({"object": "list", "data": data})

    @router.get("/models/{name:path}")
    def served_model(name: str) -> Response:
        return _json(_served(plane.deployments.get(name.rsplit("/", 1)[-1])))

    return router


def _shapes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(prefix="/accounts/{account}/trainingShapes")

    @router.get("/{shape}/versions")
    def versions(account: str, shape: str) -> Response:
        if shape != "-":
            found = [plane.means.catalog.shape(f"accounts/{account}/trainingShapes/{shape}")]
        else:
            every = plane.means.catalog.all_shapes()
            found = [one for one in every if account in ("-", one.name.split("/")[1])]
        return _answer(
            TrainingShapeVersions(training_shape_versions=[one.version() for one in found])
        )

    @router.get("/{shape}/versions/{version}")
    def version(account: str, shape: str, version: str) -> Response:
        found = plane.means.catalog.shape(f"accounts/{account}/trainingShapes/{shape}").version()
        if version not in ("1", "latest"):
            raise NotFoundError(f"version must be 1, the only one of {shape!r}, got {version!r}")
        return _answer(found)

    return router


def _jobs(plane: ControlPlane) -> APIRouter:
    router = APIRouter(prefix="/accounts/{account}/rlorTrainerJobs")
    jobs = plane.jobs

    @router.post("")
    async def create(
        request: Request, account: str, job_id: JobId = "", shape: ShapeName = "",
        deployment_id: DeploymentId = "",
    ) -> Response:  # fmt: skip
        check_account(account)
        asked = TrainerJob.parse(await request.body())
        if deployment_id and not asked.hot_load_deployment_id:
            asked = asked.model_copy(update={"hot_load_deployment_id": deployment_id})
        return _answer(await asyncio.to_thread(jobs.create, job_id, asked, shape or None))

    @router.get("")
    def every(account: str) -> Response:
        check_account(account)
        return _answer(TrainerJobs(rlor_trainer_jobs=jobs.all()))

    @router.get("/{job}")
    async def get(
        account: str, job: str, states: States = "", timeout_s: Timeout = LONGEST_WAIT_S
    ) -> Response:
        check_account(account)
        found = await _settled(lambda: jobs.get(job), jobs.rows.changes, job, states, timeout_s)
        return _answer(found)

    @router.post("/{job}:resume")
    def resume(account: str, job: str) -> Response:
        check_account(account)
        return _answer(jobs.resume(job))

    @router.post("/{job}:cancel")
    def cancel(account: str, job: str) -> Response:
        check_account(account)
        return _answer(jobs.cancel(job))

    @router.delete("/{job}")
    def delete(account: str, job: str) -> Response:
        check_account(account)
        jobs.delete(job)
        return _json({})

    return router


def _deployments(plane: ControlPlane) -> APIRouter:
    router = APIRouter(prefix="/accounts/{account}/deployments")
    deployments = plane.deployments

    @router.post("")
    async def create(request: Request, account: str, deployment_id: DeploymentId = "") -> Response:
        check_account(account)
        asked = Deployment.parse(await request.body())
        return _answer(await asyncio.to_thread(deployments.create, deployment_id, asked))

    @router.get("")
    def every(account: str) -> Response:
        check_account(account)
        return _answer(Deployments(deployments=deployments.all()))

    @router.get("/{deployment}")
    async def get(
        account: str, deployment: str, states: States = "", timeout_s: Timeout = LONGEST_WAIT_S
    ) -> Response:
        check_account(account)
        found = await _settled(
            lambda: deployments.get(deployment), deployments.rows.changes, deployment,
            states, timeout_s,
        )  # fmt: skip
        return _answer(found)

    @router.patch("/{deployment}")
    async def patch(request: Request, account: str, deployment: str) -> Response:
        check_account(account)
        change = DeploymentPatch.parse(await request.body())
        return _answer(await asyncio.to_thread(deployments.patch, deployment, change))

    @router.delete("/{deployment}")
    def delete(account: str, deployment: str) -> Response:
        check_account(account)
        deployments.delete(deployment)
        return _json({})

    return router


def _checkpoints(plane: ControlPlane) -> APIRouter:
    router = APIRouter(prefix="/accounts/{account}")

    @router.get("/rlorTrainerJobs/{job}/checkpoints")
    def rows(account: str, job: str, size: PageSize = 200, page: PageToken = "") -> Response:
        check_account(account)
        found = plane.checkpoints.rows(job)
        start = int(page) if page.isdigit() else 0
        end = start + max(1, min(size, 1000))
        token = str(end) if end < len(found) else ""
        return _answer(CheckpointRows(checkpoints=found[start:end], next_page_token=token))

    @router.post("/checkpoints/{checkpoint}:promote")
    async def promote(request: Request, account: str, checkpoint: str) -> Response:
        check_account(account)
        asked = Promote.parse(await request.body())
        return _answer(await asyncio.to_thread(plane.checkpoints.promote, checkpoint, asked))

    @router.get("/operations/{operation}")
    def operation(account: str, operation: str) -> Response:
        check_account(account)
        return _answer(plane.checkpoints.operation(operation))

    return router


def _workers(plane: ControlPlane) -> APIRouter:
    router = APIRouter(prefix="/accounts/{account}/workers")

    @router.get("/{worker}/log")
    def log(account: str, worker: str, lines: int = 100) -> Response:
        check_account(account)
        kind, _, leaf = worker.partition("-")
        if kind == "trainer":
            plane.jobs.get(leaf)
        else:
            plane.deployments.get(leaf)
        path = plane.means.launcher.log_path(worker)
        if path is None or not path.exists():
            raise NotFoundError(
                f"worker {worker!r} must have a log of its own, got none: it runs inside the "
                "platform's process and writes into that one's log"
            )
        text = path.read_text(encoding="utf-8", errors="replace").splitlines()
        return _json({"lines": text[-max(1, min(lines, 10_000)) :]})

    return router


async def _settled(
    read: Callable[[], ResourceT], changes: Changes, id: str, states: str, timeout_s: float
) -> ResourceT:
    """The resource; with ``states`` (a comma list) once it is in one of them, or time is over."""
    if not states:
        return await asyncio.to_thread(read)
    wanted = states.split(",")
    deadline = time.monotonic() + min(max(timeout_s, 0.0), LONGEST_WAIT_S)
    while True:
        changed = asyncio.wrap_future(changes.next(id))
        found = await asyncio.to_thread(read)
        left = deadline - time.monotonic()
        if found.state in wanted or left <= 0:
            changed.cancel()
            return found
        await _within(changed, left)


async def _within(event: Awaitable[None], seconds: float) -> None:
    try:
        await asyncio.wait_for(event, seconds)
    except TimeoutError:
        return


def _served(deployment: Deployment) -> dict[str, object]:
    if deployment.name is None:
        raise RequestError("deployment must have a name")
    return {"id": deployment.name, "object": "model", "created": 0, "owned_by": ACCOUNT}


def _answer(record: Record) -> Response:
    return Response(record.dump(), media_type="application/json")


def _json(content: object, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")
