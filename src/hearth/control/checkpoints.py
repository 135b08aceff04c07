"""A job's checkpoints and snapshots, and the models that are made of them.

The folders are the truth: a listing reads them, so it holds after a crash and after the job's end.
"""

from __future__ import annotations

import heapq
import logging
import shutil
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hearth.control.context import Context, list_promoted
from hearth.control.jobs import Jobs
from hearth.control.resource_names import (
    ACCOUNT,
    format_timestamp,
    full_name,
    parse_id,
    parse_model_id,
)
from hearth.control.store import Store, StoredRecord
from hearth.errors import (
    ClosedError,
    ConflictError,
    HearthError,
    NotFoundError,
    NotReadyError,
    RequestError,
)
from hearth.launch.records import read_json
from hearth.launch.spec import ExportSpec, SnapshotRecord
from hearth.sync.folders import put_in_place
from hearth.wire.fireworks import (
    UNAVAILABLE,
    BaseModelDetails,
    CheckpointEntry,
    CheckpointKind,
    Model,
    Operation,
    OperationError,
    PeftDetails,
    Promote,
    TrainerJob,
)

logger = logging.getLogger(__name__)

_KINDS: dict[str, CheckpointKind] = {
    "base": "CHECKPOINT_TYPE_INFERENCE_BASE",
    "lora": "CHECKPOINT_TYPE_INFERENCE_LORA",
    "delta": "CHECKPOINT_TYPE_INFERENCE_ARC_V2",
}
_MAKING = "making"
"""In a model's record: the promotion under way, of which nothing shows yet."""


class Checkpoints:
    """Lists and promotes. Safe to use from several threads."""

    def __init__(self, store: Store, jobs: Jobs, context: Context) -> None:
        self._store = store
        self._jobs = jobs
        self._context = context
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hearth-promote")
        self._lock = threading.Lock()

    def list_entries(self, job_id: str) -> list[CheckpointEntry]:
        """Everything that a job has saved, oldest first; also of a job that was deleted.

        Checkpoints among themselves, and snapshots too, are in the order of saving, whatever the
        clock said; their times only merge the two.

        Raises:
            NotFoundError: there never was such a job.
        """
        bucket = self._jobs.find_bucket(job_id)
        snapshots: list[CheckpointEntry] = []
        for snapshot in self._context.launcher.snapshots(bucket):
            kind = _KINDS[snapshot.kind]
            snapshots.append(
                _make_entry(snapshot.identity, snapshot.created_s, kind, promotable=True)
            )
        return [
            checkpoint.model_copy(
                update={
                    "name": f"{full_name(Jobs.collection, job_id)}/checkpoints/{checkpoint.name}"
                }
            )
            for checkpoint in heapq.merge(
                self._list_resumable(job_id),
                snapshots,
                key=lambda checkpoint: checkpoint.create_time,
            )
        ]

    def promote(self, checkpoint_id: str, request: Promote) -> Operation:
        """Begin to make a model of a sampler snapshot; ``get_operation`` returns how that goes.

        A delta is applied to what it builds on, every tensor checked. The model names the snapshot.

        Asking again for the same one changes nothing. The job that made a model may make it anew of
        another of its snapshots, as a run that is repeated does: the model is the old one until the
        new one is complete.

        Raises:
            NotFoundError: there is no such job or snapshot; the message lists what there is.
            RequestError: the output's name breaks its rule.
            ConflictError: a model of that name was made by another job.
            NotReadyError: it is being made of another snapshot.
            ClosedError: the platform ends.
        """
        parse_model_id(request.output_model)
        job_id = parse_id(request.trainer_job_id)
        snapshot = self._find_promotable(job_id, checkpoint_id)
        job = self._jobs.get_request(job_id)
        if request.base_model and request.base_model != job.training_config.base_model:
            raise RequestError(
                f"base_model must be {job.training_config.base_model!r}, which the job trained, "
                f"got {request.base_model!r}"
            )
        return self._begin(job_id, snapshot, request, job)

    def get_operation(self, operation_id: str) -> Operation:
        """How a promotion stands.

        Raises:
            NotFoundError: there is no such operation.
        """
        return Operation.from_dict(self._store.operations.get(operation_id).body)

    def recover(self) -> None:
        """After a restart: promotions that were under way have failed."""
        shutil.rmtree(self._staging, ignore_errors=True)
        for record in self._store.operations.list_all(("running",)):
            error = OperationError(
                code=UNAVAILABLE, message="the platform was restarted: promote again"
            )
            # What was asked does not matter any more: its record may be damaged.
            name = f"accounts/{ACCOUNT}/operations/{record.id}"
            self._finish(record.id, Operation(name=name, done=False), error=error)
        for record in self._store.models.list_all():
            self._give_up(record)

    def stop_accepting(self) -> None:
        """Begin no more promotions; those that wait for their turn stay undone."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Wait for what is being promoted."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def _staging(self) -> Path:
        """Where models are written before they take their places; a dot is in no model's id."""
        return self._context.models_dir / ".promoting"

    def _list_resumable(self, job_id: str) -> list[CheckpointEntry]:
        found: list[tuple[int, CheckpointEntry]] = []
        for path in self._context.checkpoint_dir(job_id).glob("*/manifest.json"):
            manifest = read_json(path)
            if manifest is None or path.parent.name.startswith("."):
                continue
            try:
                created_s = float(manifest.get("created_s") or path.stat().st_mtime)
                number = int(manifest.get("number", 0))
            except (OSError, TypeError, ValueError):
                continue  # removed meanwhile, or damaged
            kind: CheckpointKind = "CHECKPOINT_TYPE_TRAINING"
            if manifest.get("lora"):
                kind = "CHECKPOINT_TYPE_TRAINING_LORA"
            checkpoint = _make_entry(path.parent.name, created_s, kind, promotable=False)
            checkpoint = checkpoint.model_copy(update={"metadata": manifest.get("metadata")})
            found.append((number, checkpoint))
        found.sort(key=lambda item: (item[0], item[1].create_time))
        return [checkpoint for _, checkpoint in found]

    def _find_promotable(self, job_id: str, checkpoint_id: str) -> SnapshotRecord:
        kept = {
            snapshot.identity: snapshot
            for snapshot in self._context.launcher.snapshots(self._jobs.find_bucket(job_id))
        }
        if checkpoint_id not in kept:
            resumable = [checkpoint.name for checkpoint in self._list_resumable(job_id)]
            what = "a resumable checkpoint" if checkpoint_id in resumable else "unknown"
            raise NotFoundError(
                f"checkpoint must be a sampler snapshot of job {job_id!r}, got {checkpoint_id!r}, "
                f"which is {what}: snapshots (save_weights_for_sampler) are {list(kept)}"
            )
        return kept[checkpoint_id]

    def _begin(
        self, job_id: str, snapshot: SnapshotRecord, request: Promote, job: TrainerJob
    ) -> Operation:
        name = request.output_model
        origin = {"job": job_id, "identity": snapshot.identity, "merge": request.merge_adapter}
        with self._lock:
            existing = self._store.models.find(name)
            if existing is not None and (same := self._find_same(existing, origin)) is not None:
                return same
            operation_id = uuid.uuid4().hex[:12]
            operation = Operation(name=f"accounts/{ACCOUNT}/operations/{operation_id}", done=False)
            making = {"origin": origin, "operation": operation_id}
            self._store.operations.insert(
                operation_id, "running", operation.as_dict() | {"model": name}
            )
            if existing is None:
                self._store.models.insert(name, "CREATING", {"kind": "PENDING", _MAKING: making})
            else:
                self._store.models.update(name, body={**existing.body, _MAKING: making})
            try:
                self._pool.submit(self._export, operation, making, snapshot, request, job)
            except RuntimeError:
                raise ClosedError(
                    "platform must be open to promote, got one that ends: promote again once it "
                    "is back"
                ) from None
        return operation

    def _find_same(self, record: StoredRecord, origin: dict[str, Any]) -> Operation | None:
        """The operation that makes or made this very model; None when it is to be made anew.

        Raises:
            ConflictError: it was made by another job.
            NotReadyError: it is being made of another snapshot.
        """
        making = record.body.get(_MAKING)
        latest = making or record.body
        if latest["origin"] == origin:
            return self.get_operation(latest["operation"])
        if latest["origin"]["job"] != origin["job"]:
            raise ConflictError(
                f"output_model must be new, got {record.id!r}: it was made of {latest['origin']}"
            )
        if making is not None:
            raise NotReadyError(
                f"output_model must not be in the making, got {record.id!r}: it is being made of "
                f"{making['origin']}; promote again when that is done"
            )
        return None

    def _export(
        self,
        operation: Operation,
        making: dict[str, Any],
        snapshot: SnapshotRecord,
        request: Promote,
        job: TrainerJob,
    ) -> None:
        """Write the folder and finish the operation; runs on the pool."""
        try:
            model = self._write_model(making["operation"], snapshot, request, job)
        except Exception as error:  # the boundary: whoever waits must hear of it
            if not isinstance(error, HearthError | OSError):
                logger.exception("promotion of %s", request.output_model)
            logger.warning("promotion of %s failed: %s", request.output_model, error)
            self._give_up(self._store.models.get(request.output_model))
            self._finish(making["operation"], operation, error=OperationError(message=str(error)))
            return
        self._store.models.update(
            request.output_model, state="READY", body={**making, **model.as_dict()}
        )
        self._finish(making["operation"], operation, response=model)

    def _give_up(self, record: StoredRecord) -> None:
        """A model that was being made stays what it was before."""
        if record.state == "CREATING":
            self._store.models.delete(record.id)
        elif _MAKING in record.body:
            kept = {name: value for name, value in record.body.items() if name != _MAKING}
            self._store.models.update(record.id, body=kept)

    def _write_model(
        self, operation_id: str, snapshot: SnapshotRecord, request: Promote, job: TrainerJob
    ) -> Model:
        """The model, its folder complete and in its place."""
        folder = self._context.models_dir / parse_model_id(request.output_model)
        draft = self._staging / operation_id
        base = job.training_config.base_model
        entry = self._context.catalog.find_model(base, list_promoted(self._store.models))
        try:
            self._context.launcher.export(
                ExportSpec(
                    bucket=self._jobs.find_bucket(parse_id(request.trainer_job_id)),
                    identity=snapshot.identity,
                    base_model=base,
                    source=entry.source,
                    folder=str(draft),
                    merge_adapter=request.merge_adapter,
                    trust_remote_code=entry.trust_remote_code,
                    card=request.card or "",
                )
            )
            # Also over a folder without a record: its platform ended just before it wrote that.
            put_in_place(draft, folder, overwrite=True)
        finally:
            # After an exchange the draft is what the model was before.
            shutil.rmtree(draft, ignore_errors=True)
        is_adapter = snapshot.kind == "lora" and not request.merge_adapter
        return Model(
            name=request.output_model,
            kind="HF_PEFT_ADDON" if is_adapter else "HF_BASE_MODEL",
            source=str(folder),
            create_time=format_timestamp(),
            source_job=request.trainer_job_id,
            source_checkpoint=snapshot.identity,
            base_model_details=BaseModelDetails(moe=entry.moe),
            peft_details=_peft_details(folder, base) if is_adapter else None,
        )

    def _finish(
        self,
        operation_id: str,
        operation: Operation,
        *,
        response: Model | None = None,
        error: OperationError | None = None,
    ) -> None:
        done = operation.model_copy(update={"done": True, "response": response, "error": error})
        self._store.operations.update(operation_id, state="done", body=done.as_dict())


def _make_entry(
    name: str, created_s: float, kind: CheckpointKind, *, promotable: bool
) -> CheckpointEntry:
    moment = format_timestamp(created_s)
    return CheckpointEntry(
        name=name,
        create_time=moment,
        update_time=moment,
        checkpoint_type=kind,
        promotable=promotable,
    )


def _peft_details(folder: Path, base: str) -> PeftDetails:
    config = read_json(folder / "adapter_config.json") or {}
    modules: list[str] | str = config.get("target_modules") or []
    return PeftDetails(
        base_model=base,
        r=int(config.get("r", 0)),
        target_modules=[modules] if isinstance(modules, str) else sorted(modules),
    )
