"""The OpenAPI description of a platform: its routes, and the records that go in and out of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from hearth.wire import chat, fireworks, tinker
from hearth.wire import completions as samples
from hearth.wire import tinker_requests as requests
from hearth.wire.base import Record
from hearth.wire.http import ErrorDetail, FailedFuture

_ACCOUNT = "/v1/accounts/{account}"
_JOBS = f"{_ACCOUNT}/rlorTrainerJobs"
_SHAPES = f"{_ACCOUNT}/trainingShapes/{{shape}}/versions"
_TINKER = "/api/v1"
_SAVED = "/training_runs/{id}/checkpoints/{kind}/{name}"
_TRAINER = "/training/v1/rlorTrainerJobs/{account}/{job}/api/v1"
_DEPLOYMENT_HEADER = "fireworks-deployment"


class Failure(Record):
    """The body of an error."""

    error: ErrorDetail


@dataclass(frozen=True)
class Route:
    """What goes in and out of a route; an answer without a record is any object."""

    answer: tuple[type[Record], ...] = ()
    """One of these."""
    body: type[Record] | None = None
    query: type[Record] | None = None


def _operation(body: type[Record]) -> Route:
    return Route((tinker.FutureRef,), body)


def _sampling_routes(prefix: str) -> dict[str, Route]:
    answers = (samples.CompletionResponse, chat.ChatResponse)
    return {
        f"POST {prefix}/completions": Route(answers[:1], samples.CompletionCall),
        f"POST {prefix}/chat/completions": Route(answers[1:], chat.ChatRequest),
        f"POST {prefix}/tokenize": Route((chat.TokenizeResponse,), chat.TokenizeRequest),
    }


CONTROL_ROUTES: Mapping[str, Route] = {
    "GET /": Route(),
    "GET /healthz": Route(),
    "GET /readyz": Route(),
    "GET /metrics": Route(),
    "GET /openapi.json": Route(),
    "GET /v1/accounts": Route((fireworks.AccountPage,)),
    "GET /v1/models": Route((samples.ModelList,)),
    "GET /v1/models/{name}": Route((samples.ModelCard,)),
    f"GET {_ACCOUNT}/models": Route((fireworks.ModelPage,)),
    f"GET {_ACCOUNT}/models/{{model}}": Route((fireworks.Model,)),
    f"GET {_SHAPES}": Route((fireworks.TrainingShapePage,)),
    f"GET {_SHAPES}/{{version}}": Route((fireworks.TrainingShapeVersion,)),
    f"POST {_JOBS}": Route(
        (fireworks.TrainerJob,), fireworks.TrainerJob, fireworks.TrainerJobQuery
    ),
    f"GET {_JOBS}": Route((fireworks.TrainerJobPage,)),
    f"GET {_JOBS}/{{id}}": Route((fireworks.TrainerJob,), query=fireworks.WaitQuery),
    f"POST {_JOBS}/{{job_id}}:resume": Route((fireworks.TrainerJob,)),
    f"POST {_JOBS}/{{job_id}}:cancel": Route((fireworks.TrainerJob,)),
    f"DELETE {_JOBS}/{{job_id}}": Route(),
    f"GET {_JOBS}/{{job}}/checkpoints": Route(
        (fireworks.CheckpointPage,), query=fireworks.PageQuery
    ),
    f"POST {_ACCOUNT}/checkpoints/{{checkpoint}}:promote": Route(
        (fireworks.Promoted,), fireworks.Promote
    ),
    f"GET {_ACCOUNT}/operations/{{operation_id}}": Route((fireworks.Operation,)),
    f"POST {_ACCOUNT}/deployments": Route(
        (fireworks.Deployment,), fireworks.Deployment, fireworks.DeploymentQuery
    ),
    f"GET {_ACCOUNT}/deployments": Route((fireworks.DeploymentPage,)),
    f"GET {_ACCOUNT}/deployments/{{id}}": Route((fireworks.Deployment,), query=fireworks.WaitQuery),
    f"PATCH {_ACCOUNT}/deployments/{{deployment}}": Route(
        (fireworks.Deployment,), fireworks.DeploymentPatch
    ),
    f"DELETE {_ACCOUNT}/deployments/{{deployment_id}}": Route(),
    f"GET {_ACCOUNT}/workers/{{worker}}/log": Route(
        (fireworks.LogLines,), query=fireworks.LogQuery
    ),
}
"""The control plane's, by method and path."""

TRAINER_ROUTES: Mapping[str, Route] = {
    "GET /healthz": Route(),
    "POST /client/config": Route(),
    "POST /create_session": Route((tinker.SessionRef,), tinker.CreateSession),
    "POST /session_heartbeat": Route(),
    "POST /telemetry": Route(),
    "POST /create_model": _operation(tinker.CreateModel),
    "POST /unload_model": _operation(tinker.UnloadModel),
    "POST /get_info": Route((tinker.ModelInfo,), tinker.GetInfo),
    "POST /weights_info": Route((tinker.WeightsFacts,), tinker.WeightsInfo),
    "GET /get_server_capabilities": Route(),
    "GET /list_checkpoints": Route((tinker.CheckpointNames,)),
    "POST /forward": _operation(tinker.Forward),
    "POST /forward_backward": _operation(tinker.ForwardBackward),
    "POST /optim_step": _operation(tinker.OptimStep),
    "POST /save_weights": _operation(tinker.SaveWeights),
    "POST /load_weights": _operation(tinker.LoadWeights),
    "POST /save_weights_for_sampler": _operation(tinker.SaveWeightsForSampler),
    "POST /load_adapter": _operation(tinker.LoadAdapter),
    "POST /retrieve_future": Route(
        (
            tinker.TryAgain,
            FailedFuture,
            tinker.ModelRef,
            tinker.ForwardOutput,
            tinker.OptimStepOutput,
            tinker.PathOutput,
            tinker.LoadAdapterOutput,
            tinker.UnloadModel,
        ),
        tinker.RetrieveFuture,
    ),
}
"""A trainer's, below ``/api/v1``."""

DEPLOYMENT_ROUTES: Mapping[str, Route] = {
    "GET /hot_load/v1/models/hot_load": Route((samples.HotLoadState,)),
    "POST /hot_load/v1/models/hot_load": Route((samples.HotLoadState,), samples.HotLoadRequest),
    "POST /tokenize": Route((chat.TokenizeResponse,), chat.TokenizeRequest),
    **_sampling_routes("/v1"),
    **_sampling_routes("/inference/v1"),
    "GET /inference/v1/models": Route((samples.ModelList,)),
    "GET /inference/v1/models/{name}": Route((samples.ModelCard,)),
}
"""A deployment's, which the body's ``model`` or the header ``fireworks-deployment`` names."""

TINKER_ROUTES: Mapping[str, Route] = {
    "GET /healthz": Route(),
    "POST /client/config": Route(),
    "POST /client/dynamic_config": Route(),
    "POST /telemetry": Route(),
    "POST /create_session": Route(body=requests.CreateSessionRequest),
    "POST /session_heartbeat": Route(body=requests.NamedSession),
    "POST /sessions/{id}/finish": Route(),
    "GET /get_server_capabilities": Route(),
    "POST /create_model": Route(body=requests.CreateModelRequest),
    "POST /load_weights": Route(body=requests.LoadWeightsRequest),
    "POST /get_info": Route(body=requests.NamedModel),
    "POST /unload_model": Route(body=requests.NamedModel),
    "POST /forward_backward": Route(),
    "POST /optim_step": Route(body=requests.OptimStepRequest),
    "POST /save_weights": Route(body=requests.SaveWeightsRequest),
    "POST /save_weights_for_sampler": Route(body=requests.SaveForSampler),
    "POST /save_weights_external": Route(body=requests.SaveExternal),
    "POST /retrieve_future": Route(body=requests.RetrieveFutureRequest),
    "POST /create_sampling_session": Route(body=requests.CreateSampler),
    "POST /asample": Route(body=requests.AskSamples),
    "POST /cancel_future": Route(body=requests.RetrieveFutureRequest),
    "GET /samplers/{id}": Route(),
    "POST /weights_info": Route(body=requests.NamedPath),
    "GET /training_runs": Route(),
    "GET /training_runs/{id}": Route(),
    "GET /training_runs/{id}/checkpoints": Route(),
    "GET /checkpoints": Route(),
    "GET /sessions": Route(),
    "GET /sessions/{id}": Route(),
    f"GET {_SAVED}/external_weights_urls": Route(),
    f"DELETE {_SAVED}": Route(),
    f"POST {_SAVED}/publish": Route(),
    f"DELETE {_SAVED}/publish": Route(),
    f"PUT {_SAVED}/ttl": Route(body=requests.SetTtl),
    "GET /links/{token}/{name}": Route(),
}
"""Those of Tinker's official clients, below ``/api/v1``; passes and results are protobuf there."""


@cache
def describe_platform(version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a platform of this version."""
    routes = {
        **CONTROL_ROUTES,
        **_prefix_paths(TRAINER_ROUTES, _TRAINER),
        **DEPLOYMENT_ROUTES,
        **_prefix_paths(TINKER_ROUTES, _TINKER),
    }
    records: set[type[Record]] = {Failure}
    for route in routes.values():
        records.update(route.answer, (route.body or Failure, route.query or Failure))
    in_order = sorted(records, key=lambda record: f"{record.__module__}.{record.__name__}")
    references, schemas = models_json_schema(
        [(record, "validation") for record in in_order], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for address, route in routes.items():
        method, path = address.split(" ")
        described = _describe_route(path, route, references)
        paths.setdefault(path, {})[method.lower()] = described
    key = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Hearth", "version": version},
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "securitySchemes": {"key": key}},
        "security": [{"key": []}, {}],
    }


def _prefix_paths(routes: Mapping[str, Route], prefix: str) -> dict[str, Route]:
    return {address.replace(" ", f" {prefix}", 1): route for address, route in routes.items()}


def _describe_route(path: str, route: Route, references: Mapping[Any, Any]) -> dict[str, Any]:
    """An OpenAPI operation."""

    def refer(record: type[Record]) -> dict[str, Any]:
        return references[record, "validation"]

    answers = [refer(record) for record in route.answer]
    good: dict[str, Any] = {"application/json": {"schema": _any_of(answers)}}
    if "stream" in (route.body.model_fields if route.body else ()):
        good["text/event-stream"] = {"schema": {"type": "string"}}
    failure = {"application/json": {"schema": refer(Failure)}}
    described: dict[str, Any] = {
        "parameters": [*_path_parameters(path), *_query_parameters(route.query)],
        "responses": {
            "200": {"description": "Done.", "content": good},
            "default": {"description": "Refused, or failed.", "content": failure},
        },
    }
    if route.body is not None:
        content = {"application/json": {"schema": refer(route.body)}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _any_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    if not schemas:
        return {"type": "object"}
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _path_parameters(path: str) -> list[dict[str, Any]]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    if path.startswith(("/hot_load/", "/inference/")):
        header = {"name": _DEPLOYMENT_HEADER, "in": "header", "schema": {"type": "string"}}
        parameters.append(header)
    return parameters


def _query_parameters(query: type[Record] | None) -> list[dict[str, Any]]:
    if query is None:
        return []
    fields = query.model_json_schema()["properties"]
    return [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]
