"""Deployments: asked for, started, kept alive, tied to trainers, scaled to zero and deleted.

A deployment holds no state that cannot be had again, so one that dies is started again by itself
and loads the snapshot that it served. One that dies again and again is FAILED, with what is known.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from hearth.control.jobs import Jobs, Means, Values, promoted_models
from hearth.control.names import check_id, deployment_name, leaf, timestamp
from hearth.control.store import Row, Rows
from hearth.control.workers import Live, LiveTable
from hearth.errors import (
    ClosedError,
    ConfigError,
    ConflictError,
    NotFoundError,
    NotReadyError,
    RequestError,
)
from hearth.launch.spec import DeploymentSpec, Endpoint, ExitReport, Worker
from hearth.wire.fireworks import Deployment, DeploymentPatch, TrainerJob

logger = logging.getLogger(__name__)

ALIVE = ("CREATING", "READY", "UPDATING")
MOST_RESTARTS = 3
"""A deployment that dies more often within ``RESTART_WINDOW_S`` is given up."""
RESTART_WINDOW_S = 600.0
_PREFIX = "deployment-"


class Deployments:
    """The deployments of one platform. Safe to use from several threads."""

    def __init__(self, rows: Rows, models: Rows, jobs: Jobs, means: Means) -> None:
        self.rows = rows
        self.live = LiveTable()
        self._models = models
        self._jobs = jobs
        self._means = means
        self._deaths: dict[str, deque[float]] = {}
        self._lock = threading.Lock()

    def create(self, deployment_id: str, asked: Deployment) -> Deployment:
        """Start a deployment; it is ``CREATING`` until it answers. Asking again changes nothing.

        Raises:
            RequestError: a field breaks its rule.
            ConfigError, NotFoundError: the model, the shape or the trainer is unknown.
            ConflictError: another deployment has this id.
        """
        check_id(deployment_id, "deploymentId")
        self._spec(deployment_id, asked)
        self._check_replicas(asked.min_replica_count, asked.max_replica_count)
        if asked.hot_load_trainer_job:
            self._check_attachable(deployment_id, asked.hot_load_trainer_job)
        existing = self.rows.find(deployment_id)
        if existing is not None:
            if existing.body != asked.as_dict():
                raise ConflictError(
                    f"deploymentId must be new, got {deployment_id!r}: a deployment of that id "
                    f"exists ({existing.state}) and was asked for otherwise"
                )
            return self.record(existing)
        state = "CREATING" if asked.max_replica_count else "READY"
        self.rows.insert(deployment_id, state, asked.as_dict())
        if asked.max_replica_count:
            self._start(deployment_id, asked, "CREATING")
        return self.get(deployment_id)

    def get(self, deployment_id: str) -> Deployment:
        """A deployment as it stands.

        Raises:
            NotFoundError: there is none of that id.
        """
        return self.record(self._row(deployment_id))

    def all(self) -> list[Deployment]:
        """Every deployment, oldest first."""
        return [self.record(row) for row in self.rows.all()]

    def patch(self, deployment_id: str, change: DeploymentPatch) -> Deployment:
        """Scale, or attach to another trainer.

        Raises:
            NotFoundError: there is no such deployment or trainer.
            RequestError: a value breaks its rule, or the trainer publishes elsewhere.
        """
        row = self._row(deployment_id)
        if change.hot_load_trainer_job:
            self._check_attachable(deployment_id, change.hot_load_trainer_job)
        before = Deployment.checked(row.body)
        after = before.model_copy(update=change.model_dump(exclude_none=True))
        self._check_replicas(after.min_replica_count, after.max_replica_count)
        self.rows.update(deployment_id, body=after.as_dict())
        if after.max_replica_count == 0:
            self._stop_replica(deployment_id)
        elif before.max_replica_count == 0 or row.state == "FAILED":
            self._deaths.pop(deployment_id, None)
            self.rows.update(deployment_id, state="UPDATING", message="")
            self._start(deployment_id, after, "UPDATING")
        return self.get(deployment_id)

    def delete(self, deployment_id: str) -> None:
        """End a deployment and forget it, with what it served.

        Raises:
            NotFoundError: there is no such deployment.
        """
        self._row(deployment_id)
        worker = self.live.take_worker(deployment_id, Live("DELETED", "deleted by request"))
        if worker is not None:
            worker.stop()
        self.rows.delete(deployment_id)
        self.live.forget(deployment_id)
        state = self._means.data_dir / "deployments" / deployment_id / "serving.json"
        state.unlink(missing_ok=True)

    def endpoint(self, name: str) -> Endpoint:
        """Where a deployment answers; ``name`` is its full name, its id, or ``MODEL#NAME``.

        Raises:
            NotFoundError: there is no such deployment.
            NotReadyError: it is starting.
            ClosedError: it has failed, or is scaled to zero; the message says what to do.
        """
        deployment_id = leaf(name.rpartition("#")[2])
        live = self.live.get(deployment_id)
        if live is not None and (found := live.endpoint) is not None:
            return found
        row = self._row(deployment_id)
        if row.state == "FAILED":
            raise ClosedError(
                f"deployment {deployment_id!r} must be ready, got FAILED ({row.message}): delete "
                "and create it anew"
            )
        if Deployment.checked(row.body).max_replica_count == 0:
            raise ClosedError(
                f"deployment {deployment_id!r} must have a replica, got none: it is scaled to "
                "zero; patch maxReplicaCount to 1"
            )
        raise NotReadyError(
            f"deployment {deployment_id!r} must be ready, got {row.state}: ask soon"
        )

    def bucket(self, name: str) -> str:
        """Where a deployment's snapshots come from now."""
        deployment_id = leaf(name.rpartition("#")[2])
        return self._bucket(deployment_id, Deployment.checked(self._row(deployment_id).body))

    def ready(self, worker: Worker) -> None:
        """A replica answers (``Watcher``)."""
        deployment_id = worker.spec.worker_id.removeprefix(_PREFIX)
        if not self.live.belongs(deployment_id, worker):
            return
        self.live.put(deployment_id, Live("READY", worker=worker, is_ready=True))
        self.rows.update(
            deployment_id, only_from=ALIVE, state="READY", message="", worker=worker.record()
        )
        logger.info("deployment %s is ready", deployment_id)

    def failed(self, worker: Worker, report: ExitReport) -> None:
        """A replica could not start, or died (``Watcher``)."""
        deployment_id = worker.spec.worker_id.removeprefix(_PREFIX)
        if self.live.belongs(deployment_id, worker):
            live = self.live.get(deployment_id)
            was_ready = live is not None and live.is_ready
            self._replace(deployment_id, report, may_restart=was_ready or self._has_died(worker))

    def recover(self) -> None:
        """After a restart: find the replicas that still run, and start the others again."""
        for row in self.rows.all(ALIVE):
            body = Deployment.checked(row.body)
            if body.max_replica_count == 0:
                continue
            if row.worker is None:
                self._start(row.id, body, row.state)
                continue
            self.live.put(row.id, Live(row.state, is_starting=True))
            found = self._means.launcher.adopt(row.worker, self)
            if isinstance(found, ExitReport):
                self._replace(row.id, found, may_restart=True)
            else:
                live = self.live.get(row.id)
                if live is not None and live.is_starting:
                    self.live.put(row.id, Live(row.state, worker=found))

    def record(self, row: Row) -> Deployment:
        """A row as clients read it."""
        live = self.live.get(row.id)
        worker = live.worker if live is not None else None
        return Deployment.checked(row.body).model_copy(
            update={
                "name": deployment_name(row.id),
                "state": row.state,
                "status_message": row.message or None,
                "create_time": timestamp(row.created_s),
                "update_time": timestamp(row.updated_s),
                "worker_placement": self._means.launcher.placement,
                "pid": worker.pid if worker is not None else None,
            }
        )

    def _row(self, deployment_id: str) -> Row:
        row = self.rows.find(deployment_id)
        if row is None:
            known = [one.id for one in self.rows.all()]
            raise NotFoundError(f"deployment must be one of {known}, got {deployment_id!r}")
        return row

    def _check_replicas(self, least: int, most: int) -> None:
        if not 0 <= least <= most <= 1:
            raise RequestError(
                "minReplicaCount and maxReplicaCount must be 0 or 1, the first no more than the "
                f"second, got {least} and {most}: this placement runs one replica"
            )

    def _check_attachable(self, deployment_id: str, job: str) -> None:
        """A trainer publishes into its own bucket, or into one deployment's; never into two.

        Raises:
            NotFoundError: there is no such trainer.
            RequestError: it is tied to another deployment.
        """
        tied = TrainerJob.checked(self._jobs.rows.get(leaf(job)).body).hot_load_deployment_id
        if tied:
            raise RequestError(
                f"hotLoadTrainerJob must name a trainer with a bucket of its own, got {job!r}, "
                f"which publishes into deployment {leaf(tied)!r}: set exactly one of "
                f"hotLoadTrainerJob on deployment {deployment_id!r} and hotLoadDeploymentId on "
                "the trainer"
            )

    def _bucket(self, deployment_id: str, body: Deployment) -> str:
        if body.hot_load_trainer_job:
            return self._jobs.bucket(body.hot_load_trainer_job)
        return f"{_PREFIX}{deployment_id}"

    def _spec(self, deployment_id: str, body: Deployment) -> DeploymentSpec:
        entry = self._means.catalog.model(body.base_model, promoted_models(self._models))
        shape = None
        if body.deployment_shape:
            shape_name = body.deployment_shape.replace("/deploymentShapes/", "/trainingShapes/")
            shape = self._means.catalog.shape(shape_name)
            if shape.base_model != body.base_model:
                raise RequestError(
                    f"deploymentShape must be one of {body.base_model!r}, got "
                    f"{body.deployment_shape!r}, which is one of {shape.base_model!r}"
                )
        values = Values(body.extra_values or {}, shape)
        lengths = [entry.context_length, shape.context_length if shape is not None else None]
        longest = min((one for one in lengths if one is not None), default=None)
        return DeploymentSpec(
            worker_id=f"{_PREFIX}{deployment_id}",
            name=deployment_name(deployment_id),
            base_model=entry.name,
            source=entry.source,
            bucket=self._bucket(deployment_id, body),
            state_dir=str(self._means.data_dir / "deployments" / deployment_id),
            tokenizer=values.text("tokenizer"),
            dtype=values.choice("dtype", ("float32", "bfloat16"), "float32"),
            device=values.text("device"),
            max_seq_len=values.count("max_context_length") or longest,
            max_batch_size=values.count("max_batch_size") or 64,
            threads=values.count("threads") or self._means.deployment_threads,
            trust_remote_code=entry.trust_remote_code or values.flag("trust_remote_code"),
        )

    def _start(self, deployment_id: str, body: Deployment, state: str) -> None:
        try:
            spec = self._spec(deployment_id, body)
        except (ConfigError, NotFoundError, RequestError) as error:
            self._give_up(deployment_id, f"cannot be started: {error}")
            return
        self.live.put(deployment_id, Live(state, is_starting=True))
        worker = self._means.launcher.start(spec, self)
        live = self.live.get(deployment_id)
        if live is not None and live.is_starting:
            self.live.put(deployment_id, Live(state, worker=worker))
            self.rows.update(deployment_id, only_from=(state,), worker=worker.record())

    def _stop_replica(self, deployment_id: str) -> None:
        worker = self.live.take_worker(deployment_id, Live("READY", "scaled to zero"))
        self.rows.update(deployment_id, state="READY", message="scaled to zero", worker=None)
        if worker is not None:
            worker.stop()

    def _has_died(self, worker: Worker) -> bool:
        """Whether it was running before: a first start that fails is not tried again."""
        return bool(self._deaths.get(worker.spec.worker_id.removeprefix(_PREFIX)))

    def _replace(self, deployment_id: str, report: ExitReport, *, may_restart: bool) -> None:
        with self._lock:
            deaths = self._deaths.setdefault(deployment_id, deque())
            deaths.append(time.monotonic())
            while deaths and deaths[0] < time.monotonic() - RESTART_WINDOW_S:
                deaths.popleft()
            may_restart = may_restart and len(deaths) <= MOST_RESTARTS
        message = report.describe()
        if not may_restart:
            self._give_up(deployment_id, message)
            return
        logger.warning("deployment %s is started again: %s", deployment_id, message)
        moved = self.rows.update(
            deployment_id, only_from=ALIVE, state="UPDATING", message=message, worker=None
        )
        if moved:
            body = Deployment.checked(self._row(deployment_id).body)
            self._start(deployment_id, body, "UPDATING")

    def _give_up(self, deployment_id: str, message: str) -> None:
        self.live.put(deployment_id, Live("FAILED", message))
        self.rows.update(
            deployment_id, only_from=ALIVE, state="FAILED", message=message, worker=None
        )
        logger.warning("deployment %s failed: %s", deployment_id, message)
