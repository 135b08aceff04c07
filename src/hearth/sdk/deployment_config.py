"""The config of a deployment, and the platform's description of one."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hearth.errors import ConfigError
from hearth.sdk.trainer_config import NAME
from hearth.wire.fireworks import Deployment


@dataclass(frozen=True, kw_only=True)
class DeploymentConfig:
    """What a deployment is to be.

    ``hot_load_trainer_job`` is the trainer whose snapshots it serves: a job's id or full name.
    ``tokenizer_model`` and the fields after it are Hearth's own; ``extra_values`` go beside them.
    """

    deployment_id: str
    base_model: str
    deployment_shape: str | None = None
    region: str | None = None
    min_replica_count: int = 1
    max_replica_count: int | None = None
    """None leaves it to the deployment's shape, which has 1 where it does not say."""
    hot_load_bucket_type: str = "FW_HOSTED"
    hot_load_trainer_job: str | None = None
    hot_load_transition_type: str | None = None
    accelerator_type: str | None = None
    disable_speculative_decoding: bool = False
    skip_shape_validation: bool = False
    display_name: str | None = None
    extra_args: list[str] | None = None
    extra_values: dict[str, Any] | None = None
    tokenizer_model: str | None = None
    max_context_length: int | None = None
    dtype: str | None = None
    device: str | None = None
    max_batch_size: int | None = None
    max_adapters: int | None = None

    def validate(self) -> None:
        """Check the fields without a request to the platform.

        Raises:
            ConfigError: one breaks its rule, or two exclude each other.
        """
        if not NAME.fullmatch(self.deployment_id):
            raise ConfigError(
                f"deployment_id must be 1 to 63 of a-z, 0-9 and '-', got {self.deployment_id!r}"
            )
        if not self.base_model:
            raise ConfigError("base_model must be a model's name, got ''")
        most = self.max_replica_count
        if self.min_replica_count < 0 or (most is not None and self.min_replica_count > most):
            raise ConfigError(
                "min_replica_count must be within 0 and max_replica_count, got "
                f"{self.min_replica_count} and {most}"
            )
        if self.deployment_shape and self.accelerator_type:
            raise ConfigError(
                "accelerator_type must be absent where deployment_shape is given, got "
                f"{self.accelerator_type!r} and {self.deployment_shape!r}: the shape decides it"
            )
        if self.hot_load_transition_type not in (None, "ASYNC", "SYNC"):
            raise ConfigError(
                "hot_load_transition_type must be 'ASYNC' or 'SYNC', got "
                f"{self.hot_load_transition_type!r}"
            )

    def body(self, trainer_job_name: str | None) -> dict[str, Any]:
        """The request's body."""
        own = {
            "tokenizer": self.tokenizer_model,
            "max_context_length": self.max_context_length,
            "dtype": self.dtype,
            "device": self.device,
            "max_batch_size": self.max_batch_size,
        }
        values = {name: value for name, value in own.items() if value is not None}
        record = Deployment(
            base_model=self.base_model,
            display_name=self.display_name,
            description="a training run's deployment",
            min_replica_count=self.min_replica_count,
            max_replica_count=self.max_replica_count,
            enable_hot_load=True,
            for_training=True,
            hot_load_bucket_type=self.hot_load_bucket_type,
            hot_load_trainer_job=trainer_job_name,
            hot_load_transition_type=self.hot_load_transition_type,
            deployment_shape=self.deployment_shape,
            accelerator_type=self.accelerator_type,
            extra_args=self.extra_args,
            max_adapters=self.max_adapters,
            extra_values={**(self.extra_values or {}), **values} or None,
        ).as_dict()
        return {**record, "placement": {"region": self.region}} if self.region else record

    def params(self) -> dict[str, str]:
        """The request's query."""
        switches = {
            "skipShapeValidation": self.skip_shape_validation,
            "disableSpeculativeDecoding": self.disable_speculative_decoding,
        }
        return {"deploymentId": self.deployment_id} | {
            name: "true" for name, is_on in switches.items() if is_on
        }


@dataclass(frozen=True)
class DeploymentInfo:
    """A deployment as the platform describes it."""

    name: str
    base_model: str
    state: str | None = None
    status_message: str | None = None
    hot_load_trainer_job: str | None = None
    hot_load_bucket_url: str | None = None
    hot_load_transition_type: str | None = None
    deployment_shape: str | None = None
    min_replica_count: int = 1
    max_replica_count: int = 1
    display_name: str | None = None

    @property
    def deployment_id(self) -> str:
        """The last part of its name."""
        return self.name.rsplit("/", 1)[-1]

    @property
    def inference_model(self) -> str:
        """What ``DeploymentSampler`` takes as its model."""
        return self.name

    @classmethod
    def from_record(cls, record: Deployment, name: str) -> DeploymentInfo:
        """The description in a record; ``name`` where the record has none."""
        transition = record.hot_load_transition_type
        values = {field.name: getattr(record, field.name) for field in fields(cls)}
        given = {name: value for name, value in values.items() if value is not None}
        if transition and transition.endswith("UNSPECIFIED"):
            given["hot_load_transition_type"] = None
        return cls(**{**given, "name": record.name or name})
