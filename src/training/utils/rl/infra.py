"""What a loop trains with: policy, reference and deployment, asked for together and wired.

``setup_infra`` is the one entry point, for recipes and for loops of your own. All requests go out
before anything is waited for, so trainers and deployment start side by side; what fails is
collected into one error, and what was asked for is taken down.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from hearth.errors import ConfigError, EngineError, HearthError, NotFoundError
from hearth.sdk import (
    CreatedJob,
    DeploymentInfo,
    DeploymentManager,
    TrainerEndpoint,
    TrainerJobManager,
    TrainingShapeProfile,
)
from training.utils.client import DCP_TIMEOUT_S, STEP_TIMEOUT_S, ReconnectableClient
from training.utils.config import DeployConfig, InfraConfig, WeightSyncScope
from training.utils.provisioning import (
    ResourceCleanup,
    check_base_model,
    deployment_config,
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
        return self.deploy_cfg.weight_sync_scope is WeightSyncScope.PER_DEPLOYMENT


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
    ``PER_DEPLOYMENT`` trainers write into the deployment's. ``job_suffix`` makes the ids of jobs
    and deployment repeat, so that the same run finds them again.

    Raises:
        ConfigError: inference without ``deploy_mgr`` or tokenizer; nothing was asked for.
        EngineError: parts failed; each is named. Everything asked for is being taken down by
            ``cleanup``, or was if there is none.
    """
    infra_cfg, deploy_cfg = infra_cfg or InfraConfig(), deploy_cfg or DeployConfig()
    if needs_inference and deploy_mgr is None:
        raise ConfigError("deploy_mgr must be given where needs_inference is True, got None")
    own_reference = needs_reference and bool(
        lora_rank == 0 or infra_cfg.ref_training_shape_id or reference_job_id
    )
    leaf = base_model.rstrip("/").rsplit("/", 1)[-1].lower().replace("_", "-").replace(".", "-")
    own_id = f"{leaf[:40].strip('-') or 'model'}-{job_suffix or int(time.time())}"
    order = _Order(
        rlor_mgr=rlor_mgr, deploy_mgr=deploy_mgr, base_model=base_model, infra_cfg=infra_cfg,
        deploy_cfg=deploy_cfg, lora_rank=lora_rank, max_seq_len=max_seq_len,
        learning_rate=learning_rate, policy_job_id=policy_job_id,
        reference_job_id=reference_job_id, role_prefix=role_prefix, job_suffix=job_suffix,
        cleanup=cleanup or ResourceCleanup(rlor_mgr, deploy_mgr), extra_values=extra_values,
        deployment_id=(deploy_cfg.deployment_id or own_id) if needs_inference else None,
        needs_inference=needs_inference, own_reference=own_reference,
    )  # fmt: skip
    if needs_inference:
        deployment_config(deploy_cfg, base_model, deployment_id=order.deployment_id)
    started = time.perf_counter()
    try:
        ready = _provision(order, on_status)
        provisioned = time.perf_counter()
        infra = _wire(
            order, ready, api_key, needs_reference=needs_reference, seed=seed,
            step_timeout=step_timeout, dcp_timeout=dcp_timeout,
        )  # fmt: skip
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
    shapes = _shapes(order)
    jobs: dict[str, CreatedJob] = {}
    deployment: DeploymentInfo | None = None
    try:
        if order.is_per_deployment:
            deployment = _request_deployment(order, None)
        jobs["policy"] = _request_trainer(order, "policy", shapes["policy"])
        if order.own_reference:
            jobs["reference"] = _request_trainer(order, "reference", shapes["reference"])
        if not order.is_per_deployment:
            deployment = _request_deployment(order, jobs["policy"].job_name)
    except ConfigError:
        raise  # a mistake in a setting, which says itself what to do
    except (HearthError, OSError) as error:
        asked = [*jobs, *(["deployment"] if deployment is not None else [])]
        raise _failure({"request": error}, asked) from error
    asked_ids = ", ".join(one.job_id for one in jobs.values())
    on_status(f"waiting for {asked_ids}" + (f" and {order.deployment_id}" if deployment else ""))
    return _wait(order, jobs, deployment, shapes)


def _shapes(order: _Order) -> dict[str, TrainingShapeProfile | None]:
    """The shapes of both trainers: the given ones, else what fits; None where the platform picks.

    Raises:
        HearthError: a given shape is unknown.
    """
    wanted = {"policy": order.infra_cfg.training_shape_id}
    if order.own_reference:
        wanted["reference"] = order.infra_cfg.ref_training_shape_id
    found: dict[str, TrainingShapeProfile | None] = {}
    for role, shape in wanted.items():
        if shape:
            found[role] = order.rlor_mgr.resolve_training_profile(shape)
            continue
        try:
            found[role] = order.rlor_mgr.auto_select_training_shape(
                order.base_model, order.lora_rank, role == "reference"
            )
        except NotFoundError:
            found[role] = None  # a folder or hub id that no catalog lists has no shape
    return found


def _request_trainer(order: _Order, role: str, profile: TrainingShapeProfile | None) -> CreatedJob:
    given = order.policy_job_id if role == "policy" else order.reference_job_id
    if given is not None:
        # Somebody else's: attached to, and left running.
        endpoint = order.rlor_mgr.reconnect_and_wait(given, order.infra_cfg.trainer_timeout_s)
        return CreatedJob(endpoint.job_id, endpoint.job_name)
    suffix = f"-{order.job_suffix}" if order.job_suffix else ""
    name = f"{order.role_prefix}-{role}"
    created = request_trainer_job(
        order.rlor_mgr, base_model=order.base_model, infra=order.infra_cfg,
        lora_rank=order.lora_rank if role == "policy" else 0, display_name=name,
        hot_load_deployment_id=(
            order.deployment_id if order.is_per_deployment and role == "policy" else None
        ),
        forward_only=role == "reference", max_seq_len=order.max_seq_len,
        learning_rate=order.learning_rate, job_id=f"{name}{suffix}" if suffix else None,
        training_shape_id=profile.training_shape_version if profile is not None else None,
        cleanup=order.cleanup, extra_values=order.extra_values,
    )  # fmt: skip
    if created.state not in (None, "JOB_STATE_CREATING", "JOB_STATE_RUNNING", "JOB_STATE_PENDING"):
        order.rlor_mgr.resume(created.job_id)  # this very run's, from before it was interrupted
    return created


def _request_deployment(order: _Order, trainer_job: str | None) -> DeploymentInfo | None:
    if not order.needs_inference:
        return None
    manager, deployment_id = order.deploy_mgr, order.deployment_id
    assert manager is not None, "checked by setup_infra"
    assert deployment_id is not None, "made by setup_infra"
    values = order.extra_values or {}
    config = deployment_config(
        order.deploy_cfg, order.base_model, deployment_id=deployment_id,
        hot_load_trainer_job=trainer_job, max_seq_len=order.max_seq_len,
        dtype=values.get("dtype"), device=values.get("device"),
    )  # fmt: skip
    order.cleanup.deployment(deployment_id)
    info = manager.create_or_get(config)
    check_base_model(info, order.base_model)
    if info.max_replica_count == 0:
        manager.update(deployment_id, min_replica_count=1, max_replica_count=1)
    if trainer_job is not None and info.hot_load_trainer_job != trainer_job:
        info = manager.update(deployment_id, hot_load_trainer_job=trainer_job)
    return info


def _wait(
    order: _Order, jobs: dict[str, CreatedJob], deployment: DeploymentInfo | None,
    shapes: dict[str, TrainingShapeProfile | None],
) -> _Ready:  # fmt: skip
    failures: dict[str, BaseException] = {}
    with ThreadPoolExecutor(max_workers=3, thread_name_prefix="hearth-wait") as pool:
        waits: dict[str, Any] = {
            f"{role} trainer {job.job_id}": pool.submit(
                order.rlor_mgr.wait_for_ready, job.job_id, order.infra_cfg.trainer_timeout_s
            )
            for role, job in jobs.items()
        }
        if deployment is not None:
            assert order.deploy_mgr is not None, "checked by setup_infra"
            waits[f"deployment {deployment.deployment_id}"] = pool.submit(
                order.deploy_mgr.wait_for_ready, deployment.deployment_id,
                order.deploy_cfg.deployment_timeout_s,
            )  # fmt: skip
        ready: list[Any] = []
        for name, wait in waits.items():
            error = wait.exception()
            if error is not None:
                failures[name] = error
            else:
                ready.append(wait.result())
    if failures:
        raise _failure(failures, list(waits))
    endpoints = [one for one in ready if isinstance(one, TrainerEndpoint)]
    return _Ready(
        policy=endpoints[0],
        reference=endpoints[1] if len(endpoints) > 1 else None,
        deployment=next((one for one in ready if isinstance(one, DeploymentInfo)), None),
        shapes=shapes,
    )


def _wire(
    order: _Order, ready: _Ready, api_key: str, *, needs_reference: bool, seed: int | None,
    step_timeout: float, dcp_timeout: float,
) -> Infra:  # fmt: skip
    closeables: list[Callable[[], None]] = []
    policy = ReconnectableClient.connect(
        order.rlor_mgr, ready.policy, api_key=api_key, base_model=order.base_model,
        lora_rank=order.lora_rank, seed=seed, replace=True, timeout_s=step_timeout,
        dcp_timeout_s=dcp_timeout,
    )  # fmt: skip
    closeables.append(policy.close)
    reference: ReconnectableClient | None = None
    try:
        if ready.reference is not None:
            reference = ReconnectableClient.connect(
                order.rlor_mgr, ready.reference, api_key=api_key, base_model=order.base_model,
                frozen=True, timeout_s=step_timeout,
            )  # fmt: skip
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


def _failure(failures: dict[str, BaseException], asked: list[str]) -> EngineError:
    """One error that names every part."""
    lines = "".join(f"\n  - {name}: {error}" for name, error in failures.items())
    return EngineError(
        f"provisioning failed, {len(failures)} of {max(len(asked), 1)} parts:{lines}"
    )
