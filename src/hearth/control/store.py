"""The control plane's durable state, in one database.

SQLite in WAL mode by default; any other SQLAlchemy URL (PostgreSQL is tested) works the same. A
resource is a record with its id, its state and its body as JSON; a change wakes its waiters.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Collection, Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sql
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from hearth.control.migrations import prepare_schema
from hearth.errors import ConfigError, ConflictError, EngineError, NotFoundError, StorageError

logger = logging.getLogger(__name__)

_METADATA = sql.MetaData()


@dataclass(frozen=True)
class StoredRecord:
    """One resource. ``body`` is its record as JSON, ``worker`` what finds its worker again."""

    id: str
    state: str
    message: str
    body: dict[str, Any]
    worker: dict[str, Any] | None
    created_s: float
    updated_s: float


def _table(name: str) -> sql.Table:
    return sql.Table(
        name,
        _METADATA,
        sql.Column("id", sql.String(255), primary_key=True),
        sql.Column("state", sql.String(64), nullable=False),
        sql.Column("message", sql.Text, nullable=False),
        sql.Column("body", sql.JSON, nullable=False),
        sql.Column("worker", sql.JSON(none_as_null=True)),
        sql.Column("created_s", sql.Double, nullable=False),
        sql.Column("updated_s", sql.Double, nullable=False),
    )


_RESOURCES = ("jobs", "deployments", "models", "operations")
_TINKER = ("tinker_sessions", "tinker_runs", "tinker_samplers", "tinker_saved")
_TABLES = {name: _table(name) for name in (*_RESOURCES, *_TINKER)}


class Store:
    """The database: its four kinds of resources, and what Tinker's API keeps.

    Raises:
        ConfigError: the database cannot be opened, is damaged, or is a newer release's.
    """

    def __init__(self, url: str = "sqlite://") -> None:
        try:
            with contextlib.ExitStack() as stack:
                self._engine = _open(url)
                stack.callback(self._engine.dispose)
                prepare_schema(self._engine, _METADATA)
                _check_pages(self._engine)
                stack.pop_all()
        except (SQLAlchemyError, ImportError) as error:
            shown, reason = _hide_password(url), str(error).splitlines()[0]
            raise ConfigError(
                f"database_url must name a database that opens, got {shown!r}: {reason}"
            ) from None
        # One statement at a time: they are few, and an in-memory database has one connection.
        lock = threading.Lock()
        self.jobs = Records(self._engine, "jobs", lock)
        self.deployments = Records(self._engine, "deployments", lock)
        self.models = Records(self._engine, "models", lock)
        self.operations = Records(self._engine, "operations", lock)
        self.tinker_sessions = Records(self._engine, "tinker_sessions", lock)
        self.tinker_runs = Records(self._engine, "tinker_runs", lock)
        self.tinker_samplers = Records(self._engine, "tinker_samplers", lock)
        self.tinker_saved = Records(self._engine, "tinker_saved", lock)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever written; deleted jobs keep their records."""
        kinds = (self.jobs, self.deployments, self.models, self.operations)
        return not any(records.count() for records in kinds)

    def release_waiters(self) -> None:
        """Wake all that wait for a change, and let nothing wait from now on: the platform ends."""
        for records in (self.jobs, self.deployments, self.models, self.operations):
            records.changes.close()

    def close(self) -> None:
        """Close the connections and wake whoever waits."""
        self.release_waiters()
        self._engine.dispose()


class Records:
    """The resources of one kind. Safe to use from several threads."""

    def __init__(self, engine: sql.Engine, name: str, lock: threading.Lock) -> None:
        self.kind = name
        self._lock = lock
        self.changes = Changes()
        self._engine = engine
        self._table = _TABLES[name]

    def insert(
        self, id: str, state: str, body: Mapping[str, Any], message: str = ""
    ) -> StoredRecord:
        """A new record.

        Raises:
            ConflictError: the id is taken.
        """
        now = time.time()
        record = StoredRecord(id, state, message, dict(body), None, now, now)
        try:
            with self._begin() as connection:
                connection.execute(self._table.insert().values(vars(record)))
        except IntegrityError:
            raise ConflictError(
                f"id must be new among {self.kind}, got {id!r}: it exists"
            ) from None
        self.changes.notify(id)
        return record

    def find(self, id: str) -> StoredRecord | None:
        """The record of an id, or None.

        Raises:
            EngineError: its line in the database is damaged.
        """
        if "\0" in id:  # PostgreSQL does not even compare it
            return None
        try:
            with self._connect() as connection:
                query = self._table.select().where(self._table.c.id == id)
                found = connection.execute(query).mappings().first()
            return _read_record(found) if found is not None else None
        except (ValueError, TypeError) as error:
            raise EngineError(
                f"{self.kind} must hold readable records, got a damaged one of {id!r} ({error}): "
                f"repair or remove its line in the database's table {self.kind!r}"
            ) from None

    def get(self, id: str) -> StoredRecord:
        """The record of an id.

        Raises:
            NotFoundError: there is none; the message lists the ids.
        """
        record = self.find(id)
        if record is None:
            known = [record.id for record in self.list_all()]
            raise NotFoundError(f"{self.kind} must include the id, got {id!r}: known are {known}")
        return record

    def list_all(self, states: Collection[str] | None = None) -> list[StoredRecord]:
        """All records, oldest first; with ``states`` those in one of them.

        A damaged one is logged and left out; it stays in the database.
        """
        query = self._table.select().order_by(self._table.c.created_s, self._table.c.id)
        if states is not None:
            query = query.where(self._table.c.state.in_(list(states)))
        try:
            with self._connect() as connection:
                return [_read_record(found) for found in connection.execute(query).mappings()]
        except (ValueError, TypeError):
            # One line that cannot be parsed ends the reading of all.
            with self._connect() as connection:
                ids = list(connection.execute(query.with_only_columns(self._table.c.id)).scalars())
        return [record for id in ids if (record := self._find_readable(id)) is not None]

    def _find_readable(self, id: str) -> StoredRecord | None:
        try:
            return self.find(id)
        except EngineError as error:
            logger.error("%s; it is left out", error)
            return None

    @contextlib.contextmanager
    def _connect(self) -> Generator[sql.Connection, None, None]:
        """A connection to read.

        Raises:
            StorageError: the database cannot be read.
        """
        with self._explain("readable"), self._lock, self._engine.connect() as connection:
            yield connection

    @contextlib.contextmanager
    def _begin(self) -> Generator[sql.Connection, None, None]:
        """A transaction.

        Raises:
            StorageError: the database cannot be written; nothing of it was.
        """
        with self._explain("writable"), self._lock, self._engine.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def _explain(self, rule: str) -> Generator[None, None, None]:
        try:
            yield
        except IntegrityError:
            raise
        except DBAPIError as error:
            reason = " ".join(str(error.orig).split())
            raise StorageError(
                f"database {self._engine.url.database!r} must be {rule}, got {reason}: free space "
                "on its disk, or look at it; what was there before stays"
            ) from None

    def count(self) -> int:
        """How many records there are, damaged ones too."""
        with self._connect() as connection:
            query = sql.select(sql.func.count()).select_from(self._table)
            return connection.execute(query).scalar_one()

    def count_states(self) -> dict[str, int]:
        """How many records are in each state."""
        state = self._table.c.state
        query = sql.select(state, sql.func.count()).group_by(state)
        with self._connect() as connection:
            return {str(row[0]): int(row[1]) for row in connection.execute(query)}

    def update(self, id: str, *, only_from: Collection[str] | None = None, **values: Any) -> bool:
        """Change columns of a record; False when it is not in one of the states ``only_from``."""
        change = self._table.update().where(self._table.c.id == id)
        if only_from is not None:
            change = change.where(self._table.c.state.in_(list(only_from)))
        if "message" in values:
            values["message"] = values["message"].replace("\0", "")
        with self._begin() as connection:
            done = connection.execute(change.values(updated_s=time.time(), **values))
        if done.rowcount:
            self.changes.notify(id)
        return bool(done.rowcount)

    def delete(self, id: str) -> None:
        """Forget a record."""
        with self._begin() as connection:
            connection.execute(self._table.delete().where(self._table.c.id == id))
        self.changes.notify(id)


def check_records(store: Store, data_dir: Path) -> None:
    """Refuse an empty database beside the folders of an earlier one's resources.

    Started on it, the platform would know no job, and give their ids, and with them their folders,
    to new ones. Jobs and models keep their records, so their folders are never without.

    Raises:
        ConfigError: the folders are named.
    """
    if not store.is_empty:
        return
    patterns = ("workers/trainer-*", "checkpoints/*", "models/[!.]*")
    left = sorted(
        str(path.relative_to(data_dir)) for pattern in patterns for path in data_dir.glob(pattern)
    )
    if left:
        raise ConfigError(
            f"database must have the records of what is in {str(data_dir)!r}, got an empty one "
            f"beside {left[:4]} ({len(left)} in all): put back a copy of it (control.db with its "
            "control.db-wal), or move these folders away to start anew; nothing was changed"
        )


def _read_record(found: Mapping[Any, Any]) -> StoredRecord:
    """The record of a line.

    Raises:
        TypeError: a value has another type than its column's, which SQLite lets in.
    """
    record = StoredRecord(**found)
    kinds: dict[str, Any] = dict.fromkeys(("id", "state", "message"), str)
    kinds |= dict.fromkeys(("created_s", "updated_s"), (float, int))
    kinds |= {"body": dict, "worker": (dict, type(None))}
    for name, kind in kinds.items():
        if not isinstance(value := getattr(record, name), kind):
            raise TypeError(f"{name} is {value!r:.40}")
    return record


@dataclass
class Changes:
    """Wakes whoever waits for a record to change."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waiting: dict[str, list[Future[None]]] = field(default_factory=lambda: {})
    is_closed: bool = False
    """Nothing wakes from now on: readers return the present state."""

    def next_change(self, id: str) -> Future[None]:
        """Done when the record changes next. Ask for it before you read the record."""
        future: Future[None] = Future()
        with self._lock:
            waiting = [future for future in self._waiting.get(id, []) if not future.done()]
            self._waiting[id] = [*waiting, future]
        return future

    def notify(self, id: str) -> None:
        """A record has changed."""
        with self._lock:
            waiting = self._waiting.pop(id, [])
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def close(self) -> None:
        """Wake everyone, for the last time."""
        self.is_closed = True
        with self._lock:
            ids = list(self._waiting)
        for id in ids:
            self.notify(id)


def _open(url: str) -> sql.Engine:
    if url in ("sqlite://", "sqlite:///:memory:"):
        # One connection, or each thread would have an empty database of its own.
        return sql.create_engine(
            "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}
        )
    engine = sql.create_engine(url, pool_pre_ping=True)
    if engine.dialect.name == "sqlite":

        @event.listens_for(engine, "connect")
        def configure(connection: Any, _record: object) -> None:
            cursor = connection.cursor()
            cursor.execute("PRAGMA journal_mode=WAL")
            # What was answered survives a power cut too; a write takes one more fsync for it.
            cursor.execute("PRAGMA synchronous=FULL")
            cursor.execute("PRAGMA busy_timeout=10000")
            cursor.close()

    return engine


def _check_pages(engine: sql.Engine) -> None:
    """Refuse an SQLite file whose pages do not fit each other."""
    if engine.dialect.name != "sqlite":
        return
    with engine.connect() as connection:
        found = connection.execute(sql.text("PRAGMA quick_check(1)")).scalar_one()
    if found != "ok":
        raise ConfigError(
            f"database_url must name an intact database, got {engine.url.database!r}: {found}; put "
            "back a copy, or recover its lines with sqlite3's .recover"
        )


def _hide_password(url: str) -> str:
    """The URL without its password."""
    try:
        return sql.engine.make_url(url).render_as_string(hide_password=True)
    except SQLAlchemyError:
        return url.split("@")[-1]
