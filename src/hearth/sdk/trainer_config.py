"""The config of a trainer job, checked before the platform gets it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from hearth.errors import ConfigError
from hearth.wire.fireworks import TrainerJob, TrainingConfig

NAME = re.compile(r"[a-z0-9-]{1,63}")
"""What a job, a deployment or a promoted model may be called."""


@dataclass(frozen=True, kw_only=True)
class TrainerJobConfig:
    """What a trainer job is to be.

    A training shape fixes hardware and image; without one the platform chooses, or the accelerator
    fields do. ``training_shape_ref`` is another name of ``training_shape_id``. ``--forward-only``
    in ``extra_args`` means ``forward_only``. The last four fields are Hearth's own.
    """

    base_model: str
    training_shape_id: str | None = None
    training_shape_ref: str | None = None
    lora_rank: int = 0
    max_context_length: int | None = None
    learning_rate: float = 1e-5
    display_name: str | None = None
    hot_load_deployment_id: str | None = None
    forward_only: bool = False
    extra_args: list[str] | None = None
    region: str | None = None
    custom_image_tag: str | None = None
    accelerator_type: str | None = None
    accelerator_count: int | None = None
    node_count: int | None = None
    trainer_replica_count: int | None = None
    purpose: str | None = None
    managed_by: str | None = None
    skip_validations: bool = False
    job_id: str | None = None
    dtype: str | None = None
    device: str | None = None
    micro_batch_tokens: int | None = None
    recompute_above: int | None = None
    extra_values: dict[str, Any] | None = None

    @property
    def shape(self) -> str | None:
        """The training shape under either of its names."""
        return self.training_shape_id or self.training_shape_ref

    @property
    def is_forward_only(self) -> bool:
        """Whether the job only scores."""
        return self.forward_only or "--forward-only" in (self.extra_args or [])

    def validate(self) -> None:
        """Check the fields without a request to the platform.

        Raises:
            ConfigError: one breaks its rule, or two exclude each other.
        """
        if not self.base_model:
            raise ConfigError("base_model must be a model's name, got ''")
        if self.lora_rank < 0:
            raise ConfigError(f"lora_rank must be >= 0, got {self.lora_rank}")
        rate = self.learning_rate
        is_trained = not self.is_forward_only
        if not (math.isfinite(rate) and (rate > 0 or (rate == 0 and not is_trained))):
            rule = "finite and > 0 in a job that trains" if is_trained else "finite and >= 0"
            raise ConfigError(f"learning_rate must be {rule}, got {rate}")
        for name in (
            "max_context_length",
            "node_count",
            "accelerator_count",
            "micro_batch_tokens",
            "recompute_above",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be >= 1, got {value}")
        if self.job_id is not None and not NAME.fullmatch(self.job_id):
            raise ConfigError(f"job_id must be 1 to 63 of a-z, 0-9 and '-', got {self.job_id!r}")
        self._refuse_two_owners()

    def _refuse_two_owners(self) -> None:
        shape, other = self.training_shape_id, self.training_shape_ref
        if shape and other and shape != other:
            raise ConfigError(
                f"training_shape_id must equal training_shape_ref, got {shape!r} and {other!r}: "
                "they are two names of one setting"
            )
        owned = ("accelerator_type", "accelerator_count", "node_count", "custom_image_tag")
        for name in owned:
            if self.shape and getattr(self, name) is not None:
                raise ConfigError(
                    f"{name} must be absent where training_shape_id is given, got "
                    f"{getattr(self, name)!r} and {self.shape!r}: the shape decides it"
                )

    def record(self) -> TrainerJob:
        """The request's body."""
        names = ("dtype", "device", "micro_batch_tokens", "recompute_above")
        requested = ("display_name", "hot_load_deployment_id", "node_count")
        requested += ("trainer_replica_count", "purpose", "managed_by")
        own = {name: getattr(self, name) for name in names}
        values = {name: value for name, value in own.items() if value is not None}
        return TrainerJob(
            training_config=TrainingConfig(
                **{name: getattr(self, name) for name in TrainingConfig.model_fields}
            ),
            forward_only=self.is_forward_only,
            **{name: getattr(self, name) for name in requested},
            extra_values={**(self.extra_values or {}), **values} or None,
        )

    def params(self, job_id: str) -> dict[str, str]:
        """The request's query."""
        wanted = {
            "rlorTrainerJobId": job_id,
            "trainingShape": self.shape,
            "deploymentId": self.hot_load_deployment_id,
            "skipValidations": "true" if self.skip_validations else None,
        }
        return {name: value for name, value in wanted.items() if value}
