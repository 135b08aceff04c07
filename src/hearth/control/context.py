"""What jobs and deployments are made with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hearth.control.catalog import Catalog, ModelEntry
from hearth.control.store import Records
from hearth.launch.spec import Launcher


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
    workers_per_key: int | None = None
    """Resources of each kind that may have a worker at once for one key; None: any number."""

    @property
    def models_dir(self) -> Path:
        """The folder of promoted models."""
        return self.data_dir / "models"

    def checkpoint_dir(self, job_id: str) -> Path:
        """The folder of a job's resumable checkpoints; it outlives the job."""
        return self.data_dir / "checkpoints" / job_id


def list_promoted(models: Records) -> dict[str, ModelEntry]:
    """Models that were promoted here."""
    return {
        record.id: ModelEntry(name=record.id, source=record.body["source"])
        for record in models.list_all()
        if record.body.get("kind", "HF_BASE_MODEL") == "HF_BASE_MODEL" and "source" in record.body
    }
