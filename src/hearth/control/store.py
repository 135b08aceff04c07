"""What the control plane must not forget, in one database.

SQLite in WAL mode by default; any other SQLAlchemy URL (PostgreSQL is tested) works the same. A
resource is a row with its id, its state and its body as JSON; who changes a row tells whoever waits
for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sql
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from hearth.errors import ConfigError, ConflictError, NotFoundError

_METADATA = sql.MetaData()


@dataclass(frozen=True)
class Row:
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


_TABLES = {name: _table(name) for name in ("jobs", "deployments", "models", "operations")}


class Store:
    """The database and its four kinds of resources.

    Raises:
        ConfigError: the database cannot be opened.
    """

    def __init__(self, url: str = "sqlite://") -> None:
        try:
            self._engine = _open(url)
            _METADATA.create_all(self._engine)
        except (SQLAlchemyError, ImportError) as error:
            shown = str(error).splitlines()[0]
            raise ConfigError(
                f"database_url must name a database that opens, got {_hidden(url)!r}: {shown}"
            ) from None
        # One statement at a time: they are few, and an in-memory database has one connection.
        lock = threading.Lock()
        self.jobs = Rows(self._engine, "jobs", lock)
        self.deployments = Rows(self._engine, "deployments", lock)
        self.models = Rows(self._engine, "models", lock)
        self.operations = Rows(self._engine, "operations", lock)

    def end_waiting(self) -> None:
        """Wake whoever waits for a change, and let nobody wait any more: the platform ends."""
        for rows in (self.jobs, self.deployments, self.models, self.operations):
            rows.changes.end()

    def close(self) -> None:
        """Close the connections and wake whoever waits."""
        self.end_waiting()
        self._engine.dispose()


class Rows:
    """The resources of one kind. Safe to use from several threads."""

    def __init__(self, engine: sql.Engine, name: str, lock: threading.Lock) -> None:
        self.kind = name
        self._lock = lock
        self.changes = Changes()
        self._engine = engine
        self._table = _TABLES[name]

    def insert(self, id: str, state: str, body: Mapping[str, Any], message: str = "") -> Row:
        """A new row.

        Raises:
            ConflictError: the id is taken.
        """
        now = time.time()
        row = Row(id, state, message, dict(body), None, now, now)
        try:
            with self._lock, self._engine.begin() as connection:
                connection.execute(self._table.insert().values(vars(row)))
        except IntegrityError:
            raise ConflictError(
                f"id must be new among {self.kind}, got {id!r}: it exists"
            ) from None
        self.changes.tell(id)
        return row

    def find(self, id: str) -> Row | None:
        """The row of an id, or None."""
        if "\0" in id:  # PostgreSQL does not even compare it
            return None
        with self._lock, self._engine.connect() as connection:
            query = self._table.select().where(self._table.c.id == id)
            found = connection.execute(query).mappings().first()
        return Row(**found) if found is not None else None

    def get(self, id: str) -> Row:
        """The row of an id.

        Raises:
            NotFoundError: there is none; the message lists the ids.
        """
        row = self.find(id)
        if row is None:
            known = [one.id for one in self.all()]
            raise NotFoundError(f"{self.kind} must include the id, got {id!r}: known are {known}")
        return row

    def all(self, states: Collection[str] | None = None) -> list[Row]:
        """All rows, oldest first; with ``states`` those in one of them."""
        query = self._table.select().order_by(self._table.c.created_s, self._table.c.id)
        if states is not None:
            query = query.where(self._table.c.state.in_(list(states)))
        with self._lock, self._engine.connect() as connection:
            return [Row(**found) for found in connection.execute(query).mappings()]

    def update(self, id: str, *, only_from: Collection[str] | None = None, **values: Any) -> bool:
        """Change columns of a row; False when it is not in one of the states ``only_from``."""
        change = self._table.update().where(self._table.c.id == id)
        if only_from is not None:
            change = change.where(self._table.c.state.in_(list(only_from)))
        if "message" in values:
            values["message"] = values["message"].replace("\0", "")
        with self._lock, self._engine.begin() as connection:
            done = connection.execute(change.values(updated_s=time.time(), **values))
        if done.rowcount:
            self.changes.tell(id)
        return bool(done.rowcount)

    def delete(self, id: str) -> None:
        """Forget a row."""
        with self._lock, self._engine.begin() as connection:
            connection.execute(self._table.delete().where(self._table.c.id == id))
        self.changes.tell(id)


@dataclass
class Changes:
    """Wakes whoever waits for a row to change."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waiting: dict[str, list[Future[None]]] = field(default_factory=lambda: {})
    is_over: bool = False
    """Nobody is woken any more: what stands is what is told."""

    def next(self, id: str) -> Future[None]:
        """Done when the row changes next. Ask for it before you read the row."""
        future: Future[None] = Future()
        with self._lock:
            waiting = [one for one in self._waiting.get(id, []) if not one.done()]
            self._waiting[id] = [*waiting, future]
        return future

    def tell(self, id: str) -> None:
        """A row has changed."""
        with self._lock:
            waiting = self._waiting.pop(id, [])
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def end(self) -> None:
        """Wake everyone, for the last time."""
        self.is_over = True
        with self._lock:
            ids = list(self._waiting)
        for id in ids:
            self.tell(id)


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
            # Survives a killed process; only a power cut may take the last transactions.
            cursor.execute("PRAGMA synchronous=NORMAL")
            cursor.execute("PRAGMA busy_timeout=10000")
            cursor.close()

    return engine


def _hidden(url: str) -> str:
    """The URL without its password."""
    try:
        return sql.engine.make_url(url).render_as_string(hide_password=True)
    except SQLAlchemyError:
        return url.split("@")[-1]
