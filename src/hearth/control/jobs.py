"""Trainer jobs: asked for, started, watched, resumed and ended.

A job's row says what was asked and where it stands; its worker does the work. A worker that dies
makes its job FAILED with what is known of the death; nobody starts it again unasked, because its
weights since the last checkpoint are gone with it.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

from hearth.control.catalog import ModelEntry, ShapeEntry
from hearth.control.context import Context, promoted_models
from hearth.control.names import check_id, job_name, leaf, timestamp
from hearth.control.store import Row, Rows
from hearth.control.values import Values
from hearth.control.workers import Live, LiveTable, ask
from hearth.errors import (
    ClosedError,
    ConfigError,
    ConflictError,
    NotFoundError,
    NotReadyError,
    RequestError,
)
from hearth.launch.spec import Endpoint, ExitReport, TrainerSpec, Worker
from hearth.wire.fireworks import TrainerJob

logger = logging.getLogger(__name__)

ALIVE = ("JOB_STATE_CREATING", "JOB_STATE_RUNNING")
RESUMABLE = ("JOB_STATE_FAILED", "JOB_STATE_CANCELLED", "JOB_STATE_PAUSED", "JOB_STATE_COMPLETED")
_PREFIX = "trainer-"
_LEARNED = "learnedContextLength"
"""In a row's body: what the trainer said, where nobody could say before it ran."""
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


class Jobs:
    """The trainer jobs of one platform. Safe to use from several threads."""

    def __init__(self, rows: Rows, models: Rows, context: Context) -> None:
        self.rows = rows
        self.live = LiveTable()
        self._models = models
        self._context = context
        # A row and its live entry change together, whoever changes them.
        self._lock = threading.RLock()

    def create(self, job_id: str, asked: TrainerJob, training_shape: str | None) -> TrainerJob:
        """Start a job; it is ``CREATING`` until its trainer answers. Asking again changes nothing.

        Raises:
            RequestError: a field breaks its rule.
            ConfigError, NotFoundError: the model or the shape is unknown.
            ConflictError: another job has this id, or had it and was deleted.
        """
        check_id(job_id, "rlorTrainerJobId")
        asked = asked.model_copy(update={"training_shape": training_shape or asked.training_shape})
        body = self._resolved(job_id, asked)
        with self.live.turn(job_id), self._lock:
            existing = self.rows.find(job_id)
            if existing is not None:
                return self._same(existing, body)
            self.rows.insert(job_id, "JOB_STATE_CREATING", body.as_dict())
            self._start(job_id, body)
            return self.get(job_id)

    def get(self, job_id: str) -> TrainerJob:
        """A job as it stands.

        Raises:
            NotFoundError: there is none of that id.
        """
        return self.record(self._row(job_id))

    def all(self) -> list[TrainerJob]:
        """Every job that was not deleted, oldest first."""
        return [self.record(row) for row in self.rows.all() if row.state != "JOB_STATE_DELETED"]

    def resume(self, job_id: str) -> TrainerJob:
        """Start a job's trainer again, from its base weights; its checkpoints are still there.

        Raises:
            NotFoundError: there is no such job.
            ConflictError: it was deleted.
        """
        with self.live.turn(job_id), self._lock:
            row = self._row(job_id)
            if row.state in ALIVE:
                return self.record(row)
            moved = self.rows.update(
                job_id, only_from=RESUMABLE, state="JOB_STATE_CREATING", message="", worker=None
            )
            if not moved:
                raise ConflictError(
                    f"job must be in one of {list(RESUMABLE)} to be resumed, got {row.state} of "
                    f"{job_id!r}: create a new one"
                )
            self._start(job_id, TrainerJob.checked(row.body))
            return self.get(job_id)

    def cancel(self, job_id: str) -> TrainerJob:
        """Stop a job's trainer; it can be resumed. One that has ended stays as it is.

        Raises:
            NotFoundError: there is no such job.
        """
        self._row(job_id)
        self._end(job_id, "JOB_STATE_CANCELLED", "cancelled by request", only_from=ALIVE)
        return self.get(job_id)

    def delete(self, job_id: str) -> None:
        """Stop a job for good. Its checkpoints and snapshots can still be listed and promoted.

        Raises:
            NotFoundError: there is no such job.
        """
        self._row(job_id)
        self._end(job_id, "JOB_STATE_DELETED", "deleted by request", only_from=None)

    def endpoint(self, job_id: str) -> Endpoint:
        """Where a job's trainer answers.

        Raises:
            NotFoundError: there is no such job.
            NotReadyError: it is starting.
            ClosedError: it has ended; the message says how, and what to do.
        """
        live = self.live.get(job_id)
        if live is not None and (found := live.endpoint) is not None:
            return found
        row = self._row(job_id)
        if row.state in ALIVE:
            raise NotReadyError(
                f"trainer job {job_id!r} must be running, got {row.state}: ask soon"
            )
        action = "resume it" if row.state in RESUMABLE else "create a new one"
        raise ClosedError(
            f"trainer job {job_id!r} must be running, got {row.state} "
            f"({row.message or 'no reason known'}): {action}"
        )

    def bucket(self, job: str) -> str:
        """The bucket into which a job publishes; ``job`` is an id or a full name.

        Raises:
            NotFoundError: there never was such a job.
        """
        return bucket_of(leaf(job), self.asked_for(leaf(job)))

    def asked_for(self, job_id: str) -> TrainerJob:
        """A job as it was asked for, also one that was deleted.

        Raises:
            NotFoundError: there never was one of that id.
        """
        return TrainerJob.checked(self._row(job_id).body)

    def ready(self, worker: Worker) -> None:
        """A trainer answers (``Watcher``)."""
        job_id = worker.spec.worker_id.removeprefix(_PREFIX)
        # Asked before the job is said to run: whoever sees it running sees its length too.
        learned = self._learned(job_id, worker)
        with self._lock:
            row = self.rows.find(job_id)
            if row is None or not self.live.belongs(job_id, worker):
                return
            self.live.put(job_id, Live("JOB_STATE_RUNNING", worker=worker, is_ready=True))
            self.rows.update(
                job_id,
                only_from=ALIVE,
                state="JOB_STATE_RUNNING",
                worker=worker.record(),
                body={**row.body, **learned},
            )
        logger.info("trainer job %s is running", job_id)

    def failed(self, worker: Worker, report: ExitReport) -> None:
        """A trainer could not start, or died (``Watcher``)."""
        job_id = worker.spec.worker_id.removeprefix(_PREFIX)
        with self._lock:
            if self.live.belongs(job_id, worker):
                self._fail(job_id, report)

    def recover(self) -> None:
        """After a restart: find the trainers that still run, and report the others as failed."""
        for row in self.rows.all(ALIVE):
            with self._lock:
                self._find_again(row)

    def _find_again(self, row: Row) -> None:
        if row.worker is None:
            self._start(row.id, TrainerJob.checked(row.body))
            return
        self.live.put(row.id, Live(row.state, is_starting=True))
        found = self._context.launcher.adopt(row.worker, self)
        if isinstance(found, ExitReport):
            self._fail(row.id, found)
        else:
            self.live.begun(row.id, found)

    def record(self, row: Row) -> TrainerJob:
        """A row as clients read it."""
        live = self.live.get(row.id)
        worker = live.worker if live is not None else None
        body = TrainerJob.checked(row.body)
        config = body.training_config
        length = config.max_context_length or row.body.get(_LEARNED)
        return body.model_copy(
            update={
                "training_config": config.model_copy(update={"max_context_length": length}),
                "name": job_name(row.id),
                "state": row.state,
                "status_message": row.message or None,
                "create_time": timestamp(row.created_s),
                "update_time": timestamp(row.updated_s),
                "worker_placement": self._context.launcher.placement,
                "pid": worker.pid if worker is not None else None,
            }
        )

    def _row(self, job_id: str) -> Row:
        row = self.rows.find(job_id)
        if row is None:
            known = [one.id for one in self.rows.all() if one.state != "JOB_STATE_DELETED"]
            raise NotFoundError(f"trainer job must be one of {known}, got {job_id!r}")
        return row

    def _same(self, existing: Row, body: TrainerJob) -> TrainerJob:
        if existing.state == "JOB_STATE_DELETED":
            raise ConflictError(
                f"rlorTrainerJobId must be new, got {existing.id!r}: a job of that id was deleted, "
                "and its checkpoints are kept under it; choose another"
            )
        before = {name: value for name, value in existing.body.items() if name != _LEARNED}
        if before != body.as_dict():
            raise ConflictError(
                f"rlorTrainerJobId must be new, got {existing.id!r}: a job of that id exists "
                f"({existing.state}) and was asked for otherwise"
            )
        return self.record(existing)

    def _resolved(self, job_id: str, asked: TrainerJob) -> TrainerJob:
        """The job with everything filled in that decides what is started."""
        config = asked.training_config
        entry = self._context.catalog.model(config.base_model, promoted_models(self._models))
        shape = self._context.catalog.shape(asked.training_shape) if asked.training_shape else None
        if config.lora_rank < 0:
            raise RequestError(f"loraRank must be >= 0, got {config.lora_rank}")
        if config.max_context_length is not None and config.max_context_length < 1:
            raise RequestError(f"maxContextLength must be >= 1, got {config.max_context_length}")
        if shape is not None and shape.base_model != config.base_model:
            raise RequestError(
                f"trainingShape must be one of {config.base_model!r}, got {shape.name!r}, which is "
                f"one of {shape.base_model!r}"
            )
        is_frozen = asked.forward_only or "--forward-only" in (config.extra_args or [])
        is_frozen = is_frozen or (shape is not None and shape.trainer_mode == "FORWARD_ONLY")
        length = config.max_context_length or _shortest(shape, entry)
        body = asked.model_copy(
            update={
                **dict.fromkeys(_ANSWERED),
                "forward_only": is_frozen,
                "training_config": config.model_copy(update={"max_context_length": length}),
                "bucket": bucket_of(job_id, asked),
            }
        )
        self._spec(job_id, body)  # judges the values before anything is written
        return body

    def _spec(self, job_id: str, body: TrainerJob) -> TrainerSpec:
        entry = self._context.catalog.model(
            body.training_config.base_model, promoted_models(self._models)
        )
        shape = self._context.catalog.shape(body.training_shape) if body.training_shape else None
        values = Values(body.extra_values or {}, shape)
        ranks = self._ranks(values)
        threads = values.count("threads") or self._context.trainer_threads
        if ranks > 1:
            threads = max(1, (threads or os.cpu_count() or 1) // ranks)
        return TrainerSpec(
            worker_id=f"{_PREFIX}{job_id}",
            base_model=entry.name,
            source=entry.source,
            bucket=bucket_of(job_id, body),
            checkpoint_dir=str(self._context.checkpoint_dir(job_id)),
            forward_only=body.forward_only,
            ranks=ranks,
            rank_timeout_s=values.count("rank_timeout_s") or 300,
            offload_optimizer=values.flag("offload_optimizer"),
            dtype=values.choice("dtype", ("float32", "bfloat16"), "float32"),
            device=values.text("device"),
            max_seq_len=body.training_config.max_context_length,
            micro_batch_tokens=values.count("micro_batch_tokens") or 16384,
            recompute_above=values.count("recompute_above"),
            keep_checkpoints=values.count("keep_checkpoints"),
            threads=threads,
            keep_snapshots=self._context.keep_snapshots,
            models_dir=str(self._context.models_dir),
            allow_folders=self._context.catalog.allow_folders,
            trust_remote_code=entry.trust_remote_code,
        )

    def _ranks(self, values: Values) -> int:
        """How many processes share the weights.

        Raises:
            RequestError: the placement has no room for them, or what they are to do is unknown.
        """
        ranks = values.count("ranks") or 1
        if ranks > 1 and self._context.launcher.placement == "inline":
            raise RequestError(
                f"ranks must be 1 with the inline placement, got {ranks}: a process group does not "
                "belong into the user's process; use placement='process', or hearth serve"
            )
        if ranks == 1 and values.flag("offload_optimizer"):
            raise RequestError(
                "offload_optimizer must be off with ranks=1, got True: only weights that ranks "
                "share can be kept in the host's memory"
            )
        if (parallel := values.count("context_parallel") or 1) > 1:
            raise RequestError(
                f"context_parallel must be 1, got {parallel}: it is not supported on CPU, where "
                "torch's context_parallel has no attention kernel, and not connected on a GPU; "
                "recompute_above and a smaller micro_batch_tokens save memory"
            )
        return ranks

    def _start(self, job_id: str, body: TrainerJob) -> None:
        try:
            spec = self._spec(job_id, body)
        except (ConfigError, NotFoundError, RequestError) as error:
            # A catalog that changed while the platform was down.
            self._fail(job_id, ExitReport(reason=f"cannot be started: {error}"))
            return
        self.live.put(job_id, Live("JOB_STATE_CREATING", is_starting=True))
        try:
            worker = self._context.launcher.start(spec, self)
        except ConfigError as error:
            self._fail(job_id, ExitReport(reason=f"cannot be started: {error}"))
            return
        if self.live.begun(job_id, worker):
            self.rows.update(job_id, only_from=("JOB_STATE_CREATING",), worker=worker.record())

    def _learned(self, job_id: str, worker: Worker) -> dict[str, int]:
        """The context length that a trainer answers, as a part of its row, where none is known."""
        row = self.rows.find(job_id)
        if row is None or TrainerJob.checked(row.body).training_config.max_context_length:
            return {}
        answer = ask(worker.endpoint, "/api/v1/get_server_capabilities")
        try:
            return {_LEARNED: int(answer["supported_models"][0]["max_context_length"])}
        except (LookupError, TypeError, ValueError):
            logger.warning("trainer job %s does not say how long its context is", job_id)
            return {}

    def _fail(self, job_id: str, report: ExitReport) -> None:
        message = report.describe()
        self.live.put(job_id, Live("JOB_STATE_FAILED", message))
        moved = self.rows.update(
            job_id, only_from=ALIVE, state="JOB_STATE_FAILED", message=message, worker=None
        )
        if moved:
            logger.warning("trainer job %s failed: %s", job_id, message)

    def _end(self, job_id: str, state: str, message: str, *, only_from: Any) -> None:
        with self.live.turn(job_id):
            with self._lock:
                moved = self.rows.update(
                    job_id, only_from=only_from, state=state, message=message, worker=None
                )
                worker = self.live.take_worker(job_id, Live(state, message)) if moved else None
            # Not under the lock: its last news may be on the way, and wants it.
            if worker is not None:
                worker.stop()


def bucket_of(job_id: str, body: TrainerJob) -> str:
    """Where a job's snapshots go: its own bucket, or that of the deployment it is tied to."""
    if body.hot_load_deployment_id:
        return f"deployment-{check_id(leaf(body.hot_load_deployment_id), 'hotLoadDeploymentId')}"
    return f"{_PREFIX}{job_id}"


def _shortest(shape: ShapeEntry | None, entry: ModelEntry) -> int | None:
    lengths = [entry.context_length, shape.context_length if shape is not None else None]
    return min((length for length in lengths if length is not None), default=None)
