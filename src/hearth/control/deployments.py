"""Deployments: created, started, kept alive, attached to trainers, scaled to zero and deleted.

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

from hearth.control.context import RESPONSE_FIELDS, Context, list_promoted
from hearth.control.extra_values import ExtraValues
from hearth.control.jobs import ALIVE as JOB_ALIVE
from hearth.control.jobs import Jobs
from hearth.control.resource_names import check_id, deployment_name, parse_id
from hearth.control.store import Records, StoredRecord
from hearth.control.workers import LiveEntry, LiveTable
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


class Deployments:
    """The deployments of one platform. Safe to use from several threads."""

    def __init__(
        self,
        records: Records,
        models: Records,
        jobs: Jobs,
        context: Context,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.records = records
        self.live = LiveTable()
        self._models = models
        self._jobs = jobs
        self._context = context
        self._now = now
        self._deaths: dict[str, deque[float]] = {}
        # A record and its live entry change together.
        self._lock = threading.RLock()

    def create(self, deployment_id: str, request: Deployment) -> Deployment:
        """Start a deployment; it is ``CREATING`` until it answers. Repeating it changes nothing.

        Raises:
            RequestError: a field breaks its rule.
            ConfigError, NotFoundError: the model, the shape or the trainer is unknown.
            ConflictError: another deployment has this id.
        """
        check_id(deployment_id, "deploymentId")
        request = request.model_copy(update=dict.fromkeys(RESPONSE_FIELDS))
        spec = self._build_spec(deployment_id, request)
        self._check_replicas(request, spec.engine)
        if request.hot_load_trainer_job:
            self._check_attachable(deployment_id, request.hot_load_trainer_job)
        with self.live.hold(deployment_id), self._lock:
            existing = self.records.find(deployment_id)
            if existing is not None:
                return self._match_existing(existing, request)
            has_replica = request.max_replica_count > 0
            state, message = ("CREATING", "") if has_replica else ("READY", SCALED_TO_ZERO)
            self.records.insert(deployment_id, state, request.as_dict(), message)
            if has_replica:
                self._start(deployment_id, request, "CREATING")
            return self.get(deployment_id)

    def get(self, deployment_id: str) -> Deployment:
        """A deployment as it stands.

        Raises:
            NotFoundError: there is none of that id.
        """
        return self.describe(self._get_record(deployment_id))

    def list_all(self) -> list[Deployment]:
        """Every deployment, oldest first."""
        return [self.describe(record) for record in self.records.list_all()]

    def patch(self, deployment_id: str, change: DeploymentPatch) -> Deployment:
        """Scale, or attach to another trainer. One that has failed is started again by any change.

        Another number of replicas starts it again; a process then serves what it served.

        A replica that starts for another trainer than the one before serves the base weights, not
        what that one had published.

        Raises:
            NotFoundError: there is no such deployment or trainer.
            RequestError: a value breaks its rule, or the trainer publishes elsewhere.
        """
        with self.live.hold(deployment_id):
            with self._lock:
                worker = self._apply_patch(self._get_record(deployment_id), change)
            # Not under the lock: its last call of ``failed`` may wait for the lock.
            if worker is not None:
                worker.stop()
                self._resume_resized(deployment_id)
        return self.get(deployment_id)

    def _apply_patch(self, record: StoredRecord, change: DeploymentPatch) -> Worker | None:
        """Write a change and act on it; returns the worker to stop."""
        if change.hot_load_trainer_job:
            self._check_attachable(record.id, change.hot_load_trainer_job)
        before = Deployment.from_dict(record.body)
        after = before.model_copy(update=change.model_dump(exclude_none=True))
        engine = (
            self._build_spec(record.id, after).engine if after.max_replica_count > 1 else "embedded"
        )
        self._check_replicas(after, engine)
        self.records.update(record.id, body=after.as_dict())
        if after.max_replica_count == 0:
            self.records.update(record.id, state="READY", message=SCALED_TO_ZERO, worker=None)
            return self.live.take_worker(record.id, LiveEntry("READY", SCALED_TO_ZERO))
        if before.max_replica_count == 0 or record.state == "FAILED":
            self._deaths.pop(record.id, None)
            if after.hot_load_trainer_job != before.hot_load_trainer_job:
                self._delete_served_state(record.id)
            self.records.update(record.id, state="UPDATING", message="", worker=None)
            self._start(record.id, after, "UPDATING")
        elif after.max_replica_count != before.max_replica_count:
            self.records.update(record.id, state="UPDATING", message="", worker=None)
            return self.live.take_worker(record.id, LiveEntry("UPDATING"))
        return None

    def _resume_resized(self, deployment_id: str) -> None:
        """Start a deployment that was stopped to have another number of replicas."""
        with self._lock:
            record = self._get_record(deployment_id)
            if record.state == "UPDATING" and record.worker is None:
                self._start(deployment_id, Deployment.from_dict(record.body), "UPDATING")

    def use_own_bucket(self, deployment_id: str) -> None:
        """Have a deployment read its own bucket: a trainer is about to publish into it.

        It may not be there yet. Its attachment to a trainer that has ended is given up.

        Raises:
            RequestError: the trainer that it is attached to is alive.
        """
        with self.live.hold(deployment_id), self._lock:
            record = self.records.find(deployment_id)
            body = Deployment.from_dict(record.body) if record is not None else None
            if body is None or not body.hot_load_trainer_job:
                return
            job = self._jobs.records.find(parse_id(body.hot_load_trainer_job))
            if job is not None and job.state in JOB_ALIVE:
                raise RequestError(
                    f"hotLoadDeploymentId must name a deployment with a bucket of its own, got "
                    f"{deployment_id!r}, which reads that of the running trainer {job.id!r}: end "
                    "that one, or leave hotLoadDeploymentId out and attach the deployment"
                )
            untied = body.model_copy(update={"hot_load_trainer_job": None})
            self.records.update(deployment_id, body=untied.as_dict())
            if body.max_replica_count == 0:
                self._delete_served_state(deployment_id)

    def delete(self, deployment_id: str) -> None:
        """End a deployment and forget it, with what it served; its id is free again.

        Raises:
            NotFoundError: there is no such deployment.
        """
        with self.live.hold(deployment_id):
            with self._lock:
                self._get_record(deployment_id)
                self.records.update(deployment_id, state="DELETING", worker=None)
                worker = self.live.take_worker(deployment_id, LiveEntry("DELETING"))
            if worker is not None:
                worker.stop()
            with self._lock:
                self.records.delete(deployment_id)
                self.live.forget(deployment_id)
                self._deaths.pop(deployment_id, None)
            self._delete_served_state(deployment_id)

    def find_endpoint(self, name: str) -> Endpoint:
        """Where a deployment answers; ``name`` is its full name, its id, or ``MODEL#NAME``.

        Raises:
            NotFoundError: there is no such deployment.
            NotReadyError: it is starting.
            ClosedError: it has failed, or is scaled to zero; the message says what to do.
        """
        deployment_id = parse_id(name.rpartition("#")[2])
        live = self.live.get(deployment_id)
        if live is not None and (endpoint := live.endpoint) is not None:
            return endpoint
        record = self._get_record(deployment_id)
        if record.state == "FAILED":
            raise ClosedError(
                f"deployment {deployment_id!r} must be ready, got FAILED ({record.message}): patch "
                "maxReplicaCount to 1 to start it again, or delete it"
            )
        if record.state == "DELETING":
            raise ClosedError(f"deployment {deployment_id!r} must be ready, got DELETING")
        if Deployment.from_dict(record.body).max_replica_count == 0:
            raise ClosedError(
                f"deployment {deployment_id!r} must have a replica, got none: it is scaled to "
                "zero, as a `with ResourceCleanup` block leaves it; use it inside the `with` block "
                "that provisioned it, or patch maxReplicaCount to 1"
            )
        raise NotReadyError(
            f"deployment {deployment_id!r} must be ready, got {record.state}: ask soon"
        )

    def find_bucket(self, name: str) -> str:
        """Where a deployment's snapshots come from now.

        Raises:
            NotFoundError: there is no such deployment.
        """
        deployment_id = parse_id(name.rpartition("#")[2])
        return self._find_bucket(
            deployment_id, Deployment.from_dict(self._get_record(deployment_id).body)
        )

    def ready(self, worker: Worker) -> None:
        """A replica answers (``Watcher``)."""
        deployment_id = worker.spec.worker_id.removeprefix(_PREFIX)
        with self._lock:
            if not self.live.is_current(deployment_id, worker):
                return
            self.live.put(deployment_id, LiveEntry("READY", worker=worker, is_ready=True))
            self.records.update(
                deployment_id, only_from=ALIVE, state="READY", message="", worker=worker.record()
            )
        logger.info("deployment %s is ready", deployment_id)

    def failed(self, worker: Worker, report: ExitReport) -> None:
        """A replica could not start, or died (``Watcher``)."""
        deployment_id = worker.spec.worker_id.removeprefix(_PREFIX)
        with self._lock:
            live = self.live.get(deployment_id)
            if live is None or not self.live.is_current(deployment_id, worker):
                return
            # A first start that fails is not tried again.
            has_run = live.is_ready or bool(self._deaths.get(deployment_id))
            self._restart_or_fail(deployment_id, report, may_restart=has_run)

    def recover(self) -> None:
        """After a restart: find the replicas that still run, and start the others again."""
        # A worker that was not stopped ends by itself when it gets no requests.
        for record in self.records.list_all(("DELETING",)):
            self.delete(record.id)
        for record in self.records.list_all(ALIVE):
            body = Deployment.from_dict(record.body)
            if body.max_replica_count > 0:
                with self._lock:
                    self._recover(record, body)

    def _recover(self, record: StoredRecord, body: Deployment) -> None:
        if record.worker is None:
            self._start(record.id, body, record.state)
            return
        self.live.put(record.id, LiveEntry(record.state, is_starting=True))
        worker = self._context.launcher.adopt(record.worker, self)
        if isinstance(worker, ExitReport):
            self._restart_or_fail(record.id, worker, may_restart=True)
        else:
            self.live.set_worker(record.id, worker)

    def describe(self, record: StoredRecord) -> Deployment:
        """A record as clients read it."""
        return Deployment.from_dict(record.body).model_copy(
            update={"name": deployment_name(record.id), **self._context.describe(record, self.live)}
        )

    def _match_existing(self, existing: StoredRecord, request: Deployment) -> Deployment:
        if existing.state == "DELETING" or existing.body != request.as_dict():
            raise ConflictError(
                f"deploymentId must be new, got {existing.id!r}: a deployment of that id exists "
                f"({existing.state}) and was asked for otherwise"
            )
        return self.describe(existing)

    def _get_record(self, deployment_id: str) -> StoredRecord:
        record = self.records.find(deployment_id)
        if record is None:
            known = [record.id for record in self.records.list_all()]
            raise NotFoundError(f"deployment must be one of {known}, got {deployment_id!r}")
        return record

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
        tied = self._jobs.get_request(parse_id(job)).hot_load_deployment_id
        if tied:
            raise RequestError(
                f"hotLoadTrainerJob must name a trainer with a bucket of its own, got {job!r}, "
                f"which publishes into deployment {parse_id(tied)!r}: set exactly one of "
                f"hotLoadTrainerJob on deployment {deployment_id!r} and hotLoadDeploymentId on "
                "the trainer"
            )

    def _find_bucket(self, deployment_id: str, body: Deployment) -> str:
        if body.hot_load_trainer_job:
            return self._jobs.find_bucket(body.hot_load_trainer_job)
        return f"{_PREFIX}{deployment_id}"

    def _build_spec(self, deployment_id: str, body: Deployment) -> DeploymentSpec:
        entry = self._context.catalog.find_model(body.base_model, list_promoted(self._models))
        shape = None
        if body.deployment_shape:
            shape_name = body.deployment_shape.replace("/deploymentShapes/", "/trainingShapes/")
            shape = self._context.catalog.find_shape(shape_name)
            if shape.base_model != body.base_model:
                raise RequestError(
                    f"deploymentShape must be one of {body.base_model!r}, got "
                    f"{body.deployment_shape!r}, which is one of {shape.base_model!r}"
                )
        values = ExtraValues(body.extra_values or {}, shape)
        lengths = [entry.context_length, shape.context_length if shape is not None else None]
        longest = min((length for length in lengths if length is not None), default=None)
        engine = cast("Engine", values.read_choice("engine", ("embedded", "vllm"), "embedded"))
        engine_options = values.read_mapping("engine_options")
        lora_rank = values.read_count("lora_rank")
        if engine == "vllm" and lora_rank is not None:
            engine_options.setdefault("lora_rank", lora_rank)
        return DeploymentSpec(
            worker_id=f"{_PREFIX}{deployment_id}",
            name=deployment_name(deployment_id),
            base_model=entry.name,
            source=entry.source,
            bucket=self._find_bucket(deployment_id, body),
            state_dir=str(self._context.data_dir / "deployments" / deployment_id),
            tokenizer=self._read_tokenizer(values),
            engine=engine,
            replicas=max(1, body.max_replica_count),
            engine_options=engine_options,
            dtype=values.read_choice("dtype", ("float32", "bfloat16"), "float32"),
            device=values.read_text("device"),
            max_seq_len=values.read_count("max_context_length") or longest,
            max_batch_size=values.read_count("max_batch_size") or 64,
            threads=values.read_count("threads") or self._context.deployment_threads,
            trust_remote_code=entry.trust_remote_code,
        )

    def _start(self, deployment_id: str, body: Deployment, state: str) -> None:
        try:
            spec = self._build_spec(deployment_id, body)
        except (ConfigError, NotFoundError, RequestError) as error:
            self._fail(deployment_id, f"cannot be started: {error}")
            return
        self.live.put(deployment_id, LiveEntry(state, is_starting=True))
        try:
            worker = self._context.launcher.start(spec, self)
        except ConfigError as error:
            self._fail(deployment_id, f"cannot be started: {error}")
            return
        if self.live.set_worker(deployment_id, worker):
            self.records.update(deployment_id, only_from=(state,), worker=worker.record())

    def _delete_served_state(self, deployment_id: str) -> None:
        state = self._context.data_dir / "deployments" / deployment_id / "serving.json"
        state.unlink(missing_ok=True)

    def _read_tokenizer(self, values: ExtraValues) -> str | None:
        name = values.read_text("tokenizer")
        if name is not None:
            self._context.catalog.check_source(name, "extraValues.tokenizer")
        return name

    def _restart_or_fail(
        self, deployment_id: str, report: ExitReport, *, may_restart: bool
    ) -> None:
        deaths = self._deaths.setdefault(deployment_id, deque())
        deaths.append(self._now())
        while deaths[0] < self._now() - RESTART_WINDOW_S:
            deaths.popleft()
        message = report.describe()
        if not may_restart or len(deaths) > MOST_RESTARTS:
            self._fail(deployment_id, message)
            return
        logger.warning("deployment %s is started again: %s", deployment_id, message)
        moved = self.records.update(
            deployment_id, only_from=ALIVE, state="UPDATING", message=message, worker=None
        )
        if moved:
            body = Deployment.from_dict(self._get_record(deployment_id).body)
            self._start(deployment_id, body, "UPDATING")

    def _fail(self, deployment_id: str, message: str) -> None:
        self.live.put(deployment_id, LiveEntry("FAILED", message))
        self.records.update(
            deployment_id, only_from=ALIVE, state="FAILED", message=message, worker=None
        )
        logger.warning("deployment %s failed: %s", deployment_id, message)
