"""Trainer jobs that a user already has: whether they fit what a loop is set up with."""

from __future__ import annotations

from dataclasses import dataclass

from hearth.errors import ConfigError
from hearth.sdk import CreatedJob, TrainerJobManager
from training.platform.spec import InfraSpec


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
