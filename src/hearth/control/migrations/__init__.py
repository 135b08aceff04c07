"""The version of the database's schema, and what brings an older database up to it.

Revisions are in ``versions``, one a file, and are never changed once they are released. A database
from before there were versions is what the first revision makes.
"""

from __future__ import annotations

import sqlalchemy as sql

from hearth.errors import ConfigError

HEAD = "0001"
"""The revision that this release works with."""
_VERSION = sql.Table(
    "alembic_version", sql.MetaData(), sql.Column("version_num", sql.String(32), primary_key=True)
)


def prepare_schema(engine: sql.Engine, tables: sql.MetaData) -> None:
    """Make the tables of an empty database, or bring those that are there to ``HEAD``.

    It happens whole or not at all where the database can undo such changes (PostgreSQL).

    Raises:
        ConfigError: a newer release made them.
    """
    with engine.begin() as connection:
        known = set(sql.inspect(connection).get_table_names())
        if not known & set(tables.tables):
            tables.create_all(connection)
            _VERSION.create(connection, checkfirst=True)
            connection.execute(_VERSION.insert().values(version_num=HEAD))
        elif _VERSION.name not in known or _read_version(connection) != HEAD:
            _upgrade(connection)


def _read_version(connection: sql.Connection) -> str | None:
    return connection.execute(sql.select(_VERSION.c.version_num)).scalar_one_or_none()


def _upgrade(connection: sql.Connection) -> None:
    # Only an older database needs it, and importing it takes a while.
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", "hearth.control:migrations")
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise ConfigError(
            f"database must have a schema of this release ({HEAD}) or of an older one, got another "
            f"one: {error}; start the release that made it, or put back a copy from before"
        ) from None
