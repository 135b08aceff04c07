"""The control plane's HTTP routes: parse, call the library, respond. Nothing is decided here."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import hearth
from hearth.control.access import ANYONE, Access, AuditLog
from hearth.control.deployments import Deployments
from hearth.control.gateway import KEY_NAME, Gateway
from hearth.control.jobs import Jobs
from hearth.control.metrics import CONTENT_TYPE, render_metrics
from hearth.control.plane import ControlPlane
from hearth.control.resource_names import ACCOUNT, parse_id
from hearth.control.store import Changes
from hearth.errors import (
    ClosedError,
    HearthError,
    NotFoundError,
    RequestError,
    TooLargeError,
    TransportError,
)
from hearth.wire import fireworks
from hearth.wire.base import Record
from hearth.wire.completions import ModelCard, ModelList
from hearth.wire.http import SHORT_WAIT_S, Handler, handle_error, json_response
from hearth.wire.openapi import describe_platform

RecordT = TypeVar("RecordT", bound=Record)
QueryT = TypeVar("QueryT", bound=fireworks.Query)
T = TypeVar("T")
_STARTING = frozenset({"JOB_STATE_CREATING", "CREATING", "UPDATING"})
_LONGEST_BODY = 2**20
"""Bytes of a request for a resource."""
_PROMOTION_WAIT_S = 8.0
"""The official client looks at a promotion after ten seconds, and then every ten."""


def create_gateway(
    plane: ControlPlane, access: Access | None = None, audit: AuditLog | None = None
) -> Gateway:
    """The ASGI app of a whole platform: the control plane, its trainers and its deployments."""

    async def check_readiness(_: Request) -> Response:
        if gateway.is_ending:
            raise TransportError("platform must be open, got a request while it ends: ask again")
        await run_in_threadpool(plane.store.models.count)
        return json_response({"status": "ok"})

    async def send_metrics(_: Request) -> Response:
        content = await render_metrics(plane, gateway.metrics)
        return Response(content, media_type=CONTENT_TYPE)

    routes = [
        Route("/", _introduce, methods=["GET"]),
        Route("/healthz", _healthz, methods=["GET"]),
        Route("/readyz", check_readiness, methods=["GET"]),
        Route("/metrics", send_metrics, methods=["GET"]),
        Route("/openapi.json", _describe, methods=["GET"]),
        *_model_routes(plane),
        *_shape_routes(plane),
        *_job_routes(plane),
        *_deployment_routes(plane),
        *_checkpoint_routes(plane),
        _own_route("GET", "/workers/{worker}/log", partial(_read_log, plane)),
    ]
    handlers = {HearthError: handle_error, HTTPException: _handle_no_route}
    app = Starlette(routes=routes, exception_handlers=handlers)
    gateway = Gateway(plane.jobs, plane.deployments, app, access or Access(), audit)
    return gateway


def _route(method: str, path: str, handler: Handler) -> Route:
    return Route(f"/v1{path}", handler, methods=[method])


def _own_route(method: str, path: str, handler: Handler) -> Route:
    """A route below an account, which must be the one of this platform."""

    async def check_then_handle(request: Request) -> Response:
        account = request.path_params.pop("account")
        if account != ACCOUNT:
            raise NotFoundError(
                f"account must be {ACCOUNT!r}, the one of this platform, got {account!r}"
            )
        return await handler(request)

    return _route(method, "/accounts/{account}" + path, check_then_handle)


def _answer(call: Callable[..., object], *, may_wait: bool = False) -> Handler:
    """A handler that answers with what ``call`` returns for the path's parameters, by name.

    What ``may_wait`` for a worker has threads of its own, those of ``asyncio.to_thread``: workers
    that hang hold up no reader of the database.
    """

    async def call_then_answer(request: Request) -> Response:
        run = asyncio.to_thread if may_wait else run_in_threadpool
        content = await run(call, **request.path_params)
        return json_response({} if content is None else content)

    return call_then_answer


async def _introduce(_: Request) -> Response:
    return json_response(
        {
            "what": f"A Hearth platform, version {hearth.__version__}: trainers and deployments of "
            "language models.",
            "api": "/openapi.json",
            "health": "/healthz",
            "models": "/v1/models",
            "chat": "/v1/chat/completions, like OpenAI's",
            "commands": "hearth ps, hearth deploy MODEL, hearth chat ID; hearth --help",
            "train": "set HEARTH_URL to this address and HEARTH_API_KEY, then start a "
            "recipe: python -m training.recipes.rl_loop --help",
        }
    )


async def _healthz(_: Request) -> Response:
    return json_response({"status": "ok", "version": hearth.__version__})


async def _describe(_: Request) -> Response:
    return json_response(describe_platform(hearth.__version__))


async def _handle_no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "it is registered for these"
    path = f"{request.method} {request.url.path[:200]}"
    response = await handle_error(
        request, NotFoundError(f"path must be one that the platform has, got {path!r}")
    )
    response.status_code = error.status_code
    return response


def _model_routes(plane: ControlPlane) -> list[Route]:
    def list_accounts() -> fireworks.AccountPage:
        return fireworks.AccountPage(accounts=[fireworks.Account(name=f"accounts/{ACCOUNT}")])

    def list_models(account: str) -> fireworks.ModelPage:
        models = plane.list_models()
        owned = [model for model in models if account in ("-", model.name.split("/")[1])]
        return fireworks.ModelPage(models=owned)

    def get_model(account: str, model: str) -> fireworks.Model:
        return plane.find_model(f"accounts/{account}/models/{model}")

    def list_served_models() -> ModelList:
        deployments = plane.deployments.list_all()
        return ModelList(
            data=[_model_card(served) for served in deployments if served.state == "READY"]
        )

    def get_served_model(name: str) -> ModelCard:
        return _model_card(plane.deployments.get(name.rsplit("/", 1)[-1]))

    return [
        _route("GET", "/accounts", _answer(list_accounts)),
        _route("GET", "/accounts/{account}/models", _answer(list_models)),
        _route("GET", "/accounts/{account}/models/{model}", _answer(get_model)),
        _route("GET", "/models", _answer(list_served_models)),
        _route("GET", "/models/{name:path}", _answer(get_served_model)),
    ]


def _model_card(deployment: fireworks.Deployment) -> ModelCard:
    return ModelCard(id=deployment.name or "", created=0, owned_by=ACCOUNT)


def _shape_routes(plane: ControlPlane) -> list[Route]:
    catalog = plane.context.catalog

    def list_versions(account: str, shape: str) -> fireworks.TrainingShapePage:
        if shape != "-":
            found = [catalog.find_shape(f"accounts/{account}/trainingShapes/{shape}")]
        else:
            found = catalog.list_shapes(None if account == "-" else account)
        return fireworks.TrainingShapePage(
            training_shape_versions=[known.version() for known in found]
        )

    def get_version(account: str, shape: str, version: str) -> fireworks.TrainingShapeVersion:
        entry = catalog.find_shape(f"accounts/{account}/trainingShapes/{shape}")
        if version not in ("1", "latest"):
            raise NotFoundError(f"version must be 1, the only one of {shape!r}, got {version!r}")
        return entry.version()

    path = "/accounts/{account}/trainingShapes/{shape}/versions"
    return [
        _route("GET", path, _answer(list_versions)),
        _route("GET", path + "/{version}", _answer(get_version)),
    ]


def _job_routes(plane: ControlPlane) -> list[Route]:
    jobs = plane.jobs

    async def create_job(request: Request) -> Response:
        query = _parse_query(fireworks.TrainerJobQuery, request)
        job = await _parse_body(fireworks.TrainerJob, request)
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
            await asyncio.to_thread(
                jobs.create, query.rlor_trainer_job_id, job, shape, _find_creator(request)
            )
        )

    def list_jobs() -> fireworks.TrainerJobPage:
        return fireworks.TrainerJobPage(rlor_trainer_jobs=jobs.list_all())

    return [
        _own_route("POST", "/rlorTrainerJobs", create_job),
        _own_route("GET", "/rlorTrainerJobs", _answer(list_jobs)),
        _own_route("GET", "/rlorTrainerJobs/{id}", partial(_wait_for_state, jobs)),
        _own_route("POST", "/rlorTrainerJobs/{job_id}:resume", _answer(jobs.resume, may_wait=True)),
        _own_route("POST", "/rlorTrainerJobs/{job_id}:cancel", _answer(jobs.cancel, may_wait=True)),
        _own_route("DELETE", "/rlorTrainerJobs/{job_id}", _answer(jobs.delete, may_wait=True)),
    ]


def _deployment_routes(plane: ControlPlane) -> list[Route]:
    deployments = plane.deployments

    async def create_deployment(request: Request) -> Response:
        deployment_id = _parse_query(fireworks.DeploymentQuery, request).deployment_id
        body = await _parse_body(fireworks.Deployment, request)
        creator = _find_creator(request)
        return json_response(
            await asyncio.to_thread(deployments.create, deployment_id, body, creator)
        )

    def list_deployments() -> fireworks.DeploymentPage:
        return fireworks.DeploymentPage(deployments=deployments.list_all())

    async def patch_deployment(request: Request) -> Response:
        change = await _parse_body(fireworks.DeploymentPatch, request)
        deployment_id = request.path_params["deployment"]
        return json_response(await asyncio.to_thread(deployments.patch, deployment_id, change))

    path = "/deployments"
    return [
        _own_route("POST", path, create_deployment),
        _own_route("GET", path, _answer(list_deployments)),
        _own_route("GET", f"{path}/{{id}}", partial(_wait_for_state, deployments)),
        _own_route("PATCH", f"{path}/{{deployment}}", patch_deployment),
        _own_route(
            "DELETE", "/deployments/{deployment_id}", _answer(deployments.delete, may_wait=True)
        ),
    ]


def _checkpoint_routes(plane: ControlPlane) -> list[Route]:
    checkpoints = plane.checkpoints

    async def list_checkpoints(request: Request) -> Response:
        query = _parse_query(fireworks.PageQuery, request)
        entries = await run_in_threadpool(checkpoints.list_entries, request.path_params["job"])
        token = query.page_token
        if token and token not in map(str, range(len(entries) + 1)):
            raise RequestError(f"pageToken must be one that a page ended with, got {token[:80]!r}")
        start = int(token or 0)
        end = start + max(1, min(query.page_size, 1000))
        next_token = str(end) if end < len(entries) else ""
        return json_response(
            fireworks.CheckpointPage(checkpoints=entries[start:end], next_page_token=next_token)
        )

    async def promote(request: Request) -> Response:
        order = await _parse_body(fireworks.Promote, request)
        checkpoint = request.path_params["checkpoint"]
        operation = await asyncio.to_thread(checkpoints.promote, checkpoint, order)
        changes, id = plane.store.operations.changes, parse_id(operation.name)
        read = partial(checkpoints.get_operation, id)
        wait_s = _PROMOTION_WAIT_S if order.async_promotion else math.inf
        ended = await _wait_until(read, changes, id, lambda state: state.done, wait_s)
        if order.async_promotion:
            return json_response(fireworks.Promoted(operation=ended))
        if ended.error is not None:
            raise RequestError(ended.error.message)
        if not ended.done:
            raise ClosedError("platform must be open to promote, got one that ends: promote again")
        return json_response(fireworks.Promoted(model=ended.response))

    return [
        _own_route("GET", "/rlorTrainerJobs/{job}/checkpoints", list_checkpoints),
        _own_route("POST", "/checkpoints/{checkpoint}:promote", promote),
        _own_route("GET", "/operations/{operation_id}", _answer(checkpoints.get_operation)),
    ]


async def _read_log(plane: ControlPlane, request: Request) -> Response:
    query = _parse_query(fireworks.LogQuery, request)
    lines = await run_in_threadpool(plane.read_log, request.path_params["worker"])
    return json_response({"lines": lines[-max(1, min(query.lines, 10_000)) :]})


async def _wait_for_state(resources: Jobs | Deployments, request: Request) -> Response:
    """Answer with the resource, once it is in one of the wanted states or the time is over.

    Where none is named, a resource that is starting is waited for a little.

    Raises:
        RequestError: the time is not a number.
    """
    query = _parse_query(fireworks.WaitQuery, request)
    id = request.path_params["id"]
    if math.isnan(query.timeout_s):
        raise RequestError("timeoutS must be a number of seconds, got nan")
    read: Callable[[], fireworks.TrainerJob | fireworks.Deployment] = partial(resources.get, id)
    wanted = query.wait_for_state.split(",")
    wait_s = min(max(query.timeout_s, 0.0), fireworks.LONGEST_WAIT_S)
    if not query.wait_for_state:
        wait_s = SHORT_WAIT_S

    def is_met(resource: fireworks.TrainerJob | fireworks.Deployment) -> bool:
        if query.wait_for_state:
            return resource.state in wanted
        return resource.state not in _STARTING

    return json_response(await _wait_until(read, resources.records.changes, id, is_met, wait_s))


async def _wait_until(
    read: Callable[[], T], changes: Changes, id: str, is_met: Callable[[T], bool], wait_s: float
) -> T:
    """What ``read`` returns once ``is_met`` holds of it, when the time is over, or at the end.

    It is read again when the record ``id`` changes, not from time to time; the end is the
    platform's.
    """
    deadline_s = time.monotonic() + wait_s
    while True:
        # Before the read, so that no change is missed between the two.
        change = asyncio.wrap_future(changes.next_change(id))
        try:
            value = await run_in_threadpool(read)
            left_s = deadline_s - time.monotonic()
            if is_met(value) or left_s <= 0 or changes.is_closed:
                return value
            await asyncio.wait([change], timeout=None if left_s == math.inf else left_s)
        finally:
            change.cancel()


def _find_creator(request: Request) -> str | None:
    """The name of the request's key; None on a platform without keys."""
    key: str = request.scope[KEY_NAME]
    return None if key == ANYONE else key


def _parse_query(kind: type[QueryT], request: Request) -> QueryT:
    return kind.from_dict(dict(request.query_params))


async def _parse_body(kind: type[RecordT], request: Request) -> RecordT:
    """The record of a request's body.

    Raises:
        RequestError: it is none, or cannot be written as JSON again.
        TooLargeError: it is longer than a resource's record may be.
    """
    body = await request.body()
    if len(body) > _LONGEST_BODY:
        raise TooLargeError(
            f"body must be at most {_LONGEST_BODY} bytes, got {len(body)}: it is kept with the "
            "resource, and read whenever resources are listed"
        )
    record = kind.parse(body)
    try:
        record.dump()
    except TypeError as error:
        raise RequestError(f"body must be JSON of a usual depth and size, got {error}") from None
    return record
