"""The control plane's HTTP routes: parse, call the library, respond. Nothing is decided here."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import hearth
from hearth.control.access import Access
from hearth.control.gateway import Gateway
from hearth.control.long_poll import wait_for_state, wait_until
from hearth.control.plane import ControlPlane
from hearth.control.resource_names import ACCOUNT, check_account, parse_id
from hearth.errors import ClosedError, HearthError, NotFoundError, RequestError
from hearth.wire.base import Record
from hearth.wire.fireworks import (
    Account,
    AccountPage,
    CheckpointPage,
    Deployment,
    DeploymentPage,
    DeploymentPatch,
    DeploymentQuery,
    LogQuery,
    ModelPage,
    PageQuery,
    Promote,
    Promoted,
    Query,
    TrainerJob,
    TrainerJobPage,
    TrainerJobQuery,
    TrainingShapePage,
    WaitQuery,
)
from hearth.wire.http import Handler, handle_error, json_response

RecordT = TypeVar("RecordT", bound=Record)
QueryT = TypeVar("QueryT", bound=Query)


def create_gateway(plane: ControlPlane, access: Access | None = None) -> Gateway:
    """The ASGI app of a whole platform: the control plane, its trainers and its deployments."""
    routes = [
        Route("/healthz", _healthz, methods=["GET"]),
        *_model_routes(plane),
        *_shape_routes(plane),
        *_job_routes(plane),
        *_deployment_routes(plane),
        *_checkpoint_routes(plane),
        _own_route("GET", "/workers/{worker}/log", partial(_read_log, plane)),
    ]
    handlers = {HearthError: handle_error, HTTPException: _handle_no_route}
    app = Starlette(routes=routes, exception_handlers=handlers)
    return Gateway(plane.jobs, plane.deployments, app, access or Access())


def _route(method: str, path: str, handler: Handler) -> Route:
    return Route(f"/v1{path}", handler, methods=[method])


def _own_route(method: str, path: str, handler: Handler) -> Route:
    """A route below an account, which must be the one of this platform."""

    async def check_then_handle(request: Request) -> Response:
        check_account(request.path_params["account"])
        return await handler(request)

    return _route(method, "/accounts/{account}" + path, check_then_handle)


async def _healthz(_: Request) -> Response:
    return json_response({"status": "ok", "version": hearth.__version__})


async def _handle_no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "it is registered for these"
    path = f"{request.method} {request.url.path[:200]}"
    response = await handle_error(
        request, NotFoundError(f"path must be one that the platform has, got {path!r}")
    )
    response.status_code = error.status_code
    return response


def _model_routes(plane: ControlPlane) -> list[Route]:
    async def list_accounts(_: Request) -> Response:
        return json_response(AccountPage(accounts=[Account(name=f"accounts/{ACCOUNT}")]))

    async def list_models(request: Request) -> Response:
        account = request.path_params["account"]
        models = await run_in_threadpool(plane.list_models)
        owned = [model for model in models if account in ("-", model.name.split("/")[1])]
        return json_response(ModelPage(models=owned))

    async def get_model(request: Request) -> Response:
        name = "accounts/{account}/models/{model}".format(**request.path_params)
        return json_response(await run_in_threadpool(plane.find_model, name))

    async def list_served_models(_: Request) -> Response:
        deployments = await run_in_threadpool(plane.deployments.list_all)
        data = [_model_card(served) for served in deployments if served.state == "READY"]
        return json_response({"object": "list", "data": data})

    async def get_served_model(request: Request) -> Response:
        deployment_id = request.path_params["name"].rsplit("/", 1)[-1]
        served = await run_in_threadpool(plane.deployments.get, deployment_id)
        return json_response(_model_card(served))

    return [
        _route("GET", "/accounts", list_accounts),
        _route("GET", "/accounts/{account}/models", list_models),
        _route("GET", "/accounts/{account}/models/{model}", get_model),
        _route("GET", "/models", list_served_models),
        _route("GET", "/models/{name:path}", get_served_model),
    ]


def _model_card(deployment: Deployment) -> dict[str, object]:
    if deployment.name is None:
        raise RequestError("deployment must have a name")
    return {"id": deployment.name, "object": "model", "created": 0, "owned_by": ACCOUNT}


def _shape_routes(plane: ControlPlane) -> list[Route]:
    catalog = plane.context.catalog

    async def list_versions(request: Request) -> Response:
        account, shape = request.path_params["account"], request.path_params["shape"]
        if shape != "-":
            name = f"accounts/{account}/trainingShapes/{shape}"
            shapes = [await run_in_threadpool(catalog.find_shape, name)]
        else:
            known = await run_in_threadpool(catalog.list_shapes)
            shapes = [entry for entry in known if account in ("-", entry.name.split("/")[1])]
        versions = [entry.version() for entry in shapes]
        return json_response(TrainingShapePage(training_shape_versions=versions))

    async def get_version(request: Request) -> Response:
        name = "accounts/{account}/trainingShapes/{shape}".format(**request.path_params)
        entry = await run_in_threadpool(catalog.find_shape, name)
        version, shape = request.path_params["version"], request.path_params["shape"]
        if version not in ("1", "latest"):
            raise NotFoundError(f"version must be 1, the only one of {shape!r}, got {version!r}")
        return json_response(entry.version())

    path = "/accounts/{account}/trainingShapes/{shape}/versions"
    return [_route("GET", path, list_versions), _route("GET", path + "/{version}", get_version)]


def _job_routes(plane: ControlPlane) -> list[Route]:
    jobs = plane.jobs

    async def create_job(request: Request) -> Response:
        query = _parse_query(TrainerJobQuery, request)
        job = await _parse_body(TrainerJob, request)
        given, tied = query.deployment_id, job.hot_load_deployment_id
        if given and tied and parse_id(tied) != parse_id(given):
            raise RequestError(
                f"deploymentId must be the body's hotLoadDeploymentId {tied!r}, got {given!r}: a "
                "trainer publishes into one deployment"
            )
        if deployment := tied or given:
            job = job.model_copy(update={"hot_load_deployment_id": deployment})
            await asyncio.to_thread(plane.deployments.use_own_bucket, parse_id(deployment))
        shape = query.training_shape or None
        return json_response(
            await asyncio.to_thread(jobs.create, query.rlor_trainer_job_id, job, shape)
        )

    async def list_jobs(_: Request) -> Response:
        return json_response(
            TrainerJobPage(rlor_trainer_jobs=await run_in_threadpool(jobs.list_all))
        )

    async def get_job(request: Request) -> Response:
        query = _parse_query(WaitQuery, request)
        return json_response(await wait_for_state(jobs, request.path_params["job"], query))

    async def resume_job(request: Request) -> Response:
        return json_response(await run_in_threadpool(jobs.resume, request.path_params["job"]))

    async def cancel_job(request: Request) -> Response:
        return json_response(await run_in_threadpool(jobs.cancel, request.path_params["job"]))

    async def delete_job(request: Request) -> Response:
        await run_in_threadpool(jobs.delete, request.path_params["job"])
        return json_response({})

    return [
        _own_route("POST", "/rlorTrainerJobs", create_job),
        _own_route("GET", "/rlorTrainerJobs", list_jobs),
        _own_route("GET", "/rlorTrainerJobs/{job}", get_job),
        _own_route("POST", "/rlorTrainerJobs/{job}:resume", resume_job),
        _own_route("POST", "/rlorTrainerJobs/{job}:cancel", cancel_job),
        _own_route("DELETE", "/rlorTrainerJobs/{job}", delete_job),
    ]


def _deployment_routes(plane: ControlPlane) -> list[Route]:
    deployments = plane.deployments

    async def create_deployment(request: Request) -> Response:
        deployment_id = _parse_query(DeploymentQuery, request).deployment_id
        body = await _parse_body(Deployment, request)
        return json_response(await asyncio.to_thread(deployments.create, deployment_id, body))

    async def list_deployments(_: Request) -> Response:
        return json_response(
            DeploymentPage(deployments=await run_in_threadpool(deployments.list_all))
        )

    async def get_deployment(request: Request) -> Response:
        query = _parse_query(WaitQuery, request)
        return json_response(
            await wait_for_state(deployments, request.path_params["deployment"], query)
        )

    async def patch_deployment(request: Request) -> Response:
        change = await _parse_body(DeploymentPatch, request)
        deployment_id = request.path_params["deployment"]
        return json_response(await asyncio.to_thread(deployments.patch, deployment_id, change))

    async def delete_deployment(request: Request) -> Response:
        await run_in_threadpool(deployments.delete, request.path_params["deployment"])
        return json_response({})

    return [
        _own_route("POST", "/deployments", create_deployment),
        _own_route("GET", "/deployments", list_deployments),
        _own_route("GET", "/deployments/{deployment}", get_deployment),
        _own_route("PATCH", "/deployments/{deployment}", patch_deployment),
        _own_route("DELETE", "/deployments/{deployment}", delete_deployment),
    ]


def _checkpoint_routes(plane: ControlPlane) -> list[Route]:
    checkpoints = plane.checkpoints

    async def list_checkpoints(request: Request) -> Response:
        query = _parse_query(PageQuery, request)
        entries = await run_in_threadpool(checkpoints.list_entries, request.path_params["job"])
        token = query.page_token
        if token and token not in map(str, range(len(entries) + 1)):
            raise RequestError(f"pageToken must be one that a page ended with, got {token[:80]!r}")
        start = int(token or 0)
        end = start + max(1, min(query.page_size, 1000))
        next_token = str(end) if end < len(entries) else ""
        return json_response(
            CheckpointPage(checkpoints=entries[start:end], next_page_token=next_token)
        )

    async def promote(request: Request) -> Response:
        order = await _parse_body(Promote, request)
        checkpoint = request.path_params["checkpoint"]
        operation = await asyncio.to_thread(checkpoints.promote, checkpoint, order)
        if order.async_promotion:
            return json_response(Promoted(operation=operation))
        changes, id = plane.store.operations.changes, parse_id(operation.name)
        read = partial(checkpoints.get_operation, id)
        ended = await wait_until(read, changes, id, lambda state: state.done, None)
        if ended.error is not None:
            raise RequestError(ended.error.message)
        if not ended.done:
            raise ClosedError("platform must be open to promote, got one that ends: promote again")
        return json_response(Promoted(model=ended.response))

    async def get_operation(request: Request) -> Response:
        operation_id = request.path_params["operation"]
        return json_response(await run_in_threadpool(checkpoints.get_operation, operation_id))

    return [
        _own_route("GET", "/rlorTrainerJobs/{job}/checkpoints", list_checkpoints),
        _own_route("POST", "/checkpoints/{checkpoint}:promote", promote),
        _own_route("GET", "/operations/{operation}", get_operation),
    ]


async def _read_log(plane: ControlPlane, request: Request) -> Response:
    query = _parse_query(LogQuery, request)
    lines = await run_in_threadpool(plane.read_log, request.path_params["worker"])
    return json_response({"lines": lines[-max(1, min(query.lines, 10_000)) :]})


def _parse_query(kind: type[QueryT], request: Request) -> QueryT:
    return kind.from_dict(dict(request.query_params))


async def _parse_body(kind: type[RecordT], request: Request) -> RecordT:
    """The record of a request's body.

    Raises:
        RequestError: it is none, or cannot be written as JSON again.
    """
    record = kind.parse(await request.body())
    try:
        record.dump()
    except TypeError as error:
        raise RequestError(f"body must be JSON of a usual depth and size, got {error}") from None
    return record
