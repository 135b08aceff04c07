"""Trainer jobs: created, started, watched, resumed and ended.

A job's record has its request and its state; its worker does the work. A worker that dies makes its
job FAILED with what is known of the death. Only a request starts it again, because its weights
since the last checkpoint are lost.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from typing import cast, get_args

from hearth.control.catalog import ShapeEntry
from hearth.control.resource_names import check_id, parse_id
from hearth.control.resources import (
    DELETED_JOB,
    MOST_THREADS,
    RESPONSE_FIELDS,
    ExtraValues,
    Resources,
    min_context_length,
)
from hearth.control.store import StoredRecord
from hearth.control.workers import fetch_json
from hearth.errors import ClosedError, ConflictError, HearthError, NotReadyError, RequestError
from hearth.launch.spec import TrainerSpec, Worker
from hearth.planning.memory import OptimizerName
from hearth.wire.fireworks import TrainerJob

logger = logging.getLogger(__name__)

RESUMABLE = ("JOB_STATE_FAILED", "JOB_STATE_CANCELLED", "JOB_STATE_PAUSED", "JOB_STATE_COMPLETED")
_MOST_RANKS, _MOST_LOCAL_RANKS = 1024, 64
"""Processes of one trainer, on a cluster and on one machine."""
_FETCHED_LENGTH = "learnedContextLength"
"""In a record's body: the trainer's own length, where none was known before it ran."""


class Jobs(Resources[TrainerJob]):
    """The trainer jobs of one platform. Safe to use from several threads."""

    kind = "trainer job"
    prefix = "trainer-"
    collection = "rlorTrainerJobs"
    alive = ("JOB_STATE_CREATING", "JOB_STATE_RUNNING")
    created_state = "JOB_STATE_CREATING"
    ready_state = "JOB_STATE_RUNNING"
    failed_state = "JOB_STATE_FAILED"
    body_type = TrainerJob

    def create(
        self,
        job_id: str,
        request: TrainerJob,
        training_shape: str | None,
        creator: str | None = None,
    ) -> TrainerJob:
        """Start a job; it is ``CREATING`` until its trainer answers. Repeating it changes nothing.

        Raises:
            RequestError: a field breaks its rule.
            BusyError: its creator has as many trainers as one key may have.
            ConfigError, NotFoundError: the model or the shape is unknown.
            ConflictError: another job has this id, or had it and was deleted.
        """
        check_id(job_id, "rlorTrainerJobId")
        request = request.model_copy(
            update={"training_shape": training_shape or request.training_shape}
        )
        body = self._resolve(job_id, request)
        with self.live.hold(job_id), self._lock:
            existing = self.records.find(job_id)
            if existing is not None and existing.state == DELETED_JOB:
                raise ConflictError(
                    f"rlorTrainerJobId must be new, got {job_id!r}: a job of that id was deleted, "
                    "and its checkpoints are kept under it; choose another"
                )
            if existing is not None:
                return self._match_existing(existing, body, "rlorTrainerJobId")
            body = body.model_copy(update={"created_by": creator})
            self._check_limit(job_id, body)
            self.records.insert(job_id, "JOB_STATE_CREATING", body.as_dict())
            self._start(job_id, body, "JOB_STATE_CREATING")
            return self.get(job_id)

    def resume(self, job_id: str) -> TrainerJob:
        """Start a job's trainer again, from its base weights; its checkpoints are still there.

        Raises:
            NotFoundError: there is no such job.
            ConflictError: it was deleted.
            BusyError: its creator has as many trainers as one key may have.
        """
        with self.live.hold(job_id), self._lock:
            record = self._get_record(job_id)
            if record.state in self.alive:
                return self.describe(record)
            if record.state in RESUMABLE:
                self._check_limit(job_id, TrainerJob.from_dict(record.body))
            moved = self.records.update(
                job_id, only_from=RESUMABLE, state="JOB_STATE_CREATING", message="", worker=None
            )
            if not moved:
                raise ConflictError(
                    f"job must be in one of {list(RESUMABLE)} to be resumed, got {record.state} of "
                    f"{job_id!r}: create a new one"
                )
            self._start(job_id, TrainerJob.from_dict(record.body), "JOB_STATE_CREATING")
            return self.get(job_id)

    def cancel(self, job_id: str) -> TrainerJob:
        """Stop a job's trainer; it can be resumed. One that has ended stays as it is.

        Raises:
            NotFoundError: there is no such job.
        """
        self._get_record(job_id)
        self._end(job_id, "JOB_STATE_CANCELLED", "cancelled by request", only_from=self.alive)
        return self.get(job_id)

    def delete(self, job_id: str) -> None:
        """Stop a job for good. Its checkpoints and snapshots can still be listed and promoted.

        Raises:
            NotFoundError: there is no such job.
        """
        self._get_record(job_id)
        self._end(job_id, DELETED_JOB, "deleted by request", only_from=None)

    def find_bucket(self, job: str) -> str:
        """The bucket into which a job publishes; ``job`` is an id or a full name.

        Raises:
            NotFoundError: there never was such a job.
        """
        return name_bucket(parse_id(job), self.get_request(parse_id(job)))

    def get_request(self, job_id: str) -> TrainerJob:
        """A job as it was requested, also one that was deleted.

        Raises:
            NotFoundError: there never was one of that id.
        """
        return TrainerJob.from_dict(self._get_record(job_id).body)

    def describe(self, record: StoredRecord) -> TrainerJob:
        """A record as clients read it."""
        job = super().describe(record)
        config = job.training_config
        length = config.max_context_length or record.body.get(_FETCHED_LENGTH)
        config = config.model_copy(update={"max_context_length": length})
        return job.model_copy(update={"training_config": config})

    def _explain_absence(self, record: StoredRecord) -> HearthError:
        if record.state in self.alive:
            return NotReadyError(
                f"trainer job {record.id!r} must be running, got {record.state}: ask again soon"
            )
        action = "resume it" if record.state in RESUMABLE else "create a new one"
        return ClosedError(
            f"trainer job {record.id!r} must be running, got {record.state} "
            f"({record.message or 'no reason known'}): {action}"
        )

    def _handle_death(self, id: str, message: str, *, has_run: bool) -> None:
        self._fail(id, message)

    def _resolve(self, job_id: str, request: TrainerJob) -> TrainerJob:
        """The job with everything filled in that decides what is started."""
        config = request.training_config
        entry = self.find_model(config.base_model)
        shape = self._find_shape(request)
        if config.lora_rank < 0:
            raise RequestError(f"loraRank must be >= 0, got {config.lora_rank}")
        if config.max_context_length is not None and config.max_context_length < 1:
            raise RequestError(f"maxContextLength must be >= 1, got {config.max_context_length}")
        _refuse_several_machines(request)
        if shape is not None and shape.base_model != config.base_model:
            raise RequestError(
                f"trainingShape must be one of {config.base_model!r}, got {shape.name!r}, which is "
                f"one of {shape.base_model!r}"
            )
        is_frozen = request.forward_only or "--forward-only" in (config.extra_args or [])
        is_frozen = is_frozen or (shape is not None and shape.trainer_mode == "FORWARD_ONLY")
        length = config.max_context_length or min_context_length(shape, entry)
        body = request.model_copy(
            update={
                **dict.fromkeys(RESPONSE_FIELDS),
                "forward_only": is_frozen,
                "training_config": config.model_copy(update={"max_context_length": length}),
                "bucket": name_bucket(job_id, request),
            }
        )
        self._build_spec(job_id, body)  # raises before anything is written
        return body

    def _find_shape(self, job: TrainerJob) -> ShapeEntry | None:
        name = job.training_shape
        return self._context.catalog.find_shape(name) if name else None

    def _build_spec(self, id: str, body: TrainerJob) -> TrainerSpec:
        entry = self.find_model(body.training_config.base_model)
        shape = self._find_shape(body)
        values = ExtraValues(body.extra_values or {}, shape)
        ranks = self._read_ranks(values)
        threads = values.read_count("threads", MOST_THREADS) or self._context.trainer_threads
        if ranks > 1:
            threads = max(1, (threads or os.cpu_count() or 1) // ranks)
        return TrainerSpec(
            worker_id=f"{self.prefix}{id}",
            base_model=entry.name,
            source=entry.source,
            bucket=name_bucket(id, body),
            checkpoint_dir=str(self._context.checkpoint_dir(id)),
            forward_only=body.forward_only,
            ranks=ranks,
            rank_timeout_s=values.read_count("rank_timeout_s") or 300,
            offload_optimizer=values.read_flag("offload_optimizer"),
            dtype=values.read_choice("dtype", ("float32", "bfloat16")),
            device=values.read_text("device"),
            max_seq_len=body.training_config.max_context_length,
            micro_batch_tokens=values.read_count("micro_batch_tokens") or 16384,
            recompute_above=values.read_count("recompute_above"),
            optimizer=cast(
                "OptimizerName", values.read_choice("optimizer", get_args(OptimizerName)) or "adamw"
            ),
            max_policies=self._read_policies(values, ranks),
            keep_checkpoints=values.read_count("keep_checkpoints"),
            threads=threads,
            keep_snapshots=values.read_count("keep_snapshots") or self._context.keep_snapshots,
            models_dir=str(self._context.models_dir),
            allow_folders=self._context.catalog.allow_folders,
            trust_remote_code=entry.trust_remote_code,
        )

    def _read_ranks(self, values: ExtraValues) -> int:
        """How many processes share the weights.

        Raises:
            RequestError: the placement has no room for them, or what they are to do is unknown.
        """
        most = _MOST_RANKS if self._context.launcher.placement == "ray" else _MOST_LOCAL_RANKS
        ranks = values.read_count("ranks", most) or 1
        if ranks > 1 and self._context.launcher.placement == "inline":
            raise RequestError(
                f"ranks must be 1 with the inline placement, got {ranks}: a process group does not "
                "belong into the user's process; use placement='process', or hearth serve"
            )
        if ranks == 1 and values.read_flag("offload_optimizer"):
            raise RequestError(
                "offload_optimizer must be off with ranks=1, got True: only weights that ranks "
                "share can be kept in the host's memory"
            )
        if (parallel := values.read_count("context_parallel") or 1) > 1:
            raise RequestError(
                f"context_parallel must be 1, got {parallel}: it is not supported on CPU, where "
                "torch's context_parallel has no attention kernel, and not connected on a GPU; "
                "recompute_above and a smaller micro_batch_tokens save memory"
            )
        return ranks

    @staticmethod
    def _read_policies(values: ExtraValues, ranks: int) -> int:
        policies = values.read_count("max_policies") or 1
        if policies > 1 and ranks > 1:
            raise RequestError(
                f"max_policies must be 1 with ranks={ranks}, got {policies}: policies share "
                "weights that are in one process"
            )
        return policies

    def _fetch_facts(self, id: str, worker: Worker) -> dict[str, int]:
        """A trainer's own context length, as a part of its record, where none is known."""
        record = self.records.find(id)
        if record is None or TrainerJob.from_dict(record.body).training_config.max_context_length:
            return {}
        answer = fetch_json(worker.endpoint, "/api/v1/get_server_capabilities")
        try:
            return {_FETCHED_LENGTH: int(answer["supported_models"][0]["max_context_length"])}
        except (LookupError, TypeError, ValueError):
            logger.warning("trainer job %s does not say how long its context is", id)
            return {}

    def _end(
        self, job_id: str, state: str, message: str, *, only_from: Collection[str] | None
    ) -> None:
        with self.live.hold(job_id):
            with self._lock:
                moved = self.records.update(
                    job_id, only_from=only_from, state=state, message=message, worker=None
                )
                worker = self.live.take_worker(job_id) if moved else None
            # Not under the lock: its last call of ``failed`` may wait for the lock.
            if worker is not None:
                worker.stop()


def _refuse_several_machines(request: TrainerJob) -> None:
    """Raise RequestError where the hardware that was asked for would silently be less."""
    counts = {
        "trainingConfig.acceleratorCount": request.training_config.accelerator_count,
        "nodeCount": request.node_count,
        "trainerReplicaCount": request.trainer_replica_count,
    }
    for field, count in counts.items():
        if count is not None and count > 1:
            raise RequestError(
                f"{field} must be 1, got {count}: a trainer is one process here, or as many as "
                "extraValues.ranks says (TrainerConfig.ranks, or ranks in a training shape)"
            )


def name_bucket(job_id: str, body: TrainerJob) -> str:
    """Where a job's snapshots go: its own bucket, or that of the deployment it is tied to."""
    if body.hot_load_deployment_id:
        deployment_id = parse_id(body.hot_load_deployment_id)
        return f"deployment-{check_id(deployment_id, 'hotLoadDeploymentId')}"
    return f"{Jobs.prefix}{job_id}"
