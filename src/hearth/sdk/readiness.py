"""Waiting until a trainer job or a deployment answers, or has failed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import httpx

from hearth.errors import EngineError, NotFoundError
from hearth.sdk.deployment_config import DeploymentInfo
from hearth.sdk.resources import ControlPlaneClient, Watch
from hearth.wire.fireworks import Deployment, DeploymentState, JobState, TrainerJob
from hearth.wire.messages import HttpRequest

JOBS = "rlorTrainerJobs"
JOB_STATES: tuple[str, ...] = get_args(JobState)
DEPLOYMENT_STATES: tuple[str, ...] = get_args(DeploymentState)
GONE = frozenset({"FAILED", "DELETING", "DELETED"})
"""What a deployment does not come back from."""
_HEALTH_TIMEOUT_S = 5.0
# What a job does not leave by itself, unless it is just being resumed.
_ENDED = {
    "JOB_STATE_CANCELLED": "was cancelled",
    "JOB_STATE_COMPLETED": "has completed",
    "JOB_STATE_PAUSED": "is paused",
}
RESUMABLE = frozenset({*_ENDED, "JOB_STATE_FAILED"})

OnStatus = Callable[[str], None]
"""Called with each new state on the SDK's thread: must return soon and not call the SDK."""


@dataclass(frozen=True)
class TrainerEndpoint:
    """A trainer that answers. ``base_url`` is what ``FiretitanServiceClient`` takes."""

    job_id: str
    job_name: str
    base_url: str
    max_context_length: int | None = None


def trainer_url(base_url: str, job_name: str) -> str:
    """Where the trainer of a job answers."""
    _, account, _, job_id = job_name.split("/")
    return f"{base_url}/training/v1/{JOBS}/{account}/{job_id}"


class TrainerWait:
    """A wait for one job; ``run`` once, on the SDK's loop.

    ``resumed_from`` is the state that the job was just resumed from: it may still show it.
    """

    def __init__(
        self,
        control: ControlPlaneClient,
        name: str,
        timeout_s: float,
        pending_timeout_s: float,
        on_status: OnStatus | None,
        resumed_from: str | None,
    ) -> None:
        self._control = control
        self._name = name
        self._url = trainer_url(control.http.base_url, name)
        self._allowed_s = {
            "pending": pending_timeout_s,
            "starting": timeout_s,
            "ended": control.wait_policy.settle_s,
        }
        self._on_status = on_status
        self._reported: str | None = None
        self._resumed_from = resumed_from

    async def run(self) -> TrainerEndpoint:
        """The trainer once it answers.

        Raises:
            EngineError: the job failed or ended, or the time is over.
            NotFoundError: there is no such job, or it was deleted.
        """
        watch = Watch(self._control, self._name, TrainerJob, JOB_STATES)
        left_s = dict(self._allowed_s)
        job = await watch.fetch()
        while True:
            self._report(job.state)
            is_running = job.state == "JOB_STATE_RUNNING"
            if is_running and await self._is_healthy():
                return TrainerEndpoint(
                    job_id=self._name.rsplit("/", 1)[-1],
                    job_name=self._name,
                    base_url=self._url,
                    max_context_length=job.training_config.max_context_length,
                )
            phase = self._find_phase(job)
            if left_s[phase] <= 0:
                raise EngineError(self._describe_timeout(job, phase))
            start_s = time.monotonic()
            if is_running:
                job = await watch.fetch_later(left_s[phase])
            else:
                job = await watch.wait_for_change(job.state, left_s[phase])
            left_s[phase] -= time.monotonic() - start_s

    def _report(self, state: str | None) -> None:
        if state is not None and state != self._reported and self._on_status is not None:
            self._on_status(state)
        self._reported = state

    async def _is_healthy(self) -> bool:
        """Whether the job's trainer is healthy. A job may be running before it can be reached."""
        path = self._url.removeprefix(self._control.http.base_url) + "/api/v1/healthz"
        request = HttpRequest("GET", path, timeout_s=_HEALTH_TIMEOUT_S)
        try:
            answer = await self._control.http.send_once(request)
        except httpx.TransportError:
            return False
        return answer.is_success

    def _find_phase(self, job: TrainerJob) -> str:
        """Which time limit runs: for room, for starting, or for leaving an end.

        Raises:
            EngineError: the job failed, after it was resumed if it was.
            NotFoundError: the job was deleted.
        """
        if job.state == "JOB_STATE_DELETED":
            raise NotFoundError(
                f"{self._name} must exist, got JOB_STATE_DELETED: create another job"
            )
        if job.state == "JOB_STATE_FAILED" and job.state != self._resumed_from:
            raise EngineError(
                f"{self._name} must become ready, got {job.state}: {_describe_reason(job)}"
            )
        if job.state in RESUMABLE:
            return "ended"
        self._resumed_from = None
        return "pending" if job.state == "JOB_STATE_PENDING" else "starting"

    def _describe_timeout(self, job: TrainerJob, phase: str) -> str:
        if phase == "ended":
            how = _ENDED.get(job.state or "", "has failed")
            return (
                f"{self._name} must become ready, but it {how}: {_describe_reason(job)}; "
                "reconnect_and_wait resumes it"
            )
        return (
            f"{self._name} must be ready within {self._allowed_s[phase]:g} s, still {job.state}: "
            f"{_describe_reason(job)}; raise the timeout, or look at its log"
        )


def _describe_reason(resource: TrainerJob | Deployment) -> str:
    return resource.status_message or "the platform gave no reason"


async def wait_for_deployment(
    control: ControlPlaneClient, name: str, timeout_s: float, trainer: str | None
) -> DeploymentInfo:
    """The deployment once it is ready, and attached to ``trainer`` where one is given.

    Raises:
        EngineError: it failed or is being deleted, or the time is over.
        NotFoundError: there is none.
    """
    deadline_s = time.monotonic() + timeout_s
    watch = Watch(control, name, Deployment, DEPLOYMENT_STATES)
    record = await watch.fetch()
    while True:
        info = DeploymentInfo.from_record(record, name)
        is_attached = trainer is None or info.hot_load_trainer_job == trainer
        if info.state == "READY" and is_attached:
            return info
        if info.state in GONE:
            raise EngineError(
                f"{name} must become READY, got {info.state}: {_describe_reason(record)}"
            )
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            wanted = f"READY and attached to {trainer}" if trainer else "READY"
            attached = f" with {info.hot_load_trainer_job}" if trainer else ""
            raise EngineError(
                f"{name} must be {wanted} within {timeout_s:g} s, still {info.state}{attached}: "
                f"{_describe_reason(record)}; raise the timeout, or look at its log"
            )
        if info.state == "READY":
            record = await watch.fetch_later(left_s)
        else:
            record = await watch.wait_for_change(info.state, left_s)
