"""Tinker's HTTP routes: parse, ask the front, respond."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from hearth.control.gateway import KEY_NAME, LINK_PREFIX, TINKER_PREFIX
from hearth.control.resource_names import format_timestamp
from hearth.errors import HearthError, NotFoundError, RequestError
from hearth.tinker.front import Front
from hearth.tinker.protobuf import MEDIA_TYPE, read_pass
from hearth.tinker.runs import BINARY
from hearth.wire import tinker_requests as requests
from hearth.wire.base import parse_json
from hearth.wire.http import handle_error, json_response
from hearth.wire.tinker import TryAgain

logger = logging.getLogger(__name__)

_LARGE_BODY = 2**18
"""From here on bodies are parsed on a thread."""
_PENDING = 408
_MOST_LISTED = 1000

CLIENT_CONFIG = {
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
    "custom_loss_server_side": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "pjwt_auth_enabled": False,
}
"""What clients are told to do: chunks come in order, and losses of one's own run at the client."""

REFUSED: Mapping[tuple[str, str], str] = {
    ("POST", "create_custom_loss"): "use forward_backward_custom, which runs at the client",
    ("POST", "retrieve_futures"): "ask for each result with retrieve_future",
    ("POST", "join_sampling_session"): "clones of a sampling client choose their own numbers",
    ("POST", "auth/token"): "send the API key itself",
    ("GET", "auth/apikey/me"): "keys are lines of the platform's api_keys_file",
    ("DELETE", "auth/apikey/me"): "keys are lines of the platform's api_keys_file",
    ("POST", "copy_weights"): "weights are published, or loaded into a run and saved again",
    ("POST", "sessions/search"): "list the sessions",
    ("PUT", "sessions/{id}/project"): "there are no projects: a key has its own runs",
    ("GET", "sessions/{id}/trace_export"): "no traces are kept; hearth logs shows the workers'",
    ("GET", "audit"): "read audit.jsonl in the platform's data folder",
    ("GET", "billing/usage/events"): "nothing is billed",
    ("GET", "billing/usage/checkpoints/current"): "nothing is billed",
}
"""Routes that a client knows and this platform does not serve, and what to do instead."""

Ask = Callable[[str, Any], Awaitable[Any]]


def create_app(front: Front) -> Starlette:
    """The ASGI app, under ``/api/v1``."""
    routes = [
        *_session_routes(front),
        *_run_routes(front),
        *_sampling_routes(front),
        *_listing_routes(front),
        *(_route(method, path, _refuse(path, why)) for (method, path), why in REFUSED.items()),
    ]
    handlers = {HearthError: handle_error, HTTPException: _handle_no_route}
    return Starlette(routes=routes, exception_handlers=handlers)


def _route(method: str, path: str, handler: Any) -> Route:
    return Route(f"{TINKER_PREFIX}{path}", handler, methods=[method])


def _refuse(path: str, why: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(_: Request) -> Response:
        raise RequestError(f"{path} must not be asked of this platform: {why}")

    return refuse


async def _handle_no_route(request: Request, error: Exception) -> Response:
    path = f"{request.method} {request.url.path[:200]}"
    logger.warning("unknown path %s was requested", path)
    return await handle_error(
        request, NotFoundError(f"path must be one that the platform has, got {path!r}")
    )


def _post(front: Front, path: str, kind: type[requests.TinkerRequest], ask: Ask) -> Route:
    """A POST of a record; ``ask`` gets the key's name and the record, and returns the answer."""

    async def handle(request: Request) -> Response:
        await front.start()
        question = kind.from_dict(await _read_json(request))
        answer = await ask(request.scope[KEY_NAME], question)
        return json_response(answer)

    return _route("POST", path, handle)


async def _read_json(request: Request) -> Any:
    body = await request.body()
    content = (
        await asyncio.to_thread(parse_json, body) if len(body) > _LARGE_BODY else parse_json(body)
    )
    if not isinstance(content, dict):
        raise RequestError(f"body must be a JSON object, got {type(content).__name__}")
    return content


def _constant(path: str, content: Any, method: str = "POST") -> Route:
    async def respond(_: Request) -> Response:
        return json_response(content)

    return _route(method, path, respond)


def _session_routes(front: Front) -> list[Route]:
    async def create_session(owner: str, ask: requests.CreateSessionRequest) -> Any:
        session_id = await front.create_session(owner, ask)
        return {"type": "create_session", "session_id": session_id}

    async def beat(owner: str, ask: requests.NamedSession) -> Any:
        await front.beat(owner, ask.session_id)
        return {"type": "session_heartbeat"}

    async def finish(request: Request) -> Response:
        await front.start()
        await front.end_session(request.scope[KEY_NAME], request.path_params["id"])
        return Response(status_code=204)

    async def capabilities(_: Request) -> Response:
        models = [
            {"model_name": name, "trainable": True, "sampleable": True}
            for name in front.bases.names()
        ]
        return json_response({"supported_models": models})

    return [
        _constant("healthz", {"status": "ok"}, "GET"),
        _constant("client/config", CLIENT_CONFIG),
        _constant("client/dynamic_config", {"sample_cancel_enabled": True}),
        _constant("telemetry", {"status": "accepted"}),
        _post(front, "create_session", requests.CreateSessionRequest, create_session),
        _post(front, "session_heartbeat", requests.NamedSession, beat),
        _route("POST", "sessions/{id}/finish", finish),
        _route("GET", "get_server_capabilities", capabilities),
    ]


def _run_routes(front: Front) -> list[Route]:
    def make_submit(method: Callable[[str, Any], Awaitable[str]]) -> Ask:
        async def submit(owner: str, ask: Any) -> Any:
            return {"request_id": await method(owner, ask), "model_id": ask.model_id}

        return submit

    async def create_model(owner: str, ask: requests.CreateModelRequest) -> Any:
        run_id = await front.create_run(owner, ask)
        return {"request_id": f"create:{run_id}", "model_id": run_id}

    async def load_weights(owner: str, ask: requests.LoadWeightsRequest) -> Any:
        if ask.model_id is not None:
            return {"request_id": await front.load(owner, ask), "model_id": ask.model_id}
        if ask.session_id is None or ask.model_seq_id is None:
            raise RequestError("session_id and model_seq_id must be given without model_id")
        run_id = await front.load_run(owner, ask)
        return {"request_id": f"create:{run_id}", "model_id": run_id}

    async def get_info(owner: str, ask: requests.NamedModel) -> Any:
        run = await front.find_run(owner, ask.model_id)
        name = run.facts.base_model
        data = {"arch": await run.base.find_arch(), "model_name": name, "tokenizer_id": name}
        return {
            "type": "get_info",
            "model_data": data,
            "model_id": run.id,
            "model_name": name,
            "is_lora": True,
            "lora_rank": run.facts.lora.rank,
        }

    async def unload_model(owner: str, ask: requests.NamedModel) -> Any:
        raise RequestError("unload_model must not be asked: a run ends with its session")

    async def forward_backward(request: Request) -> Response:
        await front.start()
        body = await request.body()
        if request.headers.get("content-encoding"):
            raise RequestError(
                "content-encoding must be absent: client_config asks for plain bodies"
            )
        if not request.headers.get("content-type", "").startswith(MEDIA_TYPE):
            raise RequestError(f"content-type must be {MEDIA_TYPE}")
        ask = await asyncio.to_thread(read_pass, body)
        request_id = await front.run_pass(request.scope[KEY_NAME], ask)
        return json_response({"request_id": request_id, "model_id": ask.model_id})

    async def retrieve_future(request: Request) -> Response:
        await front.start()
        ask = requests.RetrieveFutureRequest.from_dict(await _read_json(request))
        result = await front.retrieve(request.scope[KEY_NAME], ask.request_id)
        if result is None:
            return json_response(TryAgain(request_id=ask.request_id), _PENDING)
        is_binary = result[:1] == BINARY
        return Response(result[1:], media_type=MEDIA_TYPE if is_binary else "application/json")

    return [
        _post(front, "create_model", requests.CreateModelRequest, create_model),
        _post(front, "load_weights", requests.LoadWeightsRequest, load_weights),
        _post(front, "get_info", requests.NamedModel, get_info),
        _post(front, "unload_model", requests.NamedModel, unload_model),
        _post(front, "optim_step", requests.OptimStepRequest, make_submit(front.step)),
        _post(front, "save_weights", requests.SaveWeightsRequest, make_submit(front.save)),
        _post(
            front,
            "save_weights_for_sampler",
            requests.SaveForSampler,
            make_submit(front.save_for_sampler),
        ),
        _post(
            front, "save_weights_external", requests.SaveExternal, make_submit(front.save_external)
        ),
        _route("POST", "forward_backward", forward_backward),
        _route("POST", "retrieve_future", retrieve_future),
    ]


def _sampling_routes(front: Front) -> list[Route]:
    async def create_sampling_session(owner: str, ask: requests.CreateSampler) -> Any:
        sampler_id = await front.create_sampler(owner, ask)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    async def asample(owner: str, ask: requests.AskSamples) -> Any:
        request_id, ids = await front.sample(owner, ask)
        return {"request_id": request_id, "sample_sequence_ids": ids}

    async def cancel_future(owner: str, ask: requests.RetrieveFutureRequest) -> Any:
        front.samples.cancel(ask.request_id, owner)
        return {}

    async def get_sampler(request: Request) -> Response:
        await front.start()
        sampler_id = request.path_params["id"]
        facts = front.find_sampler(request.scope[KEY_NAME], sampler_id)
        answer = {"sampler_id": sampler_id, "base_model": facts.base_model}
        return json_response(answer | ({"model_path": facts.path} if facts.path else {}))

    return [
        _post(front, "create_sampling_session", requests.CreateSampler, create_sampling_session),
        _post(front, "asample", requests.AskSamples, asample),
        _post(front, "cancel_future", requests.RetrieveFutureRequest, cancel_future),
        _route("GET", "samplers/{id}", get_sampler),
    ]


def _listing_routes(front: Front) -> list[Route]:
    def get(path: str, ask: Callable[[str, Request], Awaitable[Any]]) -> Route:
        async def handle(request: Request) -> Response:
            await front.start()
            return json_response(await ask(request.scope[KEY_NAME], request))

        return _route("GET", path, handle)

    def change(
        method: str, path: str, run: Callable[[str, str, Request], Awaitable[None]]
    ) -> Route:
        async def handle(request: Request) -> Response:
            await front.start()
            params = request.path_params
            saved = f"tinker://{params['id']}/{params['kind']}/{params['name']}"
            await run(request.scope[KEY_NAME], saved, request)
            return Response(status_code=204)

        return _route(method, f"training_runs/{{id}}/checkpoints/{{kind}}/{{name}}{path}", handle)

    async def weights_info(owner: str, ask: requests.NamedPath) -> Any:
        facts = await asyncio.to_thread(front.saved.find, ask.tinker_path, owner)
        lora = facts.lora
        return {
            "base_model": facts.base_model,
            "is_lora": True,
            "lora_rank": lora.rank,
            "train_unembed": lora.train_unembed,
            "train_mlp": lora.train_mlp,
            "train_attn": lora.train_attn,
        }

    async def list_runs(owner: str, request: Request) -> Any:
        return _page(await front.list_runs(owner), request, "training_runs")

    async def get_run(owner: str, request: Request) -> Any:
        return await front.describe_run(owner, request.path_params["id"])

    async def list_run_checkpoints(owner: str, request: Request) -> Any:
        run_id = request.path_params["id"]
        await front.describe_run(owner, run_id)
        return {"checkpoints": await asyncio.to_thread(front.saved.list_own, owner, run_id)}

    async def list_checkpoints(owner: str, request: Request) -> Any:
        return _page(await asyncio.to_thread(front.saved.list_own, owner), request, "checkpoints")

    async def list_sessions(owner: str, request: Request) -> Any:
        page = _page(await front.list_sessions(owner), request, "sessions")
        return {"sessions": page["sessions"]}

    async def get_session(owner: str, request: Request) -> Any:
        return await front.describe_session(owner, request.path_params["id"])

    async def list_links(owner: str, request: Request) -> Any:
        path = "tinker://{id}/{kind}/{name}".format(**request.path_params)
        links, expires_s = await front.list_links(owner, path)
        root = f"{str(request.base_url).rstrip('/')}{LINK_PREFIX}"
        return {
            "urls": {name: root + link for name, link in links.items()},
            "expires": format_timestamp(expires_s),
        }

    async def download(request: Request) -> Response:
        params = request.path_params
        return FileResponse(front.find_link(params["token"], params["name"]))

    async def delete(owner: str, path: str, _: Request) -> None:
        await asyncio.to_thread(front.saved.delete, path, owner)

    async def publish(owner: str, path: str, _: Request) -> None:
        await asyncio.to_thread(front.saved.change, path, owner, is_public=True)

    async def unpublish(owner: str, path: str, _: Request) -> None:
        await asyncio.to_thread(front.saved.change, path, owner, is_public=False)

    async def set_ttl(owner: str, path: str, request: Request) -> None:
        ask = requests.SetTtl.from_dict(await _read_json(request))
        seconds = requests.check_ttl(ask.ttl_seconds)
        await asyncio.to_thread(front.saved.set_ttl, path, owner, seconds)

    return [
        _post(front, "weights_info", requests.NamedPath, weights_info),
        get("training_runs", list_runs),
        get("training_runs/{id}", get_run),
        get("training_runs/{id}/checkpoints", list_run_checkpoints),
        get("checkpoints", list_checkpoints),
        get("sessions", list_sessions),
        get("sessions/{id}", get_session),
        get("training_runs/{id}/checkpoints/{kind}/{name}/external_weights_urls", list_links),
        Route(LINK_PREFIX + "{token}/{name}", download, methods=["GET"]),
        change("DELETE", "", delete),
        change("POST", "/publish", publish),
        change("DELETE", "/publish", unpublish),
        change("PUT", "/ttl", set_ttl),
    ]


def _page(items: list[Any], request: Request, name: str) -> dict[str, Any]:
    """A part of a list, as ``limit`` and ``offset`` ask for it."""
    numbers: list[int] = []
    for field, default in (("limit", 20), ("offset", 0)):
        text = request.query_params.get(field, str(default))
        if not text.isdigit():
            raise RequestError(f"{field} must be a whole number >= 0, got {text[:80]!r}")
        numbers.append(int(text))
    limit, offset = min(numbers[0], _MOST_LISTED), numbers[1]
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return {name: items[offset : offset + limit], "cursor": cursor}
