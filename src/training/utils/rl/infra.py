"""What a recipe trains with: policy, reference, deployment and the weight sync between them.

With no ``FIREWORKS_BASE_URL`` the platform is embedded: it starts inside this process.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hearth.errors import ConfigError
from hearth.local import EmbeddedPlatform, resolve_model
from hearth.sdk import (
    DeploymentManager,
    DeploymentSampler,
    FiretitanServiceClient,
    FiretitanTrainingClient,
    FixedConcurrencyController,
    WeightSyncer,
)
from training.utils.config import (
    DeployConfig,
    InfraConfig,
    SyncSettings,
    TrainerConfig,
    WeightSyncScope,
    agreed,
)

logger = logging.getLogger(__name__)


class ProvisionedConfig(Protocol):
    """The settings of a recipe that decide what is provisioned."""

    base_model: str
    trainer: TrainerConfig
    infra: InfraConfig
    deployment: DeployConfig
    max_seq_len: int
    lora_rank: int
    max_concurrent: int
    seed: int

    @property
    def sync(self) -> SyncSettings:
        """Weight sync settings of all spellings together."""
        ...

    @property
    def needs_reference(self) -> bool:
        """Whether anything asks for reference logprobs."""
        ...


@dataclass(frozen=True)
class InfraSpec:
    """What to provision."""

    base_model: str
    trainer: TrainerConfig
    infra: InfraConfig
    deployment: DeployConfig
    sync: SyncSettings
    max_seq_len: int
    lora_rank: int
    needs_reference: bool
    max_concurrent: int
    seed: int
    work_dir: Path

    @classmethod
    def of(cls, config: ProvisionedConfig, work_dir: Path) -> InfraSpec:
        """What a recipe's config asks for."""
        return cls(
            base_model=config.base_model, trainer=config.trainer, infra=config.infra,
            deployment=config.deployment, sync=config.sync, max_seq_len=config.max_seq_len,
            lora_rank=config.lora_rank, needs_reference=config.needs_reference,
            max_concurrent=config.max_concurrent, seed=config.seed, work_dir=work_dir,
        )  # fmt: skip


@dataclass(frozen=True)
class Infra:
    """Wired clients. ``reference`` is None when nothing asked for one."""

    policy: FiretitanTrainingClient
    reference: FiretitanTrainingClient | None
    sampler: DeploymentSampler
    syncer: WeightSyncer
    tokenizer: Any
    platform: EmbeddedPlatform
    policy_job_id: str
    reference_job_id: str | None
    deployment_id: str

    def export_model(self, folder: Path) -> None:
        """Write the policy's current weights as a Hugging Face folder with its tokenizer."""
        self.platform.export_model(self.policy_job_id, self.policy.model_id, folder)
        self.tokenizer.save_pretrained(str(folder))


def check_platform(spec: InfraSpec) -> None:
    """Judge what needs no model to be loaded.

    Raises:
        ConfigError: a served platform was asked for, or ``base_model`` is not known.
    """
    if os.environ.get("FIREWORKS_BASE_URL"):
        raise ConfigError(
            "FIREWORKS_BASE_URL must be unset, got "
            f"{os.environ['FIREWORKS_BASE_URL']!r}: this version only has the embedded platform"
        )
    resolve_model(spec.base_model)


@contextlib.contextmanager
def provision(
    spec: InfraSpec, *, on_status: Callable[[str], None] = logger.info
) -> Iterator[Infra]:
    """Everything a recipe needs, for the body of the ``with``; after it the clients are closed.

    ``on_status`` is told in one line what is started.

    Trainers and deployment start side by side. A LoRA policy without a reference shape shares its
    frozen base weights with the reference.

    Raises:
        ConfigError: a model or tokenizer cannot be loaded.
    """
    on_status(
        "FIREWORKS_BASE_URL is not set: the platform runs inside this process, with "
        f"{spec.base_model}"
    )
    _mention_unused(spec)
    with contextlib.ExitStack() as stack:
        platform = EmbeddedPlatform(work_dir=spec.work_dir)
        stack.callback(platform.close)
        yield _wire(spec, platform, stack)


def load_tokenizer(deployment: DeployConfig) -> Any:
    """The client's tokenizer.

    Raises:
        ConfigError: there is no tokenizer in that folder or under that hub id.
    """
    import transformers  # two seconds to import, and a bad config should answer at once

    try:
        return transformers.AutoTokenizer.from_pretrained(
            deployment.tokenizer_model,
            revision=deployment.tokenizer_revision or "main",
            trust_remote_code=deployment.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"deployment.tokenizer_model must be a tokenizer's folder or hub id, got "
            f"{deployment.tokenizer_model!r}: {str(error).splitlines()[0]}"
        ) from None


def _wire(spec: InfraSpec, platform: EmbeddedPlatform, stack: contextlib.ExitStack) -> Infra:
    api_key = os.environ.get("FIREWORKS_API_KEY") or "embedded"
    own_reference = spec.needs_reference and spec.lora_rank == 0
    timeout_s: float = agreed(
        ("trainer.timeout_s", spec.trainer.timeout_s),
        ("infra.trainer_timeout_s", spec.infra.trainer_timeout_s),
    )
    deployment_id = spec.deployment.deployment_id or "rollouts"
    tokenizer = load_tokenizer(spec.deployment)
    with ThreadPoolExecutor(max_workers=3) as pool:
        policy_job = pool.submit(_trainer_job, platform, spec, "policy")
        deployed = pool.submit(_deployment, platform, spec, deployment_id)
        reference_job = (
            pool.submit(_trainer_job, platform, spec, "reference") if own_reference else None
        )
        job_id = policy_job.result(timeout_s)
        reference_id = reference_job.result(timeout_s) if reference_job is not None else None
        model = deployed.result(spec.deployment.deployment_timeout_s)

    service = FiretitanServiceClient(platform.trainer_url(job_id), api_key)
    stack.callback(service.close)
    policy = service.create_training_client(spec.base_model, spec.lora_rank, seed=spec.seed)
    reference = None
    if reference_id is not None:
        reference_service = FiretitanServiceClient(platform.trainer_url(reference_id), api_key)
        stack.callback(reference_service.close)
        reference = reference_service.create_base_reference(spec.base_model)
    elif spec.needs_reference:
        reference = service.create_base_reference(spec.base_model)

    deployments = DeploymentManager(api_key, platform.base_url)
    stack.callback(deployments.close)
    syncer = WeightSyncer(
        policy, deployments, deployment_id, spec.base_model, hotload_timeout=spec.sync.timeout_s,
        first_checkpoint_type=spec.sync.first_checkpoint_type,
    )  # fmt: skip
    sampler = DeploymentSampler(
        deployments.inference_url, model, api_key, tokenizer,
        concurrency_controller=FixedConcurrencyController(spec.max_concurrent),
        http_timeout_s=spec.deployment.sample_timeout,
    )  # fmt: skip
    stack.callback(sampler.close)
    return Infra(
        policy=policy, reference=reference, sampler=sampler, syncer=syncer,
        tokenizer=tokenizer, platform=platform, policy_job_id=job_id,
        reference_job_id=reference_id, deployment_id=deployment_id,
    )  # fmt: skip


def _trainer_job(platform: EmbeddedPlatform, spec: InfraSpec, role: str) -> str:
    return platform.create_trainer_job(
        spec.base_model, job_id=role, forward_only=role == "reference", dtype=spec.trainer.dtype,
        device=spec.trainer.device, max_seq_len=spec.max_seq_len,
        micro_batch_tokens=spec.trainer.micro_batch_tokens,
    )  # fmt: skip


def _deployment(platform: EmbeddedPlatform, spec: InfraSpec, deployment_id: str) -> str:
    return platform.create_deployment(
        deployment_id, spec.base_model, tokenizer=spec.deployment.tokenizer_model,
        dtype=spec.trainer.dtype, device=spec.trainer.device, max_seq_len=spec.max_seq_len,
        max_batch_size=spec.deployment.max_batch_size,
    )  # fmt: skip


def _mention_unused(spec: InfraSpec) -> None:
    """Say once which settings choose hardware that the embedded platform does not have."""
    wanted = {
        "infra.training_shape_id": spec.infra.training_shape_id,
        "infra.region": spec.infra.region,
        "infra.custom_image_tag": spec.infra.custom_image_tag,
        "infra.accelerator_type": spec.infra.accelerator_type,
        "infra.accelerator_count": spec.infra.accelerator_count,
        "infra.node_count": spec.infra.node_count,
        "infra.extra_args": spec.infra.extra_args,
        "infra.trainer_replica_count": spec.infra.trainer_replica_count,
        "infra.purpose": spec.infra.purpose,
        "infra.managed_by": spec.infra.managed_by,
        "infra.skip_validations": spec.infra.skip_validations,
        "trainer.training_shape_id": spec.trainer.training_shape_id,
        "trainer.job_id": spec.trainer.job_id,
        "trainer.reference_job_id": spec.trainer.reference_job_id,
        "deployment.deployment_shape": spec.deployment.deployment_shape,
        "deployment.weight_sync_scope": (
            spec.deployment.weight_sync_scope is not WeightSyncScope.PER_TRAINER
        ),
    }
    unused = [name for name, value in wanted.items() if value]
    if unused:
        logger.info("the embedded platform has one shape; it does not use %s", ", ".join(unused))
