"""Trainer jobs and deployments: asked for all together, then waited for side by side."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hearth.errors import ConfigError, EngineError, HearthError, NotFoundError
from hearth.sdk import (
    APIFuture,
    CreatedJob,
    DeploymentConfig,
    DeploymentInfo,
    DeploymentManager,
    TrainerEndpoint,
    TrainerJobConfig,
    TrainerJobManager,
    TrainingShapeProfile,
)
from hearth.sdk.background import start
from hearth.sdk.readiness import GONE, RESUMABLE
from hearth.sdk.stream import MOST_RESTARTS
from training.config.parts import DeployConfig, InfraConfig, WeightSyncScope
from training.platform.cleanup import ResourceCleanup
from training.platform.managers import own_deployments, own_trainers
from training.platform.spec import InfraSpec

logger = logging.getLogger(__name__)

_HARDWARE = ("accelerator_type", "accelerator_count", "node_count", "custom_image_tag")
_LABELS = ("region", "purpose", "managed_by", "skip_validations")
_KNOWN_ARGS = frozenset({"--forward-only", "--no-compile"})
"""What the documents pass; nothing here compiles a model, so the second is always kept to."""


@dataclass(frozen=True)
class ExistingJob:
    """A job that the loop attaches to; it goes on running afterwards."""

    job: CreatedJob
    training_shape: str | None
    tied_to: str
    """The deployment into whose place it publishes; empty where it publishes into its own."""


def leaf_of(name: str | None) -> str:
    """The id in a resource's full name; an id stays as it is, and None is ``""``."""
    return (name or "").rsplit("/", 1)[-1]


def find_jobs(trainers: TrainerJobManager, spec: InfraSpec) -> dict[str, ExistingJob | None]:
    """The job that was given for each role that the loop needs; None where none was.

    Raises:
        ConfigError: there is no such job, or it cannot play the role.
    """
    jobs = {"policy": _find_job(trainers, spec, "policy", spec.policy_job_id)}
    if spec.has_reference_trainer:
        jobs["reference"] = _find_job(trainers, spec, "reference", spec.reference_job_id)
    if spec.needs_inference:
        _check_snapshot_place(spec, jobs["policy"])
    return jobs


def _find_job(
    trainers: TrainerJobManager, spec: InfraSpec, role: str, job_id: str | None
) -> ExistingJob | None:
    if job_id is None:
        return None
    field = f"{role}_job_id"
    record = trainers.get(job_id)
    if record is None or record.state == "JOB_STATE_DELETED":
        raise ConfigError(
            f"{field} must name a trainer job of this platform, got {job_id!r}: `hearth ps` lists "
            "them"
        )
    model = record.training_config.base_model
    if model != spec.base_model:
        raise ConfigError(
            f"{field} must name a job of {spec.base_model!r}, got {job_id!r}, which is one of "
            f"{model!r}"
        )
    if role == "policy" and record.forward_only:
        raise ConfigError(f"{field} must name a job that trains, got forward-only {job_id!r}")
    return ExistingJob(
        job=CreatedJob(leaf_of(job_id), record.name or job_id, record.state),
        training_shape=record.training_shape,
        tied_to=leaf_of(record.hot_load_deployment_id),
    )


def _check_snapshot_place(spec: InfraSpec, policy: ExistingJob | None) -> None:
    """Refuse settings under which snapshots are written to one place and read from another."""
    is_per_deployment = spec.publishes_into_deployment
    source = spec.deployment.hot_load_trainer_job
    is_policy = policy is not None and leaf_of(source) == policy.job.job_id
    if source is not None and (is_per_deployment or not is_policy):
        why = "the deployment is attached to the policy trainer by itself"
        if is_per_deployment:
            why = "with weight_sync_scope PER_DEPLOYMENT the trainer is tied to the deployment"
        raise ConfigError(
            f"deployment.hot_load_trainer_job must be unset, got {source!r}: {why}; unset it, or "
            "set weight_sync_scope to PER_TRAINER and trainer.job_id to that job"
        )
    if policy is None:
        return
    if policy.tied_to != (leaf_of(spec.deployment_id) if is_per_deployment else ""):
        scope = "PER_DEPLOYMENT" if is_per_deployment else "PER_TRAINER"
        place = f"into that of deployment {policy.tied_to!r}" if policy.tied_to else "into its own"
        raise ConfigError(
            f"deployment.weight_sync_scope must be "
            f"{'PER_DEPLOYMENT' if policy.tied_to else 'PER_TRAINER'} for policy job "
            f"{policy.job.job_id!r}, got {scope} with deployment {spec.deployment_id!r}: the job "
            f"publishes {place}"
        )


def request_trainer_job(
    trainers: TrainerJobManager,
    infra: InfraConfig,
    job: TrainerJobConfig,
    cleanup: ResourceCleanup | None = None,
) -> CreatedJob:
    """Ask for a job where ``infra`` says, and return at once; ``cleanup`` learns of it first.

    Raises:
        ConfigError, HearthError: a setting breaks its rule, or the platform refuses the job.
    """
    is_frozen = job.is_forward_only
    shape = infra.ref_training_shape_id if is_frozen else infra.training_shape_id
    job_id = job.job_id or f"training-api-service-{uuid.uuid4().hex[:8]}"
    config = replace(
        job,
        job_id=job_id,
        training_shape_id=job.training_shape_id or shape,
        forward_only=is_frozen,
        extra_args=[*(infra.extra_args or []), *(job.extra_args or [])] or None,
        trainer_replica_count=None if is_frozen else infra.trainer_replica_count,
        **{name: getattr(infra, name) for name in (*_HARDWARE, *_LABELS)},
    )
    config.validate()
    if ignored := [arg for arg in config.extra_args or [] if arg not in _KNOWN_ARGS]:
        logger.warning("extra_args %s are kept with the job and change nothing", ignored)
    if cleanup is not None:
        cleanup.trainer(job_id)  # the request may reach the platform and its answer not us
    return trainers.create(config)


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
    """A trainer job that answers (document 003). ``options`` are ``TrainerJobConfig``'s.

    Raises:
        EngineError: the job failed, with the platform's reason, or was not ready in time.
        ConfigError, HearthError: a setting breaks its rule, or the platform refuses the job.
    """
    trainers = own_trainers(rlor_mgr)
    job = TrainerJobConfig(
        base_model=base_model,
        lora_rank=lora_rank,
        display_name=display_name,
        hot_load_deployment_id=hot_load_deployment_id,
        extra_args=extra_args,
        **options,
    )
    created = request_trainer_job(trainers, infra, job, cleanup)
    return trainers.wait_for_ready(created.job_id, infra.trainer_timeout_s)


def deployment_config(
    spec: InfraSpec, trainer_job: str | None = None, shape: str | None = None
) -> DeploymentConfig:
    """The deployment to ask for; it serves the snapshots of ``trainer_job`` where one is given.

    ``shape`` is the deployment shape where the spec names none. What the spec leaves open, the
    shape decides.

    Raises:
        ConfigError: ``tokenizer_model`` is missing, ``replicas`` is below 1, or there is no such
            ``weight_sync_scope``.
    """
    deployment = spec.deployment
    scopes = [scope.value for scope in WeightSyncScope]
    if deployment.weight_sync_scope not in scopes:
        raise ConfigError(
            f"deployment.weight_sync_scope must be one of {scopes}, got "
            f"{deployment.weight_sync_scope!r}"
        )
    if not deployment.tokenizer_model:
        raise ConfigError(
            "deployment.tokenizer_model must be a tokenizer's folder or hub id, got '': prompts "
            "are tokenized on the client"
        )
    if deployment.replicas is not None and deployment.replicas < 1:
        raise ConfigError(f"deployment.replicas must be >= 1, got {deployment.replicas}")
    own_values = {"engine": deployment.engine, "engine_options": deployment.engine_options}
    if spec.lora_rank and not spec.merges_adapter:
        train_mlp = spec.lora_options.get("train_mlp")
        own_values |= {"lora_rank": spec.lora_rank, "train_mlp": train_mlp}
    return DeploymentConfig(
        deployment_id=spec.deployment_id,
        base_model=spec.base_model,
        deployment_shape=deployment.deployment_shape or shape,
        hot_load_trainer_job=trainer_job or deployment.hot_load_trainer_job,
        region=deployment.deployment_region,
        max_batch_size=deployment.max_batch_size,
        tokenizer_model=deployment.tokenizer_model,
        max_context_length=spec.max_seq_len,
        dtype=spec.trainer_options.get("dtype"),
        device=spec.trainer_options.get("device"),
        display_name=spec.name_part("deployment"),
        max_replica_count=deployment.replicas,
        extra_values={name: value for name, value in own_values.items() if value} or None,
    )


def request_deployment(
    deployments: DeploymentManager,
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
    info = deployments.get(config.deployment_id)
    if info is not None and info.state in GONE:
        info = None
    if info is not None and info.base_model != config.base_model:
        raise ConfigError(
            f"deployment.deployment_id must name a deployment of {config.base_model!r}, got "
            f"{info.deployment_id!r}, which serves {info.base_model!r}: choose another id, or "
            "delete that deployment"
        )
    if cleanup is not None and (info is None or is_own_id or not _is_of_others(info, config)):
        cleanup.deployment(config.deployment_id)
    if info is None:
        info = deployments.create_or_get(config)
    changes: dict[str, Any] = {}
    if info.max_replica_count == 0:
        changes = {"min_replica_count": 1, "max_replica_count": config.max_replica_count}
    trainer = config.hot_load_trainer_job
    if trainer is not None and leaf_of(info.hot_load_trainer_job) != leaf_of(trainer):
        # In one request: a replica that starts for another trainer starts with the base weights.
        changes["hot_load_trainer_job"] = trainer
    return deployments.update(config.deployment_id, **changes) if changes else info


def _is_of_others(info: DeploymentInfo, config: DeploymentConfig) -> bool:
    """Whether somebody else runs it: it has a replica, and not this run's label."""
    is_labelled = config.display_name is not None and info.display_name == config.display_name
    return info.max_replica_count > 0 and not is_labelled


def setup_deployment(
    deploy_mgr: DeploymentManager,
    deploy_cfg: DeployConfig,
    base_model: str,
    infra: InfraConfig | None = None,
    *,
    cleanup: ResourceCleanup | None = None,
) -> DeploymentInfo:
    """A deployment that answers: the one of that id, scaled up again, or a new one (document 003).

    ``infra`` is taken as the documents pass it; deployments have their own settings.

    Raises:
        ConfigError: a setting breaks its rule, or the id names a deployment of another model.
        EngineError: it failed, with the platform's reason, or was not ready in time.
    """
    config = deployment_config(InfraSpec(base_model=base_model, deployment=deploy_cfg))
    deployments = own_deployments(deploy_mgr)
    request_deployment(deployments, config, cleanup=cleanup)
    return deployments.wait_for_ready(config.deployment_id, deploy_cfg.deployment_timeout_s)


@dataclass(frozen=True)
class ProvisionedParts:
    """Trainers and deployment that answer; ``shapes`` are the trainers', by role."""

    policy: TrainerEndpoint
    reference: TrainerEndpoint | None
    deployment: DeploymentInfo | None
    shapes: dict[str, TrainingShapeProfile | None]


@dataclass(frozen=True)
class Provisioner:
    """Asks a platform for everything that a spec names."""

    spec: InfraSpec
    trainers: TrainerJobManager
    deployments: DeploymentManager | None
    cleanup: ResourceCleanup

    def provision(self, on_status: Callable[[str], None]) -> ProvisionedParts:
        """Ask for everything in order, then wait for all of it side by side.

        Raises:
            ConfigError: an existing job does not fit, or a setting breaks its rule.
            EngineError: parts failed; each is named.
        """
        spec = self.spec
        existing = find_jobs(self.trainers, spec)
        shapes = self._choose_shapes(existing)
        parts = [*existing, "deployment"] if spec.needs_inference else [*existing]
        if spec.publishes_into_deployment:
            parts = ["deployment", *existing]
        jobs: dict[str, CreatedJob] = {}
        deployment: DeploymentInfo | None = None
        for part in parts:
            try:
                if part == "deployment":
                    # The policy's job is known by now, unless the deployment comes first.
                    policy = jobs.get("policy")
                    deployment = self._request_deployment(
                        policy.job_name if policy else None, shapes["policy"]
                    )
                else:
                    job = existing[part]
                    jobs[part] = job.job if job else self._request_trainer(part, shapes[part])
            except ConfigError:
                raise  # a mistake in a setting, and the message says what to do
            except (HearthError, OSError) as error:
                name = part if part == "deployment" else f"{part} trainer"
                raise _failure({name: error}, len(parts)) from error
        job_ids = ", ".join(job.job_id for job in jobs.values())
        on_status(f"waiting for {job_ids}" + (f" and {spec.deployment_id}" if deployment else ""))
        return self._wait(jobs, deployment, shapes)

    def _choose_shapes(
        self, existing: Mapping[str, ExistingJob | None]
    ) -> dict[str, TrainingShapeProfile | None]:
        """The trainers' shapes: given ones, else what fits; None where the platform picks.

        Raises:
            HearthError: a given shape is unknown, or the policy's does not train.
        """
        infra = self.spec.infra
        given = {"policy": infra.training_shape_id, "reference": infra.ref_training_shape_id}
        has_hardware = any(getattr(infra, name) is not None for name in _HARDWARE)
        shapes: dict[str, TrainingShapeProfile | None] = dict.fromkeys(existing)
        for role, job in existing.items():
            shape = given[role] if job is None else job.training_shape
            if shape:
                profile = shapes[role] = self.trainers.resolve_training_profile(shape)
                if role == "policy" and job is None and profile.trainer_mode == "FORWARD_ONLY":
                    raise ConfigError(
                        f"training_shape_id must be a shape that trains, got {shape!r}, whose "
                        "trainers only run forward: it is one for a reference"
                    )
            # Where the user chooses hardware, no shape does.
            elif job is None and not has_hardware:
                # A folder or hub id that no catalog lists has no shape.
                with contextlib.suppress(NotFoundError):
                    shapes[role] = self.trainers.auto_select_training_shape(
                        self.spec.base_model, self.spec.lora_rank, role == "reference"
                    )
        return shapes

    def _request_trainer(self, role: str, profile: TrainingShapeProfile | None) -> CreatedJob:
        spec, is_policy = self.spec, role == "policy"
        is_tied = spec.publishes_into_deployment and is_policy
        job = TrainerJobConfig(
            base_model=spec.base_model,
            training_shape_id=profile.training_shape_version if profile is not None else None,
            lora_rank=spec.lora_rank if is_policy else 0,
            max_context_length=spec.max_seq_len,
            learning_rate=spec.learning_rate,
            display_name=f"{spec.role_prefix}-{role}",
            hot_load_deployment_id=spec.deployment_id if is_tied else None,
            forward_only=not is_policy,
            job_id=spec.name_part(role),
            extra_values=spec.trainer_options or None,
        )
        return request_trainer_job(self.trainers, spec.infra, job, self.cleanup)

    def _request_deployment(
        self, trainer_job: str | None, profile: TrainingShapeProfile | None
    ) -> DeploymentInfo:
        spec = self.spec
        assert self.deployments is not None, "checked by build_infra"
        info = request_deployment(
            self.deployments,
            deployment_config(
                spec, trainer_job, profile.deployment_shape_version if profile is not None else None
            ),
            cleanup=self.cleanup,
            is_own_id=spec.deployment.deployment_id is None,
        )
        if spec.publishes_into_deployment and info.hot_load_trainer_job:
            raise ConfigError(
                f"deployment.weight_sync_scope must be PER_TRAINER for deployment "
                f"{spec.deployment_id!r}, got PER_DEPLOYMENT: it reads the snapshots of "
                f"{info.hot_load_trainer_job!r}; choose another deployment_id"
            )
        return info

    def _wait(
        self,
        jobs: dict[str, CreatedJob],
        deployment: DeploymentInfo | None,
        shapes: dict[str, TrainingShapeProfile | None],
    ) -> ProvisionedParts:
        trainers, timeout_s = self.trainers, self.spec.infra.trainer_timeout_s
        waits: dict[str, APIFuture[Any]] = {}
        for role, job in jobs.items():
            waits[f"{role} trainer {job.job_id}"] = start(_await_trainer(trainers, job, timeout_s))
        if deployment is not None:
            assert self.deployments is not None, "checked by build_infra"
            waits[f"deployment {deployment.deployment_id}"] = self.deployments.wait_for_ready_async(
                deployment.deployment_id, self.spec.deployment.deployment_timeout_s
            )
        ready: dict[str, Any] = {}
        failures: dict[str, Exception] = {}
        try:
            for name, wait in waits.items():
                try:
                    ready[name.split()[0]] = wait.result()
                except (HearthError, OSError) as error:
                    failures[name] = error
        finally:
            for wait in waits.values():
                wait.cancel()
        if failures:
            raise _failure(failures, len(waits))
        return ProvisionedParts(
            ready["policy"], ready.get("reference"), ready.get("deployment"), shapes
        )


async def _await_trainer(
    trainers: TrainerJobManager, job: CreatedJob, timeout_s: float
) -> TrainerEndpoint:
    """A job's trainer, once it answers.

    A job that has ended is the user's, or this very run's from before an interruption: it is
    resumed. So is one that ran before and dies now, a few times.
    """
    has_run = job.state in RESUMABLE or job.state == "JOB_STATE_RUNNING"
    wait = trainers.wait_for_ready_async
    if job.state in RESUMABLE:
        wait = trainers.reconnect_and_wait_async
    end_s, left_s = time.monotonic() + timeout_s, timeout_s
    restarts = 0
    while True:
        try:
            return await wait(job.job_id, left_s)
        except EngineError as error:
            left_s = end_s - time.monotonic()
            if not has_run or restarts == MOST_RESTARTS or left_s <= 0:
                raise
            logger.warning("trainer job %s is resumed: %s", job.job_id, error)
        restarts += 1
        wait = trainers.reconnect_and_wait_async


def _failure(failures: Mapping[str, Exception], parts: int) -> EngineError:
    """One error that names every part that failed."""
    lines = "".join(f"\n  - {name}: {error}" for name, error in failures.items())
    return EngineError(f"provisioning failed, {len(failures)} of {parts} parts:{lines}")
