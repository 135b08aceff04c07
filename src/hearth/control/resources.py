"""What trainer jobs and deployments have in common: a record, and a worker that does the work."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar, cast

from hearth.control.catalog import ModelEntry, ShapeEntry
from hearth.control.context import Context, list_promoted
from hearth.control.resource_names import format_timestamp, full_name
from hearth.control.store import Records, StoredRecord
from hearth.control.workers import LiveEntry, LiveTable
from hearth.errors import (
    BusyError,
    ConfigError,
    ConflictError,
    HearthError,
    NotFoundError,
    RequestError,
)
from hearth.launch.spec import Endpoint, ExitReport, Worker, WorkerSpec
from hearth.wire.base import quote
from hearth.wire.fireworks import Deployment, TrainerJob, WorkerResource

logger = logging.getLogger(__name__)

BodyT = TypeVar("BodyT", TrainerJob, Deployment)

RESPONSE_FIELDS = tuple(WorkerResource.model_fields)
"""A request that repeats a response does not set them."""
MOST_THREADS, MOST_CONTEXT = 4096, 2**24
"""CPU threads and tokens that a request may ask for."""
DELETED_JOB = "JOB_STATE_DELETED"
"""The one state whose records stay although their resource is gone."""


class ExtraValues:
    """``extraValues`` of a request, checked one by one; a shape's fields are the defaults.

    Each method raises RequestError for a value that it is not to have.
    """

    def __init__(self, given: Mapping[str, Any], shape: ShapeEntry | None = None) -> None:
        self._given = given
        self._shape = shape

    def read_text(self, name: str) -> str | None:
        """A text, or None where nothing is given."""
        value = self._value(name)
        if value is not None and not isinstance(value, str):
            raise RequestError(f"extraValues.{name} must be a text, got {quote(value)}")
        return value

    def read_choice(self, name: str, among: tuple[str, ...]) -> str | None:
        """One of a few texts, or None where nothing is given."""
        value = self.read_text(name) or None
        if value is not None and value not in among:
            raise RequestError(
                f"extraValues.{name} must be one of {list(among)}, got {value[:80]!r}"
            )
        return value

    def read_count(self, name: str, most: int = 2**31) -> int | None:
        """A whole number in 1..``most``, also as a text; None where nothing is given."""
        value = self._value(name)
        if value is None:
            return None
        try:
            number = int(value) if not isinstance(value, bool) else 0
        except (TypeError, ValueError):
            number = 0
        if number < 1:
            raise RequestError(
                f"extraValues.{name} must be a whole number >= 1, got {quote(value)}"
            )
        if number > most:
            raise RequestError(f"extraValues.{name} must be at most {most}, got {quote(value)}")
        return number

    def read_flag(self, name: str) -> bool:
        """True or false; false where nothing is given."""
        value = self._value(name)
        if value is not None and not isinstance(value, bool):
            raise RequestError(f"extraValues.{name} must be true or false, got {quote(value)}")
        return bool(value)

    def read_mapping(self, name: str) -> dict[str, Any]:
        """ExtraValues by name; empty where nothing is given. A request's override the shape's."""
        given: object = self._given.get(name) or {}
        if not isinstance(given, Mapping):
            raise RequestError(f"extraValues.{name} must be an object, got {quote(given)}")
        default: dict[str, Any] = getattr(self._shape, name, None) or {}
        return {**default, **cast("Mapping[str, Any]", given)}

    def _value(self, name: str) -> Any:
        value = self._given.get(name)
        return getattr(self._shape, name, None) if value is None else value


class Resources(ABC, Generic[BodyT]):
    """The resources of one kind. Safe to use from several threads."""

    kind: ClassVar[str]
    """What an error calls one of them."""
    prefix: ClassVar[str]
    """What a worker's id has before the resource's."""
    collection: ClassVar[str]
    """What a full name has before the resource's id."""
    alive: ClassVar[tuple[str, ...]]
    """The states in which a resource has a worker, or will have one."""
    created_state: ClassVar[str]
    ready_state: ClassVar[str]
    failed_state: ClassVar[str]
    body_type: type[BodyT]

    def __init__(self, records: Records, models: Records, context: Context) -> None:
        self.records = records
        self.live = LiveTable()
        self._models = models
        self._context = context
        # A record and its live entry change together.
        self._lock = threading.RLock()

    def get(self, id: str) -> BodyT:
        """A resource as it stands.

        Raises:
            NotFoundError: there is none of that id.
        """
        return self.describe(self._get_record(id))

    def list_all(self) -> list[BodyT]:
        """Every resource that was not deleted, oldest first; damaged ones are logged."""
        resources: list[BodyT] = []
        for record in self._list_records():
            try:
                resources.append(self.describe(record))
            except RequestError as error:
                logger.warning("%s %s has a damaged record: %s", self.kind, record.id, error)
        return resources

    def find_endpoint(self, id: str) -> Endpoint:
        """Where a resource's worker answers.

        Raises:
            NotFoundError: there is no such resource.
            NotReadyError: it is starting.
            ClosedError: it has ended; the message says how, and what to do.
        """
        endpoint = self.live.endpoint(id)
        if endpoint is None:
            raise self._explain_absence(self._get_record(id))
        return endpoint

    def describe(self, record: StoredRecord) -> BodyT:
        """A record as clients read it."""
        live = self.live.get(record.id)
        worker = live.worker if live is not None else None
        return self.body_type.from_dict(record.body).model_copy(
            update={
                "name": full_name(self.collection, record.id),
                "state": record.state,
                "status_message": record.message or None,
                "create_time": format_timestamp(record.created_s),
                "update_time": format_timestamp(record.updated_s),
                "worker_placement": self._context.launcher.placement,
                "pid": worker.pid if worker is not None else None,
            }
        )

    def ready(self, worker: Worker) -> None:
        """A worker answers (``Watcher``)."""
        id = worker.spec.worker_id.removeprefix(self.prefix)
        # Before the resource is ready: a client that sees it ready sees these too.
        facts = self._fetch_facts(id, worker)
        with self._lock:
            if not self.live.is_current(id, worker):
                return
            self.live.set_ready(id, worker)
            self.records.update(
                id,
                only_from=self.alive,
                state=self.ready_state,
                message="",
                worker=worker.record(),
                body={**self._get_record(id).body, **facts},
            )
        logger.info("%s %s is ready", self.kind, id)

    def failed(self, worker: Worker, report: ExitReport) -> None:
        """A worker could not start, or died (``Watcher``).

        One that was killed before anything was asked of it is started once more: it had nothing to
        lose.
        """
        id = worker.spec.worker_id.removeprefix(self.prefix)
        with self._lock:
            live = self.live.get(id)
            if live is None or not self.live.is_current(id, worker):
                return
            if report.was_killed and not live.is_used and not live.is_second:
                self._start_second(self._get_record(id), report)
            else:
                self._handle_death(id, report.describe(), has_run=live.is_ready)

    def recover(self) -> None:
        """After a restart: find the workers that still run, and handle the death of the others.

        A resource whose record makes no sense has failed; the others are found.
        """
        for record in self.records.list_all(self.alive):
            with self._lock:
                try:
                    self._recover(record)
                except Exception as error:  # the boundary: one record must not stop the platform
                    logger.exception("%s %s cannot be found again", self.kind, record.id)
                    self._fail(
                        record.id,
                        "its record could not be read after a restart "
                        f"({type(error).__name__}: {error})",
                    )

    def _recover(self, record: StoredRecord) -> None:
        if record.worker is None:
            self._start(record.id, self.body_type.from_dict(record.body), record.state)
            return
        has_answered = record.state == self.ready_state
        self.live.put(record.id, LiveEntry(is_starting=True, is_used=has_answered))
        worker = self._context.launcher.adopt(record.worker, self)
        if isinstance(worker, ExitReport) and record.state == self.created_state:
            self._start_second(record, worker)
        elif isinstance(worker, ExitReport):
            self._handle_death(record.id, worker.describe(), has_run=True)
        else:
            self.live.set_worker(record.id, worker)

    def _start_second(self, record: StoredRecord, report: ExitReport) -> None:
        """Start a worker in the place of one that was never used."""
        logger.warning("%s %s is started again: %s", self.kind, record.id, report.describe())
        state = self.created_state if record.state == self.ready_state else record.state
        self.records.update(record.id, only_from=(record.state,), state=state, worker=None)
        self._start(record.id, self.body_type.from_dict(record.body), state, is_second=True)

    def _start(self, id: str, body: BodyT, state: str, *, is_second: bool = False) -> None:
        """Start a worker for a resource that is in ``state``."""
        try:
            # The catalog may have changed while the platform was down.
            spec = self._build_spec(id, body)
            self.live.put(id, LiveEntry(is_starting=True, is_second=is_second))
            worker = self._context.launcher.start(spec, self)
        except (ConfigError, NotFoundError, RequestError) as error:
            self._fail(id, f"cannot be started: {error}")
            return
        if self.live.set_worker(id, worker):
            self.records.update(id, only_from=(state,), worker=worker.record())

    def _fail(self, id: str, message: str) -> None:
        # In this order: where the disk refuses, the launcher tells the same news again.
        self.records.update(
            id, only_from=self.alive, state=self.failed_state, message=message, worker=None
        )
        self.live.take_worker(id)
        logger.warning("%s %s failed: %s", self.kind, id, message)

    def _list_records(self) -> list[StoredRecord]:
        return [record for record in self.records.list_all() if record.state != DELETED_JOB]

    def _get_record(self, id: str) -> StoredRecord:
        record = self.records.find(id)
        if record is None:
            known = [record.id for record in self._list_records()]
            raise NotFoundError(f"{self.kind} must be one of {known}, got {id!r}")
        return record

    def _match_existing(self, existing: StoredRecord, body: BodyT, field: str) -> BodyT:
        """The resource of an id that is taken, where the same was asked for.

        Raises:
            ConflictError: it was asked for otherwise.
        """
        # Read as a request, since a record's body also has what its worker has told.
        before = self.body_type.from_dict(existing.body).model_copy(update={"created_by": None})
        if existing.state == "DELETING" or before.as_dict() != body.as_dict():
            raise ConflictError(
                f"{field} must be new, got {existing.id!r}: a {self.kind} of that id exists "
                f"({existing.state}) and was asked for otherwise"
            )
        return self.describe(existing)

    def _check_limit(self, id: str, body: BodyT) -> None:
        """Raise BusyError where the key that created a resource has as many workers as it may."""
        most = self._context.workers_per_key
        if most is None or body.created_by is None:
            return
        running = [
            record.id
            for record in self.records.list_all(self.alive)
            if record.id != id
            and self.live.get(record.id) is not None
            and record.body.get("createdBy") == body.created_by
        ]
        if len(running) >= most:
            raise BusyError(
                f"{self.kind}s of key {body.created_by!r} must be at most {most} at once, got one "
                f"more than {running}: end one of them, or raise workers_per_key"
            )

    def find_model(self, name: str) -> ModelEntry:
        """A registered or promoted model, a folder or a hub id; raises as the catalog does."""
        return self._context.catalog.find_model(name, list_promoted(self._models))

    def _fetch_facts(self, id: str, worker: Worker) -> dict[str, Any]:
        """What a worker that answers adds to its record's body."""
        return {}

    @abstractmethod
    def _build_spec(self, id: str, body: BodyT) -> WorkerSpec: ...

    @abstractmethod
    def _handle_death(self, id: str, message: str, *, has_run: bool) -> None:
        """A resource's worker is dead; ``has_run`` where it has answered before."""

    @abstractmethod
    def _explain_absence(self, record: StoredRecord) -> HearthError:
        """Why a resource has no endpoint."""


def min_context_length(shape: ShapeEntry | None, entry: ModelEntry) -> int | None:
    """The shorter of the lengths that are known, in tokens."""
    lengths = [entry.context_length, shape.context_length if shape is not None else None]
    return min((length for length in lengths if length is not None), default=None)
