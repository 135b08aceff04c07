"""A job's checkpoints and snapshots, and the models that are made of them.

The folders are the truth: a listing reads them, so it holds after a crash and after the job's end.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from hearth.control.jobs import Jobs, Means, promoted_models
from hearth.control.names import ACCOUNT, job_name, leaf, promoted_leaf, timestamp
from hearth.control.store import Row, Store
from hearth.errors import ConflictError, HearthError, NotFoundError, RequestError
from hearth.launch.spec import ExportSpec, SnapshotFacts
from hearth.wire.fireworks import (
    BaseModelDetails,
    CheckpointKind,
    CheckpointRow,
    Model,
    Operation,
    OperationError,
    PeftDetails,
    Promote,
    Promoted,
    TrainerJob,
)

logger = logging.getLogger(__name__)

_KINDS: dict[str, CheckpointKind] = {
    "base": "CHECKPOINT_TYPE_INFERENCE_BASE",
    "lora": "CHECKPOINT_TYPE_INFERENCE_LORA",
    "delta": "CHECKPOINT_TYPE_INFERENCE_ARC_V2",
}


class Checkpoints:
    """Lists and promotes. Safe to use from several threads."""

    def __init__(self, store: Store, jobs: Jobs, means: Means) -> None:
        self._store = store
        self._jobs = jobs
        self._means = means
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hearth-promote")
        self._lock = threading.Lock()

    def rows(self, job_id: str) -> list[CheckpointRow]:
        """Everything that a job has saved, oldest first; also of a job that was deleted.

        Raises:
            NotFoundError: there never was such a job.
        """
        bucket = self._jobs.bucket(job_id)
        found = [
            *self._resumable(job_id),
            *map(_snapshot_row, self._means.launcher.snapshots(bucket)),
        ]
        return [
            row.model_copy(update={"name": f"{job_name(job_id)}/checkpoints/{row.name}"})
            for row in sorted(found, key=lambda one: one.create_time)
        ]

    def promote(self, checkpoint_id: str, asked: Promote) -> Promoted:
        """Make a model of a sampler snapshot. Asking again for the same one changes nothing.

        Raises:
            NotFoundError: there is no such job or snapshot; the message lists what there is.
            RequestError: the output's name breaks its rule, or the snapshot is a delta.
            ConflictError: a model of that name was made of something else.
        """
        promoted_leaf(asked.output_model)
        job_id = leaf(asked.trainer_job_id)
        snapshot = self._promotable(job_id, checkpoint_id)
        job = TrainerJob.checked(self._jobs.rows.get(job_id).body)
        if asked.base_model and asked.base_model != job.training_config.base_model:
            raise RequestError(
                f"base_model must be {job.training_config.base_model!r}, which the job trained, "
                f"got {asked.base_model!r}"
            )
        operation = self._begin(job_id, snapshot, asked, job)
        if asked.async_promotion:
            return Promoted(operation=operation)
        done = self._wait(leaf(operation.name))
        if done.error is not None:
            raise RequestError(done.error.message)
        return Promoted(model=done.response)

    def operation(self, operation_id: str) -> Operation:
        """How a promotion stands.

        Raises:
            NotFoundError: there is no such operation.
        """
        return Operation.checked(self._store.operations.get(operation_id).body)

    def recover(self) -> None:
        """After a restart: promotions that were under way have failed."""
        for row in self._store.operations.all(("running",)):
            error = OperationError(message="the platform was restarted: promote again")
            self._finish(row.id, Operation.checked(row.body), error=error)
        for row in self._store.models.all(("CREATING",)):
            self._store.models.delete(row.id)

    def close(self) -> None:
        """Wait for what is being promoted."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _resumable(self, job_id: str) -> list[CheckpointRow]:
        rows: list[CheckpointRow] = []
        for path in self._means.checkpoint_dir(job_id).glob("*/manifest.json"):
            manifest = _read_json(path)
            if manifest is None or path.parent.name.startswith("."):
                continue
            moment = timestamp(float(manifest.get("created_s") or path.stat().st_mtime))
            kind: CheckpointKind = "CHECKPOINT_TYPE_TRAINING"
            if manifest.get("lora"):
                kind = "CHECKPOINT_TYPE_TRAINING_LORA"
            rows.append(
                CheckpointRow(
                    name=path.parent.name, create_time=moment, update_time=moment,
                    checkpoint_type=kind, promotable=False, metadata=manifest.get("metadata"),
                )
            )  # fmt: skip
        return rows

    def _promotable(self, job_id: str, checkpoint_id: str) -> SnapshotFacts:
        kept = {
            one.identity: one for one in self._means.launcher.snapshots(self._jobs.bucket(job_id))
        }
        if checkpoint_id not in kept:
            resumable = [row.name for row in self._resumable(job_id)]
            what = "a resumable checkpoint" if checkpoint_id in resumable else "unknown"
            raise NotFoundError(
                f"checkpoint must be a sampler snapshot of job {job_id!r}, got {checkpoint_id!r}, "
                f"which is {what}: snapshots (save_weights_for_sampler) are {list(kept)}"
            )
        if kept[checkpoint_id].kind == "delta":
            raise RequestError(
                f"checkpoint must be promotable, got {checkpoint_id!r}, which is a delta: save one "
                "with checkpoint_type='base'"
            )
        return kept[checkpoint_id]

    def _begin(
        self, job_id: str, snapshot: SnapshotFacts, asked: Promote, job: TrainerJob
    ) -> Operation:
        name = asked.output_model
        origin = {"job": job_id, "identity": snapshot.identity, "merge": asked.merge_adapter}
        with self._lock:
            existing = self._store.models.find(name)
            if existing is not None:
                return self._existing(existing, origin)
            operation_id = uuid.uuid4().hex[:12]
            operation = Operation(name=f"accounts/{ACCOUNT}/operations/{operation_id}", done=False)
            body = {"origin": origin, "operation": operation_id, "kind": "PENDING", "source": ""}
            self._store.models.insert(name, "CREATING", body)
            self._store.operations.insert(
                operation_id, "running", operation.as_dict() | {"model": name}
            )
        self._pool.submit(self._export, operation_id, operation, snapshot, asked, job, body)
        return operation

    def _existing(self, row: Row, origin: dict[str, Any]) -> Operation:
        if row.body.get("origin") != origin:
            raise ConflictError(
                f"output_model must be new, got {row.id!r}: it was made of {row.body.get('origin')}"
            )
        return self.operation(row.body["operation"])

    def _export(
        self, operation_id: str, operation: Operation, snapshot: SnapshotFacts, asked: Promote,
        job: TrainerJob, body: dict[str, Any],
    ) -> None:  # fmt: skip
        """Write the folder and finish the operation; runs on the pool."""
        folder = self._means.data_dir / "models" / promoted_leaf(asked.output_model)
        base = job.training_config.base_model
        try:
            entry = self._means.catalog.model(base, promoted_models(self._store.models))
            self._means.launcher.export(
                ExportSpec(
                    bucket=self._jobs.bucket(leaf(asked.trainer_job_id)),
                    identity=snapshot.identity, base_model=base, source=entry.source,
                    folder=str(folder), merge_adapter=asked.merge_adapter,
                    trust_remote_code=entry.trust_remote_code,
                )
            )  # fmt: skip
        except (HearthError, OSError) as error:
            logger.warning("promotion of %s failed: %s", asked.output_model, error)
            self._store.models.delete(asked.output_model)
            self._finish(operation_id, operation, error=OperationError(message=str(error)))
            return
        is_adapter = snapshot.kind == "lora" and not asked.merge_adapter
        model = Model(
            name=asked.output_model, kind="HF_PEFT_ADDON" if is_adapter else "HF_BASE_MODEL",
            source=str(folder), create_time=timestamp(),
            base_model_details=BaseModelDetails(moe=entry.moe),
            peft_details=_peft_details(folder, base) if is_adapter else None,
        )  # fmt: skip
        self._store.models.update(
            asked.output_model, state="READY", body={**body, **model.as_dict()}
        )
        self._finish(operation_id, operation, response=model)

    def _finish(
        self, operation_id: str, operation: Operation, *, response: Model | None = None,
        error: OperationError | None = None,
    ) -> None:  # fmt: skip
        done = operation.model_copy(update={"done": True, "response": response, "error": error})
        self._store.operations.update(operation_id, state="done", body=done.as_dict())

    def _wait(self, operation_id: str) -> Operation:
        while True:
            changed = self._store.operations.changes.next(operation_id)
            operation = self.operation(operation_id)
            if operation.done:
                return operation
            changed.result()


def _snapshot_row(facts: SnapshotFacts) -> CheckpointRow:
    moment = timestamp(facts.created_s)
    return CheckpointRow(
        name=facts.identity, create_time=moment, update_time=moment,
        checkpoint_type=_KINDS[facts.kind], promotable=facts.kind != "delta",
    )  # fmt: skip


def _peft_details(folder: Any, base: str) -> PeftDetails:
    config = _read_json(folder / "adapter_config.json") or {}
    modules = config.get("target_modules") or []
    return PeftDetails(
        base_model=base, r=int(config.get("r", 0)),
        target_modules=sorted(modules) if isinstance(modules, list) else [str(modules)],
    )  # fmt: skip


def _read_json(path: Any) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return cast("dict[str, Any]", content) if isinstance(content, dict) else None
