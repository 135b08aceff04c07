"""The deployment's protocol: completions with token ids and logprobs, and what is served.

Two logprobs of each drawn token: ``logprob`` under the model itself (before temperature), and
``sampling_logprob`` under the distribution that was drawn from (after temperature, top_p, top_k).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hearth.wire.base import Record

FinishReason = Literal["stop", "length"]


class CompletionRequest(Record):
    """One prompt, ``n`` completions.

    ``top_k`` 0 and ``top_p`` 1 switch truncation off. ``max_tokens`` 0 with ``echo`` scores the
    prompt. ``logprob_format="arrays"`` puts logprobs into ``raw_output`` as plain lists and leaves
    the per-token objects out.

    Example: ``{"model": "accounts/me/deployments/d", "prompt": [1, 2, 3], "max_tokens": 16,
    "temperature": 1.0, "logprobs": true, "raw_output": true, "seed": 7}``
    """

    model: str = ""
    prompt: list[int] | str
    n: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    echo: bool = False
    logprobs: bool | int | None = None
    logprob_format: Literal["objects", "arrays"] = "objects"
    raw_output: bool = False
    stream: bool = False
    perf_metrics_in_response: bool = False


class TokenLogprob(Record):
    """One position. Prompt positions have no ``sampling_logprob``.

    The very first token of an echoed prompt has no probability either: its ``logprob`` is 0 here,
    where Fireworks' client insists on a number, and null in the lists.
    """

    token: str
    token_id: int
    logprob: float | None = None
    sampling_logprob: float | None = None


class ChoiceLogprobs(Record):
    """Per-token logprobs: objects (``content``) and the older parallel lists."""

    content: list[TokenLogprob]
    tokens: list[str]
    token_logprobs: list[float | None]


class RawOutput(Record):
    """What was drawn, as ids. With ``echo`` the lists begin with the prompt.

    ``logprobs`` and ``sampling_logprobs`` stand here only in the ``arrays`` format. ``versions``
    are run lengths ``[weight version, number of drawn tokens]``.
    """

    completion_token_ids: list[int]
    prompt_token_ids: list[int] | None = None
    logprobs: list[float | None] | None = None
    sampling_logprobs: list[float | None] | None = None
    versions: list[list[int]] | None = None


class Choice(Record):
    """One completion."""

    index: int
    text: str
    finish_reason: FinishReason
    logprobs: ChoiceLogprobs | None = None
    raw_output: RawOutput | None = None


class Usage(Record):
    """Token counts of one response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionResponse(Record):
    """All completions of one request, and the weight version that drew them."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    weight_version: int
    snapshot_identity: str | None = None
    perf_metrics: dict[str, str] | None = None


class DeltaMetadata(Record):
    """What a delta snapshot is to be applied to."""

    previous_snapshot_identity: str
    compression_format: str = "arc_v2"
    checksum_format: str = "alder32"


class HotLoadRequest(Record):
    """Serve this snapshot from now on. Example: ``{"identity": "step-1-f14b5f3d"}``."""

    identity: str = Field(min_length=1)
    reset_prompt_cache: bool = True
    incremental_snapshot_metadata: DeltaMetadata | None = None


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
    """What one replica serves. ``weight_version`` counts the weight syncs it has taken."""

    current_snapshot_identity: str | None = None
    readiness: bool
    loading_state: LoadingState
    loaded_adapters: list[LoadedAdapter] = Field(default_factory=lambda: [])
    weight_version: int = 0


class HotLoadState(Record):
    """Answer to a hot-load question."""

    replicas: list[ReplicaState]
