"""The parts of provisioning: a trainer job, a deployment, and taking them down again."""

from __future__ import annotations

import logging
import signal
import threading
import time
import uuid
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
from hearth.sdk.readiness import GONE
from training.config.parts import DeployConfig, InfraConfig
from training.platform.managers import own_deployments, own_trainers

logger = logging.getLogger(__name__)

DeploymentAction = Literal["scale_to_zero", "delete"]


class ResourceCleanup:
    """Takes down what was registered when its scope ends, in reverse order.

    First whatever was given to ``callback``, then the trainers (cancelled), then the deployments
    (scaled to zero or deleted). It does so however the body ends, by SIGTERM and Ctrl-C too; a step
    that fails is logged, the others still run, and the body's own exception goes on. A second
    Ctrl-C gives up the step that it interrupts, a second SIGTERM waits for the end.
    """

    def __init__(
        self, rlor_mgr: TrainerJobManager, deploy_mgr: DeploymentManager | None = None
    ) -> None:
        self._trainers = own_trainers(rlor_mgr)
        self._deployments = None if deploy_mgr is None else own_deployments(deploy_mgr)
        self._callbacks: list[tuple[str, Callable[[], None]]] = []
        self._jobs: list[str] = []
        self._actions: dict[str, DeploymentAction] = {}
        self._before: Any = None
        self._is_handling = False
        self._is_ending = False
        self._is_terminated = False

    def __enter__(self) -> ResourceCleanup:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGTERM)
            if before in (signal.SIG_DFL, None):
                self._before = before
                signal.signal(signal.SIGTERM, self._on_sigterm)
                self._is_handling = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_ending = True
        try:
            self.close()
        except KeyboardInterrupt:
            if error is None:
                raise
        finally:
            if self._is_handling:
                signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
                self._is_handling = False
        if self._is_terminated and error is None:
            raise SystemExit(143)

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
        """Take everything down now; what is taken down once is not again.

        Raises:
            KeyboardInterrupt: Ctrl-C came meanwhile; the other steps were still taken.
        """
        interrupt: KeyboardInterrupt | None = None
        while (step := self._next_step()) is not None:
            name, end = step
            try:
                end()
            except KeyboardInterrupt as error:
                logger.warning("%s may still run: interrupted", name)
                interrupt = error
            except (HearthError, OSError) as error:
                logger.warning("%s could not be taken down: %s", name, error)
            except Exception:
                logger.exception("%s could not be taken down", name)
        if interrupt is not None:
            raise interrupt

    def _next_step(self) -> tuple[str, Callable[[], None]] | None:
        if self._callbacks:
            return self._callbacks.pop()
        if self._jobs:
            job_id = self._jobs.pop()
            return f"trainer job {job_id}", lambda: self._trainers.cancel(job_id)
        if self._actions:
            deployment_id, action = self._actions.popitem()
            manager = self._deployments
            assert manager is not None, "checked when it was registered"
            end = manager.delete if action == "delete" else manager.scale_to_zero
            return f"deployment {deployment_id}", lambda: end(deployment_id)
        return None

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_ending:
            self._is_terminated = True
            return
        raise SystemExit(143)


def request_trainer_job(
    rlor_mgr: TrainerJobManager,
    *,
    base_model: str,
    infra: InfraConfig,
    lora_rank: int = 0,
    display_name: str | None = None,
    hot_load_deployment_id: str | None = None,
    extra_args: list[str] | None = None,
    forward_only: bool = False,
    max_seq_len: int | None = None,
    learning_rate: float = 1e-5,
    job_id: str | None = None,
    training_shape_id: str | None = None,
    cleanup: ResourceCleanup | None = None,
    extra_values: dict[str, Any] | None = None,
) -> CreatedJob:
    """Ask for a trainer job and return at once; it is registered with ``cleanup`` first.

    Raises:
        ConfigError, HearthError: a setting breaks its rule, or the platform refuses the job.
    """
    is_frozen = forward_only or "--forward-only" in (extra_args or [])
    job_id = job_id or f"training-api-service-{uuid.uuid4().hex[:8]}"
    shape = training_shape_id
    if shape is None:
        shape = infra.ref_training_shape_id if is_frozen else infra.training_shape_id
    config = TrainerJobConfig(
        base_model=base_model,
        training_shape_id=shape,
        lora_rank=lora_rank,
        max_context_length=max_seq_len,
        learning_rate=learning_rate,
        display_name=display_name,
        hot_load_deployment_id=hot_load_deployment_id,
        forward_only=is_frozen,
        extra_args=[*(infra.extra_args or []), *(extra_args or [])] or None,
        region=infra.region,
        custom_image_tag=infra.custom_image_tag,
        accelerator_type=infra.accelerator_type,
        accelerator_count=infra.accelerator_count,
        node_count=infra.node_count,
        trainer_replica_count=None if is_frozen else infra.trainer_replica_count,
        purpose=infra.purpose,
        managed_by=infra.managed_by,
        job_id=job_id,
        skip_validations=infra.skip_validations,
        extra_values=extra_values,
    )
    config.validate()
    if cleanup is not None:
        cleanup.trainer(job_id)  # the request may reach the platform and its answer not us
    return rlor_mgr.create(config)


def create_trainer_job(
    rlor_mgr: TrainerJobManager,
    *,
    base_model: str,
    infra: InfraConfig,
    lora_rank: int = 0,
    display_name: str | None = None,
    hot_load_deployment_id: str | None = None,
    extra_args: list[str] | None = None,
    cleanup: ResourceCleanup | None = None,
    **options: Any,
) -> TrainerEndpoint:
    """A trainer job that answers (document 003). ``options`` are ``request_trainer_job``'s.

    Raises:
        EngineError: the job failed, with the platform's reason, or was not ready in time.
        ConfigError, HearthError: a setting breaks its rule, or the platform refuses the job.
    """
    trainers = own_trainers(rlor_mgr)
    created = request_trainer_job(
        trainers,
        base_model=base_model,
        infra=infra,
        lora_rank=lora_rank,
        display_name=display_name,
        hot_load_deployment_id=hot_load_deployment_id,
        extra_args=extra_args,
        cleanup=cleanup,
        **options,
    )
    return trainers.wait_for_ready(created.job_id, infra.trainer_timeout_s)


def deployment_config(
    deploy_cfg: DeployConfig,
    base_model: str,
    *,
    deployment_id: str | None = None,
    hot_load_trainer_job: str | None = None,
    max_seq_len: int | None = None,
    dtype: str | None = None,
    device: str | None = None,
    display_name: str | None = None,
    lora_rank: int = 0,
) -> DeploymentConfig:
    """What to ask the platform for; without an id one is made up of the model's name and the time.

    Raises:
        ConfigError: ``tokenizer_model`` is missing, or ``replicas`` is below 1.
    """
    if not deploy_cfg.tokenizer_model:
        raise ConfigError(
            "deployment.tokenizer_model must be a tokenizer's folder or hub id, got '': prompts "
            "are tokenized on the client"
        )
    if deploy_cfg.replicas < 1:
        raise ConfigError(f"deployment.replicas must be >= 1, got {deploy_cfg.replicas}")
    chosen = deployment_id or deploy_cfg.deployment_id or made_up_id(base_model)
    wanted = {
        "engine": deploy_cfg.engine,
        "engine_options": deploy_cfg.engine_options,
        "lora_rank": lora_rank,
    }
    return DeploymentConfig(
        deployment_id=chosen,
        base_model=base_model,
        deployment_shape=deploy_cfg.deployment_shape,
        hot_load_trainer_job=hot_load_trainer_job or deploy_cfg.hot_load_trainer_job,
        region=deploy_cfg.deployment_region,
        max_batch_size=deploy_cfg.max_batch_size,
        tokenizer_model=deploy_cfg.tokenizer_model,
        max_context_length=max_seq_len,
        dtype=dtype,
        device=device,
        display_name=display_name,
        max_replica_count=deploy_cfg.replicas,
        extra_values={name: value for name, value in wanted.items() if value} or None,
    )


def made_up_id(base_model: str, suffix: str = "") -> str:
    """A deployment's id: the model's last name and ``suffix``, by default the time."""
    leaf = base_model.rstrip("/").rsplit("/", 1)[-1].lower()
    plain = "".join(one if one.isascii() and one.isalnum() else "-" for one in leaf)
    return f"{plain[:40].strip('-') or 'model'}-{suffix or int(time.time())}"


def request_deployment(
    deploy_mgr: DeploymentManager,
    config: DeploymentConfig,
    *,
    cleanup: ResourceCleanup | None = None,
    is_own_id: bool = False,
) -> DeploymentInfo:
    """Ask for a deployment and return at once.

    One that exists is taken: scaled up where it has no replica, and attached to the config's
    trainer. ``cleanup`` scales down what was asked for here: a deployment that is made or scaled
    up, or that an earlier try of the same run has left (``is_own_id``, or its display name is the
    config's). One that somebody else runs goes on running.

    Raises:
        ConfigError: it serves another model.
        HearthError: the platform refuses.
    """
    info = deploy_mgr.get(config.deployment_id)
    if info is not None and info.state in GONE:
        info = None
    if info is not None:
        check_base_model(info, config.base_model)
    if cleanup is not None and (info is None or is_own_id or not _is_brought(info, config)):
        cleanup.deployment(config.deployment_id)
    if info is None:
        info = deploy_mgr.create_or_get(config)
    changes: dict[str, Any] = {}
    if info.max_replica_count == 0:
        changes = {"min_replica_count": 1, "max_replica_count": config.max_replica_count}
    trainer = config.hot_load_trainer_job
    if trainer is not None and leaf_of(info.hot_load_trainer_job) != leaf_of(trainer):
        # In one request: a replica that starts for another trainer starts with the base weights.
        changes["hot_load_trainer_job"] = trainer
    return deploy_mgr.update(config.deployment_id, **changes) if changes else info


def _is_brought(info: DeploymentInfo, config: DeploymentConfig) -> bool:
    """Whether somebody else runs it: it has a replica, and not this run's label."""
    is_labelled = config.display_name is not None and info.display_name == config.display_name
    return info.max_replica_count > 0 and not is_labelled


def leaf_of(name: str | None) -> str:
    """The id in a resource's full name; an id stays as it is, and None is ``""``."""
    return (name or "").rsplit("/", 1)[-1]


def setup_deployment(
    deploy_mgr: DeploymentManager,
    deploy_cfg: DeployConfig,
    base_model: str,
    infra: InfraConfig | None = None,
    *,
    cleanup: ResourceCleanup | None = None,
    **options: Any,
) -> DeploymentInfo:
    """A deployment that answers: the one of that id, scaled up again, or a new one (document 003).

    ``infra`` is taken as the documents pass it; deployments have their own settings. ``options``
    are ``deployment_config``'s.

    Raises:
        ConfigError: a setting breaks its rule, or the id names a deployment of another model.
        EngineError: it failed, with the platform's reason, or was not ready in time.
    """
    config = deployment_config(deploy_cfg, base_model, **options)
    deployments = own_deployments(deploy_mgr)
    request_deployment(deployments, config, cleanup=cleanup)
    return deployments.wait_for_ready(config.deployment_id, deploy_cfg.deployment_timeout_s)


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
