"""The training side of the SDK: sessions, models, and operations that return futures.

Each model has one stream of operations. A client takes its turn, gets the next sequence number,
posts, gives the turn back, and then waits for the result. Operations are therefore executed in the
order of the calls, and a custom loss keeps its turn between its forward and its backward pass.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import tinker
import torch
from numpy.typing import NDArray

from hearth.errors import ConfigError, ForwardOnlyError, RequestError
from hearth.sdk.background import APIFuture, start
from hearth.sdk.batches import (
    MAX_CHUNK_DATUMS,
    TENSOR_ENCODING,
    DatumBatch,
    build_batch,
    merge_outputs,
    split_datums,
)
from hearth.sdk.journal import JournalEntry
from hearth.sdk.stream import LOST, MOST_RESTARTS, OperationStream, Revival, retrieve
from hearth.sdk.transport import Http
from hearth.wire import tinker as wire
from hearth.wire.base import Record
from hearth.wire.messages import HttpRequest

logger = logging.getLogger(__name__)

RecordT = TypeVar("RecordT", bound=Record)
LossFunction = Callable[
    [list[tinker.Datum], list[torch.Tensor]], tuple[torch.Tensor, dict[str, float]]
]


@dataclass(frozen=True)
class SaveResult:
    """What a save wrote. ``snapshot_name`` is the identity that a deployment loads.

    After a load ``metadata`` are those that the checkpoint was saved with.
    """

    path: str
    snapshot_name: str
    metadata: dict[str, Any] | None = None


class FiretitanServiceClient:
    """One session on one trainer.

    ``revive``, where it is given, is awaited when the trainer is lost: it returns once the trainer
    runs again, or raises. Clients then rebuild their models as of the last operation.

    Raises:
        ConfigError: the base URL or the key is missing.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        max_chunk_datums: int = MAX_CHUNK_DATUMS,
        revive: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self._max_chunk_datums = max_chunk_datums
        self._http = Http(f"{base_url.rstrip('/')}/api/v1", api_key)
        self._revive = revive
        self._session_id: str | None = None
        self._models = 0
        self._owner = uuid.uuid4().hex
        self._streams: list[OperationStream] = []

    # The parameters are those of tinker's create_lora_training_client.
    def create_training_client(
        self,
        base_model: str,
        lora_rank: int = 0,
        *,
        lora_alpha: float = 32.0,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = False,
        replace: bool = False,
    ) -> FiretitanTrainingClient:
        """A client of a new trainable model; ``lora_rank`` 0 trains all parameters.

        On a forward-only trainer it is frozen, and has the base's logprobs whatever its rank is.
        ``replace`` makes room for it where an earlier client has left its models.

        Raises:
            RequestFailedError: the trainer serves another base model, or cannot make this one.
        """
        lora = None
        if lora_rank > 0:
            lora = wire.LoraSpec(
                rank=lora_rank,
                alpha=lora_alpha,
                seed=seed,
                train_mlp=train_mlp,
                train_attn=train_attn,
                train_unembed=train_unembed,
            )
        return self._create_client(
            self._request_for(base_model, lora_config=lora, replace_policy=replace)
        )

    def create_base_reference(self, base_model: str) -> FiretitanTrainingClient:
        """A client of the frozen base weights: ``forward`` works, training is refused."""
        return self._create_client(self._request_for(base_model, base_only=True))

    def _request_for(self, base_model: str, **options: Any) -> wire.CreateModel:
        """The request for a model; its session is filled in when it is sent."""
        return wire.CreateModel(session_id="", base_model=base_model, owner=self._owner, **options)

    def _create_client(self, request: wire.CreateModel) -> FiretitanTrainingClient:
        model = start(self._create_first_model(request)).result()
        client = FiretitanTrainingClient(
            self._http,
            request,
            model,
            max_chunk_datums=self._max_chunk_datums,
            revival=self._make_revival(request),
        )
        self._streams.append(client.stream)
        return client

    async def _create_first_model(self, request: wire.CreateModel) -> wire.ModelRef:
        for attempts_left in reversed(range(MOST_RESTARTS)):
            try:
                return await self._create_model(request)
            except LOST as error:
                if self._revive is None or self._http.is_closed or attempts_left == 0:
                    raise
                logger.warning("the trainer is lost over create_model: %s", error)
                await self._revive()
                self._session_id = None
        raise AssertionError("the last attempt returns or raises")

    async def _create_model(self, request: wire.CreateModel) -> wire.ModelRef:
        if self._session_id is None:
            opened = await self._http.post("/create_session", wire.CreateSession().dump())
            self._session_id = wire.SessionRef.parse(opened).session_id
        number, self._models = self._models, self._models + 1
        sent = request.model_copy(update={"session_id": self._session_id, "model_seq_id": number})
        accepted = wire.FutureRef.parse(await self._http.post("/create_model", sent.dump()))
        return await retrieve(self._http, accepted.request_id, wire.ModelRef)

    def _make_revival(self, request: wire.CreateModel) -> Revival | None:
        if self._revive is None:
            return None
        again = request.model_copy(update={"replace_policy": False})

        async def create_model() -> str:
            # A restarted trainer does not know the old session.
            self._session_id = None
            return (await self._create_model(again)).model_id

        return Revival(self._revive, create_model)

    def close(self) -> None:
        """Close the session's connections; its clients refuse further calls, waiting ones too."""

        async def close() -> None:
            await asyncio.gather(*(stream.close() for stream in self._streams))
            await self._http.close()

        start(close()).result()


class FiretitanTrainingClient:
    """Operations on one model. Each returns a future: ``.result()`` blocks, ``await`` does not.

    The methods are called from any thread; operations run in the order of the calls.
    """

    def __init__(
        self,
        http: Http,
        request: wire.CreateModel,
        model: wire.ModelRef,
        *,
        max_chunk_datums: int = MAX_CHUNK_DATUMS,
        revival: Revival | None = None,
    ) -> None:
        self.base_model = request.base_model
        self.lora_rank = request.lora_config.rank if request.lora_config is not None else 0
        self.is_frozen = request.base_only
        self.max_seq_len = model.max_seq_len
        """Most input tokens of a datum, where the trainer states it."""
        self.supports_router_replay = bool(model.supports_router_replay)
        """Whether the model sends tokens to experts, and to those of a ``RoutedModelInput``."""
        self.keeps_graphs = bool(model.keeps_graphs)
        """Whether the trainer keeps a forward pass for a later backward pass."""
        self.takes_columns = bool(model.takes_columns)
        """Whether the trainer takes many datums as a few tensors."""
        self._http = http
        self._max_chunk_datums = max_chunk_datums
        self.stream = OperationStream(http, model.model_id, revival=revival)
        """The order of its operations."""
        self._suffix = uuid.uuid4().hex[:8]

    @property
    def model_id(self) -> str:
        """The model's id on its trainer; another one after the trainer was restarted."""
        return self.stream.model_id

    @property
    def restarts(self) -> int:
        """How often the model was rebuilt on a restarted trainer."""
        return self.stream.restarts

    def forward(
        self,
        data: Sequence[tinker.Datum],
        loss_fn: str = "cross_entropy",
        loss_fn_config: dict[str, Any] | None = None,
        *,
        graph: str | None = None,
    ) -> APIFuture[tinker.ForwardBackwardOutput]:
        """Logprobs of every datum's targets (``loss_fn_outputs[i]["logprobs"]``), no gradient.

        The trainer keeps the pass under the name ``graph``, if it can, as far as one micro-batch
        goes: a ``forward_backward`` on the same texts that names it, before the weights change,
        computes no second forward pass.
        """
        return start(self._run_pass("forward", data, loss_fn, loss_fn_config, graph))

    def forward_backward(
        self,
        data: Sequence[tinker.Datum],
        loss_fn: str = "cross_entropy",
        loss_fn_config: dict[str, Any] | None = None,
        *,
        graph: str | None = None,
    ) -> APIFuture[tinker.ForwardBackwardOutput]:
        """Run a built-in objective on the trainer and add its gradient to what has accumulated.

        ``graph`` is that of ``forward``; where it is gone, everything is computed.
        """
        self._refuse_when_frozen("forward_backward")
        return start(self._run_pass("forward_backward", data, loss_fn, loss_fn_config, graph))

    def forward_backward_custom(
        self, data: Sequence[tinker.Datum], loss_fn: LossFunction, *, temperature: float = 1.0
    ) -> APIFuture[tinker.ForwardBackwardOutput]:
        """Run a loss of your own: ``loss_fn(data, logprobs) -> (loss, metrics)``.

        ``logprobs`` are leaf tensors, one [N-1] per datum; the loss's gradient with respect to them
        goes back to the trainer as weights of a linear surrogate, which has the same gradient in
        the parameters. ``temperature`` divides the logits first, so that the logprobs are those of
        the distribution that was sampled from. The result's metrics are the loss function's own,
        plus ``loss:sum``.
        """
        self._refuse_when_frozen("forward_backward_custom")
        return start(self._run_custom_loss(list(data), loss_fn, temperature))

    def optim_step(
        self,
        adam_params: tinker.AdamParams,
        grad_accumulation_normalization: wire.Normalization | None = None,
        *,
        skip_zero_gradient: bool = False,
    ) -> APIFuture[tinker.OptimStepResponse]:
        """One AdamW step on the accumulated gradient, divided as the normalization mode says.

        A gradient of zeros still moves the weights, by the moments and the weight decay; with
        ``skip_zero_gradient`` it changes nothing, and the metric ``skipped`` is 1.

        Raises:
            ConfigError: the mode is unknown.
        """
        self._refuse_when_frozen("optim_step")
        modes = ("num_loss_tokens", "num_sequences", "none", None)
        if grad_accumulation_normalization not in modes:
            raise ConfigError(
                f"grad_accumulation_normalization must be one of {list(modes)}, "
                f"got {grad_accumulation_normalization!r}"
            )
        body: dict[str, Any] = {"adam_params": adam_params.model_dump(exclude={"type"})}
        if grad_accumulation_normalization is not None:
            body["grad_accumulation_normalization"] = grad_accumulation_normalization
        if skip_zero_gradient:
            body["skip_zero_gradient"] = True

        async def step() -> tinker.OptimStepResponse:
            done = await self._run_operation("optim_step", body, wire.OptimStepOutput)
            return tinker.OptimStepResponse(metrics=done.metrics)

        return start(step())

    def save_state(
        self, name: str, *, overwrite: bool = False, metadata: dict[str, Any] | None = None
    ) -> APIFuture[SaveResult]:
        """Write a resumable checkpoint: weights, optimizer, step count, RNG and ``metadata``.

        The metadata are your own JSON values, 1 MiB at most, which loading gives back; with
        ``"pinned": True`` the checkpoint stays where old ones are retired.
        """
        body: dict[str, Any] = {"path": name, "overwrite": overwrite}
        if metadata is not None:
            body["metadata"] = metadata
        return self._save("save_weights", body)

    def load_state(self, path: str) -> APIFuture[SaveResult]:
        """Read a checkpoint's weights and start with a fresh optimizer."""
        return self._save("load_weights", {"path": path, "optimizer": False})

    def load_state_with_optimizer(self, path: str) -> APIFuture[SaveResult]:
        """Read a checkpoint's weights and its optimizer."""
        return self._save("load_weights", {"path": path, "optimizer": True})

    def resolve_checkpoint_path(self, name: str, source_job_id: str | None = None) -> str:
        """What ``load_state`` takes for a checkpoint of this job or of ``source_job_id``.

        It sends no request: loading shows whether the checkpoint exists.

        Raises:
            ConfigError: a part is empty or has a ``/``.
        """
        parts = {"name": name} | ({} if source_job_id is None else {"source_job_id": source_job_id})
        for field, value in parts.items():
            if not value or "/" in value:
                raise ConfigError(f"{field} must be a name without '/', got {value!r}")
        return name if source_job_id is None else f"cross_job://{source_job_id}/{name}"

    def load_adapter(self, adapter_path: str) -> APIFuture[SaveResult]:
        """Start this LoRA model from a PEFT adapter."""

        async def load() -> SaveResult:
            body = {"adapter_path": adapter_path}
            done = await self._run_operation("load_adapter", body, wire.LoadAdapterOutput)
            return SaveResult(path=done.adapter_path, snapshot_name=done.adapter_path)

        return start(load())

    def save_weights_for_sampler(
        self, name: str, checkpoint_type: wire.CheckpointType = "base"
    ) -> APIFuture[SaveResult]:
        """Save a snapshot under ``name`` plus this client's suffix, so reruns never collide."""
        body = {"path": f"{name}-{self._suffix}", "checkpoint_type": checkpoint_type}
        return self._save("save_weights_for_sampler", body)

    def save_weights_for_sampler_ext(
        self, name: str, checkpoint_type: wire.CheckpointType = "base"
    ) -> SaveResult:
        """``save_weights_for_sampler``, waiting for it."""
        return self.save_weights_for_sampler(name, checkpoint_type).result()

    def list_checkpoints(self) -> list[str]:
        """Names of the trainer's resumable checkpoints, oldest first."""

        async def names() -> list[str]:
            answer = await self._http.request(HttpRequest("GET", "/list_checkpoints"))
            return wire.CheckpointNames.parse(answer.content).checkpoints

        return start(names()).result()

    def unload(self) -> None:
        """Free the model on the trainer; later calls are ``ClosedError``."""
        start(self.stream.unload()).result()

    def _save(self, operation: str, body: dict[str, Any]) -> APIFuture[SaveResult]:
        async def save() -> SaveResult:
            done = await self._run_operation(operation, body, wire.PathOutput)
            return SaveResult(path=done.path, snapshot_name=done.path, metadata=done.metadata)

        return start(save())

    def _refuse_when_frozen(self, operation: str) -> None:
        if self.is_frozen:
            raise ForwardOnlyError(
                f"{operation} must run on a trainable model, got the frozen reference "
                f"{self.model_id!r}: a reference only runs forward()"
            )

    async def _run_operation(
        self, operation: str, body: dict[str, Any], kind: type[RecordT]
    ) -> RecordT:
        async with self.stream.turn:
            accepted = await self.stream.submit(operation, body)
        return await self.stream.result(accepted, kind)

    async def _run_pass(
        self,
        operation: str,
        data: Sequence[tinker.Datum],
        loss_fn: str,
        loss_fn_config: dict[str, Any] | None,
        graph: str | None,
    ) -> tinker.ForwardBackwardOutput:
        batches: list[DatumBatch] = []
        async with self.stream.turn:
            accepted: list[JournalEntry] = []
            for chunk in split_datums(data, self._max_chunk_datums):
                batches.append(build_batch(chunk, as_columns=self.takes_columns))
                accepted.append(
                    await self._post_batch(
                        operation, batches[-1], loss_fn, loss_fn_config, graph, len(accepted)
                    )
                )
        return merge_outputs(await self._fetch_results(accepted, wire.ForwardOutput), batches)

    async def _post_batch(
        self,
        operation: str,
        batch: DatumBatch,
        loss_fn: str,
        loss_fn_config: dict[str, Any] | None,
        graph: str | None,
        number: int,
    ) -> JournalEntry:
        """Submit the chunk of that number; the caller holds the turn."""
        content: dict[str, Any] = {**batch.body, "loss_fn": loss_fn}
        if loss_fn_config:
            content["loss_fn_config"] = loss_fn_config
        body: dict[str, Any] = {f"{operation}_input": content, "tensor_encoding": TENSOR_ENCODING}
        if graph is not None and self.keeps_graphs:
            body["graph"] = f"{graph}-{number}"
        return await self.stream.submit(operation, body)

    async def _fetch_results(
        self, accepted: list[JournalEntry], kind: type[RecordT]
    ) -> list[RecordT]:
        """Each chunk's result; an error is raised once all have ended."""
        parts = await asyncio.gather(
            *(self.stream.result(operation, kind) for operation in accepted), return_exceptions=True
        )
        done: list[RecordT] = []
        for part in parts:
            if isinstance(part, BaseException):
                raise part
            done.append(part)
        return done

    async def _run_custom_loss(
        self, data: list[tinker.Datum], loss_fn: LossFunction, temperature: float
    ) -> tinker.ForwardBackwardOutput:
        if any("target_tokens" not in datum.loss_fn_inputs for datum in data):
            raise RequestError("loss_fn_inputs must hold 'target_tokens', got none")
        config = {"temperature": temperature} if temperature != 1.0 else None
        # Only what the trainer needs to score the targets; the rest stays with the loss function.
        batches = [
            build_batch(chunk, ("target_tokens",), as_columns=self.takes_columns)
            for chunk in split_datums(data, self._max_chunk_datums)
        ]
        graph = uuid.uuid4().hex[:12]

        async def post(operation: str, chunks: Iterable[DatumBatch]) -> list[JournalEntry]:
            return [
                await self._post_batch(operation, chunk, "cross_entropy", config, graph, number)
                for number, chunk in enumerate(chunks)
            ]

        async with self.stream.turn:
            parts = await self._fetch_results(await post("forward", batches), wire.ForwardOutput)
            scored = merge_outputs(parts, batches)
            logprobs = [
                torch.tensor(output["logprobs"].to_numpy(), dtype=torch.float32)
                for output in scored.loss_fn_outputs
            ]
            loss, metrics, weights = await asyncio.to_thread(
                _differentiate_loss, data, logprobs, loss_fn
            )
            rest = iter(weights)
            weighted = (batch.with_weights(list(islice(rest, batch.count))) for batch in batches)
            accepted = await post("forward_backward", weighted)
        surrogates = await self._fetch_results(accepted, wire.PassMetrics)
        own = {**metrics, "loss:sum": loss}
        own["surrogate_loss:sum"] = sum(
            surrogate.metrics.get("loss:sum", 0.0) for surrogate in surrogates
        )
        return tinker.ForwardBackwardOutput(
            loss_fn_output_type=scored.loss_fn_output_type,
            loss_fn_outputs=scored.loss_fn_outputs,
            metrics=own,
        )


def _differentiate_loss(
    data: list[tinker.Datum], logprobs: list[torch.Tensor], loss_fn: LossFunction
) -> tuple[float, dict[str, float], list[NDArray[np.float32]]]:
    """Value, metrics, and minus the gradient per logprob: the weights of the linear surrogate."""
    leaves = [logprob.requires_grad_(True) for logprob in logprobs]
    loss, metrics = loss_fn(data, leaves)
    if not bool(torch.isfinite(loss)):
        raise RequestError(f"the loss must be finite, got {float(loss.detach())}: {metrics}")
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    weights = [
        (torch.zeros_like(leaf) if gradient is None else -gradient).detach().numpy()
        for leaf, gradient in zip(leaves, gradients, strict=True)
    ]
    return float(loss.detach()), dict(metrics), weights
