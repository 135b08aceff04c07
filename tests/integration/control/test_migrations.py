"""Databases of earlier releases, opened by this one."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sql
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from hearth.control.migrations import HEAD
from hearth.control.store import _METADATA, Store
from hearth.errors import ConfigError

FIRST_TABLES = (
    "jobs",
    "deployments",
    "models",
    "operations",
    "tinker_sessions",
    "tinker_runs",
    "tinker_samplers",
    "tinker_saved",
)
COLUMNS = """id VARCHAR(255) NOT NULL, state VARCHAR(64) NOT NULL, message TEXT NOT NULL,
    body JSON NOT NULL, worker JSON, created_s {double} NOT NULL, updated_s {double} NOT NULL,
    PRIMARY KEY (id)"""
RECORD = "('j', 'JOB_STATE_FAILED', 'why', '{\"a\": [1, null]}', NULL, 1.5, 2.5)"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return request.getfixturevalue("postgres_url")
    return f"sqlite:///{tmp_path / 'control.db'}"


def write_first_release(url: str, tables: tuple[str, ...] = FIRST_TABLES) -> sql.Engine:
    """A database as releases without a schema's version wrote it, with one job."""
    engine = sql.create_engine(url)
    double = "DOUBLE" if engine.dialect.name == "sqlite" else "DOUBLE PRECISION"
    with engine.begin() as connection:
        for table in tables:
            columns = COLUMNS.format(double=double)
            connection.exec_driver_sql(f"CREATE TABLE {table} ({columns})")
        connection.exec_driver_sql(f"INSERT INTO jobs VALUES {RECORD}")
    return engine


def read_version(engine: sql.Engine) -> str:
    with engine.connect() as connection:
        return connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one()


@pytest.mark.parametrize("tables", [FIRST_TABLES, FIRST_TABLES[:4]], ids=["all", "before tinker"])
def test_a_database_without_a_version_keeps_its_records_and_gets_the_present_schema(
    url: str, tables: tuple[str, ...]
) -> None:
    engine = write_first_release(url, tables)

    for _ in range(2):  # the second time there is nothing to do
        store = Store(url)
        record = store.jobs.get("j")
        count = store.tinker_runs.count()
        store.close()

    assert (record.state, record.message, record.body) == (
        "JOB_STATE_FAILED",
        "why",
        {"a": [1, None]},
    )
    assert (record.worker, record.created_s, record.updated_s, count) == (None, 1.5, 2.5, 0)
    assert read_version(engine) == HEAD
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), _METADATA) == []
    engine.dispose()


def test_a_new_database_has_the_version_of_the_last_revision(url: str) -> None:
    Store(url).close()

    config = Config()
    config.set_main_option("script_location", "hearth.control:migrations")
    assert ScriptDirectory.from_config(config).get_current_head() == HEAD
    engine = sql.create_engine(url)
    assert read_version(engine) == HEAD
    engine.dispose()


def test_the_database_of_a_newer_release_is_refused_and_left_as_it_is(url: str) -> None:
    Store(url).close()
    engine = sql.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")

    with pytest.raises(ConfigError, match="database must have a schema of this release"):
        Store(url)

    assert read_version(engine) == "9999"
    engine.dispose()
