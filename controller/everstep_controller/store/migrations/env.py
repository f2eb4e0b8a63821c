"""Run Alembic over the connection and transaction that ``store.database`` passes."""

from __future__ import annotations

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection)
context.run_migrations()
