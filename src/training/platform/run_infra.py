"""The platform that a recipe runs on, and everything the recipe needs of it.

``FIREWORKS_BASE_URL`` names a served platform. Without it the platform is embedded: it starts
inside this process and ends with the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from hearth.errors import ConfigError
from hearth.local import EmbeddedPlatform, check_tokenizer, resolve_model
from hearth.sdk import (
    DeploymentManager,
    DeploymentSampler,
    FixedConcurrencyController,
    TrainerJobManager,
    WeightSyncer,
)
from hearth.sdk.sampling_requests import SamplingRetryPolicy
from hearth.sdk.transport import RetryPolicy
from training.config.parts import (
    DeployConfig,
    InfraConfig,
    SyncSettings,
    TrainerConfig,
    agreed,
    is_given,
)
from training.platform.infra import Infra, setup_infra
from training.platform.provisioning import ResourceCleanup

logger = logging.getLogger(__name__)

BASE_URL = "FIREWORKS_BASE_URL"
API_KEY = "FIREWORKS_API_KEY"
_WHERE = {
    "inline": "inside this process",
    "process": "in processes of its own",
    "ray": "in a Ray cluster",
}


class ProvisionedConfig(Protocol):
    """The settings of a recipe that decide what is provisioned."""

    base_model: str
    trainer: TrainerConfig
    infra: InfraConfig
    deployment: DeployConfig
    max_seq_len: int
    learning_rate: float
    lora_rank: int
    seed: int
    keep_checkpoints: int | None
    cleanup_on_exit: bool
    placement: Literal["inline", "process", "ray"]
    snapshot_store: Literal["folder", "ray"]

    @property
    def sync(self) -> SyncSettings:
        """Weight sync settings of all spellings together."""
        ...

    @property
    def needs_reference(self) -> bool:
        """Whether anything asks for reference logprobs."""
        ...

    @property
    def max_concurrent(self) -> int:
        """Sampling requests that may be in flight."""
        ...


@dataclass(frozen=True)
class PlatformSpec:
    """What to provision, and where the run keeps its files."""

    base_model: str
    trainer: TrainerConfig
    infra: InfraConfig
    deployment: DeployConfig
    sync: SyncSettings
    max_seq_len: int
    learning_rate: float
    lora_rank: int
    needs_reference: bool
    max_concurrent: int
    seed: int
    keep_checkpoints: int | None
    cleanup_on_exit: bool
    placement: Literal["inline", "process", "ray"]
    work_dir: Path
    snapshot_store: Literal["folder", "ray"] = "folder"
    running_requests: Literal["drain", "keep"] = "drain"
    """What becomes of completions that are being drawn when new weights come."""

    @classmethod
    def of(cls, config: ProvisionedConfig, work_dir: Path) -> PlatformSpec:
        """What a recipe's config asks for."""
        return cls(
            base_model=config.base_model,
            trainer=config.trainer,
            infra=config.infra,
            deployment=config.deployment,
            sync=config.sync,
            max_seq_len=config.max_seq_len,
            learning_rate=config.learning_rate,
            lora_rank=config.lora_rank,
            needs_reference=config.needs_reference,
            max_concurrent=config.max_concurrent,
            seed=config.seed,
            keep_checkpoints=_kept(config),
            cleanup_on_exit=config.cleanup_on_exit,
            placement=config.placement,
            snapshot_store=config.snapshot_store,
            work_dir=work_dir,
        )

    def infra_config(self) -> InfraConfig:
        """Both generations of trainer settings as one.

        Raises:
            ConfigError: two names of one setting were given different values.
        """
        return replace(
            self.infra,
            training_shape_id=agreed(
                ("trainer.training_shape_id", self.trainer.training_shape_id),
                ("infra.training_shape_id", self.infra.training_shape_id),
            ),
            ref_training_shape_id=agreed(
                ("trainer.reference_training_shape_id", self.trainer.reference_training_shape_id),
                ("infra.ref_training_shape_id", self.infra.ref_training_shape_id),
            ),
            trainer_timeout_s=agreed(
                ("trainer.timeout_s", self.trainer.timeout_s),
                ("infra.trainer_timeout_s", self.infra.trainer_timeout_s),
            ),
        )

    def values(self) -> dict[str, Any]:
        """Hearth's own settings of a trainer."""
        own = {
            "dtype": self.trainer.dtype,
            "device": self.trainer.device,
            "micro_batch_tokens": self.trainer.micro_batch_tokens,
            "recompute_above": self.trainer.recompute_above,
            # Not where it is 1, or runs from before would not find their jobs again.
            "ranks": self.trainer.ranks if self.trainer.ranks > 1 else None,
            "keep_checkpoints": self.keep_checkpoints,
        }
        return {name: value for name, value in own.items() if value is not None}

    def suffix(self) -> str:
        """Tells this run's jobs from others': the same folder and model give the same again."""
        parts = (
            self.work_dir.resolve(),
            self.base_model,
            self.lora_rank,
            self.max_seq_len,
            self.learning_rate,
            self.needs_reference,
            self.values(),
            self.infra_config(),
            self.deployment,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def _kept(config: ProvisionedConfig) -> int | None:
    """Checkpoints to keep; of those that nobody asked for, two.

    Never fewer: the trainer drops the older one before the manifest names the newer.
    """
    if config.keep_checkpoints is not None:
        return max(2, config.keep_checkpoints)
    return None if is_given(config.sync.dcp_save_interval) else 2


@dataclass(frozen=True, kw_only=True)
class RunInfra(Infra):
    """``Infra`` with what a recipe samples and publishes by."""

    inference_url: str
    api_key: str
    sampler: DeploymentSampler
    syncer: WeightSyncer
    tokenizer: Any
    trainers: TrainerJobManager
    is_embedded: bool
    work_dir: Path
    """The run's folder; an embedded platform keeps its data there."""
    serves_older_snapshot: bool
    """The deployment was there before, and serves what an earlier run has left."""
    served_version: int
    """Weight syncs that the deployment has had before this run."""


def is_embedded() -> bool:
    """Whether the platform runs inside this process: no URL names another."""
    return not os.environ.get(BASE_URL)


def check_platform(spec: PlatformSpec) -> None:
    """Judge what needs no model to be loaded and no platform to be asked.

    Raises:
        ConfigError: the platform's key is missing, or a setting breaks its rule.
    """
    spec.infra_config()
    if not is_embedded():
        if not os.environ.get(API_KEY):
            raise ConfigError(
                f"{API_KEY} must be set where {BASE_URL} is, got none: any text will do for a "
                "platform on this machine without keys"
            )
        return
    if spec.trainer.job_id or spec.trainer.reference_job_id:
        raise ConfigError(
            f"trainer.job_id must name a job of a served platform, got {spec.trainer.job_id!r} and "
            f"no {BASE_URL}: the embedded platform starts empty"
        )
    if spec.trainer.ranks > 1 and spec.placement == "inline":
        raise ConfigError(
            f"trainer.ranks must be 1 with placement='inline', got {spec.trainer.ranks}: a process "
            "group does not belong into the recipe's process; use placement='process'"
        )
    resolve_model(spec.base_model)


@contextlib.contextmanager
def provision(
    spec: PlatformSpec, *, on_status: Callable[[str], None] = logger.info
) -> Iterator[RunInfra]:
    """Everything a recipe needs, for the body of the ``with``; after it the clients are closed.

    ``on_status`` is told in one line where the platform is. With ``cleanup_on_exit`` trainers and
    deployment that the run asked for are taken down; those that were brought go on running.

    Raises:
        ConfigError: a model or tokenizer cannot be loaded, or they do not belong together.
        HearthError: the platform cannot be reached, or refuses.
    """
    with contextlib.ExitStack() as stack:
        base_url, api_key = _platform(spec, stack, on_status)
        trainers = TrainerJobManager(api_key, base_url=base_url)
        stack.callback(trainers.close)
        deployments = DeploymentManager(api_key, base_url=base_url)
        stack.callback(deployments.close)
        cleanup = None
        if spec.cleanup_on_exit or is_embedded():
            cleanup = stack.enter_context(ResourceCleanup(trainers, deployments))
        tokenizer = load_tokenizer(spec.deployment)
        if is_embedded():
            check_tokenizer(tokenizer, spec.deployment.tokenizer_model, spec.base_model)
        infra = setup_infra(
            rlor_mgr=trainers,
            deploy_mgr=deployments,
            base_model=spec.base_model,
            infra_cfg=spec.infra_config(),
            deploy_cfg=spec.deployment,
            lora_rank=spec.lora_rank,
            max_seq_len=spec.max_seq_len,
            learning_rate=spec.learning_rate,
            dcp_timeout=spec.sync.dcp_timeout_s,
            policy_job_id=spec.trainer.job_id,
            reference_job_id=spec.trainer.reference_job_id,
            needs_reference=spec.needs_reference,
            needs_inference=True,
            api_key=api_key,
            cleanup=cleanup,
            on_status=logger.debug,
            seed=spec.seed,
            extra_values=spec.values(),
            job_suffix=spec.suffix(),
        )
        stack.callback(infra.close)
        yield _with_sampler(spec, infra, trainers, deployments, tokenizer, api_key, stack)


def load_tokenizer(deployment: DeployConfig) -> Any:
    """The client's tokenizer.

    Raises:
        ConfigError: there is no tokenizer in that folder or under that hub id.
    """
    import transformers  # two seconds to import, and a bad config should answer at once

    # Prompts are encoded one by one: threads of its own only take time from the engines'.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return transformers.AutoTokenizer.from_pretrained(
            deployment.tokenizer_model,
            revision=deployment.tokenizer_revision or "main",
            trust_remote_code=deployment.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        asks = "trust_remote_code" in str(error) and not deployment.trust_remote_code
        trust = "; if you trust that code, set deployment.trust_remote_code=True" if asks else ""
        raise ConfigError(
            f"deployment.tokenizer_model must be a tokenizer's folder or hub id, got "
            f"{deployment.tokenizer_model!r}: {str(error).splitlines()[0]}{trust}"
        ) from None


def _platform(
    spec: PlatformSpec, stack: contextlib.ExitStack, on_status: Callable[[str], None]
) -> tuple[str, str]:
    """Base URL and key of the platform, which is started here when none is named."""
    base_url = os.environ.get(BASE_URL)
    if base_url:
        on_status(f"the platform is at {base_url} ({BASE_URL}), with {spec.base_model}")
        return base_url, os.environ[API_KEY]
    where = _WHERE[spec.placement]
    on_status(f"{BASE_URL} is not set: the platform runs {where}, with {spec.base_model}")
    platform = stack.enter_context(
        EmbeddedPlatform(
            work_dir=spec.work_dir, placement=spec.placement, snapshot_store=spec.snapshot_store
        )
    )
    return platform.base_url, os.environ.get(API_KEY) or "embedded"


def _with_sampler(
    spec: PlatformSpec,
    infra: Infra,
    trainers: TrainerJobManager,
    deployments: DeploymentManager,
    tokenizer: Any,
    api_key: str,
    stack: contextlib.ExitStack,
) -> RunInfra:
    assert infra.deployment_id is not None, "asked for with needs_inference"
    assert infra.inference_model is not None, "asked for with needs_inference"
    syncer = WeightSyncer(
        infra.policy.inner,
        deployments,
        infra.deployment_id,
        spec.base_model,
        hotload_timeout=spec.sync.timeout_s,
        first_checkpoint_type=spec.sync.first_checkpoint_type,
        running_requests=spec.running_requests,
    )
    sampler = DeploymentSampler(
        deployments.inference_url,
        infra.inference_model,
        api_key,
        tokenizer,
        concurrency_controller=FixedConcurrencyController(spec.max_concurrent),
        http_timeout_s=spec.deployment.sample_timeout,
        retry_policy=SamplingRetryPolicy(
            # A platform that is started again, and a deployment: its model is loaded anew.
            retries=RetryPolicy(attempts=9, base_s=1.0),
            boot_s=spec.deployment.deployment_timeout_s,
        ),
    )
    stack.callback(sampler.close)
    # Not just asked for: it may have died since it was ready, and then it comes back.
    served = deployments.wait_for_replica(
        infra.deployment_id, spec.base_model, spec.deployment.deployment_timeout_s
    )
    known = {field.name: getattr(infra, field.name) for field in fields(Infra)}
    return RunInfra(
        **known,
        inference_url=deployments.inference_url,
        api_key=api_key,
        sampler=sampler,
        syncer=syncer,
        tokenizer=tokenizer,
        trainers=trainers,
        is_embedded=is_embedded(),
        work_dir=spec.work_dir,
        serves_older_snapshot=served.current_snapshot_identity is not None,
        served_version=served.weight_version,
    )
