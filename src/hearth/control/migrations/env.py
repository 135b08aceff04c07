"""Alembic runs this file: the revisions run on the connection that ``prepare_schema`` gives."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
