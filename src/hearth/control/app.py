"""The control plane's HTTP face: parses, calls the library, answers. Nothing is decided here."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, TypeVar

import orjson
from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

import hearth
from hearth.control.access import Access
from hearth.control.gateway import Gateway
from hearth.control.names import ACCOUNT, check_account, leaf
from hearth.control.plane import ControlPlane
from hearth.control.waiting import LONGEST_WAIT_S, once, settled
from hearth.errors import ClosedError, HearthError, NotFoundError, RequestError
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
    Promoted,
    TrainerJob,
    TrainerJobs,
    TrainingShapeVersions,
)

RecordT = TypeVar("RecordT", bound=Record)

States = Annotated[str, Query(alias="waitForState")]
Timeout = Annotated[float, Query(alias="timeoutS")]
JobId = Annotated[str, Query(alias="rlorTrainerJobId")]
ShapeName = Annotated[str, Query(alias="trainingShape")]
DeploymentId = Annotated[str, Query(alias="deploymentId")]
PageSize = Annotated[int, Query(alias="pageSize")]
PageToken = Annotated[str, Query(alias="pageToken")]


def create_gateway(plane: ControlPlane, access: Access | None = None) -> Gateway:
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

    @app.exception_handler(RequestValidationError)
    async def answer_bad_query(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name, value = first["loc"][-1], str(first.get("input"))[:80]
        return await answer_error(
            request, RequestError(f"{name} must be valid, got {value!r}: {first['msg']}")
        )

    @app.exception_handler(HTTPException)
    async def answer_no_route(request: Request, error: HTTPException) -> Response:
        named = f"{request.method} {request.url.path[:200]}"
        fault = NotFoundError(f"path must be one that the platform has, got {named!r}")
        body = fault_body(fault, request.headers.get("x-request-id"))
        return _json(body, error.status_code)

    return Gateway(plane.jobs, plane.deployments, app, access or Access())


def _facts(plane: ControlPlane) -> APIRouter:
    router = APIRouter()

    @router.get("/accounts")
    def accounts() -> Response:
        return _answer(Accounts(accounts=[Account(name=f"accounts/{ACCOUNT}")]))

    @router.get("/accounts/{account}/models")
    def models(account: str) -> Response:
        owned = [model for model in plane.models() if account in ("-", model.name.split("/")[1])]
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
            found = [plane.context.catalog.shape(f"accounts/{account}/trainingShapes/{shape}")]
        else:
            every = plane.context.catalog.all_shapes()
            found = [one for one in every if account in ("-", one.name.split("/")[1])]
        return _answer(
            TrainingShapeVersions(training_shape_versions=[one.version() for one in found])
        )

    @router.get("/{shape}/versions/{version}")
    def version(account: str, shape: str, version: str) -> Response:
        found = plane.context.catalog.shape(f"accounts/{account}/trainingShapes/{shape}").version()
        if version not in ("1", "latest"):
            raise NotFoundError(f"version must be 1, the only one of {shape!r}, got {version!r}")
        return _answer(found)

    return router


def _jobs(plane: ControlPlane) -> APIRouter:
    router = APIRouter(prefix="/accounts/{account}/rlorTrainerJobs")
    jobs = plane.jobs

    @router.post("")
    async def create(
        request: Request,
        account: str,
        job_id: JobId = "",
        shape: ShapeName = "",
        deployment_id: DeploymentId = "",
    ) -> Response:
        check_account(account)
        asked = await _asked(TrainerJob, request)
        tied = asked.hot_load_deployment_id
        if deployment_id and tied and leaf(tied) != leaf(deployment_id):
            raise RequestError(
                f"deploymentId must be the body's hotLoadDeploymentId {tied!r}, got "
                f"{deployment_id!r}: a trainer publishes into one deployment"
            )
        if tied or deployment_id:
            asked = asked.model_copy(update={"hot_load_deployment_id": tied or deployment_id})
            await asyncio.to_thread(plane.deployments.tie, leaf(tied or deployment_id))
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
        found = await settled(lambda: jobs.get(job), jobs.rows.changes, job, states, timeout_s)
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
        asked = await _asked(Deployment, request)
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
        found = await settled(
            lambda: deployments.get(deployment),
            deployments.rows.changes,
            deployment,
            states,
            timeout_s,
        )
        return _answer(found)

    @router.patch("/{deployment}")
    async def patch(request: Request, account: str, deployment: str) -> Response:
        check_account(account)
        change = await _asked(DeploymentPatch, request)
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
        if page and page not in map(str, range(len(found) + 1)):
            raise RequestError(f"pageToken must be one that a page ended with, got {page[:80]!r}")
        start = int(page or 0)
        end = start + max(1, min(size, 1000))
        token = str(end) if end < len(found) else ""
        return _answer(CheckpointRows(checkpoints=found[start:end], next_page_token=token))

    @router.post("/checkpoints/{checkpoint}:promote")
    async def promote(request: Request, account: str, checkpoint: str) -> Response:
        check_account(account)
        asked = await _asked(Promote, request)
        begun = await asyncio.to_thread(plane.checkpoints.promote, checkpoint, asked)
        if asked.async_promotion:
            return _answer(Promoted(operation=begun))
        changes, id = plane.store.operations.changes, leaf(begun.name)
        read = partial(plane.checkpoints.operation, id)
        done = await once(read, changes, id, lambda one: one.done, None)
        if done.error is not None:
            raise RequestError(done.error.message)
        if not done.done:
            raise ClosedError("platform must be open to promote, got one that ends: promote again")
        return _answer(Promoted(model=done.response))

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
        kind, _, id = worker.partition("-")
        if kind not in ("trainer", "deployment"):
            raise NotFoundError(
                f"worker must be trainer-JOB or deployment-DEPLOYMENT, got {worker[:80]!r}"
            )
        (plane.jobs if kind == "trainer" else plane.deployments).get(id)
        path = plane.context.launcher.log_path(worker)
        if path is None or not path.exists():
            raise NotFoundError(
                f"worker {worker!r} must have a log of its own, got none: it runs inside the "
                "platform's process and writes into that one's log"
            )
        text = path.read_text(encoding="utf-8", errors="replace").splitlines()
        return _json({"lines": text[-max(1, min(lines, 10_000)) :]})

    return router


async def _asked(kind: type[RecordT], request: Request) -> RecordT:
    """The record of a request's body.

    Raises:
        RequestError: it is none, or nothing that could be written down.
    """
    record = kind.parse(await request.body())
    try:
        record.dump()
    except TypeError as error:
        raise RequestError(f"body must be JSON of a usual depth and size, got {error}") from None
    return record


def _served(deployment: Deployment) -> dict[str, object]:
    if deployment.name is None:
        raise RequestError("deployment must have a name")
    return {"id": deployment.name, "object": "model", "created": 0, "owned_by": ACCOUNT}


def _answer(record: Record) -> Response:
    return Response(record.dump(), media_type="application/json")


def _json(content: object, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")
