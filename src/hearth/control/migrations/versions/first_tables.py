"""The tables as they were before schemas had versions; what is there already stays as it is."""

import sqlalchemy as sql
from alembic import op

revision = "0001"
down_revision = None

_NAMES = (
    "jobs",
    "deployments",
    "models",
    "operations",
    "tinker_sessions",
    "tinker_runs",
    "tinker_samplers",
    "tinker_saved",
)


def upgrade() -> None:
    """Make the tables that are missing."""
    for name in _NAMES:
        op.create_table(
            name,
            sql.Column("id", sql.String(255), primary_key=True),
            sql.Column("state", sql.String(64), nullable=False),
            sql.Column("message", sql.Text, nullable=False),
            sql.Column("body", sql.JSON, nullable=False),
            sql.Column("worker", sql.JSON(none_as_null=True)),
            sql.Column("created_s", sql.Double, nullable=False),
            sql.Column("updated_s", sql.Double, nullable=False),
            if_not_exists=True,
        )
