"""The JSON requests of Tinker's official clients.

A field that a newer client sends and this file does not have is logged once, and changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast

from pydantic import Field, model_validator

from hearth.errors import RequestError
from hearth.wire.base import Record
from hearth.wire.tinker import MOST_TAGS

logger = logging.getLogger(__name__)

_LEAST_TTL_S, _MOST_TTL_S = 3600, 10 * 366 * 24 * 3600
_MOST_LOGGED = 1000
_logged: set[tuple[str, str]] = set()


def log_unknown(message: str, fields: Iterable[object]) -> None:
    """Log fields of a message that are unknown here; each once."""
    for field in fields:
        if (message, str(field)) not in _logged and len(_logged) < _MOST_LOGGED:
            _logged.add((message, str(field)))
            logger.warning("%s has the field %.80r, which is unknown here", message, field)


class TinkerRequest(Record):
    """A request's body, or a part of one."""

    @model_validator(mode="before")
    @classmethod
    def _log_unknown(cls, content: Any) -> Any:
        if isinstance(content, Mapping):
            fields = cast(Mapping[str, object], content).keys()
            log_unknown(cls.__name__, fields - cls.model_fields.keys() - {"type"})
        return cast(object, content)


class CreateSessionRequest(TinkerRequest):
    """Opens a session."""

    tags: list[str] = Field(default_factory=lambda: [], max_length=MOST_TAGS)
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class NamedSession(TinkerRequest):
    """Names a session."""

    session_id: str


class LoraConfig(TinkerRequest):
    """The adapter of a run, as a client asks for it. Its alpha is always 32."""

    rank: int = Field(ge=1)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(TinkerRequest):
    """Which optimizer a run has."""

    type: str = "adamw"


class CreateModelRequest(TinkerRequest):
    """Begins a run."""

    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None


class LoadWeightsRequest(TinkerRequest):
    """Loads a checkpoint into a run, or begins a run with one."""

    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool = False
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None


class OptimStepRequest(TinkerRequest):
    """One optimizer step of a run."""

    model_id: str
    seq_id: int
    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None


class Save(TinkerRequest):
    """What all saves have."""

    model_id: str
    seq_id: int
    path: str | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class SaveWeightsRequest(Save):
    """Saves a run's training state."""

    overwrite: bool = False


class SaveForSampler(Save):
    """Saves a run's weights for sampling: under a name, or for a new sampling session."""

    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class SaveExternal(Save):
    """Saves a run's adapter as a folder that can be downloaded."""

    age_encryption_recipients: list[str] | None = None


class NamedModel(TinkerRequest):
    """Names a run."""

    model_id: str


class CreateSampler(TinkerRequest):
    """Opens a sampling session on a base model, or on saved weights."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class SamplingParams(TinkerRequest):
    """How to sample."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_k: int = -1
    top_p: float = Field(default=1.0, allow_inf_nan=False)


class PromptChunks(TinkerRequest):
    """A prompt in chunks."""

    chunks: list[dict[str, Any]]


class AskSamples(TinkerRequest):
    """Asks for samples of one prompt."""

    num_samples: int = 1
    prompt: PromptChunks
    sampling_params: SamplingParams
    sampling_session_id: str | None = None
    seq_id: int | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


class RetrieveFutureRequest(TinkerRequest):
    """Asks for a result."""

    request_id: str
    allow_metadata_only: bool = False


class NamedPath(TinkerRequest):
    """Names saved weights."""

    tinker_path: str


class SetTtl(TinkerRequest):
    """When saved weights expire; None keeps them."""

    ttl_seconds: int | None = None


def check_ttl(seconds: int | None) -> int | None:
    """``seconds``, when saved weights may live so long.

    Raises:
        RequestError: it is less than an hour, or more than ten years.
    """
    if seconds is not None and not _LEAST_TTL_S <= seconds <= _MOST_TTL_S:
        raise RequestError(
            f"ttl_seconds must be absent or in {_LEAST_TTL_S}..{_MOST_TTL_S}, got {seconds}"
        )
    return seconds


def check_optimizer(config: OptimizerConfig | None) -> None:
    """Refuse another optimizer than AdamW.

    Raises:
        RequestError: it is another one.
    """
    if config is not None and config.type != "adamw":
        raise RequestError(
            f"optimizer_config.type must be 'adamw', got {config.type!r}: this platform trains "
            "with AdamW alone"
        )
