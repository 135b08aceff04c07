"""The trainer's protocol: sessions, models, training operations and their futures.

Every long operation answers ``FutureRef`` at once; its result comes from ``retrieve_future``.
``seq_id`` counts 1, 2, 3, ... per model over all operations that have one, and orders them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hearth.errors import RequestError
from hearth.wire.base import FiniteRecord, Record
from hearth.wire.tensors import DType, Encoding, TensorRecord, encode

Normalization = Literal["num_loss_tokens", "num_sequences", "none"]
CheckpointType = Literal["base", "delta", "merged_base", "direct"]
MOST_TAGS = 128
"""Of a session."""


class CreateSession(Record):
    """Opens a client's session. Example: ``{"tags": [], "sdk_version": "0.1.0"}``."""

    tags: list[str] = Field(default_factory=list, max_length=MOST_TAGS)
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""


class SessionRef(Record):
    """Names an open session."""

    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None


class LoraSpec(FiniteRecord):
    """Low-rank adaptation of a model. ``rank`` 0 means full-parameter training.

    ``alpha`` scales the adapter by ``alpha / rank``; ``seed`` fixes its initial values.
    """

    rank: int = Field(default=0, ge=0)
    alpha: float = Field(default=32.0, gt=0)
    seed: int | None = None
    train_unembed: bool = False
    train_mlp: bool = True
    train_attn: bool = True
    init_method: str | None = None


class CreateModel(Record):
    """Makes a trainable model, or with ``base_only`` a frozen one that only runs ``forward``.

    On a forward-only trainer every model is frozen; an adapter stays as it is made, without effect.
    A trainer has at most one policy. One of the same ``owner`` is replaced, or without an owner one
    that has none; with ``replace_policy`` so is what any other client has left there.
    """

    session_id: str
    model_seq_id: int = 0
    base_model: str
    lora_config: LoraSpec | None = None
    base_only: bool = False
    projection_head_dim: int | None = None
    user_metadata: dict[str, Any] | None = None
    owner: str | None = None
    replace_policy: bool = False


class ModelRef(Record):
    """Names a model that exists. The capability flags tell a client what it may send.

    ``supports_router_replay`` is False for a dense model; ``keeps_graphs`` is that of ``Forward``,
    ``takes_columns`` that of ``ForwardInput``. Without ``supports_reinforce`` Fireworks' client
    does not ask for that loss.
    """

    model_id: str
    base_model: str | None = None
    lora_rank: int | None = None
    max_seq_len: int | None = None
    tensor_encodings: list[Encoding] | None = None
    comms: Literal["v1", "v2"] | None = None
    supports_router_replay: bool | None = None
    supports_reinforce: bool | None = None
    keeps_graphs: bool | None = None
    takes_columns: bool | None = None


class GetInfo(Record):
    """Asks what a model is."""

    model_id: str


class ModelData(Record):
    """What a model is made of."""

    arch: str
    model_name: str
    tokenizer_id: str


class ModelInfo(Record):
    """Answer to ``GetInfo``."""

    model_id: str
    model_data: ModelData
    model_name: str
    is_lora: bool
    lora_rank: int


class ChunkRecord(Record):
    """A run of token ids. Other chunk types (images) are refused by the engine."""

    type: str = "encoded_text"
    tokens: list[int] | None = None


class ModelInputRecord(Record):
    """A token sequence in chunks.

    ``routing_matrices`` are the experts that a mixture-of-experts model is to send each token to
    (``hearth.wire.routing``), one text per token; empty ones leave it to the model's router. An
    empty list, and any list for a dense model, is the same as none.
    """

    chunks: list[ChunkRecord]
    routing_matrices: list[str] | None = None


class DatumRecord(Record):
    """One sequence: ``model_input`` of N tokens, and per-position inputs aligned to its targets.

    Example: ``{"model_input": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
    "loss_fn_inputs": {"target_tokens": {"data": [2, 3], "dtype": "int64", "shape": [2]}}}``
    """

    model_input: ModelInputRecord
    loss_fn_inputs: dict[str, TensorRecord]


class DatumColumns(Record):
    """Datums of one form in a few tensors, whatever their number.

    Each is one run of token ids, with one value per token of each loss input. Values stand end to
    end, datum after datum; ``lengths`` [D] says how many tokens each has.
    """

    lengths: TensorRecord
    tokens: TensorRecord
    """int32 or int64 [sum of lengths]."""
    loss_fn_inputs: dict[str, TensorRecord]
    """Each [sum of lengths]; ``target_tokens`` among them."""

    def arrays(self) -> tuple[list[int], NDArray[np.int64], dict[str, NDArray[Any]]]:
        """Lengths, tokens and loss inputs; whole numbers are int64.

        Raises:
            RequestError: a column is of another size than the lengths add up to, or of a dtype
                that it cannot have.
        """
        lengths, tokens = self.lengths.to_numpy(), self.tokens.to_numpy()
        if self.lengths.dtype != "int64" or lengths.ndim != 1 or bool((lengths < 0).any()):
            raise RequestError("columns.lengths must be int64 numbers of tokens, >= 0")
        if self.tokens.dtype == "float32":
            raise RequestError("columns.tokens must be int32 or int64, got float32")
        inputs = {name: _widen(record.to_numpy()) for name, record in self.loss_fn_inputs.items()}
        shape = (int(lengths.sum()),)
        for name, values in (("tokens", tokens), *inputs.items()):
            if values.shape != shape:
                raise RequestError(
                    f"columns.{name} must have the shape that the lengths add up to, "
                    f"{list(shape)}, got {list(values.shape)}"
                )
        return lengths.tolist(), np.asarray(tokens, dtype=np.int64), inputs

    def cut(self, shares: Sequence[Sequence[int]]) -> list[DatumColumns]:
        """For each list of datums' places, columns of those datums.

        Raises:
            RequestError: as ``arrays``.
        """
        lengths, tokens, inputs = self.arrays()
        ends = np.cumsum([0, *lengths])

        def take(values: NDArray[Any], places: Sequence[int], dtype: DType) -> TensorRecord:
            parts = [values[ends[place] : ends[place + 1]] for place in places]
            return encode(np.concatenate([values[:0], *parts]), dtype, "base64")

        return [
            DatumColumns(
                lengths=encode([lengths[place] for place in places], "int64", "base64"),
                tokens=take(tokens, places, self.tokens.dtype),
                loss_fn_inputs={
                    name: take(values, places, self.loss_fn_inputs[name].dtype)
                    for name, values in inputs.items()
                },
            )
            for places in shares
        ]

    def datums(self) -> list[DatumRecord]:
        """The same one by one.

        Raises:
            RequestError: as ``arrays``.
        """
        lengths, tokens, inputs = self.arrays()
        if not lengths:
            return []
        cuts = np.cumsum(lengths)[:-1]
        rows = {name: np.split(values, cuts) for name, values in inputs.items()}
        return [
            DatumRecord(
                model_input=ModelInputRecord(chunks=[ChunkRecord(tokens=own.tolist())]),
                loss_fn_inputs={
                    name: encode(
                        parts[index], "int64" if parts[index].dtype == np.int64 else "float32"
                    )
                    for name, parts in rows.items()
                },
            )
            for index, own in enumerate(np.split(tokens, cuts))
        ]


def _widen(values: NDArray[Any]) -> NDArray[Any]:
    """int32 as int64, and all else as it is."""
    return values.astype(np.int64) if values.dtype == np.int32 else values


class ForwardInput(Record):
    """Data, as datums or as their ``columns``, and the objective to run on them."""

    data: list[DatumRecord] = Field(default_factory=lambda: [])
    columns: DatumColumns | None = None
    loss_fn: str = "cross_entropy"
    loss_fn_config: dict[str, float | int | str | bool] | None = None

    def datums(self) -> list[DatumRecord]:
        """The data one by one, whichever form they have.

        Raises:
            RequestError: the columns do not fit each other.
        """
        return self.data if self.columns is None else self.columns.datums()


class ModelOperation(Record):
    """An operation of a model; ``seq_id`` is its place among them."""

    model_id: str
    seq_id: int


class Forward(ModelOperation):
    """Logprobs of the targets, without a gradient.

    The trainer keeps its pass under the name ``graph``, for a ``ForwardBackward`` on the same data.
    """

    forward_input: ForwardInput
    tensor_encoding: Encoding = "list"
    graph: str | None = None


class ForwardBackward(ModelOperation):
    """Forward, loss and gradient. Gradients add up until ``OptimStep``.

    Where the pass named ``graph`` is still there, the forward is not computed again.
    """

    forward_backward_input: ForwardInput
    tensor_encoding: Encoding = "list"
    graph: str | None = None


class AdamParams(FiniteRecord):
    """One step of AdamW. ``grad_clip_norm`` 0 switches clipping off."""

    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = Field(default=0.0, ge=0)


class OptimStep(ModelOperation):
    """Applies the accumulated gradient, divided as ``grad_accumulation_normalization`` says.

    ``skip_zero_gradient`` leaves weights and moments as they are where the gradient is all zeros.
    """

    adam_params: AdamParams
    grad_accumulation_normalization: Normalization | None = None
    skip_zero_gradient: bool = False


class SaveWeights(ModelOperation):
    """Writes a resumable checkpoint: weights, optimizer, RNG and the client's ``metadata``.

    Example of metadata: ``{"cursor": 9, "version": 4, "config": {...}, "pinned": true}``; a pinned
    checkpoint is not retired.
    """

    path: str
    overwrite: bool = False
    metadata: dict[str, Any] | None = None


class LoadWeights(ModelOperation):
    """Reads a resumable checkpoint, with or without its optimizer.

    ``path`` is a name, or ``cross_job://<job>/<name>``.
    """

    path: str
    optimizer: bool = False


class SaveWeightsForSampler(ModelOperation):
    """Exports a snapshot that a deployment can serve.

    ``export_precision`` other than ``source`` (the weights' own) is refused.
    """

    path: str
    checkpoint_type: CheckpointType = "base"
    export_precision: str | None = None
    metadata: dict[str, Any] | None = None


class LoadAdapter(ModelOperation):
    """Starts a LoRA model from an existing PEFT adapter."""

    adapter_path: str


class UnloadModel(Record):
    """Frees a model."""

    model_id: str


class FutureRef(Record):
    """The answer to every long operation."""

    request_id: str
    model_id: str | None = None


class RetrieveFuture(Record):
    """Asks for a result; the server holds the question until there is one or its time is up."""

    request_id: str
    allow_metadata_only: bool = False


class TryAgain(Record):
    """No result yet."""

    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"] = "active"


class ForwardOutput(Record):
    """Result of ``Forward`` and ``ForwardBackward``: one output per datum, in order.

    To data that came as columns the outputs are ``columns`` too, datum after datum. Metric names
    are ``name:reduction``.
    """

    loss_fn_output_type: str = "ArrayRecord"
    loss_fn_outputs: list[dict[str, TensorRecord]]
    columns: dict[str, TensorRecord] | None = None
    metrics: dict[str, float] = Field(default_factory=dict)


class PassMetrics(Record):
    """A ``ForwardOutput`` for who looks at its metrics alone."""

    metrics: dict[str, float] = Field(default_factory=dict)


class OptimStepOutput(Record):
    """Result of ``OptimStep``; names are free."""

    metrics: dict[str, float] = Field(default_factory=dict)


class PathOutput(Record):
    """Result of the save and load operations; ``metadata`` are a loaded checkpoint's."""

    path: str
    metadata: dict[str, Any] | None = None


class LoadAdapterOutput(Record):
    """Result of ``LoadAdapter``."""

    model_id: str
    adapter_path: str
    type: Literal["load_adapter"] = "load_adapter"


class WeightsInfo(Record):
    """Asks what a resumable checkpoint is of, by its name or reference."""

    tinker_path: str


class WeightsFacts(Record):
    """Answer to ``WeightsInfo``; ``lora_rank`` is absent for a model without an adapter."""

    base_model: str
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


class CheckpointNames(Record):
    """The resumable checkpoints of a trainer, oldest first."""

    checkpoints: list[str]
