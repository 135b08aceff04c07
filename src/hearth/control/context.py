"""What jobs and deployments are made with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hearth.control.catalog import Catalog, ModelEntry
from hearth.control.resource_names import format_timestamp
from hearth.control.store import Records, StoredRecord
from hearth.control.workers import LiveTable
from hearth.launch.spec import Launcher

RESPONSE_FIELDS = (
    "name",
    "state",
    "status_message",
    "create_time",
    "update_time",
    "worker_placement",
    "pid",
)
"""Fields of responses alone: a request that repeats a response does not set them."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What jobs and deployments are made with."""

    launcher: Launcher
    catalog: Catalog
    data_dir: Path
    trainer_threads: int | None = None
    """CPU threads of a process, always; None: its share of all cores."""
    deployment_threads: int | None = None
    keep_snapshots: int | None = None
    """Snapshots of a bucket to keep; None keeps all."""

    @property
    def models_dir(self) -> Path:
        """The folder of promoted models."""
        return self.data_dir / "models"

    def describe(self, record: StoredRecord, live: LiveTable) -> dict[str, str | int | None]:
        """``RESPONSE_FIELDS`` of a resource, but its name."""
        entry = live.get(record.id)
        worker = entry.worker if entry is not None else None
        return {
            "state": record.state,
            "status_message": record.message or None,
            "create_time": format_timestamp(record.created_s),
            "update_time": format_timestamp(record.updated_s),
            "worker_placement": self.launcher.placement,
            "pid": worker.pid if worker is not None else None,
        }

    def checkpoint_dir(self, job_id: str) -> Path:
        """The folder of a job's resumable checkpoints; it outlives the job."""
        return self.data_dir / "checkpoints" / job_id


def list_promoted(models: Records) -> dict[str, ModelEntry]:
    """Models that were promoted here."""
    return {
        record.id: ModelEntry(name=record.id, source=record.body["source"])
        for record in models.list_all()
        if record.body.get("kind", "HF_BASE_MODEL") == "HF_BASE_MODEL"
    }
