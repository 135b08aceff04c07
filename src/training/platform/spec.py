"""What a loop asks the platform for: one record, which every part of provisioning reads."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from training.config.parts import DeployConfig, InfraConfig, LoraTarget, WeightSyncScope
from training.config.recipe import RecipeConfig
from training.config.rl import RLConfig

STEP_TIMEOUT_S = 3600.0
DCP_TIMEOUT_S = 2700.0


@dataclass(frozen=True, kw_only=True)
class InfraSpec:
    """Policy, reference and deployment that a loop needs; ``setup_infra`` explains the fields."""

    base_model: str
    infra: InfraConfig = field(default_factory=InfraConfig)
    deployment: DeployConfig = field(default_factory=DeployConfig)
    lora_rank: int = 0
    lora_options: dict[str, Any] = field(default_factory=dict[str, Any])
    """What a training client makes the adapter with, beside its rank."""
    merges_adapter: bool = False
    """Whether the deployment is sent the model with the adapter merged in."""
    max_seq_len: int | None = None
    learning_rate: float = 1e-5
    step_timeout_s: float = STEP_TIMEOUT_S
    dcp_timeout_s: float = DCP_TIMEOUT_S
    policy_job_id: str | None = None
    reference_job_id: str | None = None
    needs_reference: bool = False
    needs_inference: bool = True
    role_prefix: str = "rl"
    job_suffix: str = ""
    seed: int | None = None
    trainer_options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Hearth's own settings of a trainer."""

    @classmethod
    def from_config(cls, config: RecipeConfig) -> InfraSpec:
        """What a recipe's config asks for.

        The same folder, model and settings give the same ``job_suffix`` again, so that a run which
        was interrupted finds its jobs.

        Raises:
            ConfigError: two names of one setting were given different values.
        """
        infra, options = config.merged_infra, config.trainer.options
        deployment = DeployConfig()
        if isinstance(config, RLConfig):
            deployment = config.merged_deployment
        if config.optimizer != "adamw":
            options["optimizer"] = config.optimizer
        if config.kept_checkpoints is not None:
            options["keep_checkpoints"] = config.kept_checkpoints
        identity = (
            Path(config.log_path).expanduser().resolve(),
            config.base_model,
            config.lora_rank,
            config.max_seq_len,
            config.learning_rate,
            config.needs_reference,
            options,
            infra,
            config.deployment if isinstance(config, RLConfig) else None,
        )
        return cls(
            base_model=config.base_model,
            infra=infra,
            deployment=deployment,
            lora_rank=config.lora_rank,
            lora_options={
                "lora_alpha": config.lora_alpha,
                **{f"train_{part}": part in config.lora_targets for part in get_args(LoraTarget)},
            },
            merges_adapter=config.sync.first_checkpoint_type == "merged_base",
            max_seq_len=config.max_seq_len,
            learning_rate=config.learning_rate,
            dcp_timeout_s=config.sync.dcp_timeout_s,
            policy_job_id=config.trainer.job_id,
            reference_job_id=config.trainer.reference_job_id,
            needs_reference=config.needs_reference,
            needs_inference=config.needs_inference,
            role_prefix="rl" if config.needs_inference else "train",
            job_suffix=hashlib.sha256(repr(identity).encode()).hexdigest()[:8],
            seed=config.seed,
            trainer_options=options,
        )

    @cached_property
    def deployment_id(self) -> str:
        """The deployment's id: the given one, or one made up of the model's name and the suffix."""
        return self.deployment.deployment_id or make_up_id(self.base_model, self.job_suffix)

    @property
    def publishes_into_deployment(self) -> bool:
        """Whether snapshots belong to the deployment, not to the policy trainer."""
        scope = self.deployment.weight_sync_scope
        return self.needs_inference and scope == WeightSyncScope.PER_DEPLOYMENT

    @property
    def has_reference_trainer(self) -> bool:
        """Whether the reference is a trainer of its own; a LoRA policy else shares its base."""
        is_asked_for = bool(self.infra.ref_training_shape_id or self.reference_job_id)
        return self.needs_reference and (self.lora_rank == 0 or is_asked_for)

    def name_part(self, role: str) -> str | None:
        """What a job or the deployment is called, where ids repeat; else None."""
        return f"{self.role_prefix}-{role}-{self.job_suffix}" if self.job_suffix else None


def make_up_id(base_model: str, suffix: str = "") -> str:
    """A deployment's id: the model's last name and ``suffix``, by default one that is made up."""
    leaf = base_model.rstrip("/").rsplit("/", 1)[-1].lower()
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in leaf)
    return f"{plain[:40].strip('-') or 'model'}-{suffix or secrets.token_hex(4)}"
