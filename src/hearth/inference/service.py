"""A deployment's HTTP face: parses, asks its backend, answers. The app has no other state.

Handlers may run on any number of event loops at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from hearth.errors import HearthError, RequestError
from hearth.inference.backend import InferenceBackend, SampledSequence, SampleRequest
from hearth.inference.responses import (
    completion_response,
    perf_metrics,
    prompt_ids,
    sample_requests,
)
from hearth.telemetry import new_request_id
from hearth.wire.completions import (
    CompletionRequest,
    HotLoadRequest,
    HotLoadState,
    LoadedAdapter,
    LoadingState,
    ReplicaState,
)
from hearth.wire.faults import fault_body, status_of

if TYPE_CHECKING:
    # The service itself needs no torch.
    from hearth.sync.store import SnapshotStore

logger = logging.getLogger(__name__)

LONGEST_POLL_S = 600.0
"""Longest that a question for a hot-load's end is held."""

_CLIENT_GONE = 499

Handler = Callable[[Request], Awaitable[Response]]


def create_app(
    backend: InferenceBackend, *, model_name: str, snapshots: SnapshotStore
) -> Starlette:
    """The app of one deployment, an ASGI application.

    Completions under ``/inference/v1/completions`` and ``/v1/completions``, weight syncs under
    ``/hot_load/v1/models/hot_load``, ``/healthz``. Requests are not checked for their ``model``:
    whoever routed them here has done that.
    """
    deployment = _Deployment(backend, model_name, snapshots)
    routes = [
        ("/inference/v1/completions", "POST", deployment.complete),
        ("/v1/completions", "POST", deployment.complete),
        ("/hot_load/v1/models/hot_load", "POST", deployment.hot_load),
        ("/hot_load/v1/models/hot_load", "GET", deployment.hot_load_state),
        ("/healthz", "GET", deployment.health),
    ]
    return Starlette(
        routes=[Route(path, _answering(run), methods=[method]) for path, method, run in routes]
    )


class _Deployment:
    def __init__(
        self, backend: InferenceBackend, model_name: str, snapshots: SnapshotStore
    ) -> None:
        self._backend = backend
        self._model_name = model_name
        self._snapshots = snapshots

    async def complete(self, request: Request) -> Response:
        start_s = time.perf_counter()
        asked = CompletionRequest.parse(await request.body())
        prompt = prompt_ids(asked, self._backend.tokenizer)
        drawn = await self._draw(request, sample_requests(asked, prompt))
        metrics = perf_metrics(prompt, drawn, time.perf_counter() - start_s)
        body = completion_response(
            asked, prompt, drawn, model_name=self._model_name, metrics=metrics,
            tokenizer=self._backend.tokenizer,
        ).dump()  # fmt: skip
        headers = {f"fireworks-{name}": value for name, value in metrics.items()}
        if not asked.stream:
            return _json(body, headers=headers)
        events = b"data: " + body + b"\n\ndata: [DONE]\n\n"
        return Response(events, headers=headers, media_type="text/event-stream")

    async def hot_load(self, request: Request) -> Response:
        identity = HotLoadRequest.parse(await request.body()).identity
        self._backend.hot_load(identity, lambda: self._snapshots.get(identity))
        return _json(self._state().dump())

    async def hot_load_state(self, request: Request) -> Response:
        identity = request.query_params.get("wait_for")
        if identity:
            timeout_s = _seconds(request.query_params.get("timeout_s", "0"))
            settled = asyncio.wrap_future(self._backend.settled(identity))
            try:
                await asyncio.wait([settled], timeout=timeout_s)
                if settled.done():
                    settled.result()
            finally:
                settled.cancel()
        return _json(self._state().dump())

    async def health(self, _: Request) -> Response:
        state = self._backend.state()
        return _json(orjson.dumps({"status": "ok", "weight_version": state.weight_version}))

    async def _draw(
        self, request: Request, wanted: Sequence[SampleRequest]
    ) -> list[SampledSequence]:
        """Draw all; whatever ends this early (an error, a client that is gone) ends the draws."""
        futures: list[Future[SampledSequence]] = []
        try:
            futures.extend(self._backend.submit(one) for one in wanted)
            drawing = asyncio.gather(*map(asyncio.wrap_future, futures))
            return await _unless_gone(request, drawing)
        finally:
            for future in futures:
                future.cancel()

    def _state(self) -> HotLoadState:
        state = self._backend.state()
        adapters: list[LoadedAdapter] = []
        if state.is_adapter and state.current_identity is not None:
            adapters.append(LoadedAdapter(identity=state.current_identity, status="loaded"))
        loading = LoadingState(
            stage=state.stage,
            target_snapshot_identity=state.target_identity,
            error_message=state.error,
        )
        replica = ReplicaState(
            current_snapshot_identity=state.current_identity, readiness=True,
            loading_state=loading, loaded_adapters=adapters, weight_version=state.weight_version,
        )  # fmt: skip
        return HotLoadState(replicas=[replica])


async def _unless_gone(
    request: Request, drawing: asyncio.Future[list[SampledSequence]]
) -> list[SampledSequence]:
    """The draws.

    Raises:
        ClientDisconnect: nobody waits for them any more.
    """
    # The body is read, so all that can still come is the client's leaving.
    leaving = asyncio.ensure_future(request.receive())
    try:
        done, _ = await asyncio.wait([drawing, leaving], return_when=asyncio.FIRST_COMPLETED)
        if drawing not in done:
            raise ClientDisconnect
        return drawing.result()
    finally:
        drawing.cancel()
        leaving.cancel()


def _answering(handler: Handler) -> Handler:
    """The handler with its errors as answers, and the caller's request id on every answer."""

    async def answer(request: Request) -> Response:
        request_id = request.headers.get("x-request-id") or new_request_id()
        try:
            response = await handler(request)
        except ClientDisconnect:
            response = Response(status_code=_CLIENT_GONE)
        except HearthError as error:
            response = _fault(error, request_id)
        except Exception as error:
            logger.exception("request %s to %s failed", request_id, request.url.path)
            response = _fault(error, request_id)
        response.headers["x-request-id"] = request_id
        return response

    return answer


def _fault(error: Exception, request_id: str) -> Response:
    return _json(orjson.dumps(fault_body(error, request_id)), status=status_of(error))


def _json(body: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status_code=status, headers=headers, media_type="application/json")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise RequestError(f"timeout_s must be a number of seconds >= 0, got {text!r}")
    return min(seconds, LONGEST_POLL_S)
