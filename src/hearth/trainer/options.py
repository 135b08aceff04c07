"""How one trainer runs: the options of its engine, and of the worker around it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hearth.errors import ConfigError, NotFoundError, RequestError
from hearth.models.loading import best_device, choose_dtype
from hearth.planning.memory import OptimizerName
from hearth.sync.manifest import check_name
from hearth.sync.objects import open_buckets
from hearth.sync.store import Buckets, SnapshotStore

DEFAULT_LOGIT_BUDGET = 2**26
"""Most logits at one time: 256 MiB in float32."""


_PROMOTED = "accounts/me/models/"


@dataclass(frozen=True)
class AdapterStore:
    """Promoted adapters by name, and other folders if requests may name them."""

    models_dir: Path | None = None
    allow_folders: bool = True

    def find_folder(self, adapter_path: str) -> Path:
        """The folder of ``accounts/me/models/NAME``, or of a path.

        Raises:
            NotFoundError: no such adapter was promoted.
            RequestError: the name is invalid, or paths are not allowed.
        """
        if adapter_path.startswith(_PROMOTED):
            name = check_name(adapter_path.removeprefix(_PROMOTED), "adapter_path")
            if self.models_dir is None or not (self.models_dir / name).is_dir():
                raise NotFoundError(
                    f"adapter_path must name a promoted model, got {adapter_path!r}: there is none"
                )
            return self.models_dir / name
        if not self.allow_folders:
            raise RequestError(
                f"adapter_path must be {_PROMOTED}NAME on this platform, got {adapter_path!r}"
            )
        return Path(adapter_path).expanduser()


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """How one trainer's engine runs."""

    dtype: str = "float32"
    """``float32``, or ``bfloat16`` with float32 master weights, gradients and logprobs."""
    device: str = "cpu"
    max_seq_len: int | None = None
    """Most input tokens of a datum; None takes what the model has positions for."""
    micro_batch_tokens: int = 16384
    """Most padded tokens of one forward pass; a longer datum gets a pass of its own."""
    logit_budget: int = DEFAULT_LOGIT_BUDGET
    """Most logits (tokens times vocabulary) in memory at one time."""
    recompute_above: int | None = None
    """Forward passes of more tokens than this keep only what enters each layer, and the backward
    pass computes the rest again (activation checkpointing): a third more arithmetic for a fraction
    of the memory. None never does."""
    forward_only: bool = False
    """Refuse every operation that trains."""
    optimizer: OptimizerName = "adamw"
    """What updates trained weights: AdamW alone, also with moments in eight bits, or Muon for the
    matrices of layers."""
    trust_remote_code: bool = False
    max_policies: int = 1
    """How many policies there may be at once. Above 1 each is a LoRA adapter on the one base."""
    keep_checkpoints: int | None = None
    """How many resumable checkpoints stay, beside pinned ones; None keeps all."""

    def check(self) -> None:
        """Refuse limits below 1.

        Raises:
            ConfigError: a limit is below 1.
        """
        for name in ("micro_batch_tokens", "recompute_above", "max_policies"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be >= 1, got {value}")

    def should_recompute(self, num_tokens: int) -> bool:
        """Whether a pass of so many tokens computes its activations again."""
        return self.recompute_above is not None and num_tokens > self.recompute_above


@dataclass(frozen=True, kw_only=True)
class TrainerWorkerOptions(TrainerOptions):
    """All that a launcher tells a trainer's worker: a job's ``TrainerSpec`` and its buckets."""

    buckets: str | Buckets[SnapshotStore]
    """The folder of all buckets, or the buckets themselves where they are in this process."""
    bucket: str
    """Where snapshots go."""
    base_model: str
    source: str
    checkpoint_dir: str
    ranks: int
    rank_timeout_s: float
    offload_optimizer: bool
    keep_snapshots: int | None
    models_dir: str | None
    allow_folders: bool

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Self:
        """The options of a launcher's values.

        ``device`` None takes a GPU where there is one, ``dtype`` None the device's fast one.
        """
        device = values["device"] or best_device()
        return cls(**{**values, "device": device, "dtype": choose_dtype(values["dtype"], device)})

    def engine_arguments(self) -> dict[str, Any]:
        """The keyword arguments of a ``TrainerEngine`` with these options."""
        buckets = open_buckets(self.buckets, self.keep_snapshots)
        models_dir = Path(self.models_dir) if self.models_dir else None
        return {
            "source": self.source,
            "name": self.base_model,
            "snapshots": buckets.bucket(self.bucket),
            "checkpoint_dir": Path(self.checkpoint_dir),
            "options": self,
            "adapters": AdapterStore(models_dir, allow_folders=self.allow_folders),
        }
