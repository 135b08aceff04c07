"""Options of a deployment's vLLM servers (``engine_options``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from hearth.errors import ConfigError, EngineError
from hearth.models.lora import LoraOptions, is_expert_tensor
from hearth.sync.snapshot import Snapshot

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks for which vLLM can be configured; an adapter may have a lower one."""


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """``engine_options`` of a deployment with ``engine = "vllm"``.

    Raises:
        ConfigError: a value breaks its rule.
    """

    start_timeout_s: float = 600.0
    """Time limit for a server's start, loading included."""
    lora_rank: int | None = None
    """Highest rank of served adapters, up to 512; None serves no adapters."""
    train_mlp: bool | None = None
    """Whether adapters will change MLPs, as ``LoraConfig.train_mlp`` says; None: nobody knows."""
    kv_cache_mb: int | None = None
    """Budget of the KV cache in MiB. None: 1024 on a CPU, what ``gpu_memory_utilization`` leaves
    on a GPU."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory that the server takes; None is vLLM's default."""
    tensor_parallel_size: int = 1
    """GPUs that share a replica's weights."""
    enforce_eager: bool | None = None
    """Run without graphs and compilation. None does so on a CPU, where a compiled step would keep
    the weights with which it was compiled."""
    drain: Literal["wait", "abort"] = "wait"
    """What ``running_requests="drain"`` does: wait until running requests have ended, or cancel
    them and run them again with the new weights."""

    def __post_init__(self) -> None:
        _require(self.start_timeout_s > 0, "start_timeout_s", "> 0", self.start_timeout_s)
        is_rank = self.lora_rank is None or 1 <= self.lora_rank <= LORA_RANKS[-1]
        _require(is_rank, "lora_rank", f"in 1..{LORA_RANKS[-1]}", self.lora_rank)
        for name in ("kv_cache_mb", "tensor_parallel_size"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, ">= 1", value)
        share = self.gpu_memory_utilization
        _require(share is None or 0 < share <= 1, "gpu_memory_utilization", "in (0, 1]", share)
        _require(self.drain in ("wait", "abort"), "drain", "'wait' or 'abort'", self.drain)

    @property
    def room_for_rank(self) -> int | None:
        """The lowest rank of ``LORA_RANKS`` that is not below ``lora_rank``."""
        if self.lora_rank is None:
            return None
        return next(rank for rank in LORA_RANKS if rank >= self.lora_rank)

    def check(self, snapshot: Snapshot) -> None:
        """Refuse an adapter whose rank is too high for the servers, or that changes experts.

        Raises:
            EngineError: its rank is above ``lora_rank``, or a mixture's experts are in it.
        """
        if snapshot.kind != "lora":
            return
        if any(is_expert_tensor(name) for name in snapshot.tensors):
            raise EngineError(
                f"adapter {snapshot.identity!r} must leave a mixture's experts alone with engine "
                "'vllm', got some of them: send the merged model (checkpoint type 'merged_base'), "
                "use engine 'embedded', or train an adapter without mlp"
            )
        rank = LoraOptions.from_metadata(snapshot.metadata).rank
        if self.lora_rank is None or rank > self.lora_rank:
            raise EngineError(
                f"engine_options.lora_rank must be >= {rank} for adapter {snapshot.identity!r}, "
                f"got {self.lora_rank}: start the deployment with it"
            )


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "float": ((int, float), "a number"),
    "float | None": ((int, float), "a number"),
    "int": ((int,), "a whole number"),
    "int | None": ((int,), "a whole number"),
    "bool | None": ((bool,), "true or false"),
    "Literal['wait', 'abort']": ((str,), "a text"),
}


def read_options(values: Mapping[str, Any]) -> VllmOptions:
    """The options of JSON values.

    Raises:
        ConfigError: a name is unknown, or a value breaks its rule.
    """
    known = {field.name: _KINDS[str(field.type)] for field in fields(VllmOptions)}
    unknown = sorted(values.keys() - known.keys())
    if unknown:
        raise ConfigError(f"engine_options must be among {sorted(known)}, got {unknown}")
    present = {name: value for name, value in values.items() if value is not None}
    for name, value in present.items():
        kinds, rule = known[name]
        # In Python True is an int.
        fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        _require(fits, name, rule, value)
    return VllmOptions(**present)


def _require(is_met: bool, name: str, rule: str, value: object) -> None:
    if not is_met:
        raise ConfigError(f"engine_options.{name} must be {rule}, got {value!r}")
