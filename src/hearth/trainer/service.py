"""The trainer's HTTP app: it parses requests, queues operations and returns results.

Any operation with a model and a number is accepted. Errors in its content fail its future, so that
its number is used and the next operations run.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hearth.errors import HearthError, NumericsError, RequestError
from hearth.models.lora import LoraOptions
from hearth.trainer.engine import TrainerEngine
from hearth.trainer.futures import FutureStore
from hearth.trainer.passes import PassResult
from hearth.trainer.queue import OperationQueue
from hearth.wire import tinker
from hearth.wire.base import Record, parse_json, quote
from hearth.wire.http import Handler, handle_error, json_response
from hearth.wire.tensors import Encoding, encode

Content = dict[str, Any]

POLL_S = 25.0
"""How long a request for a result waits; clients time out at 45 s."""

# Above this, reading a body would hold the event loop for more than about a millisecond.
_LARGE_BODY = 2**18


class Unloaded(Record):
    """Result of ``UnloadModel``."""

    model_id: str


@dataclass(frozen=True)
class Operations:
    """The engine's operations, from wire content to wire record; they run on the queue's thread."""

    engine: TrainerEngine
    queue: OperationQueue

    def create_model(self, content: Content) -> Record:
        request = tinker.CreateModel.from_dict(content)
        if request.base_model not in (self.engine.name, self.engine.source):
            raise RequestError(
                f"base_model must be {self.engine.name!r}, which this trainer serves, got "
                f"{request.base_model!r}"
            )
        if request.projection_head_dim:
            raise RequestError(
                f"projection_head_dim must be absent, got {request.projection_head_dim}: a model "
                "here has its language model head only"
            )
        lora = _parse_lora(request.lora_config)
        model_id = self.engine.create_model(
            lora, is_frozen=request.base_only, owner=request.owner, replace=request.replace_policy
        )
        self.queue.open(model_id)
        return tinker.ModelRef(
            model_id=model_id,
            base_model=self.engine.name,
            lora_rank=self.engine.facts(model_id).lora_rank,
            max_seq_len=self.engine.max_seq_len,
            tensor_encodings=["list", "base64"],
            supports_router_replay=self.engine.supports_router_replay,
            supports_reinforce=True,
            keeps_graphs=self.engine.keeps_graphs,
            takes_columns=True,
        )

    def forward(self, content: Content) -> Record:
        request = tinker.Forward.from_dict(content)
        return _run_pass(self.engine.forward, request, request.forward_input)

    def forward_backward(self, content: Content) -> Record:
        request = tinker.ForwardBackward.from_dict(content)
        return _run_pass(self.engine.forward_backward, request, request.forward_backward_input)

    def optim_step(self, content: Content) -> Record:
        request = tinker.OptimStep.from_dict(content)
        metrics = self.engine.optim_step(
            request.model_id,
            request.adam_params,
            request.grad_accumulation_normalization,
            skip_zero_gradient=request.skip_zero_gradient,
        )
        return tinker.OptimStepOutput(metrics=metrics)

    def save_weights(self, content: Content) -> Record:
        request = tinker.SaveWeights.from_dict(content)
        name = self.engine.save_state(
            request.model_id,
            request.path,
            overwrite=request.overwrite,
            metadata=request.metadata,
            seq_id=request.seq_id,
        )
        return tinker.PathOutput(path=name)

    def load_weights(self, content: Content) -> Record:
        request = tinker.LoadWeights.from_dict(content)
        metadata = self.engine.read_checkpoint_facts(request.path).metadata
        name = self.engine.load_state(
            request.model_id, request.path, with_optimizer=request.optimizer
        )
        return tinker.PathOutput(path=name, metadata=dict(metadata) or None)

    def save_weights_for_sampler(self, content: Content) -> Record:
        request = tinker.SaveWeightsForSampler.from_dict(content)
        if request.export_precision not in (None, "source"):
            raise RequestError(
                f"export_precision must be 'source', got {request.export_precision!r}: snapshots "
                "hold the weights as they are served"
            )
        identity = self.engine.save_for_sampler(
            request.model_id, request.path, request.checkpoint_type, request.metadata
        )
        return tinker.PathOutput(path=identity)

    def load_adapter(self, content: Content) -> Record:
        request = tinker.LoadAdapter.from_dict(content)
        self.engine.load_adapter(request.model_id, request.adapter_path)
        return tinker.LoadAdapterOutput(
            model_id=request.model_id, adapter_path=request.adapter_path
        )

    def unload_model(self, content: Content) -> Record:
        model_id = tinker.UnloadModel.from_dict(content).model_id
        self.engine.unload(model_id)
        self.queue.drop(model_id)
        return Unloaded(model_id=model_id)


def create_app(
    engine: TrainerEngine, *, poll_s: float = POLL_S, on_phase: Callable[[str], None] | None = None
) -> Starlette:
    """The ASGI app of one trainer, under ``/api/v1``. Its thread ends with ``engine.close()``.

    ``on_phase`` is called with the name of each operation that begins, and ``idle`` when it ends.
    """
    futures = FutureStore()
    queue = OperationQueue(futures, name=engine.name, on_phase=on_phase)
    engine.call_on_close(queue.close)
    operations = Operations(engine, queue)

    async def stats(_: Request) -> Response:
        return json_response(queue.stats())

    routes = [
        *_future_routes(futures, poll_s),
        *_operation_routes(operations),
        *_model_routes(operations),
        *_session_routes(),
        Route("/stats", stats, methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers={HearthError: handle_error})


def _post(handler: Handler) -> Route:
    return Route(f"/api/v1/{handler.__name__}", handler, methods=["POST"])


def _get(handler: Handler) -> Route:
    return Route(f"/api/v1/{handler.__name__}", handler, methods=["GET"])


def _constant(name: str, content: dict[str, Any], method: str = "POST") -> Route:
    async def respond(_: Request) -> Response:
        return json_response(content)

    return Route(f"/api/v1/{name}", respond, methods=[method])


def _session_routes() -> list[Route]:
    async def create_session(_: Request) -> Response:
        return json_response(tinker.SessionRef(session_id=f"session-{uuid.uuid4().hex[:12]}"))

    flags = {"parallel_fwdbwd_chunks": True, "proto_write_fwdbwd": False}
    return [
        _constant("healthz", {"status": "ok"}, "GET"),
        _constant("client/config", flags | {"proto_compress_fwdbwd": False}),
        _post(create_session),
        _constant("session_heartbeat", {}),
        _constant("telemetry", {"status": "accepted"}),
    ]


def _model_routes(operations: Operations) -> list[Route]:
    engine, queue = operations.engine, operations.queue

    async def create_model(request: Request) -> Response:
        content = await _read_content(request)
        # Two requests with the same number of a session are the same request.
        session, number = content.get("session_id"), content.get("model_seq_id")
        key = None if session is None or number is None else f"{session}/{number}"
        request_id = queue.submit(
            lambda: operations.create_model(content), key=key, phase="create_model"
        )
        return json_response(tinker.FutureRef(request_id=request_id))

    async def unload_model(request: Request) -> Response:
        content = await _read_content(request)
        request_id = queue.submit(lambda: operations.unload_model(content), phase="unload_model")
        return json_response(tinker.FutureRef(request_id=request_id))

    async def get_info(request: Request) -> Response:
        facts = engine.facts(tinker.GetInfo.from_dict(await _read_content(request)).model_id)
        data = tinker.ModelData(arch=facts.arch, model_name=engine.name, tokenizer_id=engine.source)
        info = tinker.ModelInfo(
            model_id=facts.model_id,
            model_data=data,
            model_name=engine.name,
            is_lora=facts.lora_rank > 0,
            lora_rank=facts.lora_rank,
        )
        return json_response(info)

    async def get_server_capabilities(_: Request) -> Response:
        model = {"model_name": engine.name, "max_context_length": engine.max_seq_len}
        return json_response({"supported_models": [model]})

    async def weights_info(request: Request) -> Response:
        named = tinker.WeightsInfo.from_dict(await _read_content(request))
        facts = engine.read_checkpoint_facts(named.tinker_path)
        info = tinker.WeightsFacts(base_model=facts.base_model, is_lora=facts.lora is not None)
        if facts.lora is not None:
            info.lora_rank = facts.lora.rank
            info.train_unembed = facts.lora.train_unembed
            info.train_mlp, info.train_attn = facts.lora.train_mlp, facts.lora.train_attn
        return json_response(info)

    async def list_checkpoints(_: Request) -> Response:
        return json_response(tinker.CheckpointNames(checkpoints=engine.list_checkpoints()))

    posts = map(_post, (create_model, unload_model, get_info, weights_info))
    return [*posts, *map(_get, (get_server_capabilities, list_checkpoints))]


def _operation_routes(operations: Operations) -> list[Route]:
    """The numbered operations; each is a route of its own name."""

    def route(run: Callable[[Content], Record]) -> Route:
        async def submit(request: Request) -> Response:
            content = await _read_content(request)
            model_id, seq_id = _read_address(content)
            request_id = operations.queue.submit_numbered(
                model_id,
                seq_id,
                lambda: run(content),
                phase=run.__name__,
                size=len(await request.body()),
            )
            return json_response(tinker.FutureRef(request_id=request_id, model_id=model_id))

        return Route(f"/api/v1/{run.__name__}", submit, methods=["POST"])

    return [
        route(operations.forward),
        route(operations.forward_backward),
        route(operations.optim_step),
        route(operations.save_weights),
        route(operations.load_weights),
        route(operations.save_weights_for_sampler),
        route(operations.load_adapter),
    ]


def _future_routes(futures: FutureStore, poll_s: float) -> list[Route]:
    async def retrieve_future(request: Request) -> Response:
        request_id = tinker.RetrieveFuture.from_dict(await _read_content(request)).request_id
        body = await futures.wait(request_id, poll_s)
        return json_response(body or tinker.TryAgain(request_id=request_id))

    return [_post(retrieve_future)]


async def _read_content(request: Request) -> Content:
    """The body as plain containers; the queue's thread makes records and tensors of them.

    Raises:
        RequestError: the body is no JSON object.
    """
    body = await request.body()
    if len(body) > _LARGE_BODY:
        return await asyncio.to_thread(_parse, body)
    return _parse(body)


def _parse(body: bytes) -> Content:
    content = parse_json(body)
    if not isinstance(content, dict):
        raise RequestError(f"body must be a JSON object, got {type(content).__name__}")
    return content


def _read_address(content: Content) -> tuple[str, int]:
    """The model and number of an operation.

    Raises:
        RequestError: they are missing or have another type.
    """
    model_id, seq_id = content.get("model_id"), content.get("seq_id")
    if not isinstance(model_id, str) or not isinstance(seq_id, int) or isinstance(seq_id, bool):
        raise RequestError(
            f"model_id must be a string and seq_id an integer, got {quote(model_id)} "
            f"and {quote(seq_id)}"
        )
    return model_id, seq_id


def _parse_lora(spec: tinker.LoraSpec | None) -> LoraOptions | None:
    if spec is None or spec.rank == 0:
        return None
    if spec.init_method not in (None, "kaiming"):
        raise RequestError(
            f"lora_config.init_method must be 'kaiming' or absent, got {spec.init_method!r}"
        )
    return LoraOptions(
        rank=spec.rank,
        alpha=spec.alpha,
        seed=spec.seed or 0,
        train_attn=spec.train_attn,
        train_mlp=spec.train_mlp,
        train_unembed=spec.train_unembed,
    )


def _run_pass(
    run: Callable[..., PassResult],
    request: tinker.Forward | tinker.ForwardBackward,
    given: tinker.ForwardInput,
) -> Record:
    if given.columns is not None and given.data:
        raise RequestError("data must be absent beside columns, got both: send the datums once")
    data = given.data if given.columns is None else given.columns
    result = run(request.model_id, data, given.loss_fn, given.loss_fn_config, graph=request.graph)
    return _make_output(result, request.tensor_encoding, as_columns=given.columns is not None)


def _make_output(result: PassResult, encoding: Encoding, *, as_columns: bool) -> Record:
    """The result as a record.

    Raises:
        NumericsError: a metric is not finite, which JSON cannot hold.
    """
    odd = {name: value for name, value in result.metrics.items() if not math.isfinite(value)}
    if odd:
        raise NumericsError(
            f"metrics must be finite, got {odd}: the loss has overflowed; "
            "optim_step refuses a gradient that has overflowed, too"
        )
    if as_columns:
        columns = {"logprobs": encode(result.values, "float32", encoding)}
        return tinker.ForwardOutput(loss_fn_outputs=[], columns=columns, metrics=result.metrics)
    outputs = [{"logprobs": encode(values, "float32", encoding)} for values in result.logprobs]
    return tinker.ForwardOutput(loss_fn_outputs=outputs, metrics=result.metrics)
