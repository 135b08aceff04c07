"""The parts of provisioning: a trainer job, a deployment, and taking them down again."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Literal

from hearth.errors import ConfigError, HearthError
from hearth.sdk import (
    CreatedJob,
    DeploymentConfig,
    DeploymentInfo,
    DeploymentManager,
    TrainerEndpoint,
    TrainerJobConfig,
    TrainerJobManager,
)
from training.utils.config import DeployConfig, InfraConfig

logger = logging.getLogger(__name__)

DeploymentAction = Literal["scale_to_zero", "delete"]


class ResourceCleanup:
    """Takes down what was registered when its scope ends, in reverse order.

    First whatever was given to ``callback``, then the trainers (cancelled), then the deployments
    (scaled to zero or deleted). It does so however the body ends, by SIGTERM and Ctrl-C too; a step
    that fails is logged, the others still run, and the body's own exception goes on.
    """

    def __init__(
        self, rlor_mgr: TrainerJobManager, deploy_mgr: DeploymentManager | None = None
    ) -> None:
        self._trainers = rlor_mgr
        self._deployments = deploy_mgr
        self._callbacks: list[tuple[str, Callable[[], None]]] = []
        self._jobs: list[str] = []
        self._actions: dict[str, DeploymentAction] = {}
        self._before: Any = None
        self._is_handling = False

    def __enter__(self) -> ResourceCleanup:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGTERM)
            if before in (signal.SIG_DFL, None):
                self._before = before
                signal.signal(signal.SIGTERM, _exit_on_sigterm)
                self._is_handling = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        try:
            self.close()
        finally:
            if self._is_handling:
                signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
                self._is_handling = False

    def trainer(self, job_id: str) -> None:
        """Cancel this job when the scope ends."""
        if job_id not in self._jobs:
            self._jobs.append(job_id)

    def deployment(self, deployment_id: str, action: DeploymentAction = "scale_to_zero") -> None:
        """Scale this deployment to zero, or delete it, when the scope ends.

        Raises:
            ConfigError: there is no manager of deployments, or no such action.
        """
        if self._deployments is None:
            raise ConfigError("deploy_mgr must be given to clean up deployments, got None")
        if action not in ("scale_to_zero", "delete"):
            raise ConfigError(f"action must be 'scale_to_zero' or 'delete', got {action!r}")
        self._actions[deployment_id] = action

    def callback(self, name: str, close: Callable[[], None]) -> None:
        """Call ``close`` when the scope ends; ``name`` is for the log."""
        self._callbacks.append((name, close))

    def cancel_trainer(self, job_id: str) -> None:
        """Cancel a job now."""
        self._trainers.cancel(job_id)
        if job_id in self._jobs:
            self._jobs.remove(job_id)

    def close(self) -> None:
        """Take everything down now; what is taken down once is not again."""
        while self._callbacks:
            _attempt(*self._callbacks.pop())
        while self._jobs:
            job_id = self._jobs.pop()
            _attempt(f"trainer job {job_id}", lambda job_id=job_id: self._trainers.cancel(job_id))
        while self._actions:
            deployment_id, action = self._actions.popitem()
            manager = self._deployments
            assert manager is not None, "checked when it was registered"
            end = manager.delete if action == "delete" else manager.scale_to_zero
            _attempt(
                f"deployment {deployment_id}",
                lambda end=end, deployment_id=deployment_id: end(deployment_id),
            )


def request_trainer_job(
    rlor_mgr: TrainerJobManager, *, base_model: str, infra: InfraConfig, lora_rank: int = 0,
    display_name: str | None = None, hot_load_deployment_id: str | None = None,
    extra_args: list[str] | None = None, forward_only: bool = False,
    max_seq_len: int | None = None, learning_rate: float = 1e-5, job_id: str | None = None,
    training_shape_id: str | None = None, cleanup: ResourceCleanup | None = None,
    extra_values: dict[str, Any] | None = None,
) -> CreatedJob:  # fmt: skip
    """Ask for a trainer job and return at once; it is registered with ``cleanup`` first.

    Raises:
        ConfigError, HearthError: a setting breaks its rule, or the platform refuses the job.
    """
    is_frozen = forward_only or "--forward-only" in (extra_args or [])
    shape = training_shape_id
    if shape is None:
        shape = infra.ref_training_shape_id if is_frozen else infra.training_shape_id
    config = TrainerJobConfig(
        base_model=base_model, training_shape_id=shape, lora_rank=lora_rank,
        max_context_length=max_seq_len, learning_rate=learning_rate, display_name=display_name,
        hot_load_deployment_id=hot_load_deployment_id, forward_only=is_frozen,
        extra_args=[*(infra.extra_args or []), *(extra_args or [])] or None, region=infra.region,
        custom_image_tag=infra.custom_image_tag, accelerator_type=infra.accelerator_type,
        accelerator_count=infra.accelerator_count, node_count=infra.node_count,
        trainer_replica_count=None if is_frozen else infra.trainer_replica_count,
        purpose=infra.purpose, managed_by=infra.managed_by, job_id=job_id,
        skip_validations=infra.skip_validations, extra_values=extra_values,
    )  # fmt: skip
    config.validate()
    if job_id is not None and cleanup is not None:
        cleanup.trainer(job_id)  # the request may reach the platform and its answer not us
    created = rlor_mgr.create(config)
    if cleanup is not None:
        cleanup.trainer(created.job_id)
    return created


def create_trainer_job(
    rlor_mgr: TrainerJobManager, *, base_model: str, infra: InfraConfig, lora_rank: int = 0,
    display_name: str | None = None, hot_load_deployment_id: str | None = None,
    extra_args: list[str] | None = None, cleanup: ResourceCleanup | None = None, **options: Any,
) -> TrainerEndpoint:  # fmt: skip
    """A trainer job that answers (document 003). ``options`` are ``request_trainer_job``'s.

    Raises:
        EngineError: the job failed, with the platform's reason, or was not ready in time.
        ConfigError, HearthError: a setting breaks its rule, or the platform refuses the job.
    """
    created = request_trainer_job(
        rlor_mgr, base_model=base_model, infra=infra, lora_rank=lora_rank,
        display_name=display_name, hot_load_deployment_id=hot_load_deployment_id,
        extra_args=extra_args, cleanup=cleanup, **options,
    )  # fmt: skip
    return rlor_mgr.wait_for_ready(created.job_id, infra.trainer_timeout_s)


def deployment_config(
    deploy_cfg: DeployConfig, base_model: str, *, deployment_id: str | None = None,
    hot_load_trainer_job: str | None = None, max_seq_len: int | None = None,
    dtype: str | None = None, device: str | None = None,
) -> DeploymentConfig:  # fmt: skip
    """What to ask the platform for.

    Raises:
        ConfigError: ``tokenizer_model`` or the id is missing.
    """
    if not deploy_cfg.tokenizer_model:
        raise ConfigError(
            "deployment.tokenizer_model must be a tokenizer's folder or hub id, got '': prompts "
            "are tokenized on the client"
        )
    chosen = deployment_id or deploy_cfg.deployment_id
    if not chosen:
        raise ConfigError("deployment.deployment_id must be a name, got None")
    return DeploymentConfig(
        deployment_id=chosen, base_model=base_model, deployment_shape=deploy_cfg.deployment_shape,
        hot_load_trainer_job=hot_load_trainer_job or deploy_cfg.hot_load_trainer_job,
        region=deploy_cfg.deployment_region, max_batch_size=deploy_cfg.max_batch_size,
        tokenizer_model=deploy_cfg.tokenizer_model, max_context_length=max_seq_len, dtype=dtype,
        device=device,
    )  # fmt: skip


def setup_deployment(
    deploy_mgr: DeploymentManager, deploy_cfg: DeployConfig, base_model: str,
    infra: InfraConfig | None = None, *, cleanup: ResourceCleanup | None = None, **options: Any,
) -> DeploymentInfo | None:  # fmt: skip
    """A deployment that answers: the one of that id, or a new one (document 003).

    ``infra`` is taken as the documents pass it; deployments have their own settings.

    Raises:
        ConfigError: a setting breaks its rule, or the id names a deployment of another model.
        EngineError: it failed, with the platform's reason, or was not ready in time.
    """
    config = deployment_config(deploy_cfg, base_model, **options)
    if cleanup is not None:
        cleanup.deployment(config.deployment_id)
    info = deploy_mgr.create_or_get(config)
    check_base_model(info, base_model)
    return deploy_mgr.wait_for_ready(config.deployment_id, deploy_cfg.deployment_timeout_s)


def check_base_model(info: DeploymentInfo, base_model: str) -> None:
    """Refuse a deployment that serves another model.

    Raises:
        ConfigError: it does.
    """
    if info.base_model != base_model:
        raise ConfigError(
            f"deployment.deployment_id must name a deployment of {base_model!r}, got "
            f"{info.deployment_id!r}, which serves {info.base_model!r}: choose another id, or "
            "delete that deployment"
        )


def _attempt(name: str, end: Callable[[], None]) -> None:
    try:
        end()
    except (HearthError, OSError, TimeoutError) as error:
        logger.warning("%s could not be taken down: %s", name, error)


def _exit_on_sigterm(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(143)
