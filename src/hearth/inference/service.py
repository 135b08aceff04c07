"""A deployment's HTTP app: parses requests, calls its backend and makes the responses.

Handlers may run on any number of event loops at once.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from hearth.errors import EngineError, NotFoundError, RequestError
from hearth.inference.backend import InferenceBackend, Phase, SampledSequence, SampleRequest
from hearth.inference.chat import chat_prompt, chat_response, read_tokenize, tokenize
from hearth.inference.events import ChatEvents, CompletionEvents
from hearth.inference.hot_loads import HotLoads, Sources
from hearth.inference.requests import (
    chat_requests,
    is_text,
    is_whole,
    prompt_ids,
    read_chat,
    read_completion,
)
from hearth.inference.requests import sample_requests as completion_requests
from hearth.inference.responses import completion_response, perf_metrics, token_text
from hearth.inference.streaming import CompletionStream, EventResponse, StreamPiece
from hearth.inference.sync_tracker import resolve_future
from hearth.inference.texts import longest_text
from hearth.inference.tool_calls import visible_tokens
from hearth.wire.asgi import CLIENT_HEADER
from hearth.wire.chat import ChatRequest, TokenizeRequest, TokenizeResponse
from hearth.wire.completions import CompletionCall, HotLoadRequest, ModelCard, ModelList
from hearth.wire.http import (
    SHORT_WAIT_S,
    Handler,
    await_connected,
    catch_errors,
    error_body,
    json_response,
)
from hearth.wire.room import Room

if TYPE_CHECKING:
    # The service itself needs no torch.
    from hearth.sync.store import Buckets, SnapshotStore

LONGEST_POLL_S = 600.0
"""Longest wait of a request for a hot-load's end."""
MOST_PENDING = 32768
"""Completions that run or wait at once, of all clients; half of them of one alone. Those that run
are a few hundred, and a run that samples without a limit sends a whole step at once."""
BUCKET_HEADER = "x-hearth-snapshot-bucket"
"""Names the bucket from which a hot-load takes its snapshot."""


def create_app(
    backend: InferenceBackend,
    *,
    model_name: str,
    snapshots: SnapshotStore | Buckets[SnapshotStore],
    state_dir: Path | None = None,
    default_bucket: str = "default",
    on_phase: Callable[[Phase], None] | None = None,
) -> Starlette:
    """The app of one deployment, an ASGI application.

    Completions, chat and models of OpenAI's API and vLLM's ``tokenize`` under ``/v1`` and
    ``/inference/v1``, weight syncs under ``/hot_load/v1/models/hot_load``, ``/healthz``. The
    ``model`` of a request is not checked: the gateway has done that.

    With ``state_dir`` the deployment remembers what it serves. After a restart it loads that
    snapshot again and answers 425 until it is loaded (``app.state.restored``, a future or None). If
    that fails, it goes on answering 425 with the reason until a weight sync succeeds.
    ``app.state.failed`` is resolved with the reason then, or when the backend has failed.
    ``on_phase`` is called whenever the backend begins to sample, to load a snapshot or to idle.

    Raises:
        ConfigError: the file in ``state_dir`` cannot be read.
    """
    if on_phase is not None:
        backend.watch_phase(on_phase)
    hot_loads = HotLoads(backend, Sources(snapshots, default_bucket), state_dir)
    deployment = _Deployment(backend, model_name, hot_loads)
    routes = [
        ("/hot_load/v1/models/hot_load", "POST", deployment.hot_load),
        ("/hot_load/v1/models/hot_load", "GET", deployment.hot_load_state),
        ("/healthz", "GET", deployment.health),
        ("/stats", "GET", deployment.stats),
        ("/tokenize", "POST", deployment.tokenize),
    ]
    for prefix in ("/inference/v1", "/v1"):
        routes += [
            (f"{prefix}/completions", "POST", deployment.complete),
            (f"{prefix}/chat/completions", "POST", deployment.chat),
            (f"{prefix}/tokenize", "POST", deployment.tokenize),
            (f"{prefix}/models", "GET", deployment.models),
            (f"{prefix}/models/{{name:path}}", "GET", deployment.model),
        ]
    app = _App(
        routes=[Route(path, catch_errors(run), methods=[method]) for path, method, run in routes]
    )
    for prefix in ("/inference/v1", "/v1"):
        app.direct["POST", f"{prefix}/completions"] = catch_errors(deployment.complete)
    app.state.restored = hot_loads.restored
    app.state.failed = _first_of(hot_loads.failed, backend.failed)
    return app


class _App(Starlette):
    """Starlette, and ``direct`` handlers by method and path for the most frequent requests.

    They answer every error themselves, so they skip the routes and the middleware for errors.
    """

    def __init__(self, routes: list[Route]) -> None:
        super().__init__(routes=routes)
        self.direct: dict[tuple[str, str], Handler] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self.direct.get((scope.get("method", ""), scope.get("path", "")))
        if handler is None or scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        response = await handler(Request(scope, receive, send))
        await response(scope, receive, send)


class _Deployment:
    def __init__(self, backend: InferenceBackend, model_name: str, hot_loads: HotLoads) -> None:
        self._backend = backend
        self._model_name = model_name
        self._hot_loads = hot_loads
        self._created = int(time.time())
        self._room = Room(MOST_PENDING, "completions")
        self._sampled = Counter[str]()
        self._lock = threading.Lock()

    async def complete(self, request: Request) -> Response:
        start_s = time.perf_counter()
        self._hot_loads.require_ready()
        call = read_completion(await request.body())
        tokenizer = self._backend.tokenizer
        if is_text(call):
            prompts = await asyncio.to_thread(self._tokenize, call)
        else:
            prompts = prompt_ids(call, tokenizer, most_bytes=0)
        adapter = self._hot_loads.find_adapter(call.adapter)
        samples = completion_requests(call, prompts, client=_client(request), adapter=adapter)
        if call.stream and not is_whole(call):
            events = CompletionEvents(
                call, prompts, model_name=self._model_name, tokenizer=tokenizer
            )
            return await self._stream(request, samples, events)
        completions = await self._sample(request, samples)
        metrics = perf_metrics(prompts, completions, time.perf_counter() - start_s)
        body = completion_response(
            call,
            prompts,
            completions,
            model_name=self._model_name,
            metrics=metrics,
            tokenizer=tokenizer,
        ).dump()
        headers = _metric_headers(metrics)
        if not call.stream:
            return json_response(body, headers=headers)
        event = b"data: " + body + b"\n\ndata: [DONE]\n\n"
        return Response(event, headers=headers, media_type="text/event-stream")

    async def chat(self, request: Request) -> Response:
        start_s = time.perf_counter()
        self._hot_loads.require_ready()
        call = read_chat(await request.body())
        tokenizer = self._backend.tokenizer
        prompt = await asyncio.to_thread(self._render, call)
        samples = chat_requests(
            call,
            prompt,
            max_seq_len=self._backend.max_seq_len,
            client=_client(request),
            adapter=self._hot_loads.find_adapter(call.adapter),
            visible_tokens=visible_tokens(call, tokenizer),
        )
        if call.stream:
            events = ChatEvents(call, prompt, model_name=self._model_name, tokenizer=tokenizer)
            return await self._stream(request, samples, events)
        completions = await self._sample(request, samples)
        metrics = perf_metrics([prompt], completions, time.perf_counter() - start_s)
        response = chat_response(
            call,
            prompt,
            completions,
            model_name=self._model_name,
            tokenizer=tokenizer,
            metrics=metrics,
        )
        return json_response(response, headers=_metric_headers(metrics))

    async def tokenize(self, request: Request) -> Response:
        asked = read_tokenize(await request.body())
        tokens = await asyncio.to_thread(self._tokenize_request, asked)
        text_of = token_text(self._backend.tokenizer)
        return json_response(
            TokenizeResponse(
                count=len(tokens),
                max_model_len=self._backend.max_seq_len,
                tokens=tokens,
                token_strs=list(map(text_of, tokens)) if asked.return_token_strs else None,
            )
        )

    async def models(self, _: Request) -> Response:
        return json_response(ModelList(data=[self._model()]))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._model_name:
            raise NotFoundError(f"model must be {self._model_name!r}, got {name!r}")
        return json_response(self._model())

    async def hot_load(self, request: Request) -> Response:
        load = HotLoadRequest.parse(await request.body())
        metadata = load.incremental_snapshot_metadata
        self._hot_loads.load(
            load.identity,
            request.headers.get(BUCKET_HEADER),
            metadata and metadata.previous_snapshot_identity,
            running_requests=load.running_requests,
        )
        return json_response(self._hot_loads.state())

    async def hot_load_state(self, request: Request) -> Response:
        identity = request.query_params.get("wait_for")
        timeout_s = _seconds(request.query_params.get("timeout_s", "0"))
        state = self._backend.state()
        if not identity and state.stage == "loading":
            identity, timeout_s = state.target_identity, SHORT_WAIT_S
        if identity:
            sync = asyncio.wrap_future(self._hot_loads.watch(identity))
            try:
                await asyncio.wait([sync], timeout=timeout_s)
                if sync.done():
                    sync.result()
            finally:
                sync.cancel()
        return json_response(self._hot_loads.state())

    async def health(self, _: Request) -> Response:
        self._hot_loads.require_ready()
        state = self._backend.state()
        return json_response({"status": "ok", "weight_version": state.weight_version})

    async def stats(self, _: Request) -> Response:
        """The numbers of ``hearth.control.metrics``."""
        names = ("completions", "prompt_tokens", "completion_tokens")
        with self._lock:
            counts = {name: self._sampled[name] for name in names}
        version = self._backend.state().weight_version
        pending = self._room.in_flight()
        return json_response(
            counts | {"completions_in_progress": pending, "weight_version": version}
        )

    def _model(self) -> ModelCard:
        return ModelCard(
            id=self._model_name,
            created=self._created,
            owned_by="hearth",
            max_model_len=self._backend.max_seq_len,
        )

    @cached_property
    def _longest_text(self) -> int:
        """In bytes. A large vocabulary takes 0.1 s, so only who sends texts waits for it."""
        return longest_text(self._backend.tokenizer, self._backend.max_seq_len)

    def _tokenize(self, call: CompletionCall) -> list[list[int]]:
        return prompt_ids(call, self._backend.tokenizer, most_bytes=self._longest_text)

    def _tokenize_request(self, asked: TokenizeRequest) -> list[int]:
        return tokenize(asked, self._backend.tokenizer, most_bytes=self._longest_text)

    def _render(self, call: ChatRequest) -> list[int]:
        return chat_prompt(call, self._backend.tokenizer, most_bytes=self._longest_text)

    def _submit(self, samples: Sequence[SampleRequest]) -> list[Future[SampledSequence]]:
        """Queue all or, when one is refused or they are too many, none."""
        client = samples[0].client if samples else ""
        self._room.take(client, len(samples))
        futures: list[Future[SampledSequence]] = []
        try:
            for sample in samples:
                futures.append(self._backend.submit(sample))
        except RequestError as error:
            _cancel(futures)
            raise _name_prompt(error, samples, len(futures)) from None
        except BaseException:
            _cancel(futures)
            raise
        finally:
            self._room.give_back(client, len(samples) - len(futures))
            for sample, future in zip(samples, futures, strict=False):
                future.add_done_callback(partial(self._count, sample))
        return futures

    def _count(self, sample: SampleRequest, future: Future[SampledSequence]) -> None:
        """Count a completion that has ended; one that was cancelled or has failed as no sample."""
        self._room.give_back(sample.client, 1)
        if future.cancelled() or future.exception() is not None:
            return
        with self._lock:
            self._sampled["completions"] += 1
            self._sampled["prompt_tokens"] += len(sample.prompt)
            self._sampled["completion_tokens"] += len(future.result().token_ids)

    async def _sample(
        self, request: Request, samples: Sequence[SampleRequest]
    ) -> list[SampledSequence]:
        """Run all; an error or a client that disconnects cancels them."""
        futures = self._submit(samples)
        try:
            return await await_connected(
                request, asyncio.gather(*map(asyncio.wrap_future, futures))
            )
        finally:
            _cancel(futures)

    async def _stream(
        self,
        request: Request,
        samples: Sequence[SampleRequest],
        events: Callable[[list[StreamPiece]], Iterable[bytes]],
    ) -> Response:
        """Answer with events from the first piece on; an earlier error has its own status."""
        stream = CompletionStream(samples, self._submit, self._backend.tokenizer)
        try:
            first = await await_connected(request, asyncio.ensure_future(stream.next()))
        except BaseException:
            stream.close()
            raise
        request_id = request.state.request_id
        return EventResponse(
            stream, first, events=events, fault=lambda error: error_body(error, request_id)
        )


def _first_of(*failures: Future[EngineError]) -> Future[EngineError]:
    """What is resolved first."""
    first: Future[EngineError] = Future()
    for failure in failures:
        failure.add_done_callback(lambda done: resolve_future(first, result=done.result()))
    return first


def _cancel(futures: Iterable[Future[SampledSequence]]) -> None:
    for future in futures:
        future.cancel()


def _name_prompt(error: RequestError, samples: Sequence[SampleRequest], place: int) -> RequestError:
    """The error of the sample at ``place``; with several prompts it has the prompt's number."""
    prompts = list(dict.fromkeys(id(sample.prompt) for sample in samples))
    if len(prompts) == 1:
        return error
    number = prompts.index(id(samples[place].prompt))
    return RequestError(f"prompt {number} of {len(prompts)}: {error}")


def _client(request: Request) -> str:
    return request.headers.get(CLIENT_HEADER.decode(), "")


def _metric_headers(metrics: dict[str, str]) -> dict[str, str]:
    return {f"fireworks-{name}": value for name, value in metrics.items()}


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise RequestError(f"timeout_s must be a number of seconds >= 0, got {text!r}")
    return min(seconds, LONGEST_POLL_S)
