"""Deployments: asked for, started, kept alive, tied to trainers, scaled to zero and deleted.

A deployment holds no state that cannot be had again, so one that dies is started again by itself;
in a process of its own it then loads the snapshot that it served. One that dies again and again is
FAILED, with what is known, and so is one whose first start fails.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import cast

from hearth.control.context import Context, promoted_models
from hearth.control.jobs import ALIVE as JOB_ALIVE
from hearth.control.jobs import Jobs
from hearth.control.names import check_id, deployment_name, leaf, timestamp
from hearth.control.store import Row, Rows
from hearth.control.values import Values
from hearth.control.workers import Live, LiveTable
from hearth.errors import (
    ClosedError,
    ConfigError,
    ConflictError,
    NotFoundError,
    NotReadyError,
    RequestError,
)
from hearth.launch.spec import DeploymentSpec, Endpoint, Engine, ExitReport, Worker
from hearth.wire.fireworks import Deployment, DeploymentPatch

logger = logging.getLogger(__name__)

ALIVE = ("CREATING", "READY", "UPDATING")
MOST_RESTARTS = 3
"""A deployment that dies more often within ``RESTART_WINDOW_S`` is given up."""
RESTART_WINDOW_S = 600.0
MOST_REPLICAS = 64
"""Of one deployment, where its engine can have several."""
SCALED_TO_ZERO = "scaled to zero"
_PREFIX = "deployment-"
_ANSWERED = (
    "name",
    "state",
    "status_message",
    "create_time",
    "update_time",
    "worker_placement",
    "pid",
)
"""What only answers say; a client that sends back what it read is not taken at its word."""


class Deployments:
    """The deployments of one platform. Safe to use from several threads."""

    def __init__(
        self,
        rows: Rows,
        models: Rows,
        jobs: Jobs,
        context: Context,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rows = rows
        self.live = LiveTable()
        self._models = models
        self._jobs = jobs
        self._context = context
        self._now = now
        self._deaths: dict[str, deque[float]] = {}
        # A row and its live entry change together, whoever changes them.
        self._lock = threading.RLock()

    def create(self, deployment_id: str, asked: Deployment) -> Deployment:
        """Start a deployment; it is ``CREATING`` until it answers. Asking again changes nothing.

        Raises:
            RequestError: a field breaks its rule.
            ConfigError, NotFoundError: the model, the shape or the trainer is unknown.
            ConflictError: another deployment has this id.
        """
        check_id(deployment_id, "deploymentId")
        asked = asked.model_copy(update=dict.fromkeys(_ANSWERED))
        spec = self._spec(deployment_id, asked)
        self._check_replicas(asked, spec.engine)
        if asked.hot_load_trainer_job:
            self._check_attachable(deployment_id, asked.hot_load_trainer_job)
        with self.live.turn(deployment_id), self._lock:
            existing = self.rows.find(deployment_id)
            if existing is not None:
                return self._same(existing, asked)
            has_replica = asked.max_replica_count > 0
            state, message = ("CREATING", "") if has_replica else ("READY", SCALED_TO_ZERO)
            self.rows.insert(deployment_id, state, asked.as_dict(), message)
            if has_replica:
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
        """Scale, or attach to another trainer. One that has failed is started again by any change.

        Another number of replicas starts it again; a process then serves what it served.

        A replica that starts for another trainer than the one before serves the base weights, not
        what that one had published.

        Raises:
            NotFoundError: there is no such deployment or trainer.
            RequestError: a value breaks its rule, or the trainer publishes elsewhere.
        """
        with self.live.turn(deployment_id):
            with self._lock:
                worker = self._patched(self._row(deployment_id), change)
            # Not under the lock: its last news may be on the way, and wants it.
            if worker is not None:
                worker.stop()
                self._resume_resized(deployment_id)
        return self.get(deployment_id)

    def _patched(self, row: Row, change: DeploymentPatch) -> Worker | None:
        """Write a change and act on it; what comes back is to be stopped."""
        if change.hot_load_trainer_job:
            self._check_attachable(row.id, change.hot_load_trainer_job)
        before = Deployment.checked(row.body)
        after = before.model_copy(update=change.model_dump(exclude_none=True))
        engine = self._spec(row.id, after).engine if after.max_replica_count > 1 else "embedded"
        self._check_replicas(after, engine)
        self.rows.update(row.id, body=after.as_dict())
        if after.max_replica_count == 0:
            self.rows.update(row.id, state="READY", message=SCALED_TO_ZERO, worker=None)
            return self.live.take_worker(row.id, Live("READY", SCALED_TO_ZERO))
        if before.max_replica_count == 0 or row.state == "FAILED":
            self._deaths.pop(row.id, None)
            if after.hot_load_trainer_job != before.hot_load_trainer_job:
                self._forget_served(row.id)
            self.rows.update(row.id, state="UPDATING", message="", worker=None)
            self._start(row.id, after, "UPDATING")
        elif after.max_replica_count != before.max_replica_count:
            self.rows.update(row.id, state="UPDATING", message="", worker=None)
            return self.live.take_worker(row.id, Live("UPDATING"))
        return None

    def _resume_resized(self, deployment_id: str) -> None:
        """Start a deployment that was stopped to have another number of replicas."""
        with self._lock:
            row = self._row(deployment_id)
            if row.state == "UPDATING" and row.worker is None:
                self._start(deployment_id, Deployment.checked(row.body), "UPDATING")

    def tie(self, deployment_id: str) -> None:
        """Have a deployment read its own bucket: a trainer is about to publish into it.

        It may not be there yet. Its attachment to a trainer that has ended is given up.

        Raises:
            RequestError: the trainer that it is attached to is alive.
        """
        with self.live.turn(deployment_id), self._lock:
            row = self.rows.find(deployment_id)
            body = Deployment.checked(row.body) if row is not None else None
            if body is None or not body.hot_load_trainer_job:
                return
            job = self._jobs.rows.find(leaf(body.hot_load_trainer_job))
            if job is not None and job.state in JOB_ALIVE:
                raise RequestError(
                    f"hotLoadDeploymentId must name a deployment with a bucket of its own, got "
                    f"{deployment_id!r}, which reads that of the running trainer {job.id!r}: end "
                    "that one, or leave hotLoadDeploymentId out and attach the deployment"
                )
            untied = body.model_copy(update={"hot_load_trainer_job": None})
            self.rows.update(deployment_id, body=untied.as_dict())
            if body.max_replica_count == 0:
                self._forget_served(deployment_id)

    def delete(self, deployment_id: str) -> None:
        """End a deployment and forget it, with what it served; its id is free again.

        Raises:
            NotFoundError: there is no such deployment.
        """
        with self.live.turn(deployment_id):
            with self._lock:
                self._row(deployment_id)
                self.rows.update(deployment_id, state="DELETING", worker=None)
                worker = self.live.take_worker(deployment_id, Live("DELETING"))
            if worker is not None:
                worker.stop()
            with self._lock:
                self.rows.delete(deployment_id)
                self.live.forget(deployment_id)
                self._deaths.pop(deployment_id, None)
            self._forget_served(deployment_id)

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
                f"deployment {deployment_id!r} must be ready, got FAILED ({row.message}): patch "
                "maxReplicaCount to 1 to start it again, or delete it"
            )
        if row.state == "DELETING":
            raise ClosedError(f"deployment {deployment_id!r} must be ready, got DELETING")
        if Deployment.checked(row.body).max_replica_count == 0:
            raise ClosedError(
                f"deployment {deployment_id!r} must have a replica, got none: it is scaled to "
                "zero, as a `with ResourceCleanup` block leaves it; use it inside the `with` block "
                "that provisioned it, or patch maxReplicaCount to 1"
            )
        raise NotReadyError(
            f"deployment {deployment_id!r} must be ready, got {row.state}: ask soon"
        )

    def bucket(self, name: str) -> str:
        """Where a deployment's snapshots come from now.

        Raises:
            NotFoundError: there is no such deployment.
        """
        deployment_id = leaf(name.rpartition("#")[2])
        return self._bucket(deployment_id, Deployment.checked(self._row(deployment_id).body))

    def ready(self, worker: Worker) -> None:
        """A replica answers (``Watcher``)."""
        deployment_id = worker.spec.worker_id.removeprefix(_PREFIX)
        with self._lock:
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
        with self._lock:
            live = self.live.get(deployment_id)
            if live is None or not self.live.belongs(deployment_id, worker):
                return
            # A first start that fails is not tried again.
            has_run = live.is_ready or bool(self._deaths.get(deployment_id))
            self._replace(deployment_id, report, may_restart=has_run)

    def recover(self) -> None:
        """After a restart: find the replicas that still run, and start the others again."""
        # Its worker, if that was not stopped any more, ends by itself: nobody asks it for anything.
        for row in self.rows.all(("DELETING",)):
            self.delete(row.id)
        for row in self.rows.all(ALIVE):
            body = Deployment.checked(row.body)
            if body.max_replica_count > 0:
                with self._lock:
                    self._find_again(row, body)

    def _find_again(self, row: Row, body: Deployment) -> None:
        if row.worker is None:
            self._start(row.id, body, row.state)
            return
        self.live.put(row.id, Live(row.state, is_starting=True))
        found = self._context.launcher.adopt(row.worker, self)
        if isinstance(found, ExitReport):
            self._replace(row.id, found, may_restart=True)
        else:
            self.live.begun(row.id, found)

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
                "worker_placement": self._context.launcher.placement,
                "pid": worker.pid if worker is not None else None,
            }
        )

    def _same(self, existing: Row, asked: Deployment) -> Deployment:
        if existing.state == "DELETING" or existing.body != asked.as_dict():
            raise ConflictError(
                f"deploymentId must be new, got {existing.id!r}: a deployment of that id exists "
                f"({existing.state}) and was asked for otherwise"
            )
        return self.record(existing)

    def _row(self, deployment_id: str) -> Row:
        row = self.rows.find(deployment_id)
        if row is None:
            known = [one.id for one in self.rows.all()]
            raise NotFoundError(f"deployment must be one of {known}, got {deployment_id!r}")
        return row

    def _check_replicas(self, body: Deployment, engine: Engine) -> None:
        least, most = body.min_replica_count, body.max_replica_count
        highest = MOST_REPLICAS if engine == "vllm" else 1
        if not 0 <= least <= most <= highest:
            raise RequestError(
                "minReplicaCount and maxReplicaCount must be 0 or 1, or up to "
                f"{MOST_REPLICAS} with engine 'vllm', the first no more than the second, got "
                f"{least} and {most} with engine {engine!r}"
            )

    def _check_attachable(self, deployment_id: str, job: str) -> None:
        """A trainer publishes into its own bucket, or into one deployment's; never into two.

        Raises:
            NotFoundError: there is no such trainer.
            RequestError: it is tied to another deployment.
        """
        tied = self._jobs.asked_for(leaf(job)).hot_load_deployment_id
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
        entry = self._context.catalog.model(body.base_model, promoted_models(self._models))
        shape = None
        if body.deployment_shape:
            shape_name = body.deployment_shape.replace("/deploymentShapes/", "/trainingShapes/")
            shape = self._context.catalog.shape(shape_name)
            if shape.base_model != body.base_model:
                raise RequestError(
                    f"deploymentShape must be one of {body.base_model!r}, got "
                    f"{body.deployment_shape!r}, which is one of {shape.base_model!r}"
                )
        values = Values(body.extra_values or {}, shape)
        lengths = [entry.context_length, shape.context_length if shape is not None else None]
        longest = min((length for length in lengths if length is not None), default=None)
        engine = cast("Engine", values.choice("engine", ("embedded", "vllm"), "embedded"))
        engine_options = values.mapping("engine_options")
        lora_rank = values.count("lora_rank")
        if engine == "vllm" and lora_rank is not None:
            engine_options.setdefault("lora_rank", lora_rank)
        return DeploymentSpec(
            worker_id=f"{_PREFIX}{deployment_id}",
            name=deployment_name(deployment_id),
            base_model=entry.name,
            source=entry.source,
            bucket=self._bucket(deployment_id, body),
            state_dir=str(self._context.data_dir / "deployments" / deployment_id),
            tokenizer=self._tokenizer(values),
            engine=engine,
            replicas=max(1, body.max_replica_count),
            engine_options=engine_options,
            dtype=values.choice("dtype", ("float32", "bfloat16"), "float32"),
            device=values.text("device"),
            max_seq_len=values.count("max_context_length") or longest,
            max_batch_size=values.count("max_batch_size") or 64,
            threads=values.count("threads") or self._context.deployment_threads,
            trust_remote_code=entry.trust_remote_code,
        )

    def _start(self, deployment_id: str, body: Deployment, state: str) -> None:
        try:
            spec = self._spec(deployment_id, body)
        except (ConfigError, NotFoundError, RequestError) as error:
            self._give_up(deployment_id, f"cannot be started: {error}")
            return
        self.live.put(deployment_id, Live(state, is_starting=True))
        try:
            worker = self._context.launcher.start(spec, self)
        except ConfigError as error:
            self._give_up(deployment_id, f"cannot be started: {error}")
            return
        if self.live.begun(deployment_id, worker):
            self.rows.update(deployment_id, only_from=(state,), worker=worker.record())

    def _forget_served(self, deployment_id: str) -> None:
        state = self._context.data_dir / "deployments" / deployment_id / "serving.json"
        state.unlink(missing_ok=True)

    def _tokenizer(self, values: Values) -> str | None:
        name = values.text("tokenizer")
        if name is not None:
            self._context.catalog.check_source(name, "extraValues.tokenizer")
        return name

    def _replace(self, deployment_id: str, report: ExitReport, *, may_restart: bool) -> None:
        deaths = self._deaths.setdefault(deployment_id, deque())
        deaths.append(self._now())
        while deaths[0] < self._now() - RESTART_WINDOW_S:
            deaths.popleft()
        message = report.describe()
        if not may_restart or len(deaths) > MOST_RESTARTS:
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
