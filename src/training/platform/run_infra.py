"""The platform that a recipe runs on, and everything the recipe needs of it.

``HEARTH_URL`` names a served platform. Without it the platform is embedded: it starts
inside this process and ends with the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hearth import local
from hearth.errors import ConfigError
from hearth.sdk import (
    DeploymentConfig,
    DeploymentManager,
    DeploymentSampler,
    FixedConcurrencyController,
    TrainerJobManager,
    WeightSyncer,
)
from hearth.sdk.sampling_requests import SamplingRetryPolicy
from hearth.sdk.transport import RetryPolicy
from hearth.settings import API_KEY_VARIABLE, URL_VARIABLE, read_api_key, read_url
from training.config.parts import DeployConfig, TokenizerConfig
from training.config.recipe import RecipeConfig
from training.config.rl import RLConfig
from training.platform.cleanup import ResourceCleanup
from training.platform.infra import Infra, build_infra
from training.platform.spec import InfraSpec

logger = logging.getLogger(__name__)

_WHERE = {
    "inline": "inside this process",
    "process": "in processes of its own",
    "ray": "in a Ray cluster",
}


@dataclass(frozen=True, kw_only=True)
class TrainerInfra(Infra):
    """``Infra`` with what every recipe needs besides."""

    tokenizer: Any
    trainers: TrainerJobManager
    is_embedded: bool
    work_dir: Path
    """The run's folder; an embedded platform keeps its data there."""


@dataclass(frozen=True, kw_only=True)
class RunInfra(TrainerInfra):
    """``TrainerInfra`` with what a recipe samples and publishes by."""

    inference_url: str
    api_key: str
    deployments: DeploymentManager
    cleanup: ResourceCleanup | None
    """Takes down at the end what is registered; None where everything goes on running."""
    sampler: DeploymentSampler
    syncer: WeightSyncer
    serves_older_snapshot: bool
    """The deployment was there before, and serves what an earlier run has left."""
    served_version: int
    """Weight syncs that the deployment has had before this run."""


def is_embedded() -> bool:
    """Whether the platform runs inside this process: no URL names another."""
    return not read_url()


def check_platform(config: RecipeConfig) -> None:
    """Judge what needs neither a loaded model nor an answer of the platform.

    Raises:
        ConfigError: the platform's key is missing, or a setting breaks its rule.
    """
    _ = config.merged_infra
    if not is_embedded():
        _require_key()
        return
    trainer = config.trainer
    if trainer.job_id or trainer.reference_job_id:
        raise ConfigError(
            f"trainer.job_id must name a job of a served platform, got {trainer.job_id!r} and no "
            f"{URL_VARIABLE}: the embedded platform starts empty"
        )
    if (trainer.ranks or 1) > 1 and config.placement == "inline":
        raise ConfigError(
            f"trainer.ranks must be 1 with placement='inline', got {trainer.ranks}: a process "
            "group does not belong into the recipe's process; use placement='process'"
        )
    local.resolve_model(config.base_model)


@contextlib.contextmanager
def provision_trainer(
    config: RecipeConfig, tokenizer: Any, *, on_status: Callable[[str], None] = logger.info
) -> Iterator[TrainerInfra]:
    """``provision`` for a recipe that samples nothing: there is no deployment.

    Raises:
        ConfigError: the model cannot be loaded, or the tokenizer does not belong to it.
        HearthError: the platform cannot be reached, or refuses.
    """
    with contextlib.ExitStack() as stack:
        yield _connect(config, tokenizer, stack, on_status).trainer_infra


@contextlib.contextmanager
def provision(
    config: RLConfig,
    tokenizer: Any,
    *,
    max_concurrent: int = 32,
    running_requests: Literal["drain", "keep"] = "drain",
    on_status: Callable[[str], None] = logger.info,
) -> Iterator[RunInfra]:
    """Everything a recipe needs, for the body of the ``with``; after it the clients are closed.

    ``tokenizer`` is that of ``load_tokenizer``. ``max_concurrent`` sampling requests may be in
    flight; ``running_requests`` says what becomes of them when new weights come. ``on_status``
    receives one line that names the platform. With ``cleanup_on_exit`` the trainers and the
    deployment that the run started are taken down; those that the user named go on running.

    Raises:
        ConfigError: the model cannot be loaded, or the tokenizer does not belong to it.
        HearthError: the platform cannot be reached, or refuses.
    """
    with contextlib.ExitStack() as stack:
        connected = _connect(config, tokenizer, stack, on_status)
        infra, deployments = connected.trainer_infra, connected.deployments
        assert infra.deployment_id is not None, "a recipe's spec needs inference"
        assert infra.inference_model is not None, "a recipe's spec needs inference"
        syncer = WeightSyncer(
            infra.policy_client,
            deployments,
            infra.deployment_id,
            config.base_model,
            hotload_timeout=config.sync.timeout_s,
            first_checkpoint_type=config.sync.first_checkpoint_type,
            running_requests=running_requests,
        )
        sampler = make_sampler(
            deployments.inference_url,
            infra.inference_model,
            connected.api_key,
            tokenizer,
            config.deployment,
            max_concurrent,
        )
        stack.callback(sampler.close)
        # It may have died since it was ready; then it comes back.
        replica = deployments.wait_for_replica(
            infra.deployment_id, config.base_model, config.deployment.deployment_timeout_s
        )
        yield RunInfra(
            **vars(infra),
            inference_url=deployments.inference_url,
            api_key=connected.api_key,
            deployments=deployments,
            cleanup=connected.cleanup,
            sampler=sampler,
            syncer=syncer,
            serves_older_snapshot=replica.current_snapshot_identity is not None,
            served_version=replica.weight_version,
        )


def make_sampler(
    inference_url: str,
    model: str,
    api_key: str,
    tokenizer: Any,
    deployment: DeployConfig,
    max_concurrent: int,
) -> DeploymentSampler:
    """A sampler that outlives restarts of the deployment and of the platform."""
    return DeploymentSampler(
        inference_url,
        model,
        api_key,
        tokenizer,
        concurrency_controller=FixedConcurrencyController(max_concurrent),
        http_timeout_s=deployment.sample_timeout,
        retry_policy=SamplingRetryPolicy(
            # Long enough for a platform and a deployment that start again and load the model.
            retries=RetryPolicy(attempts=9, base_s=1.0),
            boot_s=deployment.deployment_timeout_s,
        ),
    )


@dataclass(frozen=True)
class _Connected:
    """A run's parts, and the platform's managers."""

    trainer_infra: TrainerInfra
    deployments: DeploymentManager
    cleanup: ResourceCleanup | None
    api_key: str


def _connect(
    config: RecipeConfig,
    tokenizer: Any,
    stack: contextlib.ExitStack,
    on_status: Callable[[str], None],
) -> _Connected:
    """Find or start the platform, and provision there what the config asks for."""
    base_url, api_key = _find_platform(config, stack, on_status)
    trainers = TrainerJobManager(api_key, base_url=base_url)
    stack.callback(trainers.close)
    deployments = DeploymentManager(api_key, base_url=base_url)
    stack.callback(deployments.close)
    cleanup = None
    spec = InfraSpec.from_config(config)
    if config.cleanup_on_exit or is_embedded():
        cleanup = stack.enter_context(ResourceCleanup(trainers, deployments))
    if is_embedded():
        name = config.tokenizer_config.tokenizer_model
        local.check_tokenizer(tokenizer, name, config.base_model)
        if config.lora_rank and isinstance(config, RLConfig) and not spec.merges_adapter:
            engine = config.deployment.engine
            local.check_adapter_is_servable(config.base_model, config.lora_targets, engine)
    infra = build_infra(spec, trainers, deployments, api_key, cleanup, logger.debug)
    stack.callback(infra.close)
    trainer_infra = TrainerInfra(
        **vars(infra),
        tokenizer=tokenizer,
        trainers=trainers,
        is_embedded=is_embedded(),
        work_dir=Path(config.log_path).expanduser(),
    )
    return _Connected(trainer_infra, deployments, cleanup, api_key)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model that is served to be sampled from, and never trained."""

    base_model: str
    """The folder or hub id that it was loaded from."""
    tokenizer: Any
    sampler: DeploymentSampler
    inference_url: str
    api_key: str


@dataclass(frozen=True)
class SamplingPlatform:
    """A platform that serves models, and its key."""

    deployments: DeploymentManager
    api_key: str


@contextlib.contextmanager
def open_platform(work_dir: Path) -> Iterator[SamplingPlatform]:
    """The platform that ``HEARTH_URL`` names, or of one that is started here.

    Raises:
        ConfigError: the platform's key is missing.
    """
    with contextlib.ExitStack() as stack:
        base_url, api_key = read_url(), read_api_key() or "embedded"
        if base_url:
            _require_key()
        else:
            base_url = stack.enter_context(local.EmbeddedPlatform(work_dir=work_dir)).base_url
        deployments = DeploymentManager(api_key, base_url=base_url)
        stack.callback(deployments.close)
        yield SamplingPlatform(deployments, api_key)


@contextlib.contextmanager
def serve_model(
    platform: SamplingPlatform, name: str, *, deployment_id: str, max_concurrent: int
) -> Iterator[ServedModel]:
    """A deployment of this id, or of a model, which is deployed for the body of the ``with``.

    Raises:
        ConfigError: there is neither.
        HearthError: the platform refuses, or cannot be reached.
    """
    deployments = platform.deployments
    with contextlib.ExitStack() as stack:
        found = None if "/" in name or is_embedded() else deployments.get(name)
        if found is None:
            local.resolve_model(name)
            stack.callback(deployments.delete, deployment_id)
            found = deployments.create_or_get(
                DeploymentConfig(deployment_id=deployment_id, base_model=name)
            )
            deployments.wait_for_ready(deployment_id)
        tokenizer = load_tokenizer(
            TokenizerConfig(tokenizer_model=local.resolve_model(found.base_model))
        )
        sampler = DeploymentSampler(
            deployments.inference_url,
            found.name,
            platform.api_key,
            tokenizer,
            concurrency_controller=FixedConcurrencyController(max_concurrent),
        )
        stack.callback(sampler.close)
        yield ServedModel(
            base_model=found.base_model,
            tokenizer=tokenizer,
            sampler=sampler,
            inference_url=deployments.inference_url,
            api_key=platform.api_key,
        )


def _require_key() -> None:
    if not read_api_key():
        raise ConfigError(
            f"{API_KEY_VARIABLE} must be set where {URL_VARIABLE} is, got none: any text "
            "will do for a platform on this machine without keys"
        )


def load_tokenizer(settings: TokenizerConfig) -> Any:
    """The client's tokenizer.

    Raises:
        ConfigError: there is no tokenizer in that folder or under that hub id.
    """
    import transformers  # two seconds to import, and a bad config should answer at once

    # Prompts are encoded one by one: threads of its own only take time from the engines'.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return transformers.AutoTokenizer.from_pretrained(
            settings.tokenizer_model,
            revision=settings.tokenizer_revision or "main",
            trust_remote_code=settings.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        asks = "trust_remote_code" in str(error) and not settings.trust_remote_code
        part = "deployment" if isinstance(settings, DeployConfig) else "tokenizer"
        trust = f"; if you trust that code, set {part}.trust_remote_code=True" if asks else ""
        raise ConfigError(
            f"{part}.tokenizer_model must be a tokenizer's folder or hub id, got "
            f"{settings.tokenizer_model!r}: {str(error).splitlines()[0]}{trust}"
        ) from None


def _find_platform(
    config: RecipeConfig, stack: contextlib.ExitStack, on_status: Callable[[str], None]
) -> tuple[str, str]:
    """Base URL and key of the platform, which is started here when none is named."""
    base_url = read_url()
    if base_url:
        on_status(f"the platform is at {base_url}, with {config.base_model}")
        return base_url, read_api_key()
    on_status(f"the platform runs {_WHERE[config.placement]}, with {config.base_model}")
    platform = stack.enter_context(
        local.EmbeddedPlatform(
            work_dir=Path(config.log_path).expanduser(),
            placement=config.placement,
            snapshot_store=config.snapshot_store,
        )
    )
    return platform.base_url, read_api_key() or "embedded"
