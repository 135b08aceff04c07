"""Deployments: created, started, kept alive, attached to trainers, scaled to zero and deleted.

A deployment holds no state that cannot be had again, so one that dies is started again by itself;
in a process of its own it then loads the snapshot that it served. One that dies again and again is
FAILED, with what is known, and so is one whose first start fails.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import cast

from hearth.control.catalog import ShapeEntry
from hearth.control.context import Context
from hearth.control.jobs import Jobs
from hearth.control.resource_names import check_id, full_name, parse_id
from hearth.control.resources import (
    MOST_CONTEXT,
    MOST_THREADS,
    RESPONSE_FIELDS,
    ExtraValues,
    Resources,
    min_context_length,
)
from hearth.control.store import Records, StoredRecord
from hearth.errors import ClosedError, HearthError, NotReadyError, RequestError
from hearth.files import SERVING_FILE
from hearth.launch.spec import DeploymentSpec, Engine, Worker
from hearth.wire.fireworks import Deployment, DeploymentPatch

logger = logging.getLogger(__name__)

MOST_RESTARTS = 3
"""A deployment that dies more often within ``RESTART_WINDOW_S`` is given up, unless it has answered
a completion in between: such a one is killed from outside, or by single requests, which end."""
RESTART_WINDOW_S = 600.0
MOST_REPLICAS = 64
"""Of one deployment, where its engine can have several."""
MOST_ADAPTERS = 1024
"""In the memory of one deployment."""
SCALED_TO_ZERO = "scaled to zero"


class Deployments(Resources[Deployment]):
    """The deployments of one platform. Safe to use from several threads."""

    kind = "deployment"
    prefix = "deployment-"
    collection = "deployments"
    alive = ("CREATING", "READY", "UPDATING")
    created_state = "CREATING"
    ready_state = "READY"
    failed_state = "FAILED"
    body_type = Deployment

    def __init__(
        self,
        records: Records,
        models: Records,
        jobs: Jobs,
        context: Context,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(records, models, context)
        self._jobs = jobs
        self._now = now
        self._deaths: dict[str, list[float]] = {}

    def create(
        self, deployment_id: str, request: Deployment, creator: str | None = None
    ) -> Deployment:
        """Start a deployment; it is ``CREATING`` until it answers. Repeating it changes nothing.

        Raises:
            RequestError: a field breaks its rule.
            ConfigError, NotFoundError: the model, the shape or the trainer is unknown.
            ConflictError: another deployment has this id.
            BusyError: its creator has as many deployments as one key may have.
        """
        check_id(deployment_id, "deploymentId")
        request = request.model_copy(update=dict.fromkeys(RESPONSE_FIELDS))
        if request.max_replica_count is None:
            replicas = self._default_replicas(request)
            request = request.model_copy(update={"max_replica_count": replicas})
        spec = self._build_spec(deployment_id, request)
        self._check_replicas(request, spec.engine)
        if request.hot_load_trainer_job:
            self._check_attachable(deployment_id, request.hot_load_trainer_job)
        with self.live.hold(deployment_id), self._lock:
            existing = self.records.find(deployment_id)
            if existing is not None:
                return self._match_existing(existing, request, "deploymentId")
            request = request.model_copy(update={"created_by": creator})
            has_replica = count_replicas(request) > 0
            if has_replica:
                self._check_limit(deployment_id, request)
            state, message = ("CREATING", "") if has_replica else ("READY", SCALED_TO_ZERO)
            self.records.insert(deployment_id, state, request.as_dict(), message)
            if has_replica:
                self._start(deployment_id, request, "CREATING")
            return self.get(deployment_id)

    def patch(self, deployment_id: str, change: DeploymentPatch) -> Deployment:
        """Scale, or attach to another trainer. One that has failed is started again by any change.

        Scaled up without a ``max_replica_count`` it has as many replicas as its shape says.

        Another number of replicas starts it again; a process then serves what it served.

        A replica that starts for another trainer than the one before serves the base weights, not
        what that one had published.

        Raises:
            NotFoundError: there is no such deployment or trainer.
            RequestError: a value breaks its rule, or the trainer publishes elsewhere.
            BusyError: its creator has as many deployments as one key may have.
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
        if change.max_replica_count is None and after.min_replica_count > count_replicas(before):
            replicas = max(after.min_replica_count, self._default_replicas(before))
            after = after.model_copy(update={"max_replica_count": replicas})
        has_several = count_replicas(after) > 1
        engine = self._build_spec(record.id, after).engine if has_several else "embedded"
        self._check_replicas(after, engine)
        is_stopped = count_replicas(before) == 0 or record.state == "FAILED"
        if is_stopped and count_replicas(after) > 0:
            self._check_limit(record.id, after)
        self.records.update(record.id, body=after.as_dict())
        if count_replicas(after) == 0:
            self.records.update(record.id, state="READY", message=SCALED_TO_ZERO, worker=None)
            return self.live.take_worker(record.id)
        if is_stopped:
            self._deaths.pop(record.id, None)
            if after.hot_load_trainer_job != before.hot_load_trainer_job:
                self._delete_served_state(record.id)
            self.records.update(record.id, state="UPDATING", message="", worker=None)
            self._start(record.id, after, "UPDATING")
        elif count_replicas(after) != count_replicas(before):
            self.records.update(record.id, state="UPDATING", message="", worker=None)
            return self.live.take_worker(record.id)
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
            if job is not None and job.state in self._jobs.alive:
                raise RequestError(
                    f"hotLoadDeploymentId must name a deployment with a bucket of its own, got "
                    f"{deployment_id!r}, which reads that of the running trainer {job.id!r}: end "
                    "that one, or leave hotLoadDeploymentId out and attach the deployment"
                )
            untied = body.model_copy(update={"hot_load_trainer_job": None})
            self.records.update(deployment_id, body=untied.as_dict())
            if count_replicas(body) == 0:
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
                worker = self.live.take_worker(deployment_id)
            if worker is not None:
                worker.stop()
            with self._lock:
                self.records.delete(deployment_id)
                self._deaths.pop(deployment_id, None)
            self._delete_served_state(deployment_id)

    def find_bucket(self, deployment_id: str) -> str:
        """Where a deployment's snapshots come from now.

        Raises:
            NotFoundError: there is no such deployment.
        """
        body = Deployment.from_dict(self._get_record(deployment_id).body)
        return self._find_bucket(deployment_id, body)

    def ready(self, worker: Worker) -> None:
        """A worker answers (``Watcher``). Completions may be asked of it by anybody from now on."""
        super().ready(worker)
        self.live.note_use(worker.spec.worker_id.removeprefix(self.prefix))

    def note_completion(self, id: str) -> None:
        """A deployment has answered: it does not die of its start."""
        if id in self._deaths:
            with self._lock:
                self._deaths.pop(id, None)

    def recover(self) -> None:
        """After a restart: find the replicas that still run, and start the others again."""
        # A worker that was not stopped ends by itself when it gets no requests.
        for record in self.records.list_all(("DELETING",)):
            self.delete(record.id)
        super().recover()

    def _recover(self, record: StoredRecord) -> None:
        if count_replicas(Deployment.from_dict(record.body)) > 0:
            super()._recover(record)

    def _explain_absence(self, record: StoredRecord) -> HearthError:
        if record.state == "FAILED":
            return ClosedError(
                f"deployment {record.id!r} must be ready, got FAILED ({record.message}): patch "
                "maxReplicaCount to 1 to start it again, or delete it"
            )
        if record.state == "DELETING":
            return ClosedError(f"deployment {record.id!r} must be ready, got DELETING")
        if count_replicas(Deployment.from_dict(record.body)) == 0:
            return ClosedError(
                f"deployment {record.id!r} must have a replica, got none: it was stopped, or its "
                f"run has ended; `hearth start {record.id}` starts it, as does maxReplicaCount 1; "
                "your own loop uses it inside the `with` block that provisioned it"
            )
        return NotReadyError(
            f"deployment {record.id!r} must be ready, got {record.state}: ask again soon"
        )

    def _check_replicas(self, body: Deployment, engine: Engine) -> None:
        least, most = body.min_replica_count, count_replicas(body)
        highest = MOST_REPLICAS if engine == "vllm" else 1
        if not 0 <= least <= most <= highest:
            raise RequestError(
                "minReplicaCount and maxReplicaCount must be 0 or 1, or up to "
                f"{MOST_REPLICAS} with engine 'vllm', the first no more than the second, got "
                f"{least} and {most} with engine {engine!r}"
            )

    @staticmethod
    def _check_adapters(count: int, engine: Engine) -> None:
        if not 0 <= count <= MOST_ADAPTERS:
            raise RequestError(
                f"maxAdapters must be in 0..{MOST_ADAPTERS}, got {count}: all of them are in "
                "memory at the same time"
            )
        if count and engine == "vllm":
            raise RequestError(
                f"maxAdapters must be absent with engine 'vllm', got {count}: requests name "
                "adapters with engine 'embedded'; with vLLM sync an adapter, or deploy each alone"
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
        return f"{self.prefix}{deployment_id}"

    def _build_spec(self, id: str, body: Deployment) -> DeploymentSpec:
        entry, shape = self.find_model(body.base_model), self._find_shape(body)
        values = ExtraValues(body.extra_values or {}, shape)
        engine = cast("Engine", values.read_choice("engine", ("embedded", "vllm")) or "embedded")
        engine_options = values.read_mapping("engine_options")
        self._check_adapters(body.max_adapters or 0, engine)
        lora_rank = values.read_count("lora_rank")
        if engine == "vllm" and lora_rank is not None:
            engine_options.setdefault("lora_rank", lora_rank)
            if values.read_flag("train_mlp"):
                engine_options.setdefault("train_mlp", True)
        return DeploymentSpec(
            worker_id=f"{self.prefix}{id}",
            name=full_name(self.collection, id),
            base_model=entry.name,
            source=entry.source,
            bucket=self._find_bucket(id, body),
            state_dir=str(self._context.data_dir / "deployments" / id),
            tokenizer=self._read_tokenizer(values),
            engine=engine,
            replicas=max(1, count_replicas(body)),
            engine_options=engine_options,
            dtype=values.read_choice("dtype", ("float32", "bfloat16")),
            device=values.read_text("device"),
            max_seq_len=values.read_count("max_context_length", MOST_CONTEXT)
            or min_context_length(shape, entry),
            max_batch_size=values.read_count("max_batch_size") or 64,
            max_adapters=body.max_adapters or 0,
            threads=values.read_count("threads", MOST_THREADS) or self._context.deployment_threads,
            trust_remote_code=entry.trust_remote_code,
        )

    def _find_shape(self, body: Deployment) -> ShapeEntry | None:
        """The shape that a deployment names.

        Raises:
            NotFoundError: there is none of that name.
            RequestError: it is one of another model.
        """
        if not body.deployment_shape:
            return None
        name = body.deployment_shape.replace("/deploymentShapes/", "/trainingShapes/")
        shape = self._context.catalog.find_shape(name)
        if shape.base_model != body.base_model:
            raise RequestError(
                f"deploymentShape must be one of {body.base_model!r}, got "
                f"{body.deployment_shape!r}, which is one of {shape.base_model!r}"
            )
        return shape

    def _default_replicas(self, body: Deployment) -> int:
        """How many replicas a deployment has where a request does not say."""
        shape = self._find_shape(body)
        return (shape.replicas if shape is not None else None) or 1

    def _delete_served_state(self, deployment_id: str) -> None:
        state = self._context.data_dir / "deployments" / deployment_id / SERVING_FILE
        state.unlink(missing_ok=True)
        self._context.launcher.forget_served(deployment_id)

    def _read_tokenizer(self, values: ExtraValues) -> str | None:
        name = values.read_text("tokenizer")
        if name is not None:
            self._context.catalog.check_source(name, "extraValues.tokenizer")
        return name

    def _handle_death(self, id: str, message: str, *, has_run: bool) -> None:
        """Start the deployment again, unless it never ran or has died too often."""
        now_s, before = self._now(), self._deaths.get(id, [])
        deaths = [*(death_s for death_s in before if death_s >= now_s - RESTART_WINDOW_S), now_s]
        if not (has_run or before) or len(deaths) > MOST_RESTARTS:
            self._fail(id, message)
            self._deaths[id] = deaths
            return
        logger.warning("deployment %s is started again: %s", id, message)
        moved = self.records.update(
            id, only_from=self.alive, state="UPDATING", message=message, worker=None
        )
        # Not sooner: where the disk refuses, the launcher tells of the same death again.
        self._deaths[id] = deaths
        if moved:
            self._start(id, Deployment.from_dict(self._get_record(id).body), "UPDATING")


def count_replicas(body: Deployment) -> int:
    """The replicas that a deployment is to have; its record always says how many."""
    return 1 if body.max_replica_count is None else body.max_replica_count
