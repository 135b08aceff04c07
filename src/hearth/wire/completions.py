"""The deployment's protocol: completions with token ids and logprobs, and what is served.

Two logprobs of each sampled token: ``logprob`` under the model itself (before temperature), and
``sampling_logprob`` under the distribution that was sampled from (after temperature, top_p, top_k).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidatorFunctionWrapHandler,
    WrapSerializer,
    WrapValidator,
    model_serializer,
)

from hearth.wire.base import FiniteRecord, Record
from hearth.wire.tensors import Encoding, unpack_floats, unpack_ids

FinishReason = Literal["stop", "length"]
RunningRequests = Literal["drain", "keep"]
"""What new weights mean for requests that run; see ``HotLoadRequest``."""


def _read_packed(unpack: Callable[[str], list[Any]]) -> WrapValidator:
    def read(value: object, read_list: ValidatorFunctionWrapHandler) -> list[Any]:
        return unpack(value) if isinstance(value, str) else read_list(value)

    return WrapValidator(read)


def _keep_packed(value: object, write_list: SerializerFunctionWrapHandler) -> object:
    return value if isinstance(value, str) else write_list(value)


Ids = Annotated[list[int], _read_packed(unpack_ids), WrapSerializer(_keep_packed)]
"""Token ids; base64 of them is read as well, and a text is written as it is."""
Logprobs = Annotated[list[float | None], _read_packed(unpack_floats), WrapSerializer(_keep_packed)]
"""The same of numbers."""


class StreamOptions(Record):
    """``include_usage`` adds one last event with the token counts of the whole request."""

    include_usage: bool = False


class SamplingFields(FiniteRecord):
    """How to sample: what completions and chat have in common.

    ``top_k`` 0 and ``top_p`` 1 switch truncation off. ``top_logprobs`` tells the most probable
    tokens beside each sampled one. ``include_routing_matrix`` tells which experts a
    mixture-of-experts model took for each sampled token (``hearth.wire.routing``), where logprobs
    are told; a dense model leaves it out. ``adapter`` names the snapshot of a LoRA adapter in the
    deployment's bucket: it is sampled on the base weights (``max_adapters`` allows it). ``stream``
    sends text as it is sampled; with ``raw_output`` one event holds everything.
    ``return_token_ids`` tells the ids of prompt and answer where vLLM does, in streams too.
    """

    model: str = ""
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    top_logprobs: int | None = None
    include_routing_matrix: bool = False
    raw_output: bool = False
    adapter: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    perf_metrics_in_response: bool = False
    return_token_ids: bool = False


class CompletionFields(SamplingFields):
    """What a completion request has besides its prompt.

    ``max_tokens`` 0 with ``echo`` scores the prompt. ``logprobs`` as a number is OpenAI's: that
    many of the most probable tokens. ``logprob_format="arrays"`` puts logprobs into ``raw_output``
    as plain lists and leaves the per-token objects out. ``encoding="base64"`` makes the lists of
    ids and logprobs in ``raw_output`` texts: base64 of little-endian int32 and float32, NaN for
    null. ``prompt_cache_max_len`` is taken and changes nothing: a prompt from the cache has the
    numbers of a fresh one. ``include_prompt_routing`` adds the experts of the prompt's own tokens
    to ``raw_output``, which ``echo`` would do at the price of the prompt's ids and text.
    """

    max_tokens: int = 16
    echo: bool = False
    logprobs: bool | int | None = None
    logprob_format: Literal["objects", "arrays"] = "objects"
    encoding: Encoding = "list"
    prompt_cache_max_len: int | None = None
    include_prompt_routing: bool = False


class CompletionRequest(CompletionFields):
    """One prompt, ``n`` completions.

    Example: ``{"model": "accounts/me/deployments/d", "prompt": [1, 2, 3], "max_tokens": 16,
    "temperature": 1.0, "logprobs": true, "raw_output": true, "seed": 7}``
    """

    prompt: list[int] | str


class CompletionCall(CompletionFields):
    """A completion request as a deployment takes it: one prompt or several, ``n`` of each.

    Choices are numbered prompt by prompt: the ``n`` of the first, then those of the second.
    ``echo_last`` echoes so many of a prompt's last tokens alone, and only those are scored: with a
    large vocabulary most of a scoring's work is in the tokens that nobody asks about.
    """

    prompt: list[int] | str | list[list[int]] | list[str]
    echo_last: int | None = None


class TopLogprob(Record):
    """One of the most probable tokens at a position, under the model itself."""

    token: str
    token_id: int
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(Record):
    """One position. Prompt positions have no ``sampling_logprob``.

    The very first token of an echoed prompt has no probability either: its ``logprob`` is 0 here,
    where Fireworks' client insists on a number, and null in the lists. ``bytes`` are UTF-8, and
    absent where the token is only part of a character. ``routing_matrix`` are the experts of the
    position that the token was predicted at, the one before its own.
    """

    token: str
    token_id: int
    logprob: float | None = None
    sampling_logprob: float | None = None
    top_logprobs: list[TopLogprob] | None = None
    bytes: list[int] | None = None
    routing_matrix: str | None = None


class ChoiceLogprobs(Record):
    """Per-token logprobs: objects (``content``) and the older parallel lists.

    ``top_logprobs`` are by text, the sampled token among them; of tokens with one text the likelier
    stands there, and ``content`` has all. An echoed prompt's first position is null; in a stream
    all of the prompt's are. ``text_offset`` are the characters before each token where
    ``logprobs`` is OpenAI's number; in a stream those of earlier pieces count.
    """

    content: list[TokenLogprob]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] | None = None


class RawOutput(Record):
    """What was sampled, as ids. With ``echo`` the lists begin with the prompt.

    ``logprobs``, ``sampling_logprobs`` and ``routing_matrices`` (one text per id, empty for the
    first of a prompt) stand here only in the ``arrays`` format. ``prompt_routing_matrices`` are
    those of the prompt's ids after the first. ``versions`` are run lengths ``[weight version,
    number of sampled tokens]`` in the order of the tokens, several where weights were swapped amid
    the completion.
    """

    completion_token_ids: Ids
    prompt_token_ids: Ids | None = None
    logprobs: Logprobs | None = None
    sampling_logprobs: Logprobs | None = None
    versions: list[list[int]] | None = None
    routing_matrices: list[str] | None = None
    prompt_routing_matrices: list[str] | None = None


class Choice(Record):
    """One completion."""

    index: int
    text: str
    finish_reason: FinishReason
    logprobs: ChoiceLogprobs | None = None
    raw_output: RawOutput | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Usage(Record):
    """Token counts of one response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionResponse(Record):
    """All completions of one request, and the oldest weight version that sampled one of the tokens.

    ``snapshot_identity`` is that version's, absent for the weights of the start.
    """

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    weight_version: int
    snapshot_identity: str | None = None
    perf_metrics: dict[str, str] | None = None


class ChunkChoice(Record):
    """The next piece of one completion; ``finish_reason`` is null until its last."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: ChoiceLogprobs | None = None
    token_ids: list[int] | None = None
    """Those of this piece."""
    prompt_token_ids: list[int] | None = None
    """In the first piece."""

    @model_serializer(mode="wrap")
    def _with_nulls(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"finish_reason": None} | plain(self)


class CompletionChunk(Record):
    """One event of a streamed completion; those that end a choice tell its oldest version."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    weight_version: int | None = None
    snapshot_identity: str | None = None
    perf_metrics: dict[str, str] | None = None


class ModelCard(Record):
    """A deployment as OpenAI lists models. ``created`` is in seconds since 1970."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int | None = None


class ModelList(Record):
    """The models that are served here."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class DeltaMetadata(Record):
    """What a delta snapshot is to be applied to."""

    previous_snapshot_identity: str
    compression_format: str = "arc_v2"
    checksum_format: str = "alder32"


class HotLoadRequest(Record):
    """Serve this snapshot from now on. Example: ``{"identity": "step-1-f14b5f3d"}``.

    ``running_requests`` says what becomes of completions that run when the snapshot is ready:
    ``drain`` ends them on the old weights while new requests wait; ``keep`` swaps the weights amid
    them, so that their next tokens are the new version's, sampled on the old one's KV cache. Only a
    value other than ``drain`` is sent: Fireworks' servers do not know the field.
    """

    identity: str = Field(min_length=1)
    reset_prompt_cache: bool = True
    incremental_snapshot_metadata: DeltaMetadata | None = None
    running_requests: RunningRequests = "drain"

    @model_serializer(mode="wrap")
    def _without_default(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = plain(self)
        if self.running_requests == "drain":
            fields.pop("running_requests", None)
        return fields


class LoadingState(Record):
    """Where a hot-load stands."""

    stage: Literal["idle", "loading", "done", "error"]
    target_snapshot_identity: str | None = None
    error_message: str | None = None


class LoadedAdapter(Record):
    """A LoRA snapshot on a replica."""

    identity: str
    status: str


class ReplicaState(Record):
    """What one replica serves. ``weight_version`` is the number of the weight sync it serves.

    ``current_snapshot_identity`` is null, not absent, before the first.
    """

    current_snapshot_identity: str | None = None
    readiness: bool
    loading_state: LoadingState
    loaded_adapters: list[LoadedAdapter] = Field(default_factory=lambda: [])
    weight_version: int = 0

    @model_serializer(mode="wrap")
    def _with_nulls(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"current_snapshot_identity": None} | plain(self)


class HotLoadState(Record):
    """Answer to a hot-load question."""

    replicas: list[ReplicaState]
