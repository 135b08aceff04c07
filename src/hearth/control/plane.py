"""The control plane as a library: its parts, put together, and found again after a restart."""

from __future__ import annotations

import logging
import os

from hearth.control.catalog import ModelEntry
from hearth.control.checkpoints import Checkpoints
from hearth.control.context import Context
from hearth.control.deployments import Deployments
from hearth.control.jobs import Jobs
from hearth.control.store import Store, StoredRecord
from hearth.errors import NotFoundError
from hearth.wire.fireworks import BaseModelDetails, Model

logger = logging.getLogger(__name__)

_LOG_BYTES = 2**20
"""How much of a log is read, from its end."""


class ControlPlane:
    """Jobs, deployments, checkpoints and models of one platform. It computes nothing itself."""

    def __init__(self, store: Store, context: Context) -> None:
        self.store = store
        self.context = context
        self.jobs = Jobs(store.jobs, store.models, context)
        self.deployments = Deployments(store.deployments, store.models, self.jobs, context)
        self.checkpoints = Checkpoints(store, self.jobs, context)

    def recover(self) -> None:
        """Find what an earlier control plane with the same store had started."""
        self.checkpoints.recover()
        self.jobs.recover()
        self.deployments.recover()

    def find_model(self, name: str) -> Model:
        """A registered or promoted model.

        Raises:
            NotFoundError: there is none of that name; the message lists those that there are.
        """
        record = self.store.models.find(name)
        if record is not None and record.state == "READY":
            return _describe_promoted(record)
        if name not in self.context.catalog.models:
            known = [model.name for model in self.list_models()]
            raise NotFoundError(f"model must be one of {known}, got {name!r}")
        return _describe_entry(self.context.catalog.find_model(name))

    def list_models(self) -> list[Model]:
        """All registered models by name, then the promoted ones, oldest first."""
        known = self.context.catalog
        registered = [_describe_entry(known.find_model(name)) for name in sorted(known.models)]
        promoted = [_describe_promoted(record) for record in self.store.models.list_all(("READY",))]
        return registered + promoted

    def read_log(self, worker: str) -> list[str]:
        """The last lines that a worker has logged; ``worker`` is its resource's kind and id.

        Raises:
            NotFoundError: there is no such worker, or it has no log of its own.
        """
        kind, _, id = worker.partition("-")
        if kind not in ("trainer", "deployment"):
            raise NotFoundError(
                f"worker must be trainer-JOB or deployment-DEPLOYMENT, got {worker[:80]!r}"
            )
        (self.jobs if kind == "trainer" else self.deployments).get(id)
        path = self.context.launcher.log_path(worker)
        if path is None or not path.exists():
            raise NotFoundError(
                f"worker {worker!r} must have a log of its own, got none: it runs inside the "
                "platform's process and writes into that one's log"
            )
        with path.open("rb") as file:
            skipped = max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES)
            file.seek(skipped)
            lines = file.read(_LOG_BYTES).decode(errors="replace").splitlines()
        return [f"(the first {skipped} bytes are in {path})", *lines[1:]] if skipped else lines

    def close(self) -> None:
        """Stop every worker and close the database."""
        # A promotion that began after the launcher's end would start another forkserver.
        self.checkpoints.stop_accepting()
        self.context.launcher.close()
        self.checkpoints.close()
        self.store.close()


def _describe_entry(entry: ModelEntry) -> Model:
    return Model(
        name=entry.name,
        source=entry.source,
        parameter_count=str(entry.parameters) if entry.parameters is not None else None,
        base_model_details=BaseModelDetails(moe=entry.moe),
    )


def _describe_promoted(record: StoredRecord) -> Model:
    return Model.from_dict({**record.body, "name": record.id})
