"""What a loop trains with: policy, reference and deployment, asked for together and wired.

``setup_infra`` is the one entry point, for recipes and for loops of your own. All requests go out
before anything is waited for, so trainers and deployment start side by side; what fails is
collected into one error, and what was asked for is taken down.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hearth.errors import ConfigError, EngineError, HearthError, NotFoundError
from hearth.sdk import (
    APIFuture,
    CreatedJob,
    DeploymentInfo,
    DeploymentManager,
    TrainerEndpoint,
    TrainerJobManager,
    TrainingShapeProfile,
)
from hearth.sdk.readiness import RESUMABLE
from training.config.parts import DeployConfig, InfraConfig, WeightSyncScope
from training.platform.client import DCP_TIMEOUT_S, STEP_TIMEOUT_S, ReconnectableClient
from training.platform.existing_jobs import BroughtJob, check_snapshot_place, find_job
from training.platform.managers import own_deployments, own_trainers
from training.platform.provisioning import (
    ResourceCleanup,
    deployment_config,
    made_up_id,
    request_deployment,
    request_trainer_job,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Infra:
    """Wired clients and what they run on.

    ``reference`` is None when nothing asked for one; ``inference_model`` (what a sampler takes as
    its model) and ``deployment_id`` are None without inference. ``boot_metrics`` are seconds.
    """

    policy: ReconnectableClient
    reference: ReconnectableClient | None
    policy_profile: TrainingShapeProfile | None
    policy_job_id: str
    reference_job_id: str | None
    inference_model: str | None
    deployment_id: str | None
    deployment_shape: str | None
    training_shape_id: str | None
    ref_training_shape_id: str | None
    max_seq_len: int | None
    boot_metrics: dict[str, float] = field(default_factory=dict)
    closeables: list[Callable[[], None]] = field(default_factory=list)

    @property
    def has_experts(self) -> bool:
        """Whether the policy is a mixture of experts that router replay can act on."""
        return self.policy.inner.supports_router_replay

    def close(self) -> None:
        """Close the clients; the resources are ``ResourceCleanup``'s."""
        for close in reversed(self.closeables):
            close()


@dataclass(frozen=True, kw_only=True)
class _Order:
    """What ``setup_infra`` was asked for."""

    rlor_mgr: TrainerJobManager
    deploy_mgr: DeploymentManager | None
    base_model: str
    infra_cfg: InfraConfig
    deploy_cfg: DeployConfig
    lora_rank: int
    max_seq_len: int | None
    learning_rate: float
    policy_job_id: str | None
    reference_job_id: str | None
    role_prefix: str
    job_suffix: str
    cleanup: ResourceCleanup
    extra_values: dict[str, Any] | None
    deployment_id: str | None
    needs_inference: bool
    own_reference: bool

    @property
    def is_per_deployment(self) -> bool:
        """Whether snapshots belong to the deployment."""
        scope = self.deploy_cfg.weight_sync_scope
        return self.needs_inference and scope == WeightSyncScope.PER_DEPLOYMENT

    @property
    def label(self) -> str:
        """Tells this run's parts from others'; empty where ids do not repeat."""
        return f"-{self.job_suffix}" if self.job_suffix else ""


def setup_infra(
    *,
    rlor_mgr: TrainerJobManager,
    deploy_mgr: DeploymentManager | None = None,
    base_model: str,
    infra_cfg: InfraConfig | None = None,
    deploy_cfg: DeployConfig | None = None,
    lora_rank: int = 0,
    max_seq_len: int | None = None,
    learning_rate: float = 1e-5,
    step_timeout: float = STEP_TIMEOUT_S,
    dcp_timeout: float = DCP_TIMEOUT_S,
    policy_job_id: str | None = None,
    reference_job_id: str | None = None,
    needs_reference: bool = False,
    needs_inference: bool = True,
    role_prefix: str = "rl",
    job_suffix: str = "",
    api_key: str,
    cleanup: ResourceCleanup | None = None,
    on_status: Callable[[str], None] = logger.info,
    seed: int | None = None,
    extra_values: dict[str, Any] | None = None,
) -> Infra:
    """Provision and wire everything; the configs are not changed.

    A job or deployment that exists under the given (or derived) id is attached to instead of made.
    A full-parameter policy's reference is a trainer of its own, forward-only; a LoRA policy shares
    its frozen base weights, unless a reference shape or job id asks for a trainer. With
    ``PER_TRAINER`` (the default) the deployment reads the policy trainer's snapshots; with
    ``PER_DEPLOYMENT`` the policy trainer writes into the deployment's. ``job_suffix`` makes the ids
    of jobs and deployment repeat, so that the same run finds them again.

    ``cleanup`` takes down what was asked for here. Jobs given by id and a deployment that somebody
    else runs already go on running.

    Raises:
        ConfigError: inference without ``deploy_mgr`` or tokenizer, a job that does not fit, or two
            places for snapshots; nothing was asked for.
        EngineError: parts failed; each is named. Everything asked for is being taken down by
            ``cleanup``, or was if there is none.
    """
    rlor_mgr = own_trainers(rlor_mgr)
    deploy_mgr = None if deploy_mgr is None else own_deployments(deploy_mgr)
    infra_cfg, deploy_cfg = infra_cfg or InfraConfig(), deploy_cfg or DeployConfig()
    if needs_inference and deploy_mgr is None:
        raise ConfigError("deploy_mgr must be given where needs_inference is True, got None")
    own_reference = needs_reference and bool(
        lora_rank == 0 or infra_cfg.ref_training_shape_id or reference_job_id
    )
    own_id = made_up_id(base_model, job_suffix)
    order = _Order(
        rlor_mgr=rlor_mgr,
        deploy_mgr=deploy_mgr,
        base_model=base_model,
        infra_cfg=infra_cfg,
        deploy_cfg=deploy_cfg,
        lora_rank=lora_rank,
        max_seq_len=max_seq_len,
        learning_rate=learning_rate,
        policy_job_id=policy_job_id,
        reference_job_id=reference_job_id,
        role_prefix=role_prefix,
        job_suffix=job_suffix,
        cleanup=cleanup or ResourceCleanup(rlor_mgr, deploy_mgr),
        extra_values=extra_values,
        deployment_id=(deploy_cfg.deployment_id or own_id) if needs_inference else None,
        needs_inference=needs_inference,
        own_reference=own_reference,
    )
    if needs_inference:
        deployment_config(deploy_cfg, base_model, deployment_id=order.deployment_id)
    started = time.perf_counter()
    try:
        ready = _provision(order, on_status)
        provisioned = time.perf_counter()
        infra = _wire(
            order,
            ready,
            api_key,
            needs_reference=needs_reference,
            seed=seed,
            step_timeout=step_timeout,
            dcp_timeout=dcp_timeout,
        )
    except BaseException:
        if cleanup is None:
            order.cleanup.close()
        raise
    infra.boot_metrics["boot/provision_time"] = provisioned - started
    infra.boot_metrics["boot/wire_time"] = time.perf_counter() - provisioned
    if cleanup is not None:
        cleanup.callback("training clients", infra.close)
    return infra


@dataclass
class _Ready:
    """What answers."""

    policy: TrainerEndpoint
    reference: TrainerEndpoint | None
    deployment: DeploymentInfo | None
    shapes: dict[str, TrainingShapeProfile | None]


def _provision(order: _Order, on_status: Callable[[str], None]) -> _Ready:
    """Ask for everything in order, then wait for all of it side by side."""
    roles = {"policy": order.policy_job_id}
    if order.own_reference:
        roles["reference"] = order.reference_job_id
    brought = {
        role: find_job(order.rlor_mgr, role, job_id, order.base_model)
        for role, job_id in roles.items()
    }
    if order.needs_inference:
        check_snapshot_place(order.deploy_cfg, order.deployment_id, brought["policy"])
    shapes = _shapes(order, brought)
    parts = [*roles, "deployment"] if order.needs_inference else [*roles]
    if order.is_per_deployment:
        parts = ["deployment", *roles]
    jobs: dict[str, CreatedJob] = {}
    deployment: DeploymentInfo | None = None
    for part in parts:
        try:
            if part == "deployment":
                policy = jobs.get("policy")  # asked for by now, unless the deployment comes first
                deployment = _request_deployment(order, policy.job_name if policy else None)
            else:
                jobs[part] = _request_trainer(order, part, shapes[part], brought[part])
        except ConfigError:
            raise  # a mistake in a setting, which says itself what to do
        except (HearthError, OSError) as error:
            name = part if part == "deployment" else f"{part} trainer"
            raise _failure({name: error}, len(parts)) from error
    asked_ids = ", ".join(job.job_id for job in jobs.values())
    on_status(f"waiting for {asked_ids}" + (f" and {order.deployment_id}" if deployment else ""))
    return _wait(order, jobs, deployment, shapes)


def _shapes(
    order: _Order, brought: Mapping[str, BroughtJob | None]
) -> dict[str, TrainingShapeProfile | None]:
    """The shapes of both trainers: the given ones, else what fits; None where the platform picks.

    Raises:
        HearthError: a given shape is unknown.
    """
    config = order.infra_cfg
    given = {"policy": config.training_shape_id, "reference": config.ref_training_shape_id}
    # Whoever chooses hardware has no shape choose it.
    is_free = (
        config.accelerator_type,
        config.accelerator_count,
        config.node_count,
        config.custom_image_tag,
    ) == (None,) * 4
    found: dict[str, TrainingShapeProfile | None] = {}
    for role, job in brought.items():
        shape = given[role] if job is None else job.training_shape
        if shape:
            found[role] = order.rlor_mgr.resolve_training_profile(shape)
            continue
        if job is not None or not is_free:
            found[role] = None
            continue
        try:
            found[role] = order.rlor_mgr.auto_select_training_shape(
                order.base_model, order.lora_rank, role == "reference"
            )
        except NotFoundError:
            found[role] = None  # a folder or hub id that no catalog lists has no shape
    return found


def _request_trainer(
    order: _Order, role: str, profile: TrainingShapeProfile | None, brought: BroughtJob | None
) -> CreatedJob:
    if brought is not None:
        return brought.job
    name = f"{order.role_prefix}-{role}"
    return request_trainer_job(
        order.rlor_mgr,
        base_model=order.base_model,
        infra=order.infra_cfg,
        lora_rank=order.lora_rank if role == "policy" else 0,
        display_name=name,
        hot_load_deployment_id=(
            order.deployment_id if order.is_per_deployment and role == "policy" else None
        ),
        forward_only=role == "reference",
        max_seq_len=order.max_seq_len,
        learning_rate=order.learning_rate,
        job_id=f"{name}{order.label}" if order.label else None,
        training_shape_id=profile.training_shape_version if profile is not None else None,
        cleanup=order.cleanup,
        extra_values=order.extra_values,
    )


def _request_deployment(order: _Order, trainer_job: str | None) -> DeploymentInfo:
    manager, deployment_id = order.deploy_mgr, order.deployment_id
    assert manager is not None, "checked by setup_infra"
    assert deployment_id is not None, "made by setup_infra"
    values = order.extra_values or {}
    config = deployment_config(
        order.deploy_cfg,
        order.base_model,
        deployment_id=deployment_id,
        hot_load_trainer_job=trainer_job,
        max_seq_len=order.max_seq_len,
        dtype=values.get("dtype"),
        device=values.get("device"),
        display_name=f"{order.role_prefix}-deployment{order.label}" if order.label else None,
        lora_rank=order.lora_rank,
    )
    info = request_deployment(
        manager, config, cleanup=order.cleanup, is_own_id=order.deploy_cfg.deployment_id is None
    )
    if order.is_per_deployment and info.hot_load_trainer_job:
        raise ConfigError(
            f"deployment.weight_sync_scope must be PER_TRAINER for deployment {deployment_id!r}, "
            f"got PER_DEPLOYMENT: it reads the snapshots of {info.hot_load_trainer_job!r}; choose "
            "another deployment_id"
        )
    return info


def _wait(
    order: _Order,
    jobs: dict[str, CreatedJob],
    deployment: DeploymentInfo | None,
    shapes: dict[str, TrainingShapeProfile | None],
) -> _Ready:
    waits: dict[str, APIFuture[Any]] = {}
    for role, job in jobs.items():
        # A job that has ended was brought, or is this very run's from before it was interrupted.
        wait_for = order.rlor_mgr.wait_for_ready_async
        if job.state in RESUMABLE:
            wait_for = order.rlor_mgr.reconnect_and_wait_async
        waits[f"{role} trainer {job.job_id}"] = wait_for(
            job.job_id, order.infra_cfg.trainer_timeout_s
        )
    if deployment is not None:
        assert order.deploy_mgr is not None, "checked by setup_infra"
        waits[f"deployment {deployment.deployment_id}"] = order.deploy_mgr.wait_for_ready_async(
            deployment.deployment_id, order.deploy_cfg.deployment_timeout_s
        )
    ready: list[Any] = []
    failures: dict[str, Exception] = {}
    try:
        for name, wait in waits.items():
            try:
                ready.append(wait.result())
            except (HearthError, OSError) as error:
                failures[name] = error
    finally:
        for wait in waits.values():
            wait.cancel()
    if failures:
        raise _failure(failures, len(waits))
    endpoints = [one for one in ready if isinstance(one, TrainerEndpoint)]
    return _Ready(
        policy=endpoints[0],
        reference=endpoints[1] if len(endpoints) > 1 else None,
        deployment=next((one for one in ready if isinstance(one, DeploymentInfo)), None),
        shapes=shapes,
    )


def _wire(
    order: _Order,
    ready: _Ready,
    api_key: str,
    *,
    needs_reference: bool,
    seed: int | None,
    step_timeout: float,
    dcp_timeout: float,
) -> Infra:
    closeables: list[Callable[[], None]] = []
    policy = ReconnectableClient.connect(
        order.rlor_mgr,
        ready.policy,
        api_key=api_key,
        base_model=order.base_model,
        lora_rank=order.lora_rank,
        seed=seed,
        replace=True,
        timeout_s=step_timeout,
        dcp_timeout_s=dcp_timeout,
    )
    closeables.append(policy.close)
    reference: ReconnectableClient | None = None
    try:
        if ready.reference is not None:
            reference = ReconnectableClient.connect(
                order.rlor_mgr,
                ready.reference,
                api_key=api_key,
                base_model=order.base_model,
                frozen=True,
                timeout_s=step_timeout,
            )
        elif needs_reference:
            reference = policy.create_base_reference()
    except BaseException:
        policy.close()
        raise
    if reference is not None:
        closeables.append(reference.close)
    deployment = ready.deployment
    profile, ref_profile = ready.shapes.get("policy"), ready.shapes.get("reference")
    return Infra(
        policy=policy,
        reference=reference,
        policy_profile=profile,
        policy_job_id=ready.policy.job_id,
        reference_job_id=ready.reference.job_id if ready.reference is not None else None,
        inference_model=deployment.inference_model if deployment is not None else None,
        deployment_id=order.deployment_id,
        deployment_shape=deployment.deployment_shape if deployment is not None else None,
        training_shape_id=profile.training_shape_id if profile is not None else None,
        ref_training_shape_id=ref_profile.training_shape_id if ref_profile is not None else None,
        max_seq_len=order.max_seq_len or policy.inner.max_seq_len,
        closeables=closeables,
    )


def _failure(failures: Mapping[str, Exception], parts: int) -> EngineError:
    """One error that names every part that failed."""
    lines = "".join(f"\n  - {name}: {error}" for name, error in failures.items())
    return EngineError(f"provisioning failed, {len(failures)} of {parts} parts:{lines}")
